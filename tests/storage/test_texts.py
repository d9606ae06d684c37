"""What strangers may put where distap expects its own JSON: an error of one kind, at once and in little memory."""

import json
import os

import pytest

from distap.errors import DistapError
from distap.evaluation.saved import read_evaluation
from distap.model.trained import read_saved
from distap.retrieval.descriptor_files import read_descriptors
from distap.storage import texts
from distap.storage.texts import as_line, is_line, parsed_json, printable, read_json, read_text


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("[" * 100_000, list, "recursion limit"),
        ('{"a":' * 250 + "1" + "}" * 250, dict, "recursion limit"),
        ("[]", dict, "a list, expected a dict"),
        ("1" * 10_000, int, "out of range"),
        (b"\xff", dict, "expected value"),
        ("", dict, "EOF"),
    ],
)
def test_json_that_is_no_record_is_a_value_error(text, kind, message):
    with pytest.raises(ValueError, match=message):
        parsed_json(text, kind)


def test_sound_json_is_what_it_was():
    value = {"a": [1, 2.5, None, {"b": [[True]]}], "c": "é"}
    assert parsed_json(json.dumps(value)) == value
    assert len(parsed_json("[" * 64 + "]" * 64, list)) == 1


def pipe(path):
    os.mkfifo(path)


def folder(path):
    path.mkdir()


def long(path):
    path.write_text(json.dumps({"a": "b" * 2000}))


@pytest.mark.parametrize(
    ("make", "message"), [(pipe, "no regular file"), (folder, "no regular file"), (long, "more than 1,000 bytes")]
)
def test_only_regular_files_of_a_bounded_size_are_read(make, message, tmp_path, monkeypatch):
    monkeypatch.setattr(texts.read_text, "__defaults__", (1000,))
    make(tmp_path / "x.json")
    with pytest.raises(ValueError, match=message):
        read_json(tmp_path / "x.json")
    (tmp_path / "y").write_text("é")
    assert read_text(tmp_path / "y") == "é"


@pytest.mark.parametrize("make", [pipe, lambda path: path.write_text("[" * 100_000)])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("result.json", read_evaluation),
        ("about.json", read_descriptors),
        ("config.json", lambda folder: read_saved(str(folder))),
    ],
)
def test_a_record_that_is_none_is_named(make, name, read, tmp_path):
    make(tmp_path / name)
    with pytest.raises(DistapError, match=str(tmp_path)):
        read(tmp_path)


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[2J", "a\u2028b", "a\udce9", "", "a\tb", "x" * 4097, "é" * 2049])
def test_a_name_is_one_line_or_is_shown_as_one(name):
    assert not is_line(name)
    assert is_line(as_line(name)) or not name
    assert as_line("кот\u202f0.jpg") == "кот\u202f0.jpg"


def test_messages_keep_their_lines_and_lose_what_commands_a_terminal():
    assert printable("a\tb\n\x1b[2J\x9b") == "a\tb\n\\x1b[2J\\x9b"

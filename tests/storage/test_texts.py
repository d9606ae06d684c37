"""What strangers may put where distap expects its own JSON: an error of one kind, at once and in
little memory.
"""

import json
import os

import pytest

from distap.errors import DistapError, holds_secret, without_secrets
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
    ("make", "message"),
    [(pipe, "no regular file"), (folder, "no regular file"), (long, "more than 1,000 bytes")],
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


@pytest.mark.parametrize(
    "name", ["a\nb", "a\x1b[2J", "a\u2028b", "a\udce9", "", "a\tb", "x" * 4097, "é" * 2049]
)
def test_a_name_is_one_line_or_is_shown_as_one(name):
    assert not is_line(name)
    assert is_line(as_line(name)) or not name
    assert as_line("кот\u202f0.jpg") == "кот\u202f0.jpg"


def test_messages_keep_their_lines_and_lose_what_commands_a_terminal():
    assert printable("a\tb\n\x1b[2J\x9b") == "a\tb\n\\x1b[2J\\x9b"


@pytest.mark.parametrize(
    "place",
    [
        "https://user:PASSWORD@host/x",
        "https:/user:PASSWORD@host/x",  # as pathlib writes it
        "described:https://user:PASSWORD@host/x",
        "https://user:PASS@WORD@host/x",
        "https://user:PASSWORD/?@host/x",
        "git+ssh://PASSWORD@host/x",
        "s3://bucket/x?X-Amz-Date=1&X-Amz-Signature=PASSWORD",
        "https://host/x#access_token=PASSWORD",
        "https://host/x%3Fsig%3DPASSWORD",
        "hf:user/name?token=PASSWORD",
        "imagefolder:photos?Signature=PASSWORD&x=1",
    ],
)
def test_an_error_names_a_place_without_its_secret(place):
    message = str(DistapError("storage.missing", f"cannot read '{place}': no such file"))
    assert "WORD" not in message
    assert message.startswith("cannot read '")
    assert message.endswith("no such file")
    assert holds_secret(place)


@pytest.mark.parametrize(
    "place", ["https://host:8080/x@v1", "s3://bucket/a@b", "runs/a?x=1/b", "https://h/{0..9}.tar"]
)
def test_a_place_without_a_secret_is_told_as_it_is(place):
    assert without_secrets(place) == place
    assert not holds_secret(place)


def test_an_error_that_repeats_a_file_is_cut_in_the_middle():
    message = str(DistapError("data.damaged", f"x.json: wrong: {'a' * 10**7}; write it again"))
    assert len(message) < 10_000
    assert message.startswith("x.json: wrong: a")
    assert message.endswith("a; write it again")


def test_an_error_names_each_of_many_files():
    message = str(
        DistapError(
            "data.damaged",
            "\n".join(
                ["these are damaged:", *(f"{number:06}.tar: cut short" for number in range(1000))]
            ),
        )
    )
    assert message.count(".tar: cut short") == 1000


def test_the_error_of_a_record_that_is_no_utf8_does_not_repeat_it(tmp_path):
    (tmp_path / "about.json").write_bytes(b'{"x": "' + b"a" * 10**6 + b'\xff"}')
    with pytest.raises(DistapError, match=r"about\.json: not readable.*byte 1000007") as caught:
        read_descriptors(tmp_path)
    assert len(str(caught.value)) < 1000

"""What strangers may send: indexes, labels, lists, JSON and uploads that mutate in every way
hypothesis finds.

They take four seconds. FUZZING=60 tries 60 times as many.
"""

import asyncio
import io
import json
import os
import zipfile

import numpy as np
import pytest
from evil import Evil
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.lib import format as npy
from raising import raises
from starlette.exceptions import HTTPException
from starlette.requests import Request

from distap.apps.serve.limits import ServeSettings
from distap.apps.serve.uploads import Arrivals, RefusedError, read_upload
from distap.data.labels import NO_CLASS, class_name, class_numbers
from distap.data.shards.image_files import levels_of_each_class, list_images
from distap.data.shards.index import parse_index
from distap.data.shards.shard_names import shard_names
from distap.errors import DistapError
from distap.evaluation.saved import Evaluation, read_evaluation
from distap.storage.locations import parse_source
from distap.storage.texts import is_line, parsed_json

quick = settings(
    max_examples=60 * int(os.environ.get("FUZZING", "1")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

SHARD = 10_000  # bytes
COLUMNS = {
    "version": np.array(5),
    "shard": np.array([0, 0, 1], dtype=np.int32),
    "offset": np.array([512, 2048, 512], dtype=np.int64),
    "size": np.array([100, 200, 300], dtype=np.int64),
    "crc32": np.array([1, 2, 3], dtype=np.uint32),
    "label": np.array([0, 1, 1], dtype=np.int64),
    "width": np.array([8, 8, 8], dtype=np.int32),
    "height": np.array([6, 6, 6], dtype=np.int32),
    "key": np.array(["a", "b", "c"]),
    "path": np.array(["x/a.png", "y/b.png", "y/c 0.png"]),
    "shard_name": np.array(["0.tar", "sub/1.tar"]),
    "shard_size": np.array([SHARD, SHARD], dtype=np.int64),
    "shard_sha256": np.array(["0" * 64, "f" * 64]),
    "class_name": np.array(["x", "y"]),
    "class_levels": np.array([["", ""], ["g", "h"]]),
}


def packed(**changes):
    buffer = io.BytesIO()
    columns = {name: value for name, value in {**COLUMNS, **changes}.items() if value is not None}
    np.savez(buffer, **columns)
    return buffer.getvalue()


def with_entry(name, data, compression=zipfile.ZIP_STORED):
    """An index one of whose columns has these bytes."""
    buffer = io.BytesIO(packed(**{name: None}))
    with zipfile.ZipFile(buffer, "a", compression) as archive:
        archive.writestr(f"{name}.npy", data)
    return buffer.getvalue()


def declared(shape, dtype, data=b""):
    """A .npy file whose header says what it likes."""
    buffer = io.BytesIO()
    npy.write_array_header_1_0(buffer, {"shape": shape, "fortran_order": False, "descr": dtype})
    return buffer.getvalue() + data


def read(data):
    """The index, or None where it is refused by name."""
    try:
        index = parse_index(data, "shards/index.npz")
    except DistapError as error:
        assert str(error).startswith("shards/index.npz: ")
        return None
    check_is_sound(index)
    return index


def check_is_sound(index):
    """Nothing in an index that was accepted leads outside its shards, its classes or its folder."""
    assert ((index.shard >= 0) & (index.shard < len(index.shard_name))).all()
    assert ((index.label >= 0) & (index.label < len(index.class_name))).all()
    assert len(index.class_levels) == len(index.class_name)
    ends = [int(offset) + int(size) for offset, size in zip(index.offset, index.size, strict=True)]
    assert all(
        end <= int(index.shard_size[shard]) for end, shard in zip(ends, index.shard, strict=True)
    )
    assert (index.offset >= 0).all()
    assert (index.size > 0).all()
    for name in index.shard_name.tolist():
        assert not name.startswith("/")
        assert ".." not in name.split("/")
    assert len(index.fingerprint) == 64


@given(st.data())
@quick
def test_a_mutated_index_is_refused_or_sound(data):
    whole = bytearray(packed())
    assert read(bytes(whole)) is not None
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(whole) - 1))
        if data.draw(st.booleans()):
            whole[place] = data.draw(st.integers(0, 255))
        else:
            del whole[place : place + data.draw(st.integers(1, 64))]
    read(bytes(whole))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"key": np.array([Evil(eval, "1/0"), None, None], dtype=object)},
            "column key: of type object",
        ),
        (
            {"offset": np.array([512, 9_900, 512])},
            r"sample 1 \('b'\): its image reaches beyond its shard",
        ),
        ({"offset": np.array([-1, 2048, 512])}, "reaches beyond its shard"),
        ({"size": np.array([100, 2**63 - 1, 300])}, "reaches beyond its shard"),
        ({"size": np.array([100, 0, 300])}, "size is below 1"),
        ({"label": np.array([0, 2, 1])}, r"label is none of 0 \.\. 1"),
        ({"shard": np.array([0, 2, 1], dtype=np.int32)}, "shard is none of"),
        ({"label": np.array([0, 1])}, "columns of unequal length: .*label 2"),
        (
            {"label": np.array([0, 1, 1], dtype=np.int32)},
            "column label: of type int32, expected int64",
        ),
        ({"key": np.array([b"a", b"b", b"c"])}, r"column key: of type \|S1, expected str"),
        ({"label": None}, "column label: .*no item named"),
        ({"version": np.array(7)}, "version 7 of the index, expected 5"),
        ({"class_levels": np.array(["", "g"])}, r"column class_levels: of shape \(2,\)"),
        ({"shard_size": np.array([-5, SHARD])}, "negative size"),
        ({"shard_sha256": np.array(["0" * 64, "../../../etc/passwd"])}, "no SHA-256"),
        ({"shard_name": np.array(["0.tar", "0.tar"])}, "two shards of one name"),
        ({"shard_name": np.array(["0.tar", "/etc/passwd"])}, "'/etc/passwd' is no name of a shard"),
        ({"shard_name": np.array(["0.tar", "a/../../1.tar"])}, "is no name of a shard"),
        ({"shard_name": np.array(["0.tar", "s3://b/1.tar"])}, "is no name of a shard"),
        (
            {"shard_name": np.array(["0.tar", "1\n.tar"])},
            "shard_name: a name with control characters or line ends",
        ),
        ({"width": np.array([0, 8, 8], dtype=np.int32)}, "width or height is below 1"),
    ],
)
def test_what_cannot_be_is_named(changes, message):
    with pytest.raises(DistapError, match=message):
        parse_index(packed(**changes), "index.npz")


@pytest.mark.parametrize(
    "data",
    [
        with_entry("label", declared((2**40,), "<i8")),
        with_entry("key", declared((2**20,), "<U1000000000")),
        with_entry("key", declared((2**60,), "<U0")),
        with_entry("label", declared((3,), "<i8", bytes(23))),
        with_entry("key", declared((3,), "<U1", b"\xff" * 12)),
        with_entry("key", declared((1,), "<U1", b"\x00\xd8\x00\x00")),
        with_entry("label", b"\x93NUMPY\x03\x00" + bytes(100)),
        with_entry("label", b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65535),
        with_entry("label", declared((3,), "<i8", bytes(24)), zipfile.ZIP_DEFLATED),
        with_entry("key", declared((1,), "<U5000", bytes(20_000))),
        with_entry("key", declared((1,), "<U3", "a\nb".encode("utf-32-le"))),
    ],
)
def test_a_header_that_declares_what_is_not_there_is_refused_without_taking_memory(data):
    import tracemalloc

    tracemalloc.start()
    try:
        with raises("data.damaged_index", "index.npz"):
            parse_index(data, "index.npz")
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


@given(st.text(alphabet="ab01.{},*?[]/:~%\\-!s3 htpf", max_size=40))
@example("{" * 1500)
@example("s3://" + "{a," * 400)
@example("a/{0..9}" * 20)
@example("a{1..1000001}.tar")
@settings(parent=quick, max_examples=2 * quick.max_examples)
def test_any_text_is_a_source_or_is_refused(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)

    class Listing:
        def names(self, pattern):
            return [pattern.replace("*", "x").replace("?", "x").replace("[", "x")]

    try:
        names = shard_names(parse_source(text), Listing())
    except DistapError:
        return
    for name in names:
        assert ".." not in name.split("/")
        assert not name.startswith("/")


FLOATS = st.floats(allow_subnormal=False)
LABELS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    FLOATS,
    st.text(max_size=8),
    st.sampled_from(
        [
            *NO_CLASS,
            " NaN ",
            "-1.0",
            "-0",
            "1.",
            "01",
            "1e3",
            "\ud800",
            b"a",
            [],
            (),
            np.eye(2),
            np.int8(-1),
        ]
    ),
    st.integers(-3, 12).map(lambda number: f" {number}.0"),
)


@given(LABELS)
@settings(parent=quick, max_examples=4 * quick.max_examples)
def test_any_label_is_a_class_or_none_or_refused_by_its_value(label):
    try:
        name = class_name(label)
    except ValueError as error:
        assert "is no class" in str(error)
        return
    assert class_name(name) == name == name.strip()
    assert name.lower() not in NO_CLASS - {""}
    if isinstance(label, int | float):
        assert name in (str(label), "") or float(name) == label


NUMBERS = st.integers(-1, 12)
WORDS = st.text(st.characters(exclude_characters="\0"), max_size=3)  # numpy cuts them off


@given(st.lists(st.one_of(st.none(), WORDS, NUMBERS, NUMBERS.map(float)), min_size=1))
@quick
def test_numbers_of_classes_are_those_of_their_names(labels):
    names = [class_name(label) for label in np.asarray(labels).tolist()]
    numbers = class_numbers(labels).tolist()
    assert [number == -1 for number in numbers] == [name == "" for name in names]
    assert len(set(zip(names, numbers, strict=True))) == len(set(names)) == len(set(numbers))


CELLS = st.one_of(
    st.sampled_from(
        ["path", "label", "class", "group", "split", "is_query", "is_gallery", "Label", "filename"]
    ),
    st.sampled_from(
        [
            "apple/0.png",
            "apple/1.png",
            "../images/car/0.png",
            "0",
            "1.0",
            "-1",
            "true",
            "no",
            '"',
            "\ufeff",
        ]
    ),
    st.text(max_size=6),
)


HEADS = st.sampled_from(
    [(), ("path", "label"), ("path", "label", "split"), ("label", "path", "is_query")]
)


@given(
    HEADS,
    st.lists(st.lists(CELLS, max_size=4), max_size=5),
    st.sampled_from(",;\t"),
    st.binary(max_size=3),
)
@settings(parent=quick, max_examples=3 * quick.max_examples)
def test_any_list_is_read_or_refused_by_its_line(image_folder, head, rows, delimiter, junk):
    table = image_folder / "list.csv"
    text = "\n".join(delimiter.join(row) for row in (head, *rows) if row)
    table.write_bytes(text.encode(errors="replace") + junk)
    try:
        listing = list_images(table)
        levels_of_each_class(listing.images)
    except DistapError as error:
        assert len(str(error)) < 4000
        return
    for image in listing.images:
        assert is_line(image.class_name)
        assert is_line(listing.name_of(image))
    assert all(is_line(name) for name in set(listing.by_part()) - {""})


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), FLOATS, st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
)


@given(
    st.one_of(
        st.binary(max_size=60), st.text('[]{}":,0e-nultrfas', max_size=60), JSON.map(json.dumps)
    )
)
@example("[" * 10_000)
@settings(parent=quick, max_examples=3 * quick.max_examples)
def test_any_text_is_json_of_the_wanted_kind_or_a_value_error(text):
    for kind in (dict, list):
        try:
            assert isinstance(parsed_json(text, kind), kind)
        except ValueError as error:
            assert str(error)


@given(st.dictionaries(st.sampled_from([*Evaluation.model_fields, "x"]), JSON, max_size=4))
@quick
def test_any_record_of_an_evaluation_is_read_or_refused_by_its_file(tmp_path, changes):
    (tmp_path / "result.json").write_text(json.dumps(changes))
    try:
        read_evaluation(tmp_path)
    except DistapError as error:
        assert str(error).startswith(f"{tmp_path}/result.json: ")


PARTS = st.lists(
    st.one_of(
        st.sampled_from(
            [
                b"--b",
                b"--b--",
                b"\r\n",
                b"\r\n\r\n",
                b'Content-Disposition: form-data; name="image"',
            ]
        ),
        st.sampled_from(
            [
                b'; filename="x"',
                b'; name="k"',
                b"Content-Type: text/plain; charset=utf-7",
                b"\xff\xd8",
                b":",
            ]
        ),
        st.binary(max_size=20),
    ),
    max_size=14,
).map(b"".join)
TYPES = st.one_of(
    st.sampled_from(
        [
            b"multipart/form-data; boundary=b",
            b'multipart/form-data; boundary="b"; charset=idna',
            b"",
        ]
    ),
    st.sampled_from(
        [b"multipart/form-data", b"multipart/form-data; boundary=" + b"x" * 300, b"text/html"]
    ),
    st.binary(max_size=40).map(lambda rest: b"multipart/form-data; " + rest),
)


@given(
    PARTS,
    TYPES,
    st.lists(
        st.tuples(st.sampled_from([b"content-length", b"x"]), st.binary(max_size=8)), max_size=2
    ),
)
@settings(parent=quick, max_examples=3 * quick.max_examples)
def test_any_upload_is_an_image_or_refused(body, kind, headers):
    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {
        "type": "http",
        "method": "POST",
        "headers": [(b"content-type", kind), *headers],
        "app": None,
    }
    limits = ServeSettings(max_upload_bytes=200)
    try:
        arrivals = Arrivals(limits, require_place=lambda: None)
        image = asyncio.run(read_upload(Request(scope, receive), limits, arrivals))
    except RefusedError as error:
        assert 400 <= error.status < 500
    except HTTPException as error:  # of Starlette, which the server passes on
        assert error.status_code == 400
    else:
        assert 0 < len(image) <= 200

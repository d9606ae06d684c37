import os
import pickle
import subprocess
from pathlib import Path

import numpy as np
import pytest
from dataset_trees import dump
from evil import Evil
from raising import raises

from distap.data.converters.revisited import plain_value
from distap.errors import DistapError

MARK = "written-by-a-pickle"


def save(path, contents):
    path.write_bytes(contents)
    return path


@pytest.mark.parametrize(
    ("protocol", "old"),
    [(0, True), (1, True), (2, True), (3, True), (0, False), (2, False), (4, False), (5, False)],
)
def test_arrays_and_numbers_of_every_protocol_are_read(protocol, old, tmp_path):
    value = {
        "list": [1, 2.5, "a", None, True],
        "tuple": (3, b"b"),
        "array": np.arange(6, dtype=np.int64),
        "big-endian": np.arange(3, dtype=">i4"),
        "matrix": np.arange(6, dtype=np.uint8).reshape(2, 3),
        "empty": np.array([], dtype=np.float32),
        "words": np.array(["one", "three"]),
        "objects": np.array(["one", 2], dtype=object),
        "scalar": np.float32(1.5),
        "flag": np.array([True, False]),
    }
    path = tmp_path / "x.pkl"
    if old:
        dump(path, value, protocol)
    else:
        path.write_bytes(pickle.dumps(value, protocol))
    read = plain_value(path)
    for name in ("list", "tuple"):
        assert read[name] == value[name]
    for name in ("array", "big-endian", "empty", "words", "objects", "flag", "matrix"):
        assert read[name] == value[name].ravel().tolist()
    assert read["scalar"] == 1.5


def test_a_pickle_of_python_2_is_read(tmp_path):
    # {'cids': ['ab'], 'idxs': numpy.array([3, 258])} as Python 2 and numpy 1 write it with protocol
    # 2.
    path = save(
        tmp_path / "x.pkl",
        b"\x80\x02}q\x00(U\x04cidsq\x01]q\x02U\x02abq\x03aU\x04idxsq\x04cnumpy.core.multiarray\n_reconstruct\n"
        b"q\x05cnumpy\nndarray\nq\x06K\x00\x85U\x01b\x87Rq\x07(K\x01K\x02\x85cnumpy\ndtype\nq\x08U\x02i4K\x00K\x01"
        b"\x87Rq\t(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x08\x03\x00\x00\x00\x02\x01\x00\x00"
        b"tbu.",
    )
    assert plain_value(path) == {"cids": ["ab"], "idxs": [3, 258]}


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize(
    ("evil", "named"),
    [
        (Evil(os.system, f"touch {MARK}"), "posix.system"),
        (Evil(subprocess.check_call, ["touch", MARK]), "check_call"),
        (Evil(eval, f"open('{MARK}', 'w')"), "eval"),
        (Evil(open, MARK, "w"), "open"),
        (Evil(Path, MARK), r"pathlib.*\.Path"),
        (Evil(np.save, MARK, 1), "save"),
        (Evil(getattr, "text", "upper"), "getattr"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_nothing_of_an_evil_pickle_is_run(evil, named, protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path / "evil.pkl", pickle.dumps({"cids": [], "evil": evil}, protocol))
    with pytest.raises(DistapError, match=rf"evil\.pkl: .*{named}"):
        plain_value(path)
    assert [file.name for file in tmp_path.iterdir()] == ["evil.pkl"]


@pytest.mark.parametrize(
    "contents",
    [
        b"",
        b"no pickle",
        b"\x80\x02}q\x00(U\x04cids",
        b"\x80\x02cnumpy\nndarray\n)R.",  # numpy.ndarray, called
        b"\x80\x02cnumpy\nndarray\n)\x81.",
        b"\x80\x02cnumpy\nndarray\n}X\x01\x00\x00\x00aK\x01sb.",  # given an attribute
        b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x03\x00\x00\x00bz2\x86R.",
        b"\x80\x02cnumpy\ndtype\nX\x02\x00\x00\x00V9K\x00K\x01\x87R.",
        b"\x80\x02cnumpy\ndtype\nX\x05\x00\x00\x00f8,f8K\x00K\x01\x87R.",
        b"\x80\x02c__builtin__\nbytes\nJ\x00\x00\x00\x7f\x85R.",  # two gigabytes of zeros
        b"\x80\x02X\x01\x00\x00\x00aQ.",  # a persistent reference
        b"\x80\x02\x82\x01.",  # an extension
    ],
)
def test_a_pickle_that_is_not_plain_is_an_error_that_names_the_file(contents, tmp_path):
    with raises("data.wrong_list", "x.pkl"):
        plain_value(save(tmp_path / "x.pkl", contents))


def test_the_bytes_of_an_array_never_count_as_pointers(tmp_path):
    """numpy's own dtype takes flags from a pickle, and then reads eight bytes as the address of an
    object.
    """
    kind = pickle.dumps(np.dtype("O", False, True), 2)[2:-1].replace(b"K?t", b"K\0t")
    evil = (
        b"\x80\x02cnumpy.core.numeric\n_frombuffer\n(C\x08"
        + b"\x10" * 8
        + kind
        + b"K\x01\x85X\x01\0\0\0CtR."
    )
    assert b"K\0t" in kind and np.frombuffer(
        bytes(8), pickle.loads(b"\x80\x02" + kind + b".")
    ).shape == (1,)
    with raises("data.wrong_list", "1", "8"):
        plain_value(save(tmp_path / "x.pkl", evil))

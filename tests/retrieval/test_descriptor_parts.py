"""Distractors in parts: files of numpy and HDF5, and extracted folders."""

import os
import sys

import h5py
import numpy as np
import pytest
import torch
from postprocessing_reference import write_descriptors
from retrieval_reference import labelled_figures, order_of
from torch.nn.functional import normalize

import distap
from distap.errors import DistapError
from distap.retrieval.descriptor_files import DescribedBy, DescriptorSet
from distap.retrieval.row_blocks import DescriptorParts, open_parts

LEFT_OUT = "left_out"


def random_rows(count, seed, dimensions=6):
    return normalize(
        torch.randn(count, dimensions, generator=torch.Generator().manual_seed(seed))
    ).numpy()


@pytest.fixture
def parts(tmp_path):
    """Five parts in every format, and their rows as they are stored."""
    rows = [random_rows(count, count).astype(np.float16) for count in (9, 1, 30, 12, 5)]
    folder = tmp_path / "folder"
    extracted = tmp_path / "extracted"
    folder.mkdir()
    for number in (0, 1):
        np.save(folder / f"{number}.npy", rows[number])
    with h5py.File(folder / "yfcc_00002.hdf5", "w") as file:
        file.create_dataset("index", data=[f"image {row}" for row in range(30)])
        file.create_dataset("features", data=rows[2], compression="gzip", chunks=(4, 6))
    names = np.arange(12).astype(str)
    write_descriptors(
        extracted, DescriptorSet(rows[3], names, names, DescribedBy("net", "crop 8"), "shards")
    )
    np.save(tmp_path / "last.npy", rows[4])
    return [folder, extracted, tmp_path / "last.npy"], np.concatenate(rows).astype(np.float32)


@pytest.mark.parametrize("block", [2**24, 24])
def test_distractors_in_parts_count_as_those_of_one_gallery(parts, monkeypatch, block):
    """The reference sorts all similarities; the same rows as images without a class give the same
    figures too.
    """
    monkeypatch.setattr("distap.retrieval.ranks.CONVERTED_NUMBERS", block)
    paths, distractors = parts
    own_row = random_rows(40, 3)
    labels = torch.arange(40) % 7
    evaluation = distap.evaluate(own_row, labels, distractors=paths)
    similarities = own_row @ np.concatenate([own_row, distractors]).T
    orders = {}
    for query, row in enumerate(similarities.tolist()):
        positives = {other for other in range(40) if other % 7 == query % 7 and other != query}
        orders[query] = [place in positives for place in order_of(row, positives, {query})]
    assert {
        name: evaluation[name] for name in evaluation if "@" in name or name == "mAP"
    } == pytest.approx(labelled_figures(orders, (1, 5, 10)))
    whole = distap.evaluate(
        np.concatenate([own_row, distractors]), [*labels.tolist(), *[-1] * len(distractors)]
    )
    assert {**whole, LEFT_OUT: 0} == evaluation
    asks = np.arange(40) < 10
    apart = distap.evaluate(own_row, labels, asks, distractors=paths)
    longer = np.concatenate([asks, np.zeros(len(distractors), bool)])
    assert apart == distap.evaluate(
        np.concatenate([own_row, distractors]), [*labels.tolist(), *[-1] * len(distractors)], longer
    )
    assert apart != distap.evaluate(own_row, labels, asks)


def test_rows_of_parts_are_taken_in_any_order_and_shape(parts):
    paths, distractors = parts
    opened = open_parts(paths, 6)
    assert opened.shape == distractors.shape and opened.dtype == np.float16
    for chosen in (
        slice(8, 41),
        slice(40, 40),
        np.array([50, 3, 3, 12, 9]),
        np.array([[56, 0], [10, 41]]),
    ):
        assert np.array_equal(opened[chosen].astype(np.float32), distractors[chosen])
    nested = DescriptorParts([("one", distractors[:5]), ("others", opened)])
    assert np.array_equal(nested[3:9], np.concatenate([distractors[3:5], distractors[:4]]))


def test_what_is_no_part_is_named(tmp_path, parts, monkeypatch):
    own_row = random_rows(4, 0)
    labels = [0, 0, 1, 1]
    for name, values in {
        "narrow": random_rows(3, 0, 5),
        "flat": np.ones(6, np.float32),
        "whole": np.ones((2, 6), np.int64),
        "long": 3 * random_rows(3, 0),
        "broken": np.full((2, 6), np.nan, np.float32),
        "objects": np.array([["a"], [None]], dtype=object),
    }.items():
        np.save(tmp_path / f"{name}.npy", values, allow_pickle=True)
    (tmp_path / "cut.hdf5").write_bytes((parts[0][0] / "yfcc_00002.hdf5").read_bytes()[:900])
    (tmp_path / "text.txt").write_text("1 2 3")
    (tmp_path / "empty").mkdir()
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["vectors"] = own_row
    with h5py.File(tmp_path / "group.h5", "w") as file:
        file.create_group("features")
    with h5py.File(tmp_path / "null.h5", "w") as file:
        file["features"] = h5py.Empty("f4")
    os.mkfifo(tmp_path / "pipe.h5")
    for name, message in {
        "narrow.npy": "descriptors of 5 dimensions, expected 6",
        "flat.npy": r"float32 of shape \(6,\); expected descriptors",
        "whole.npy": "int64 of shape",
        "long.npy": "descriptor 0 has length 3, expected 1",
        "broken.npy": "descriptor 0 is not finite",
        "objects.npy": "not readable as `numpy.save` writes it",
        "cut.hdf5": "not readable as `the extractor of ILIAS` writes it",
        "other.h5": "not readable as `the extractor of ILIAS` writes it",
        "group.h5": "not readable as .*features is a Group without numbers",
        "null.h5": "not readable as .*features is a Dataset without numbers",
        "pipe.h5": "not readable as .*no regular file",
        "text.txt": "no descriptors; expected .npy",
        "empty": "no descriptors in it",
        "missing.npy": "no such file",
        "missing": "no such file; expected .npy",
    }.items():
        with pytest.raises(DistapError, match=rf"{name}: {message}"):
            distap.evaluate(own_row, labels, distractors=tmp_path / name)
    assert (
        distap.evaluate(own_row, labels, distractors=[tmp_path / "long.npy"], dot_product=True)[
            "queries"
        ]
        == 4
    )
    with pytest.raises(DistapError, match=r"extracted: described by .*'net'.*expected .*'another'"):
        open_parts(parts[0], 6, described_by=DescribedBy("another", "crop 8"))
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(DistapError, match=r"needs h5py: pip install 'distap\[hdf5\]'"):
        distap.evaluate(own_row, labels, distractors=parts[0])

import json
from dataclasses import replace

import numpy as np
import pytest
from postprocessing_reference import clustered, write_descriptors

from distap.errors import DistapError
from distap.retrieval.descriptor_files import DescribedBy, DescriptorSet, read_descriptors
from distap.storage.atomic import file_identity

DTYPES = [np.float32, np.float16]


def texts(*values):
    return np.array(values, dtype=np.str_)


def assert_same(read, written):
    assert read.descriptors.dtype == written.descriptors.dtype
    np.testing.assert_array_equal(read.descriptors, written.descriptors)
    assert read.keys.tolist() == written.keys.tolist()
    assert read.classes.tolist() == written.classes.tolist()
    assert (read.described_by, read.data) == (written.described_by, written.data)


@pytest.fixture
def images():
    return clustered(50, 6, 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_is_read(tmp_path, dtype):
    maker = DescribedBy("abc", "side 1024", (1.0, 0.5), "whitening")
    images = replace(clustered(50, 6, 4, dtype=dtype), described_by=maker)
    write_descriptors(tmp_path / "of" / "mine", images)
    assert_same(read_descriptors(tmp_path / "of" / "mine"), images)


def test_no_image_and_odd_names_are_kept(tmp_path):
    none = DescriptorSet(
        np.zeros((0, 3), np.float32), texts(), texts(), DescribedBy("n", "s"), "nothing"
    )
    write_descriptors(tmp_path, none)
    assert read_descriptors(tmp_path).descriptors.shape == (0, 3)
    odd = DescriptorSet(
        np.ones((3, 2), np.float16),
        texts("ä/é 🌍", "a\nb", "'\"\\"),
        texts("", "x", ""),
        DescribedBy("n", "s"),
        "ö",
    )
    write_descriptors(tmp_path, odd)
    assert_same(read_descriptors(tmp_path), odd)


def test_a_file_that_is_missing_cut_or_longer_is_refused(tmp_path, images):
    with pytest.raises(DistapError, match="no such file; `distap extract` writes it"):
        read_descriptors(tmp_path)
    write_descriptors(tmp_path, images)
    for path in {*tmp_path.iterdir()} - {tmp_path / "about.json"}:
        whole = path.read_bytes()
        for damaged in (whole[:-1], whole[: len(whole) // 2], b"", whole + b"x"):
            path.write_bytes(damaged)
            with pytest.raises(
                DistapError, match=rf"{path.name}: damaged .* {len(damaged)} bytes, not the"
            ):
                read_descriptors(tmp_path)
        path.unlink()
        with pytest.raises(DistapError, match=f"{path.name}: No such file"):
            read_descriptors(tmp_path)
        path.write_bytes(whole)


def test_an_array_of_objects_is_refused_unread(tmp_path, images):
    write_descriptors(tmp_path, images)
    np.save(tmp_path / "keys.npy", np.array([{"a": 1}] * 50, dtype=object), allow_pickle=True)
    record = json.loads((tmp_path / "about.json").read_text())
    record["files"]["keys.npy"] = vars(file_identity(tmp_path / "keys.npy"))
    (tmp_path / "about.json").write_text(json.dumps(record))
    with pytest.raises(DistapError, match="not readable"):
        read_descriptors(tmp_path)


def test_a_record_that_is_none_or_does_not_fit_is_refused(tmp_path, images):
    write_descriptors(tmp_path, images)
    path = tmp_path / "about.json"
    record = json.loads(path.read_text())
    for text in ("", "3", "[]", "{}", '{"version": 3}', "\udcff", "{"):
        path.write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(DistapError, match=r"about\.json: not readable"):
            read_descriptors(tmp_path)
    of_network = {"network": "x", "sizing": "y", "scales": 3}
    wrong = {
        "dtype": ["object", 3],
        "images": [49, "many"],
        "dimensions": [7],
        "version": [1],
        "left_out": [3],
    }
    wrong |= {"files": [[], {}], "described_by": [{"network": "x"}, of_network]}
    for key, values in wrong.items():
        for value in values:
            path.write_text(json.dumps({**record, key: value}))
            with pytest.raises(DistapError, match=str(tmp_path)):
                read_descriptors(tmp_path)


def test_keys_and_descriptors_have_one_number_of_rows(images):
    with pytest.raises(DistapError, match="for 49 keys and 50 classes"):
        replace(images, keys=images.keys[1:])

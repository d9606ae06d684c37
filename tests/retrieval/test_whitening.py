from dataclasses import replace

import numpy as np
import pytest
from postprocessing_reference import clustered, described, lw_projection, pca_projection
from safetensors.numpy import load, save

from distap.errors import DistapError
from distap.retrieval.whitening import learned_whitening, load_whitening, save_whitening


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr("distap.retrieval.row_blocks.BLOCK_NUMBERS", 70)  # 10 rows of 7 dimensions


def test_pca_is_the_formula_of_the_paper(small_blocks):
    images = clustered(123, 7, 9, dtype=np.float64)
    whitening = learned_whitening(images)
    expected = pca_projection(images.descriptors, 0.25)
    np.testing.assert_allclose(whitening.projection, expected, atol=1e-9)
    np.testing.assert_allclose(whitening.mean, images.descriptors.mean(axis=0), atol=1e-12)


def test_discriminative_whitening_is_the_formula_over_all_images_of_a_class(small_blocks):
    images = clustered(90, 7, 12, dtype=np.float64)
    # those without a class match nothing, nor does `alone`
    classes = np.where(np.arange(90) < 5, "", images.classes)
    classes[7] = "alone"
    actual = learned_whitening(replace(images, classes=classes), "lw").projection
    expected = lw_projection(images.descriptors, classes)
    # a direction's is free, and changes no similarity
    signs = np.sign((actual * expected).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(actual, signs * expected, atol=1e-9)


def test_fewer_dimensions_are_the_first_of_all():
    images = clustered(200, 8, 9)
    whole = learned_whitening(images)
    cut = learned_whitening(images, dimensions=3)
    np.testing.assert_array_equal(cut.projection, whole.projection[:3])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_directions_without_variance_are_left_out(dtype):
    images = clustered(200, 5, 20, dtype=np.float64)
    # a constant survives rounding
    wide = np.hstack([images.descriptors, np.full((200, 2), 0.25)]).astype(dtype)
    images = replace(images, descriptors=wide)
    assert learned_whitening(images).projection.shape == (5, 7)
    with pytest.raises(
        DistapError, match=r"6 dimensions cannot be learned .* vary in 5 directions of 7"
    ):
        learned_whitening(images, dimensions=6)


def test_fewer_images_than_dimensions_vary_in_one_direction_less_than_there_are_images():
    assert len(learned_whitening(clustered(10, 32, 3)).projection) == 9


def test_what_teaches_nothing_is_refused():
    broken = clustered(30, 4, 3)
    ones = np.ones((20, 4), np.float32)
    whitened = replace(broken, described_by=replace(broken.described_by, whitening="of them"))
    broken.descriptors[7, 2] = np.nan
    for images, kind, message in (
        (broken, "pca", "descriptor 7 is not finite"),
        (whitened, "pca", "whitened already"),
        (described(ones), "pca", "do not vary"),
        (described(ones[:0]), "pca", "no descriptor to learn from"),
        (described(ones), "lw", "no class has two images"),
    ):
        with pytest.raises(DistapError, match=message):
            learned_whitening(images, kind)


def test_a_memory_map_in_half_precision_is_read_as_it_is(tmp_path):
    images = clustered(300, 16, 9, dtype=np.float16)
    np.save(tmp_path / "descriptors.npy", images.descriptors)
    mapped = replace(images, descriptors=np.load(tmp_path / "descriptors.npy", mmap_mode="r"))
    whitening = learned_whitening(mapped)
    exact = learned_whitening(replace(images, descriptors=images.descriptors.astype(np.float64)))
    np.testing.assert_array_equal(whitening.projection, exact.projection)
    np.testing.assert_array_equal(whitening.mean, exact.mean)


def test_what_is_saved_is_loaded(tmp_path):
    whitening = learned_whitening(clustered(100, 16, 9))
    save_whitening(tmp_path / "w.safetensors", whitening)
    loaded = load_whitening(tmp_path / "w.safetensors")
    assert loaded.fingerprint == whitening.fingerprint
    np.testing.assert_array_equal(loaded.mean, whitening.mean)
    np.testing.assert_array_equal(loaded.projection, whitening.projection)
    for name in ("learned_from", "described_by"):
        assert getattr(loaded, name) == getattr(whitening, name)


def test_a_damaged_whitening_is_refused_whichever_byte_it_is_and_another_header_too(tmp_path):
    path = tmp_path / "w.safetensors"
    save_whitening(path, learned_whitening(clustered(40, 4, 5)))
    whole = path.read_bytes()
    begin_of_arrays = 8 + int.from_bytes(whole[:8], "little")
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(DistapError, match=r"w\.safetensors: not readable"):
            load_whitening(path)
    for place in range(begin_of_arrays, len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(DistapError, match=r"w\.safetensors: not readable"):
            load_whitening(path)
    arrays = load(whole)
    for header in ("[]", "{", '{"learned_from": 3}'):
        path.write_bytes(save(arrays, {"whitening": header}))
        with pytest.raises(DistapError, match=r"w\.safetensors"):
            load_whitening(path)
    with pytest.raises(DistapError, match="no such file"):
        load_whitening(tmp_path / "none")

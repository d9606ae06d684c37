from dataclasses import replace

import numpy as np
import pytest
from postprocessing_reference import clustered, described, lw_projection, matches, pca_projection, unit
from safetensors.numpy import load, save

from distap.errors import DistapError
from distap.retrieval.whitening import learn_discriminative, learn_pca, load_whitening, save_whitening


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr("distap.retrieval.row_blocks.BLOCK_NUMBERS", 70)  # 10 rows of 7 dimensions


def assert_same_up_to_sign(actual, expected):
    """The sign of a direction is free, and changes no similarity."""
    signs = np.sign((actual * expected).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(actual, signs * expected, atol=1e-9)


def test_pca_is_the_formula_of_the_paper(small_blocks):
    images = clustered(123, 7, 9, dtype=np.float64)
    whitening = learn_pca(images)
    expected = pca_projection(images.descriptors, 0.25)
    np.testing.assert_allclose(whitening.projection, expected, atol=1e-9)
    whitened = unit((images.descriptors - images.descriptors.mean(axis=0)) @ expected.T)
    np.testing.assert_allclose(whitening.apply(images.descriptors), whitened, atol=1e-9)


def test_fewer_dimensions_are_the_first_of_all():
    images = clustered(200, 8, 9)
    whole, cut = learn_pca(images), learn_pca(images, dimensions=3)
    np.testing.assert_array_equal(cut.projection, whole.projection[:3])
    assert cut.apply(images.descriptors).shape == (200, 3)


def test_discriminative_whitening_is_the_formula_over_all_matching_images(small_blocks):
    generator = np.random.default_rng(3)
    of_image = np.concatenate([np.repeat(0, 27), generator.integers(1, 12, 60), [90, 91]])  # two match nothing
    images = described(unit(generator.normal(size=(89, 7))), generator.permutation(of_image))
    whitening = learn_discriminative(images)
    pairs = matches(images.classes.tolist())
    assert_same_up_to_sign(whitening.projection, lw_projection(images.descriptors, pairs))


def test_discriminative_whitening_learns_from_pairs_too(small_blocks):
    images = clustered(60, 7, 9, dtype=np.float64)
    pairs = np.random.default_rng(2).permutation(60).reshape(30, 2)
    whitening = learn_discriminative(images, pairs=pairs)
    assert_same_up_to_sign(whitening.projection, lw_projection(images.descriptors, [(i, j, 1) for i, j in pairs]))


def test_an_image_without_a_class_matches_nothing():
    images = clustered(50, 6, 4, dtype=np.float64)
    more = described(np.vstack([images.descriptors, images.descriptors[::-1]]))
    more = replace(more, classes=np.concatenate([images.classes, [""] * 50]))
    same = described(more.descriptors)
    same = replace(same, classes=np.concatenate([images.classes, [f"alone-{row}" for row in range(50)]]))
    np.testing.assert_array_equal(learn_discriminative(more).projection, learn_discriminative(same).projection)
    with pytest.raises(DistapError, match="no class has two images"):
        learn_discriminative(described(images.descriptors))


@pytest.mark.parametrize("learn", [learn_pca, learn_discriminative])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_directions_without_variance_are_left_out(learn, dtype):
    images = clustered(200, 5, 20, dtype=np.float64)
    wide = np.hstack([images.descriptors, np.full((200, 2), 0.25)]).astype(dtype)  # a constant survives rounding
    images = replace(images, descriptors=wide)
    assert learn(images).projection.shape == (5, 7)
    with pytest.raises(DistapError, match=r"6 dimensions cannot be learned .* vary in 5 directions of 7"):
        learn(images, dimensions=6)


def test_fewer_images_than_dimensions_vary_in_one_direction_less_than_there_are_images():
    assert len(learn_pca(clustered(10, 32, 3)).projection) == 9


def test_descriptors_that_do_not_vary_are_an_error():
    with pytest.raises(DistapError, match="do not vary"):
        learn_pca(described(np.ones((20, 4), np.float32)))


@pytest.mark.parametrize("learn", [learn_pca, learn_discriminative])
def test_a_descriptor_that_is_not_finite_teaches_nothing(learn):
    images = clustered(30, 4, 3)
    images.descriptors[7, 2] = np.nan
    with pytest.raises(DistapError, match="not finite"):
        learn(images)
    with pytest.raises(DistapError, match="no descriptor to learn from"):
        learn(described(np.zeros((0, 4), np.float32)))


def test_a_memory_map_in_half_precision_is_read_as_it_is(tmp_path):
    images = clustered(300, 16, 9, dtype=np.float16)
    np.save(tmp_path / "descriptors.npy", images.descriptors)
    mapped = replace(images, descriptors=np.load(tmp_path / "descriptors.npy", mmap_mode="r"))
    whitening = learn_pca(mapped)
    exact = learn_pca(replace(images, descriptors=images.descriptors.astype(np.float64)))
    np.testing.assert_array_equal(whitening.projection, exact.projection)
    whitened = whitening.apply(mapped.descriptors)
    assert whitened.dtype == np.float32
    np.testing.assert_allclose(whitened, exact.apply(images.descriptors.astype(np.float64)), atol=1e-6)


def test_whitened_descriptors_teach_no_second_whitening():
    images = clustered(100, 16, 9)
    with pytest.raises(DistapError, match="whitened already"):
        learn_pca(replace(images, described_by=replace(images.described_by, whitening="of them")))


def test_descriptors_of_other_dimensions_are_refused():
    images = clustered(100, 16, 9)
    with pytest.raises(DistapError, match="16 dimensions"):
        learn_pca(images).apply(images.descriptors[:, :9])


@pytest.mark.parametrize("learn", [learn_pca, learn_discriminative])
def test_what_is_saved_is_loaded(tmp_path, learn):
    whitening = learn(clustered(100, 16, 9))
    save_whitening(tmp_path / "w.safetensors", whitening)
    loaded = load_whitening(tmp_path / "w.safetensors")
    assert loaded.fingerprint == whitening.fingerprint
    np.testing.assert_array_equal(loaded.mean, whitening.mean)
    np.testing.assert_array_equal(loaded.projection, whitening.projection)
    for name in ("kind", "power", "learned_from", "described_by"):
        assert getattr(loaded, name) == getattr(whitening, name)


def test_a_damaged_whitening_is_refused_whichever_byte_it_is(tmp_path):
    path = tmp_path / "w.safetensors"
    save_whitening(path, learn_pca(clustered(40, 4, 5)))
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


def test_a_header_of_anything_else_is_refused(tmp_path):
    path = tmp_path / "w.safetensors"
    save_whitening(path, learn_pca(clustered(40, 4, 5)))
    arrays = load(path.read_bytes())
    for header in ("[]", "{", '{"version": 1, "kind": ["pca"]}', '{"version": 2}'):
        path.write_bytes(save(arrays, {"whitening": header}))
        with pytest.raises(DistapError, match=r"w\.safetensors"):
            load_whitening(path)
    with pytest.raises(DistapError, match="no such file"):
        load_whitening(tmp_path / "none")

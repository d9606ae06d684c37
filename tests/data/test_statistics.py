from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from images import write_images
from PIL import Image

from distap.data.plan import Classes
from distap.data.sampling.p_by_k import PByKSampling
from distap.data.shards.image_files import ImageFile
from distap.data.shards.load_index import load_index
from distap.data.shards.packing import pack
from distap.data.shards.statistics import most_classes, share_with_positive, statistics
from distap.errors import DistapError


def test_a_small_set_is_counted_by_hand(shards):
    index = load_index(shards)
    figures = statistics(index)
    assert (figures["images"], figures["classes"], figures["shards"], figures["group_sizes"]) == (9, 3, 3, {})
    assert figures["bytes"] == int(index.size.sum())
    spread = figures["images_a_class"]
    assert (spread["least"], spread["median"], spread["mean"], spread["greatest"]) == (2, 3, 3, 4)
    assert figures["singletons"] == 0
    assert figures["largest"] == {"apple": 4, "bear": 3, "car": 2}
    assert figures["smallest_classes_batch"] == 6


def test_sizes_groups_and_singletons_are_told_apart(tmp_path):
    images = []
    for name, size in {"tall.jpg": (30, 90), "wide.png": (300, 40), "flat.webp": (2000, 1000)}.items():
        path = tmp_path / name
        Image.new("RGB", size).save(path)
        images.append(ImageFile(path, path.stem, "animals" if name == "tall.jpg" else ""))
    index, _ = pack(images, tmp_path / "out")
    figures = statistics(index)
    assert (figures["singletons"], figures["without_group"]) == (3, 2)
    assert figures["group_sizes"] == {"animals": (1, 1)}
    assert figures["megapixels"]["greatest"] == 2 and figures["aspect"]["greatest"] == 7.5
    assert all(each["most_classes"] == 0 for each in figures["p_by_k"])


labels = st.lists(st.integers(0, 4), min_size=4, max_size=8).map(
    lambda values: np.unique(values, return_inverse=True)[1].astype(np.int64)
)


@given(labels, st.integers(1, 4))
def test_the_share_with_a_positive_is_that_of_all_batches(label, size):
    batches = list(combinations(label.tolist(), size))
    found = sum(batch.count(one) > 1 for batch in batches for one in batch)
    assert share_with_positive(Classes(label), size) == pytest.approx(found / (size * len(batches)))


@given(labels, st.integers(2, 5))
def test_p_by_k_takes_as_many_classes_as_told_and_no_more(label, images):
    classes = Classes(label)
    most = most_classes(classes, images)
    if most:
        PByKSampling(classes=most, images=images).check(classes)
    with pytest.raises(DistapError):
        PByKSampling(classes=most + 1, images=images).check(classes)


def test_batches_larger_than_the_data_set_are_not_told_of(tmp_path):
    index, _ = pack(write_images(tmp_path / "images", {"a": 150, "b": 150}, size=4), tmp_path / "out")
    assert [batch["size"] for batch in statistics(index)["random"]] == [64, 256]

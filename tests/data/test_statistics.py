import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distap.data.plan import Classes
from distap.data.sampling.p_by_k import PByKSampling
from distap.data.shards.load_index import load_index
from distap.data.shards.statistics import most_classes, statistics
from distap.errors import DistapError


def test_a_small_set_is_counted_by_hand(shards):
    index = load_index(shards)
    assert statistics(index) == {
        "images": 9,
        "classes": 3,
        "classes_of_one_image": 0,
        "images_a_class_min": 2,
        "images_a_class_median": 3,
        "images_a_class_max": 4,
        "bytes": int(index.size.sum()),
        "left_out": 0,
    }


labels = st.lists(st.integers(0, 4), min_size=4, max_size=8).map(
    lambda values: np.unique(values, return_inverse=True)[1].astype(np.int64)
)


@given(labels, st.integers(2, 5))
def test_p_by_k_takes_as_many_classes_as_told_and_no_more(label, images):
    classes = Classes(label)
    most = most_classes(classes, images)
    if most:
        PByKSampling(classes=most, images=images).check(classes)
    with pytest.raises(DistapError):
        PByKSampling(classes=most + 1, images=images).check(classes)

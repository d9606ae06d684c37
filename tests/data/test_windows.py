"""Batches from windows of shards, and which rank takes which images."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises

from distap.data.plan import Classes, Plan
from distap.data.sampling import (
    ClassesSampling,
    MinedSampling,
    PByKSampling,
    RandomSampling,
    SuperPByKSampling,
)

IMAGES_A_CLASS = 4


def packed_by_class(shards=12, classes_a_shard=10, groups=0):
    """Images as `data pack` packs them: a class lies in one shard."""
    classes = shards * classes_a_shard
    labels = np.repeat(np.arange(classes), IMAGES_A_CLASS)
    in_shards = np.repeat(np.arange(shards, dtype=np.int32), classes_a_shard * IMAGES_A_CLASS)
    levels = None
    if groups:
        levels = np.array([f"group-{label % groups}" for label in range(classes)])[:, None]
    return Classes(labels, levels, shards=in_shards)


PLANS = {
    "random": lambda window: RandomSampling(batch_size=32, window=window),
    "p_by_k": lambda window: PByKSampling(classes=8, images=4, window=window),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("window", [1, 3, 5, 12, 40])
def test_a_batch_holds_no_image_twice(name, window):
    plan = Plan(packed_by_class(), PLANS[name](window), seed=4)
    for step in range(70):
        batch = plan.batch(step)
        assert len(np.unique(batch)) == len(batch) == 32


@pytest.mark.parametrize("name", ["random", "p_by_k"])
@pytest.mark.parametrize("window", [1, 3, 5, 12, 40])
def test_each_image_comes_once_in_a_pass(name, window):
    data = packed_by_class()
    plan = Plan(data, PLANS[name](window), seed=1)
    steps = len(data) // 32
    for first in (0, steps, 7 * steps):
        drawn = np.concatenate([plan.batch(step) for step in range(first, first + steps)])
        assert sorted(drawn.tolist()) == list(range(len(data)))


@pytest.mark.parametrize("name", ["random", "p_by_k"])
def test_a_pass_goes_through_one_window_of_shards_after_the_other(name):
    data = packed_by_class()
    plan = Plan(data, PLANS[name](3), seed=1)
    steps = len(data) // 32
    # 12 shards of 40 images are four windows of 120, between which batches of 32 lie across.
    shards = [set(data.shards[plan.batch(step)].tolist()) for step in range(steps, 2 * steps)]
    assert max(map(len, shards)) <= 6
    visits = [shard for present in shards for shard in present]
    assert max(Counter(visits).values()) <= 120 // 32 + 2
    for shard in range(12):
        seen = [step for step, present in enumerate(shards) if shard in present]
        assert seen == list(range(seen[0], seen[-1] + 1))


def test_each_pass_has_other_windows():
    data = packed_by_class()
    plan = Plan(data, PLANS["p_by_k"](3), seed=1)
    steps = len(data) // 32
    first = [
        tuple(sorted(set(data.shards[plan.batch(step)].tolist()))) for step in (0, steps, 2 * steps)
    ]
    assert len(set(first)) == 3


def test_within_a_window_batches_mix_the_classes_of_all_its_shards():
    data = packed_by_class(shards=4)
    plan = Plan(data, PLANS["p_by_k"](4), seed=1)
    shards = [set(data.shards[plan.batch(step)].tolist()) for step in range(5)]
    assert min(map(len, shards)) >= 3


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=8, max_size=40),
    shards=st.integers(2, 9),
    window=st.integers(1, 4),
    seed=st.integers(0, 3),
)
def test_classes_over_several_shards_are_drawn_once_a_pass_too(sizes, shards, window, seed):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    in_shards = (np.arange(len(labels)) * shards // len(labels)).astype(np.int32)
    data = Classes(labels, shards=in_shards)
    usable = len(data.with_pairs)
    if usable < 2 or data.sizes.max() < 3:
        return
    plan = Plan(data, PByKSampling(classes=2, images=2, window=window), seed)
    steps = usable // 2
    drawn = [set(labels[plan.batch(step)].tolist()) for step in range(steps)]
    counts = Counter(label for batch in drawn for label in batch)
    assert max(counts.values()) == 1 or usable < 4
    assert all(len(batch) == 2 for batch in drawn)


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        (ClassesSampling(batch_size=240, window=2), "every class"),
        (MinedSampling(classes=8, images=4, window=2), "look alike"),
        (PByKSampling(classes=8, images=4, window=2, balance=1), "balance"),
        (SuperPByKSampling(classes=8, images=4, window=2), "super-category"),
    ],
)
def test_windows_are_refused_with_the_reason(sampling, reason):
    with raises("sampling.no_window", "sampling.window is 2", reason):
        Plan(packed_by_class(groups=3), sampling, 0)


@pytest.mark.parametrize("name", PLANS)
def test_images_in_no_shards_have_no_windows(name):
    data = packed_by_class(groups=3)
    data.shards = None
    with raises("sampling.no_window", "data pack"):
        Plan(data, PLANS[name](2), 0)


def runs(plan, step, ranks):
    """The samples of each rank."""
    order = plan.order(step, ranks)
    batch = plan.batch(step)
    return [batch[order[rank::ranks]] for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("window", [None, 3])
def test_each_rank_takes_a_run_of_the_shards_and_its_slots_ascend(ranks, window):
    data = packed_by_class(shards=16)
    plan = Plan(data, PByKSampling(classes=7, images=4, window=window), 0)
    for step in range(0, 40, 7):
        order = plan.order(step, ranks)
        assert sorted(order.tolist()) == list(range(28))
        for rank in range(ranks):
            slots = order[rank::ranks]
            assert (np.diff(slots) > 0).all()
        places = [plan.spread(step)[data.shards[samples]] for samples in runs(plan, step, ranks)]
        for lower, higher in pairwise(places):
            assert lower.max() <= higher.min()


def test_each_host_reads_its_own_shards_of_a_window():
    data = packed_by_class(shards=32, classes_a_shard=25)
    plan = Plan(data, PByKSampling(classes=100, images=4, window=8), 0)
    steps = len(data) // 400
    readers = [Counter(), Counter()]
    for step in range(steps):
        for host, samples in enumerate(runs(plan, step, 2)):
            readers[host].update(data.shards[samples].tolist())
    # By far most images of each shard are read by one of the two hosts.
    shared = sum(min(readers[0][shard], readers[1][shard]) for shard in range(32))
    assert shared < 0.1 * len(data)
    assert {shard for shard in range(32) if readers[0][shard] > readers[1][shard]} != set(range(32))


def test_a_single_rank_needs_no_order():
    assert Plan(packed_by_class(), PLANS["random"](None), 0).order(3, 1) is None

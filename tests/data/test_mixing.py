"""The plan of batches from several data sets: exact shares, whole classes, any step first."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from images import ALONE, AUGMENTATION, pack_sets
from raising import raises

from distap.data.loading.indexed import IndexedSource
from distap.data.loading.share import LoadingJob, MixedSource
from distap.data.mixing import MOST_BATCHES, Shares, mixed, numbers_of
from distap.data.plan import Classes, MixedClasses, Plan
from distap.data.sampling import (
    ClassesSampling,
    MinedSampling,
    PByKSampling,
    RandomSampling,
    SuperPByKSampling,
)
from distap.stopwatch import Stopwatch
from distap.storage.locations import parse_source
from distap.world import World

HALVES = {"a": Fraction(1), "b": Fraction(1), "c": Fraction(1, 2)}
LEVELS = np.array([["x"], ["y"], ["x"], ["y"]] * 5)


def classes(count, images):
    """`count` classes of `images` samples each, mixed, of which each level-1 class has half."""
    labels = np.random.default_rng(count).permutation(np.repeat(np.arange(count), images))
    return Classes(labels, LEVELS[:count], shards=np.sort(labels // 3).astype(np.int32))


SETS = MixedClasses([classes(20, 5), classes(16, 4), classes(12, 6)])
SAMPLINGS = [
    RandomSampling(20),
    RandomSampling(20, window=2),
    PByKSampling(10, 2),
    PByKSampling(10, 2, window=3),
    PByKSampling(10, 2, balance=1),
    SuperPByKSampling(10, 2),
    MinedSampling(10, 2, near=2),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=repr)
def test_a_batch_holds_each_set_by_its_weight_as_if_that_trained_alone(
    sampling,
):
    plan = Plan(SETS, mixed(sampling, HALVES), 3)
    for step in (0, 1, 2, 7, 1000, 10**9):
        batch = plan.batch(step)
        assert len(np.unique(batch)) == sampling.size
        assert np.bincount(SETS.sets_of(batch)).tolist() == [8, 8, 4]
        for number, alone in enumerate(SETS.sets):
            units = int(sampling.units * [0.4, 0.4, 0.2][number])
            expected = Plan(alone, sampling.of_units(units), 3).batch(step) + SETS.first[number]
            assert np.array_equal(batch[SETS.sets_of(batch) == number], expected)


@pytest.mark.parametrize("sampling", [*SAMPLINGS, ClassesSampling(50)], ids=repr)
def test_batches_of_one_set_are_those_of_the_set_alone_one_after_the_other(
    sampling,
):
    one = replace(sampling, mix="one")
    plan = Plan(SETS, mixed(one, HALVES), 3)
    batches = [plan.batch(step) for step in range(50)]
    numbers = [int(SETS.sets_of(batch)[0]) for batch in batches]
    assert np.bincount(numbers).tolist() == [20, 20, 10]
    assert any(a != b for a, b in zip(numbers[:5], numbers[5:10], strict=True))
    for number, alone in enumerate(SETS.sets):
        own = [batch for batch, of in zip(batches, numbers, strict=True) if of == number]
        alone_plan = Plan(alone, sampling, 3)
        for step, batch in enumerate(own):
            assert np.array_equal(batch, alone_plan.batch(step) + SETS.first[number])


@pytest.mark.parametrize("mix", ["all", "one"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=repr)
def test_one_set_alone_gives_the_batches_of_a_training_on_it(sampling, mix):
    alone = SETS.sets[0]
    mixture = replace(sampling, mix=mix)
    plan = Plan(MixedClasses([alone]), mixed(mixture, {"a": Fraction(7)}), 5)
    assert plan.classes.numbers.shape == alone.numbers.shape
    for step in (0, 3, 123):
        assert np.array_equal(plan.batch(step), Plan(alone, sampling, 5).batch(step))


@given(
    weights=st.lists(st.fractions(1, 50, max_denominator=20), min_size=1, max_size=6),
    units=st.integers(1, 40),
    seed=st.integers(0, 5),
)
def test_shares_are_exact_over_blocks_and_rounded_in_each_batch(weights, units, seed):
    shares = Shares(tuple(weights), units)
    batches, counts = shares._block
    exact = [units * batches * weight / sum(weights) for weight in weights]
    if batches < MOST_BATCHES:
        assert counts.tolist() == exact
    assert counts.sum() == units * batches and counts.min() > 0
    assert all(
        abs(count - wanted) <= max(1, len(weights))
        for count, wanted in zip(counts, exact, strict=True)
    )
    before = np.array([shares.before(step, seed) for step in range(2 * batches + 1)])
    assert np.array_equal(before[batches], counts) and np.array_equal(before[-1], 2 * counts)
    takes = np.diff(before, axis=0)
    assert (takes.sum(axis=1) == units).all()
    assert (takes >= shares.least).all() and (takes <= shares.most).all()
    assert (shares.most - shares.least <= 1).all()


def test_shares_of_few_batches_are_nearly_exact():
    shares = Shares((Fraction("0.617"), Fraction("0.3"), Fraction("0.083")), 1)
    taken = np.array([shares.before(step, 0) for step in range(1000)])
    expected = np.arange(1000)[:, None] * np.array([0.617, 0.3, 0.083])
    assert np.abs(taken - expected).max() < 3


def test_a_later_weighting_goes_on_where_the_one_before_ended():
    sampling = PByKSampling(10, 2)
    before = mixed(sampling, HALVES)
    taken = before.shares.before(7, 0)
    after = mixed(
        sampling,
        {"a": Fraction(2), "b": Fraction(1), "c": Fraction(2)},
        7,
        taken,
    )
    assert after.shares.before(7, 0).tolist() == taken.tolist()
    assert (after.shares.before(8, 0) - taken).tolist() == [4, 2, 4]
    plan = Plan(SETS, after, 0)
    assert np.bincount(SETS.sets_of(plan.batch(9))).tolist() == [8, 4, 8]


def test_weights_are_numbers_sizes_or_their_roots():
    images = {"a": 400, "b": 100}
    assert numbers_of({"a": 0.1, "b": 3}, images) == {
        "a": Fraction(1, 10),
        "b": Fraction(3),
    }
    assert numbers_of({"a": "size", "b": "size"}, images) == {
        "a": 400,
        "b": 100,
    }
    assert numbers_of({"a": "sqrt", "b": "sqrt"}, images) == {
        "a": 20,
        "b": 10,
    }


def test_classes_and_levels_of_each_set_follow_those_of_the_last_and_the_set_is_the_coarsest():
    flat = Classes(np.array([0, 0, 1, 1]))
    deep = Classes(np.array([0, 1, 1, 2]), np.array([["x"], ["x"], [""]]))
    joined = MixedClasses([flat, deep])
    assert joined.numbers.tolist() == [
        [0, 0, 0],
        [1, 1, 0],
        [2, 3, 1],
        [3, 3, 1],
        [4, 2, 1],
    ]
    assert joined.labels_of(np.array([0, 3, 4, 7])).tolist() == [0, 1, 2, 4]
    assert joined.samples(3).tolist() == [5, 6] and len(joined) == 8


def test_a_damaged_image_is_replaced_by_one_of_its_class_and_set():
    plan = Plan(SETS, mixed(PByKSampling(10, 2), HALVES), 0)
    batch = plan.batch(4)
    for slot in range(20):
        stand_ins = plan.stand_ins(4, slot)
        assert len(stand_ins) and not set(stand_ins.tolist()) & set(batch.tolist())
        labels = SETS.labels_of(np.append(stand_ins, batch[slot]))
        assert len(set(labels.tolist())) == 1


def test_what_a_set_cannot_provide_is_refused_with_its_name():
    few = MixedClasses([classes(20, 5), classes(3, 4)])
    with raises("sampling.set_too_small", "data.train.b", 5, 10, 3, 6):
        Plan(
            few,
            mixed(PByKSampling(10, 2), {"a": Fraction(1), "b": Fraction(1)}),
            0,
        )
    Plan(
        few,
        mixed(PByKSampling(10, 2), {"a": Fraction(4), "b": Fraction(1)}),
        0,
    )
    with raises("sampling.unequal_parts", "data.train.a", 36, 37):
        Plan(
            few,
            mixed(ClassesSampling(55), {"a": Fraction(2), "b": Fraction(1)}),
            0,
        )


class Sevens:
    """A sampling from elsewhere, which knows nothing of turns."""

    size = 7

    def check(self, data):
        assert len(data) > 7

    def batch(self, data, seed, step):
        return (np.arange(7) + 7 * step) % len(data)


def test_a_sampling_from_elsewhere_draws_whole_batches_of_one_set():
    plan = Plan(SETS, mixed(Sevens(), HALVES), 0)
    batches = [plan.batch(step) for step in range(5)]
    assert sorted(int(SETS.sets_of(batch)[0]) for batch in batches) == [
        0,
        0,
        1,
        1,
        2,
    ]
    assert {len(set(SETS.sets_of(batch).tolist())) for batch in batches} == {1}


class Reversed(RandomSampling):
    """Random batches in the reverse order."""

    def batch(self, data, seed, step):
        return super().batch(data, seed, step)[::-1]


def test_a_sampling_that_draws_its_own_batches_draws_those_of_one_set():
    plan = Plan(SETS, mixed(Reversed(20), HALVES), 0)
    numbers = [set(SETS.sets_of(plan.batch(step)).tolist()) for step in range(5)]
    assert {len(of_batch) for of_batch in numbers} == {1}
    with raises("sampling.no_mix", "sampling.mix", "Reversed"):
        Plan(SETS, mixed(Reversed(20, mix="all"), HALVES), 0)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Shards, a folder of images, and three quarters of the classes of other shards."""
    folder = tmp_path_factory.mktemp("sets")
    pack_sets(folder, "{}-shards".format, {"a": (8, 4), "b": (6, 5), "c": (12, 3)}, size=24)
    texts = {"a": folder / "a-shards", "b": f"imagefolder:{folder / 'b'}"}
    texts["c"] = f"{folder / 'c-shards'}[:0.75]"
    return {name: parse_source(text) for name, text in texts.items()}


def opened(sources, sampling, world=ALONE, **settings):
    source = MixedSource(sources, dict.fromkeys(sources, 1.0))
    transform = AUGMENTATION.transform(16)
    settings = {"chunk": 4, "sizes": ((0, 16, transform),), **settings}
    return IndexedSource().open(LoadingJob(source, sampling, 1, **settings), world, Stopwatch())


def pixels_by_slot(sources, sampling, step, ranks, **settings):
    """The pixels, labels and names of a batch by slot, as `ranks` ranks read it."""
    found = {}
    for rank in range(ranks):
        images = opened(sources, sampling, World(rank, ranks), **settings)
        shares = images.shares(range(step, step + 1))
        share = next(shares)
        pixels = share.images(slice(0, len(images.places)))
        for row, slot in enumerate(images.slots(step)):
            found[slot] = (
                pixels[row].numpy().copy(),
                share.labels[row].tolist(),
                share.names[row],
            )
    return [found[slot] for slot in range(sampling.size)]


@pytest.mark.parametrize(
    "sampling",
    [PByKSampling(6, 3), RandomSampling(18), PByKSampling(5, 3, mix="one")],
    ids=repr,
)
@pytest.mark.parametrize("workers", [0, 2])
def test_any_ranks_and_workers_read_the_same_pixels_of_shards_folders_and_parts(
    sources, sampling, workers
):
    whole = pixels_by_slot(sources, sampling, 3, 1)
    for ranks in (2, 3):
        parts = pixels_by_slot(sources, sampling, 3, ranks, workers=workers)
        for (pixels, labels, name), (others, *rest) in zip(whole, parts, strict=True):
            assert np.array_equal(pixels, others) and rest == [labels, name]
    names = {name.partition(": ")[0] for _, _, name in whole}
    assert names == (set("abc") if sampling.mix is None else {name[:1] for name in names})


def test_a_set_has_its_own_augmentation(sources):
    sampling = PByKSampling(6, 3)
    own = {"b": ((0.0, 16, type(AUGMENTATION)(crop=1, flip=0).transform(16)),)}
    plain = pixels_by_slot(sources, sampling, 0, 1)
    changed = pixels_by_slot(sources, sampling, 0, 1, own_sizes=own)
    for (pixels, _, name), (others, _, _) in zip(plain, changed, strict=True):
        assert np.array_equal(pixels, others) == (not name.startswith("b: "))

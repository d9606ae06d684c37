from collections import Counter
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, reject, settings
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
from distap.data.turns import in_turn
from distap.errors import DistapError
from distap.registry import build_part

SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=9)


def labels_of(sizes):
    """Labels of classes of these sizes, mixed."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    return labels[np.random.default_rng(len(labels)).permutation(len(labels))]


def by_classes(sizes, batch_size, seed=0):
    return Plan(Classes(labels_of(sizes)), ClassesSampling(batch_size=batch_size), seed)


@st.composite
def plans_by_classes(draw):
    sizes = draw(SIZES.filter(lambda sizes: sum(sizes) >= 2 * len(sizes)))
    return by_classes(sizes, draw(st.integers(2 * len(sizes), sum(sizes))), draw(st.integers(0, 3)))


def even_shares(sizes, total):
    """One image at a time to the class that has been given fewest, while it has any left."""
    inputs = [0] * len(sizes)
    for _ in range(total):
        label = min((c for c in range(len(sizes)) if inputs[c] < sizes[c]), key=lambda c: inputs[c])
        inputs[label] += 1
    return sorted(inputs)


@settings(deadline=None)
@given(plan=plans_by_classes(), step=st.integers(0, 100))
def test_by_classes_every_class_gives_as_even_a_share_as_can_be(plan, step):
    batch = plan.batch(step)
    sizes = plan.classes.sizes.tolist()
    taken = np.bincount(plan.classes.labels[batch], minlength=len(sizes))
    assert len(batch) == len(set(batch.tolist())) == plan.sampling.size
    assert sorted(taken.tolist()) == even_shares(sizes, plan.sampling.size)
    assert all(count >= min(2, size) for count, size in zip(taken, sizes, strict=True))


@settings(deadline=None)
@given(plan=plans_by_classes())
def test_by_classes_every_image_of_a_class_is_used_before_any_is_used_again(plan):
    used = Counter()
    for step in range(40):
        used.update(plan.batch(step).tolist())
        for label in range(plan.classes.count):
            uses = [used[sample] for sample in plan.classes.samples(label).tolist()]
            assert max(uses) - min(uses) <= 1


def super_labels(groups):
    """Classes over super-categories: for each group, the sizes of its classes."""
    sizes = [size for group in groups for size in group]
    names = [f"group-{number}" for number, group in enumerate(groups) for _ in group]
    return Classes(labels_of(sizes), np.array(names)[:, None])


@st.composite
def plans_within_pairs(draw):
    groups = draw(
        st.lists(st.lists(st.integers(1, 6), min_size=4, max_size=12), min_size=2, max_size=5)
    )
    groups = [[2, 3, *group] for group in groups]  # so that each has two classes with pairs
    sampling = SuperPByKSampling(classes=draw(st.integers(2, 4)), images=draw(st.integers(2, 4)))
    try:
        return Plan(super_labels(groups), sampling, draw(st.integers(0, 3)))
    except DistapError:
        reject()


def groups_in(plan, batch):
    return Counter(plan.classes.levels[plan.classes.labels[batch], 0].tolist())


@settings(deadline=None)
@given(plan=plans_within_pairs(), step=st.integers(0, 60))
def test_a_batch_within_a_pair_has_two_super_categories_and_half_of_each_where_there_are_as_many(
    plan, step
):
    batch = plan.batch(step)
    assert len(batch) == len(set(batch.tolist())) == plan.sampling.size
    counts = groups_in(plan, batch)
    assert len(counts) == 2
    taken = np.bincount(plan.classes.labels[batch], minlength=plan.classes.count)
    assert taken.max() <= plan.sampling.images
    assert not taken[plan.classes.sizes == 1].any()
    smallest = plan.sampling.classes // 2 * plan.sampling.images
    for name, count in counts.items():
        inputs = plan.classes.available(plan.classes.by_group[name], plan.sampling.images)
        assert count >= min(smallest, inputs)


@settings(deadline=None)
@given(plan=plans_within_pairs())
def test_an_epoch_of_pairs_has_each_pair_that_can_fill_a_batch_once(plan):
    inputs = [
        plan.classes.available(members, plan.sampling.images)
        for members in plan.classes.by_group.values()
    ]
    steps = sum(item + other >= plan.sampling.size for item, other in combinations(inputs, 2))
    for epoch in range(2):
        pairs = {
            frozenset(groups_in(plan, plan.batch(epoch * steps + turn))) for turn in range(steps)
        }
        assert len(pairs) == steps


def test_the_classes_of_a_super_category_have_their_turn_one_after_the_other():
    plan = Plan(
        super_labels([[4] * 8, [4] * 8, [4] * 8]), SuperPByKSampling(classes=4, images=4), 0
    )
    batches = [set(plan.classes.labels[plan.batch(step)].tolist()) for step in range(6)]
    of_first = [{label for label in batch if label < 8} for batch in batches]
    turns = [labels for labels in of_first if labels]
    assert len(turns) == 4  # each super-category is in two of an epoch's three pairs
    assert set.union(*turns) == set(range(8))


ALL = [
    RandomSampling(batch_size=24),
    ClassesSampling(batch_size=24),
    PByKSampling(classes=6, images=4),
    PByKSampling(classes=6, images=4, balance=1),
    SuperPByKSampling(classes=6, images=4),
]


def mixed_plan(sampling, seed=0):
    return Plan(super_labels([[3, 4, 9, 5], [2, 7, 6, 5], [4, 4, 8, 8]]), sampling, seed)


def name_of(sampling):
    return type(sampling).__name__


@pytest.mark.parametrize("sampling", ALL, ids=name_of)
def test_every_sampling_is_a_function_of_seed_and_step_alone_and_takes_no_image_twice(sampling):
    in_order = [mixed_plan(sampling).batch(step) for step in range(30)]
    one_plan = mixed_plan(sampling)
    backwards = [one_plan.batch(step) for step in reversed(range(30))][::-1]
    assert all(np.array_equal(a, b) for a, b in zip(in_order, backwards, strict=True))
    assert any(
        not np.array_equal(a, mixed_plan(sampling, 1).batch(s)) for s, a in enumerate(in_order)
    )
    assert all(not np.array_equal(a, b) for a, b in pairwise(in_order))
    assert all(len(set(batch.tolist())) == len(batch) == sampling.size for batch in in_order)


@pytest.mark.parametrize("sampling", ALL, ids=name_of)
def test_stand_ins_of_every_sampling_are_of_the_class_and_of_one_slot_only(sampling):
    plan = mixed_plan(sampling)
    for step in range(10):
        batch = plan.batch(step)
        offered = [plan.stand_ins(step, slot).tolist() for slot in range(24)]
        everything = [sample for group in offered for sample in group]
        assert len(everything) == len(set(everything))
        assert not set(everything) & set(batch.tolist())
        for slot, group in enumerate(offered):
            assert all(
                plan.classes.labels[sample] == plan.classes.labels[batch[slot]] for sample in group
            )


MANY = np.array([c for c in range(40) for _ in range(1 + c % 7)])
SIX = Classes(np.repeat(np.arange(6), 7), np.array([[*"aabbcc"]]).T)


@pytest.mark.parametrize(
    ("classes", "sampling", "step", "batch"),
    [
        (Classes(MANY), RandomSampling(batch_size=8), 3, [125, 46, 86, 60, 132, 150, 18, 0]),
        (Classes(MANY), PByKSampling(classes=2, images=4), 3, [58, 57, 36, 37, 35, 34, 60, 61]),
        (
            SIX,
            ClassesSampling(batch_size=14),
            9,
            [1, 5, 6, 8, 12, 20, 19, 24, 25, 29, 28, 33, 35, 37],
        ),
        (
            SIX,
            PByKSampling(classes=3, images=4, balance=1),
            9,
            [39, 36, 40, 38, 6, 0, 1, 3, 14, 20, 18, 15],
        ),
        (
            SIX,
            SuperPByKSampling(classes=4, images=3),
            9,
            [7, 13, 12, 6, 0, 1, 32, 30, 34, 39, 36, 40],
        ),
    ],
)
def test_a_plan_never_changes(classes, sampling, step, batch):
    """A training that goes on with a newer distap, numpy or machine sees the same batches, or
    VERSION changes.
    """
    assert Plan(classes, sampling, 0).batch(step).tolist() == batch


@pytest.mark.parametrize("batch_size", [7, 32, 50, len(MANY) // 2])
def test_an_epoch_of_random_batches_has_every_image_once_and_a_batch_none_twice(batch_size):
    plan = Plan(Classes(MANY), RandomSampling(batch_size=batch_size), 0)
    batches = [plan.batch(step) for step in range(60)]
    assert all(len(set(batch.tolist())) == batch_size for batch in batches)
    epochs = np.concatenate(batches)
    epochs = epochs[: len(epochs) // len(MANY) * len(MANY)].reshape(-1, len(MANY))
    assert all(np.array_equal(np.sort(epoch), np.arange(len(MANY))) for epoch in epochs)
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == len(epochs) > 1


@st.composite
def sets_in_turn(draw):
    longest = draw(st.integers(1, 9))
    counts = draw(st.lists(st.integers(longest, 5 * longest), min_size=1, max_size=4))
    return longest, np.array(counts), draw(st.integers(0, 5))


@settings(deadline=None)
@given(given=sets_in_turn(), draws=st.data())
def test_elements_have_their_turn_once_a_round_and_not_again_within_the_longest(given, draws):
    longest, counts, seed = given
    numbers = np.arange(len(counts))
    starts = np.zeros(len(counts), dtype=np.int64)
    seen = [[] for _ in counts]
    for _ in range(25):
        takes = np.array(
            draws.draw(
                st.lists(st.integers(0, longest), min_size=len(counts), max_size=len(counts))
            )
        )
        takes[0] = max(takes[0], 1)
        drawn = in_turn(counts, starts, takes, longest, key=(1, seed), numbers=numbers)
        for elements, drawn_part in zip(seen, np.split(drawn, np.cumsum(takes)[:-1]), strict=True):
            elements.extend(drawn_part.tolist())
        starts = starts + takes
    for count, elements in zip(counts.tolist(), seen, strict=True):
        for start in range(0, len(elements) - count + 1, count):
            assert sorted(elements[start : start + count]) == list(range(count))
        for start in range(len(elements)):
            window = elements[start : start + longest]
            assert len(set(window)) == len(window)


@pytest.mark.parametrize("step", [0, 10**6, 10**9, 10**12])
@pytest.mark.parametrize(
    "sampling",
    [RandomSampling(batch_size=24), PByKSampling(classes=6), SuperPByKSampling(classes=6)],
    ids=name_of,
)
def test_a_late_step_is_drawn_as_an_early_one(sampling, step):
    plan = mixed_plan(sampling)
    drawn = [plan.batch(step + turn).tolist() for turn in range(3)]
    assert all(
        len(set(batch)) == sampling.size and max(batch) < len(plan.classes) for batch in drawn
    )
    assert len({frozenset(batch) for batch in drawn}) > 1


def test_p_by_k_takes_k_images_of_each_class_that_has_them_and_no_singleton():
    plan = Plan(Classes(MANY), PByKSampling(classes=8, images=4), 0)
    available = np.bincount(MANY)
    drawn = set()
    for step in range(20):
        counts = np.bincount(MANY[plan.batch(step)], minlength=40)
        taken = np.flatnonzero(counts)
        # All give K images, or all they have, but the class that fills the batch up, and one that
        # gives it company.
        assert sum(counts[c] < min(4, available[c]) for c in taken) <= 2
        assert len(taken) >= 8
        assert not (available[taken] == 1).any()
        drawn |= set(taken.tolist()) if step < 5 else set()  # 34 classes have two images or more
    assert drawn == set(plan.classes.with_pairs.tolist())


@st.composite
def plans_of_uneven_classes(draw):
    groups = draw(
        st.lists(st.lists(st.integers(1, 7), min_size=2, max_size=8), min_size=1, max_size=4)
    )
    data = super_labels(groups)
    seed = draw(st.integers(0, 3))
    settings = {"classes": draw(st.integers(2, 6)), "images": draw(st.integers(2, 5))}
    name = draw(st.sampled_from(["p_by_k", "balance", "mined", "super_p_by_k"]))
    if name == "mined":
        order = np.random.default_rng(seed).permutation(data.with_pairs)
        nearest = np.stack([np.arange(data.count), np.arange(data.count)], axis=1)
        nearest[data.with_pairs, 1] = order
        data = Classes(data.labels, data.levels, nearest)
    sampling = {
        "p_by_k": PByKSampling(**settings),
        "balance": PByKSampling(**settings, balance=1),
        "mined": MinedSampling(**settings, near=2),
        "super_p_by_k": SuperPByKSampling(**settings),
    }[name]
    try:
        return Plan(data, sampling, seed)
    except DistapError:
        reject()


@settings(deadline=None, max_examples=100)
@given(plan=plans_of_uneven_classes(), step=st.integers(0, 20))
def test_no_image_of_a_batch_of_some_of_each_class_is_alone_in_its_class(plan, step):
    batch = plan.batch(step)
    taken = np.bincount(plan.classes.labels[batch], minlength=plan.classes.count)
    assert len(batch) == len(set(batch.tolist())) == plan.sampling.size
    assert taken.max() <= plan.sampling.images
    assert 1 not in taken


def test_an_odd_batch_of_classes_of_two_images_is_refused_and_never_advised():
    data = Classes(labels_of([2] * 9))
    with raises("sampling.lone_image", "3", "9"):
        Plan(data, PByKSampling(classes=3, images=3), 0)
    assert data.most(3) == 6


def test_an_odd_batch_of_two_super_categories_of_pairs_is_refused_by_their_names():
    levels = np.array([["cup"]] * 9 + [["pen"]] * 9 + [["hat"]] * 9)
    data = Classes(labels_of([2] * 18 + [4] * 9), levels=levels)
    with raises("sampling.lone_image", "cup", "pen"):
        Plan(data, SuperPByKSampling(classes=3, images=3), 0)


@settings(deadline=None)
@given(
    groups=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    share=st.integers(0, 100),
    seed=st.integers(0, 3),
)
def test_balanced_p_by_k_takes_as_many_classes_of_each_coarser_class_as_can_be(groups, share, seed):
    sampling = PByKSampling(classes=1 + share * (sum(groups) - 1) // 100, images=3, balance=1)
    plan = Plan(super_labels([[4] * group for group in groups]), sampling, seed)
    met = [Counter() for _ in groups]
    for step in range(20):
        labels = set(plan.classes.labels[plan.batch(step)].tolist())
        by_group = Counter(int(plan.classes.numbers[label, 1]) for label in labels)
        assert sorted(by_group[group] for group in range(len(groups))) == even_shares(
            groups, sampling.classes
        )
        for label in labels:
            met[plan.classes.numbers[label, 1]][label] += 1
    for group, counts in enumerate(met):  # each has its turn before any has another
        uses = [
            counts[label] for label in np.flatnonzero(plan.classes.numbers[:, 1] == group).tolist()
        ]
        assert max(uses) - min(uses) <= 1


@pytest.mark.parametrize(
    ("classes", "sampling", "code", "names"),
    [
        (
            labels_of([5] * 8),
            ClassesSampling(batch_size=15),
            "sampling.too_small",
            ["8", "16", "p_by_k"],
        ),
        (labels_of([1] * 7), ClassesSampling(batch_size=14), "sampling.too_few_images", ["7"]),
        (MANY, RandomSampling(batch_size=1000), "sampling.too_few_images", ["batch_size", "1000"]),
        (MANY, PByKSampling(classes=36, images=2), "sampling.too_few_classes", ["34"]),
        (MANY, PByKSampling(classes=34, images=7), "sampling.too_few_images", []),
        (
            SIX,
            PByKSampling(classes=4, balance=2),
            "sampling.unknown_level",
            ["sampling.balance", "2", "1"],
        ),
        (labels_of([5] * 8), SuperPByKSampling(), "sampling.no_super_categories", ["0", "8"]),
        (
            super_labels([[3, 3]]),
            SuperPByKSampling(classes=2, images=2),
            "sampling.no_super_categories",
            ["1", "0"],
        ),
        (
            super_labels([[3, 3], [4, 4]]),
            SuperPByKSampling(classes=4, images=4),
            "sampling.too_few_images",
            ["4", "16", "group-0", "6"],
        ),
    ],
)
def test_what_a_data_set_cannot_give_is_refused(classes, sampling, code, names):
    with raises(code, *names):
        Plan(classes if isinstance(classes, Classes) else Classes(classes), sampling, 0)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("random", "batch_size", 1), ("p_by_k", "images", 1), ("super_p_by_k", "classes", 1)],
)
def test_a_batch_without_two_images_to_compare_is_refused_when_the_recipe_is_read(name, key, value):
    with raises("recipe.value", key, "1", "2"):
        build_part("sampling", name, **{key: value})


labels = st.lists(st.integers(0, 4), min_size=4, max_size=8).map(
    lambda values: np.unique(values, return_inverse=True)[1].astype(np.int64)
)


@given(labels, st.integers(2, 5))
def test_p_by_k_takes_as_many_classes_as_told_and_no_more(label, images):
    classes = Classes(label)
    limit = classes.most(images)
    if limit:
        PByKSampling(classes=limit, images=images).check(classes)
    with pytest.raises(DistapError):
        PByKSampling(classes=limit + 1, images=images).check(classes)

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distap.data.plan import Classes, Plan
from distap.data.sampling import PByKSampling, RandomSampling
from distap.errors import DistapError

LABELS = np.array([c for c in range(40) for _ in range(1 + c % 7)])


def plan(sampling, seed=0, labels=LABELS):
    return Plan(Classes(labels), sampling, seed)


SAMPLINGS = [RandomSampling(batch_size=32), PByKSampling(classes=8, images=4)]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_no_image_is_twice_in_a_batch(sampling):
    for step in range(50):
        batch = plan(sampling).batch(step)
        assert len(set(batch.tolist())) == len(batch) == 32


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_plan_is_a_function_of_seed_and_step_alone(sampling):
    in_order = [plan(sampling).batch(step) for step in range(12)]
    backwards = [plan(sampling).batch(step) for step in reversed(range(12))][::-1]
    assert all(np.array_equal(a, b) for a, b in zip(in_order, backwards, strict=True))
    assert not np.array_equal(plan(sampling, seed=1).batch(0), in_order[0])


def test_the_plan_never_changes():
    """A training that goes on with a newer distap, numpy or machine must see the same batches."""
    assert plan(RandomSampling(batch_size=8)).batch(3).tolist() == [138, 48, 90, 23, 135, 94, 131, 89]
    assert plan(PByKSampling(classes=2, images=4)).batch(3).tolist() == [90, 91, 93, 92, 48, 46, 47, 43]


def test_an_epoch_of_random_batches_repeats_no_image():
    sampling = RandomSampling(batch_size=32)
    steps = sampling.steps_per_epoch(Classes(LABELS))
    epoch = np.concatenate([plan(sampling).batch(step) for step in range(steps)])
    assert len(set(epoch.tolist())) == len(epoch) == steps * 32
    assert not np.array_equal(plan(sampling).batch(0), plan(sampling).batch(steps))


def test_p_by_k_takes_k_images_of_each_class_that_has_them():
    for step in range(20):
        counts = np.bincount(LABELS[plan(PByKSampling(classes=8, images=4)).batch(step)], minlength=40)
        available = np.bincount(LABELS)
        taken = np.flatnonzero(counts)
        # All but the class that fills the batch up give K images, or all they have.
        assert sum(counts[c] < min(4, available[c]) for c in taken) <= 1
        assert len(taken) >= 8


def test_an_epoch_of_p_by_k_gives_every_class_its_turn():
    sampling = PByKSampling(classes=8, images=4)
    usable = Classes(LABELS).with_pairs
    steps = -(-len(usable) // 8)
    seen = {label for step in range(steps) for label in LABELS[plan(sampling).batch(step)].tolist()}
    assert len(seen) > 0.9 * len(usable)


def test_a_singleton_class_is_never_drawn_as_one_of_p():
    singletons = {int(c) for c in np.flatnonzero(np.bincount(LABELS) == 1)}
    drawn = {c for step in range(30) for c in LABELS[plan(PByKSampling(classes=8, images=4)).batch(step)].tolist()}
    assert not drawn & singletons


@given(step=st.integers(0, 30), seed=st.integers(0, 5))
def test_stand_ins_are_of_the_class_outside_the_batch_and_of_one_slot_only(step, seed):
    chosen = plan(RandomSampling(batch_size=32), seed)
    batch = chosen.batch(step)
    offered = [sample for slot in range(32) for sample in chosen.stand_ins(step, slot).tolist()]
    assert len(offered) == len(set(offered))
    assert not set(offered) & set(batch.tolist())
    for slot in range(32):
        assert all(LABELS[sample] == LABELS[batch[slot]] for sample in chosen.stand_ins(step, slot))


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (RandomSampling(batch_size=1000), "batch_size is 1000, but the data set has only"),
        (RandomSampling(batch_size=1), "at least 2 images"),
        (PByKSampling(classes=36, images=2), "only 34 classes have two images or more"),
        (PByKSampling(classes=34, images=7), "the data set has only"),
        (PByKSampling(classes=3, images=1), "images of at least 2"),
    ],
)
def test_what_the_data_set_cannot_fill_is_refused(sampling, message):
    with pytest.raises(DistapError, match=message):
        plan(sampling)

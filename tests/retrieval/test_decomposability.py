import math

import pytest
import torch
from retrieval_reference import average_precision, labelled_orders, mean
from torch.nn.functional import normalize

from distap.retrieval.metrics import decomposability_gap


def mean_average_precision(descriptors, labels):
    orders = labelled_orders((descriptors @ descriptors.t()).tolist(), labels.tolist())
    return mean([average_precision(right) for right in orders.values()])


def clusters():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(90) // 6
    centres = normalize(torch.randn(15, 6, generator=generator, dtype=torch.float64))
    own = 0.6 * torch.randn(90, 6, generator=generator, dtype=torch.float64)
    return normalize(centres[labels] + own), labels


def test_the_gap_is_that_of_evaluating_each_batch_and_the_whole(monkeypatch):
    descriptors, labels = clusters()
    one_of_each = torch.arange(0, 90, 6)
    others = torch.tensor([row for row in range(90) if row % 6])
    order = torch.cat([one_of_each, others])
    monkeypatch.setattr(torch, "randperm", lambda images, generator: order[:images])
    whole = mean_average_precision(descriptors, labels)
    batches = order.view(6, 15)[1:]  # the first tells nothing
    within = mean([mean_average_precision(descriptors[batch], labels[batch]) for batch in batches])
    assert within > whole
    for values, known in ((descriptors, None), (descriptors.numpy(), None), (descriptors, whole)):
        assert decomposability_gap(values, labels, 15, known) == pytest.approx(within - whole, abs=1e-12)


def test_batches_are_drawn_at_random_and_always_alike(monkeypatch):
    descriptors, labels = clusters()
    gap = decomposability_gap(descriptors, labels, 20)
    assert gap == decomposability_gap(descriptors, labels, 20)
    monkeypatch.setattr(torch, "randperm", lambda images, generator: torch.arange(images))
    assert gap != decomposability_gap(descriptors, labels, 20)


@pytest.mark.parametrize("batch", [90, 91])
def test_the_whole_set_as_the_only_batch_has_no_gap(batch):
    descriptors, labels = clusters()
    assert decomposability_gap(descriptors, labels, batch) == pytest.approx(0)


def test_batches_that_all_tell_nothing_have_no_gap():
    descriptors, labels = clusters()
    assert math.isnan(decomposability_gap(descriptors, labels, 1))

import math

import pytest
import torch
from retrieval_reference import average_precision, labelled_orders, mean
from torch.nn.functional import normalize

from distap.errors import DistapError
from distap.retrieval.metrics import decomposability_gap, random_batches


def mean_average_precision(descriptors, labels):
    orders = labelled_orders((descriptors @ descriptors.t()).tolist(), labels.tolist())
    return mean([average_precision(right) for right in orders.values()])


def clusters():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(90) // 6
    centres = normalize(torch.randn(15, 6, generator=generator, dtype=torch.float64))
    own = 0.6 * torch.randn(90, 6, generator=generator, dtype=torch.float64)
    return normalize(centres[labels] + own), labels


def test_the_gap_is_that_of_evaluating_each_batch_and_the_whole():
    descriptors, labels = clusters()
    batches = [*random_batches(90, 20, torch.Generator().manual_seed(1))]
    assert sorted(len(batch) for batch in batches) == [20] * 4
    assert len(torch.cat(batches).unique()) == 80
    batches.append(torch.arange(0, 90, 6))  # no two of a class
    whole = mean_average_precision(descriptors, labels)
    within = mean([mean_average_precision(descriptors[batch], labels[batch]) for batch in batches[:-1]])
    assert within > whole
    for values, known in ((descriptors, None), (descriptors.numpy(), None), (descriptors, whole)):
        assert decomposability_gap(values, labels, batches, known) == pytest.approx(within - whole, abs=1e-12)


def test_the_whole_set_as_the_only_batch_has_no_gap():
    descriptors, labels = clusters()
    assert decomposability_gap(descriptors, labels, random_batches(90, 90, torch.Generator())) == pytest.approx(0)


def test_batches_that_tell_nothing_have_no_gap():
    descriptors, labels = clusters()
    assert math.isnan(decomposability_gap(descriptors, labels, [torch.arange(0, 90, 6)]))
    with pytest.raises(DistapError, match="batch of 91 images from a set of 90"):
        random_batches(90, 91, torch.Generator())

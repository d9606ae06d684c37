"""Ranks share an evaluation: the same bits on any number of them."""

import numpy as np
import pytest
import torch
from ranks import on_ranks
from torch import Tensor
from torch.nn.functional import normalize

from distap.data.converters.landmarks import OF_LANDMARKS
from distap.data.converters.revisited import DIFFICULTIES, OF_REVISITED
from distap.retrieval import evaluate, ranks
from distap.retrieval.figures import labelled_figures
from distap.retrieval.row_blocks import DescriptorParts
from distap.retrieval.truth import Truth, class_truth
from distap.world import World

IMAGES, CLASSES, QUERIES = 600, 40, 5


def evaluations(world):
    """All protocols, on the same random descriptors."""
    evaluate.MOST_QUERIES, ranks.CONVERTED_NUMBERS = 16, 64 * 32  # more blocks than ranks
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, CLASSES, (IMAGES,), generator=generator)
    centres, noise = (torch.randn(count, 64, generator=generator) for count in (CLASSES, IMAGES))
    gallery = normalize(centres[labels] + noise)
    queries, of_queries = gallery[:QUERIES], labels[:QUERIES].tolist()  # a single block, whose gallery ranks share
    rows = [(labels == label).nonzero().flatten().tolist() for label in of_queries]
    graded = Truth(
        IMAGES, [own[2:9] for own in rows], [own[9:] for own in rows], [[1] * 4 + [2] * 3] * QUERIES, DIFFICULTIES
    )
    landmarks = Truth(IMAGES, rows, parts=["Public"] * QUERIES)
    head = torch.stack([torch.randperm(IMAGES, generator=generator)[:20] for _ in range(QUERIES)])
    protocol, half = labelled_figures(), gallery.numpy().astype(np.float16)
    more = DescriptorParts([("part", half[:70]), ("another", half[100:333])])
    results = [
        evaluate.evaluate_descriptors(
            *arguments, world=world, head=first, distractors=more if first is None else None
        )
        for first, *arguments in (
            (None, gallery, gallery, class_truth(labels), protocol, 10),
            (None, gallery[:200], gallery[200:], class_truth(labels[:200], labels[200:]), protocol, 10),
            (None, gallery[:20], gallery, class_truth(labels[:20], labels), protocol),
            (None, queries, gallery, graded, OF_REVISITED),
            (head, queries, half, graded, OF_REVISITED),
            (None, queries, gallery, landmarks, OF_LANDMARKS),
        )
    ]
    return [*map(vars, results)]


@pytest.mark.slow
def test_figures_are_the_same_bits_on_any_number_of_ranks(monkeypatch):
    monkeypatch.setattr(evaluate, "MOST_QUERIES", evaluate.MOST_QUERIES)
    monkeypatch.setattr(ranks, "CONVERTED_NUMBERS", ranks.CONVERTED_NUMBERS)
    alone = evaluations(World())
    for size in (2, 3):
        for of_rank in on_ranks(size, evaluations):
            for own, expected in zip(of_rank, alone, strict=True):
                assert_same(own, expected)


def assert_same(found, expected):
    if isinstance(expected, Tensor):
        assert torch.equal(found.nan_to_num(-1), expected.nan_to_num(-1))
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert_same(found[name], expected[name])
    else:
        assert found == expected

"""Ranks share their work as NCCL allows it: `helpers/nccl_rules.py` says what it refuses."""

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from nccl_rules import RefusedError, nccl_rules
from problems import problem
from ranks import on_ranks
from test_on_a_device import LOSSES
from torch.nn.functional import normalize
from twin_device import twin_device, values

from distap.data.converters.landmarks import OF_LANDMARKS
from distap.evaluation.extraction.extracting import SharedProgress
from distap.ranking.gather import gather
from distap.ranking.loss import build_loss
from distap.ranking.rank import rank_descriptors
from distap.retrieval import evaluate
from distap.retrieval.figures import labelled_figures
from distap.retrieval.truth import Truth, class_truth

IMAGES = 91  # uneven on two ranks


def of_rank_0(descriptors, labels):
    """A loss of all descriptors, which rank 0 computes for all."""
    return ((descriptors @ descriptors.t()).square() * (labels[:, None] == labels)).mean()


def shared(world):
    """What ranks share in a training and an evaluation; on one rank, what it should be."""
    with twin_device() as device, nccl_rules():
        world = replace(world, device=device)
        raw, labels = problem(4, IMAGES, 7, dtype=torch.float32)
        descriptors, mine = normalize(raw), slice(world.rank, None, world.size)
        present = torch.arange(IMAGES) != 17
        facts = (one[mine].to(device) for one in (descriptors, labels, present))
        gathered, found = gather(*facts, world, IMAGES), {}
        for name in (*LOSSES, of_rank_0):
            loss = build_loss(name).sized(60, 8, 0)
            if loss.learned is not None:
                loss.learned.to(device)
            ranking = rank_descriptors(loss, gathered, memory_bytes=2**16)
            found[getattr(name, "__name__", name)] = values(ranking.loss), values(ranking.gradient)
        evaluate.MOST_QUERIES = 8  # several blocks a rank
        gallery, truth = descriptors.to(device), class_truth(labels.to(device))
        figures = evaluate.evaluate_descriptors(gallery, gallery, truth, labelled_figures(), 10, world=world)
        parts = ["Public" if row % 2 else "Private" for row in range(15)]
        listed = Truth(IMAGES, [[row, row + 20] for row in range(15)], parts=parts, device=device)
        found["figures"] = figures.summary()
        evaluate.MOST_QUERIES = 20  # a single block: ranks share the gallery
        asked = gallery[:15]
        found["truth"] = evaluate.evaluate_descriptors(asked, gallery, listed, OF_LANDMARKS, world=world).summary()
        found["values"] = world.gather_values({"rank": world.rank})
        shown = []
        SharedProgress(world, shown.append, lambda: False).finish()
        found["shown"] = shown
        world.barrier()
        return found


def test_ranks_share_their_work_by_what_nccl_allows():
    [alone] = on_ranks(1, shared)
    answers = on_ranks(2, shared)
    for name in (*LOSSES, "of_rank_0"):
        expected, rows = alone[name]
        for rank, answer in enumerate(answers):
            found, own = answer[name]
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(own, rows[rank::2], rtol=1e-4, atol=1e-6)
    for answer in answers:
        assert (answer["figures"], answer["truth"]) == (alone["figures"], alone["truth"])
        assert answer["values"] == [{"rank": rank} for rank in range(2)]
        assert answer["shown"] == [0]


REFUSED = {
    "of a tensor on the CPU": lambda world: replace(world, device=torch.device("cpu")).maximum(1.0),
    "not contiguous": lambda world: world.sum(torch.zeros(3, 2, device=world.device).t()),
    "of torch.complex64": lambda world: world.sum(torch.zeros(3, dtype=torch.complex64, device=world.device)),
    r"all_gather_into_tensor of \[\[\[2, 3\], \[1, 3\]\], \[\[4, 3\], \[2, 3\]\]\]": lambda world: world.start_gather(
        torch.zeros(world.rank + 1, 3, device=world.device)
    ),
    "all_gather_object: NCCL has none": lambda world: dist.all_gather_object([None] * 2, world.rank),
}


def refused(world):
    """What is said of each."""
    said = []
    with twin_device() as device, nccl_rules():
        for action in REFUSED.values():
            with pytest.raises(RefusedError) as error:
                action(replace(world, device=device))
            said.append(str(error.value))
    return said


def test_what_nccl_refuses_is_found():
    for said in on_ranks(2, refused):
        for name, text in zip(REFUSED, said, strict=True):
            assert re.search(name, text), name

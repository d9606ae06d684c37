"""Ranks share their work on a device (`helpers/twin_device.py`) by collectives that refuse what
NCCL refuses.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from problems import problem
from ranks import on_ranks
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils._pytree import tree_leaves, tree_map_only
from twin_device import Twin, twin_device, values

from distap.data.converters.landmarks import OF_LANDMARKS
from distap.data.converters.revisited import DIFFICULTIES, OF_REVISITED
from distap.evaluation.extraction.extracting import SharedProgress
from distap.ranking.gather import gather
from distap.ranking.losses.building import build_loss
from distap.ranking.rank import rank_descriptors
from distap.retrieval import evaluate, ranks
from distap.retrieval.figures import LABELLED_FIGURES
from distap.retrieval.row_blocks import DescriptorParts
from distap.retrieval.truth import Truth, class_truth
from distap.world import World

DTYPES = {
    *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
CHECKED = (
    "all_gather_into_tensor",
    "all_reduce",
    "broadcast",
    "reduce_scatter_tensor",
    "scatter",
    "send",
    "recv",
)
# They would need uneven sizes, or pickle what they send, which also takes the CPU's memory.
REFUSED = (
    "gather",
    "all_gather",
    "all_to_all",
    "gather_object",
    "all_gather_object",
    "broadcast_object_list",
)


class RefusedError(Exception):
    """NCCL would not do this, or not with these tensors."""


@contextmanager
def nccl_rules() -> Iterator[None]:
    """Use the rules for as long as the context lasts."""
    checked = {name: _checked(name, getattr(dist, name)) for name in CHECKED}
    refused = {name: _refused(name) for name in REFUSED}
    with patch.multiple(dist, **checked, **refused):
        yield


def _checked(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
    all_gather_object = dist.all_gather_object

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        for tensor in tensors:
            if not isinstance(tensor, Twin):
                raise RefusedError(f"{name} of a tensor on the CPU, of {tuple(tensor.shape)}")
            if not tensor.is_contiguous():
                raise RefusedError(
                    f"{name} of a tensor that is not contiguous, of {tuple(tensor.shape)}"
                )
            if tensor.dtype not in DTYPES:
                raise RefusedError(f"{name} of {tensor.dtype}")
        if name not in ("send", "recv"):
            shapes = (
                [list(value.shape) for value in tensors]
                if name != "scatter"
                else [list(tensors[0].shape)]
            )
            sizes: list[Any] = [None] * dist.get_world_size()
            all_gather_object(sizes, shapes)
            if any(value != shapes for value in sizes):
                raise RefusedError(f"{name} of {sizes}")
        return collective(*tree_map_only(Twin, values, args), **tree_map_only(Twin, values, kwargs))

    return call


def _refused(name: str) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise RefusedError(f"{name}: NCCL has none, or not for these sizes")

    return call


IMAGES = 61  # uneven on two and on three ranks
# One loss of each class that says how ranks share their work; the others inherit it.
LOSSES = [
    "ap_q",
    "arc_face",
    "blackbox_ap",
    "csl",
    "fast_ap",
    "h_ap",
    "multi_similarity",
    "recall_at_k",
    "roadmap",
    "sigmoid",
    "simix",
    "smooth_ap",
    "smooth_ndcg",
    "sup_ap",
    "sup_con",
    "triplet",
    "within",
]
WITHIN = {"within": {"inner": {"ap_q": 1, "smooth_ap": 1, "arc_face": 0.1}}}


def of_rank_0(descriptors, labels):
    """A loss of all descriptors, which rank 0 computes for all."""
    return ((descriptors @ descriptors.t()).square() * (labels[:, None] == labels)).mean()


def all_losses(world):
    """Value and gradients of every loss, and its gradient by parameters of its own."""
    raw, labels = problem(4, IMAGES, 7, dtype=torch.float32)
    own_rows = slice(world.rank, None, world.size)
    present = torch.arange(IMAGES) != 17
    classes = torch.arange(60)
    classes = torch.stack([classes, (classes > 9).long()], dim=1)
    facts = (item[own_rows].to(world.device) for item in (normalize(raw), classes[labels], present))
    gathered = gather(*facts, world, IMAGES)
    results = {}
    for name in (*LOSSES, of_rank_0):
        given = WITHIN if name == "within" else name
        loss = build_loss(given).sized(classes, 8, 0)
        if loss.learned is not None:
            loss.learned.to(world.device)
        ranking = rank_descriptors(loss, gathered, memory_bytes=2**16)
        of_name = (ranking.loss, *ranking.by_parameters, ranking.gradient)
        results[getattr(name, "__name__", name)] = [values(item).detach() for item in of_name]
    return results


def all_figures(world):
    """The figures of every protocol, with the head of a ranking and without, and with
    distractors."""
    raw, labels = problem(5, 150, 20, dtype=torch.float32)
    descriptors, labels = normalize(raw).to(world.device), labels.to(world.device)
    generator = torch.Generator().manual_seed(0)
    head = torch.stack(
        [(row + 1 + torch.randperm(149, generator=generator)[:4]) % 150 for row in range(150)]
    )
    head, half = head.to(world.device), normalize(raw).numpy().astype(np.float16)
    distractors = DescriptorParts([("part", half[:30]), ("another", half[50:99])])
    positives = [[row, row + 20, 40 + row] for row in range(15)]
    junk = [[59 - row] for row in range(15, 0, -1)]
    graded = Truth(
        150,
        [rows[:2] for rows in positives],
        junk,
        [[1, 2]] * 15,
        DIFFICULTIES,
        device=world.device,
    )
    names_of_parts = ["Public" if row % 2 else "Private" for row in range(15)]
    landmarks = Truth(150, positives, parts=names_of_parts, device=world.device)
    protocol = LABELLED_FIGURES
    small_set = descriptors[:15]
    results = [
        evaluate.evaluate_descriptors(
            *arguments,
            world=world,
            head=first,
            distractors=None if first is not None else distractors,
        )
        for first, *arguments in (
            (None, descriptors, descriptors, class_truth(labels), protocol, 10),
            (head, descriptors, descriptors, class_truth(labels), protocol, 10),
            (
                None,
                descriptors[:60],
                descriptors[60:],
                class_truth(labels[:60], labels[60:]),
                protocol,
                10,
            ),
            (head[:15], small_set, half, graded, OF_REVISITED),
            (None, small_set, descriptors, graded, OF_REVISITED),
            (None, small_set, descriptors, landmarks, OF_LANDMARKS),
        )
    ]
    return [{name: plain(value) for name, value in vars(item).items()} for item in results]


def plain(value):
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return values(value) if isinstance(value, Tensor) else value


def everything(world):
    # Several blocks a rank; 15 queries are a single one.
    with (
        patch.object(evaluate, "MOST_QUERIES", 16),
        patch.object(ranks, "CONVERTED_NUMBERS", 64 * 8),
    ):
        return all_losses(world), all_figures(world)


def shared(world):
    """What ranks share in a training and an evaluation."""
    with twin_device() as device, nccl_rules():
        world, shown = replace(world, device=device), []
        results = everything(world)
        SharedProgress(world, shown.append, lambda: False).finish()
        gathered = world.gather_values({"rank": world.rank})
        world.barrier()
        return *results, shown, gathered


def test_ranks_share_their_work_by_what_nccl_allows_and_get_what_a_cpu_gets():
    losses, figures = everything(World())
    size = 3
    for rank, (own_losses, own_figures, shown, gathered) in enumerate(on_ranks(size, shared)):
        for name, (*expected, rows) in losses.items():
            *values_of_loss, own_rows = own_losses[name]
            torch.testing.assert_close(values_of_loss, expected, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(own_rows, rows[rank::size], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(own_figures, figures, rtol=0, atol=0, equal_nan=True)
        assert shown == [0] and gathered == [{"rank": index} for index in range(size)]


ACTIONS = {
    "of a tensor on the CPU": lambda world: replace(world, device=torch.device("cpu")).maximum(1.0),
    "not contiguous": lambda world: world.sum(torch.zeros(3, 2, device=world.device).t()),
    "of torch.complex64": lambda world: world.sum(
        torch.zeros(3, dtype=torch.complex64, device=world.device)
    ),
    r"all_gather_into_tensor of \[\[\[2, 3\], \[1, 3\]\], \[\[4, 3\], \[2, 3\]\]\]": lambda world: (
        world.start_gather(torch.zeros(world.rank + 1, 3, device=world.device))
    ),
    "all_gather_object: NCCL has none": lambda world: dist.all_gather_object(
        [None] * 2, world.rank
    ),
}


def refused(world):
    """What is said of each."""
    output = []
    with twin_device() as device, nccl_rules():
        for action in ACTIONS.values():
            with pytest.raises(RefusedError) as error:
                action(replace(world, device=device))
            output.append(str(error.value))
    return output


def test_what_nccl_refuses_is_found():
    for output in on_ranks(2, refused):
        for name, text in zip(ACTIONS, output, strict=True):
            assert re.search(name, text), name

"""Refuse descriptors and labels that cannot be ranked, and graphs whose gradients would be lost."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from distap.errors import LENGTH_TOLERANCE, DistapError
from distap.ranking.gathered import Gathered
from distap.world import World

Extra = Mapping[str, Tensor]  # further tensors of images, (b, ...)
MOST_ROWS = 10


def check_arguments(
    descriptors: Tensor, labels: Tensor, world: World, extra: Extra, loss: Any, images: Any = None
) -> list[int]:
    """Return the number of each rank's labels.

    Raises a DistapError on all ranks if `rank` cannot rank some rank's descriptors, labels or extra
    tensors.
    """
    problem: str | None = _problem(descriptors, labels) or images_problem(images, labels)
    problem = problem or extra_problem(extra, len(labels), loss.extras)
    count = len(labels) if labels.ndim else 0
    return world.agreed(
        problem, kind_of(labels, {"descriptors": descriptors, **extra}, loss), count
    )


def _problem(descriptors: Tensor, labels: Tensor) -> str | None:
    if descriptors.ndim != 2 or not descriptors.is_floating_point():
        shape = tuple(descriptors.shape)
        return (
            f"descriptors are {shape} of {descriptors.dtype}; (b, C) of a floating-point type is"
            " expected"
        )
    problem = label_problem(labels, len(descriptors))
    if problem:
        return problem
    lengths = torch.linalg.vector_norm(descriptors.double(), dim=1)
    wrong = ~lengths.isfinite()
    if wrong.any():
        return f"{_rows(wrong)}: descriptors hold values that are not finite (NaN or infinite)"
    return _length_problem(lengths)


def _length_problem(lengths: Tensor) -> str | None:
    """Return why descriptors of these lengths cannot be ranked; None if they can."""
    wrong = lengths == 0
    if wrong.any():
        return (
            f"{_rows(wrong)}: descriptors have length 0, and so no direction to rank by: all their"
            " numbers are 0; look at these images, and at what the network makes of them"
        )
    wrong = (lengths - 1).abs() > LENGTH_TOLERANCE
    if wrong.any():
        return (
            f"{_rows(wrong)}: descriptors have other lengths than 1, such as"
            f" {float(lengths[wrong][0]):.4g}; normalise them first (torch.nn.functional.normalize)"
        )
    return None


def refuse_lengths(gathered: Gathered) -> None:
    """Raise a DistapError, on every rank alike, that names the rank and rows of descriptors not of
    length 1.
    """
    world = gathered.world
    # Images that take no part have no descriptor that could be wrong.
    lengths = gathered.descriptors.new_ones(len(gathered.taking_part))
    lengths[gathered.taking_part] = torch.linalg.vector_norm(gathered.descriptors, dim=1)
    problems = [_length_problem(lengths[rank :: world.size]) for rank in range(world.size)]
    if any(problems):
        by_rank = [
            f"{world.called(rank)}: {problem}" for rank, problem in enumerate(problems) if problem
        ]
        raise DistapError("; ".join(by_rank) if world.size > 1 else str(problems[0]))


def label_problem(labels: Tensor, count: int) -> str | None:
    """Return why labels are no class numbers of `count` images; None if they are."""
    if labels.ndim not in (1, 2) or len(labels) != count or not labels[:1].numel() >= min(count, 1):
        shapes = f"({count},), or ({count}, L) for L levels"
        return f"labels are {tuple(labels.shape)} for {count} images; {shapes}, is expected"
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        return f"labels are {labels.dtype}; whole class numbers of an integer type are expected"
    # As int64, an unsigned number beyond its range is negative; so is one that overflowed before.
    wrong = labels.long() < 0
    if wrong.any():
        values = labels[wrong][:MOST_ROWS].cpu().numpy()
        wrong = wrong if wrong.ndim == 1 else wrong.any(dim=1)
        return (
            f"{_rows(wrong)}: labels {', '.join(map(str, values))} are no class numbers, which run"
            f" from 0 to {2**63 - 1}; an overflow of integers may have made them"
        )
    return None


def images_problem(images: Tensor | None, labels: Tensor) -> str:
    """Return why numbers by which images are known again are none; "" if they are, or if there are
    no numbers.
    """
    if images is None or (images.shape == labels.shape[:1] and not images.is_floating_point()):
        return ""
    told = f"images are {tuple(images.shape)} of {images.dtype}"
    return f"{told}; a whole number for each of {len(labels)} images is expected"


def extra_problem(extra: Extra, count: int, taken: Sequence[str]) -> str | None:
    """Return why tensors of `count` images are not those that the loss takes; None if they are."""
    lacking = [name for name in taken if name not in extra]
    if lacking:
        return (
            f"the loss takes {', '.join(lacking)} of each image; extra has"
            f" {', '.join(extra) or 'nothing'}"
        )
    for name, rows in extra.items():
        told = f"extra: {name} is {tuple(rows.shape)}"
        if name not in taken:
            return f"{told}, but the loss takes {', '.join(taken) or 'no tensors of images'}"
        if not rows.ndim or len(rows) != count:
            return f"{told} for {count} images; a row for each is expected"
        if rows.requires_grad:
            return f"{told} and requires a gradient, which it would not get; detach() it"
    return None


def kind_of(labels: Tensor, tensors: Extra, loss: object) -> tuple[str, str]:
    """Describe shapes of labels, types of tensors, and the loss, which have to be the same on all
    ranks.
    """

    def shape(rows: Tensor) -> str:
        return f"({', '.join(['b', *map(str, rows.shape[1:])])})"

    others = [f"{name} {shape(rows)} of {rows.dtype}" for name, rows in sorted(tensors.items())]
    return ", ".join([f"labels {shape(labels)}", *others]), re.sub(r" at 0x\w+", "", repr(loss))


def refuse_crossing(levels: Tensor) -> None:
    """Raise a DistapError unless each class (N, L) lies within one class of the next level."""
    for level in range(levels.shape[1] - 1):
        # Sorted by the finer class, one that lies within two others has different neighbours
        # somewhere.
        pairs = levels[levels[:, level].argsort(stable=True), level : level + 2]
        again = (pairs[1:, 0] == pairs[:-1, 0]) & (pairs[1:, 1] != pairs[:-1, 1])
        if again.any():
            label, one = pairs[:-1][again][0].tolist()
            _, other = pairs[1:][again][0].tolist()
            raise DistapError(
                f"label {label} of level {level} lies within {one} and within {other} of level"
                f" {level + 1}; levels go from the finest to the coarsest, and each class belongs"
                " to one of the next level"
            )


def _rows(wrong: Tensor) -> str:
    rows = wrong.nonzero().flatten().tolist()
    more = f" and {len(rows) - MOST_ROWS} more" if len(rows) > MOST_ROWS else ""
    return f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:MOST_ROWS]))}{more}"


def refuse_other_leaves(outputs: Sequence[Tensor], known: Iterable[Tensor], advice: str) -> None:
    """Raise a DistapError if backward passes from all outputs would reach a tensor that is none of
    `known`.
    """
    known_ids = {id(tensor) for tensor in known}
    shared = set.intersection(*map(_nodes, outputs))
    leaves = [node.variable for node in shared if hasattr(node, "variable")]
    for leaf in leaves:
        if id(leaf) not in known_ids:
            kind = "parameter" if isinstance(leaf, nn.Parameter) else "tensor"
            raise DistapError(f"a {kind} {tuple(leaf.shape)} would get no gradient: {advice}")


def refuse_shared_graphs(outputs: Sequence[Tensor]) -> None:
    """Raise a DistapError if the graphs of several passes meet in an operation, and not only in
    leaves.
    """
    shared = set.intersection(*map(_nodes, outputs))
    operations = sorted(node.name() for node in shared if not hasattr(node, "variable"))
    if operations:
        names = ", ".join(name.removesuffix("Backward0") for name in operations[:MOST_ROWS])
        raise DistapError(
            f"all passes of the network share a part of their graph ({names}), which the first"
            " backward pass frees: compute it inside the network's forward(), or detach() it"
        )


def _nodes(output: Tensor) -> set[Node]:
    """Return all operations and leaves of a graph; those of a leaf have the attribute
    `variable`."""
    # Not by recursion: a deep network has more nodes in a row than Python has frames.
    nodes: list[Node | None] = [output.grad_fn]
    seen = set[Node]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # of torch.utils.checkpoint with use_reentrant=True
        if node.name() == "CheckpointFunctionBackward":
            raise DistapError(
                "the network checkpoints activations with use_reentrant=True, which hides"
                " parameters from autograd; pass use_reentrant=False (gradient_checkpointing_kwargs"
                " of Hugging Face networks)"
            )
        nodes += [following for following, _ in node.next_functions]
    return seen

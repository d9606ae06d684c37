"""Refuse descriptors and classes that cannot be ranked, and graphs that lose gradients."""

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.autograd.graph import Node

from distap.errors import LENGTH_TOLERANCE, DistapError
from distap.ranking.gathered import Gathered

MOST_ROWS = 10  # that a message names


def refuse_lengths(gathered: Gathered) -> None:
    """Raise a DistapError on every rank that names rank and rows of descriptors not of length 1."""
    world = gathered.world
    # Images that take no part have no descriptor that could be wrong.
    lengths = gathered.descriptors.new_ones(len(gathered.taking_part))
    lengths[gathered.taking_part] = torch.linalg.vector_norm(gathered.descriptors, dim=1)
    problems = [_why_not_normalised(lengths[gathered.slots_of(rank)]) for rank in range(world.size)]
    if any(problems):
        by_rank = [
            f"{world.called(rank)}: {problem}" for rank, problem in enumerate(problems) if problem
        ]
        raise DistapError(
            "descriptors.not_normalised",
            "; ".join(by_rank) if world.size > 1 else str(problems[0]),
        )


def _why_not_normalised(lengths: Float[Tensor, " b"]) -> str | None:
    wrong = lengths == 0
    if wrong.any():
        return (
            f"{row_names(wrong)}: descriptors have length 0, and so no direction to rank by: all"
            " their numbers are 0; look at these images, and at what the network makes of them"
        )
    wrong = (lengths - 1).abs() > LENGTH_TOLERANCE
    if wrong.any():
        return (
            f"{row_names(wrong)}: descriptors have other lengths than 1, such as"
            f" {float(lengths[wrong][0]):.4g}; normalise them first (torch.nn.functional.normalize)"
        )
    return None


def refuse_crossing(levels: Int64[Tensor, "N L"]) -> None:
    """Raise a DistapError unless each class lies within one class of the next level."""
    for level in range(levels.shape[1] - 1):
        # Sorted by the finer class, one that lies within two others has different neighbours
        # somewhere.
        pairs = levels[levels[:, level].argsort(stable=True), level : level + 2]
        crosses = (pairs[1:, 0] == pairs[:-1, 0]) & (pairs[1:, 1] != pairs[:-1, 1])
        if crosses.any():
            label, coarser = pairs[:-1][crosses][0].tolist()
            _, other = pairs[1:][crosses][0].tolist()
            raise DistapError(
                "data.crossing_levels",
                f"label {label} of level {level} lies within {coarser} and within {other} of level"
                f" {level + 1}; levels go from the finest to the coarsest, and each class belongs"
                " to one of the next level",
            )


def row_names(wrong: Tensor) -> str:
    """Name the rows at which `wrong`, (b,) bool, is True: 'rows 3, 7'."""
    rows = wrong.nonzero().flatten().tolist()
    names = f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:MOST_ROWS]))}"
    return f"{names} and {len(rows) - MOST_ROWS} more" if len(rows) > MOST_ROWS else names


def refuse_other_leaves(
    outputs: Sequence[Tensor], parameters: Iterable[Tensor], advice: str
) -> None:
    """Raise a DistapError if a graph of all outputs has a leaf that is none of `parameters`."""
    ids = {id(tensor) for tensor in parameters}
    for node in _shared_nodes(outputs):
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in ids:
            kind = "parameter" if isinstance(leaf, nn.Parameter) else "tensor"
            raise DistapError(
                "network.unknown_parameter",
                f"a {kind} {tuple(leaf.shape)} would get no gradient: {advice}",
            )


def refuse_shared_graphs(outputs: Sequence[Tensor]) -> None:
    """Raise a DistapError if graphs of several passes share an operation, and not only leaves."""
    shared = _shared_nodes(outputs)
    operations = sorted(node.name() for node in shared if not hasattr(node, "variable"))
    if operations:
        names = ", ".join(name.removesuffix("Backward0") for name in operations[:MOST_ROWS])
        raise DistapError(
            "network.shared_graph",
            f"all passes of the network share a part of their graph ({names}), which the first"
            " backward pass frees: compute it inside the network's forward(), or detach() it",
        )


def _shared_nodes(outputs: Sequence[Tensor]) -> set[Node]:
    """Return the operations and leaves in the graphs of all outputs; a leaf has a `variable`."""
    return set.intersection(*map(_nodes, outputs))


def _nodes(output: Tensor) -> set[Node]:
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
                "network.reentrant_checkpoints",
                "the network checkpoints activations with use_reentrant=True, which hides"
                " parameters from autograd; pass use_reentrant=False (gradient_checkpointing_kwargs"
                " of Hugging Face networks)",
            )
        nodes += [following for following, _ in node.next_functions]
    return seen

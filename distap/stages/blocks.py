"""Find the blocks of a network, the modules that repeat along its depth, and compile them."""

from collections.abc import Collection, Iterator
from functools import partial
from textwrap import shorten

import torch
from torch import nn

from distap.errors import DistapError
from distap.stages.exactness import why_cut_matters

# A block that holds more than this share of the parameters is cut into those of its own lists, such
# as the third stage of a ConvNeXt.
LARGEST_SHARE = 1 / 8
LEAST_SHARE = 0.5  # of the parameters that blocks have to hold together
# Graphs of a block: with and without autograd, in training and in evaluation, of full, ragged and
# single micro-batches, at several image sizes. Torch would run all beyond the eighth uncompiled.
MOST_GRAPHS = 64


def blocks_of(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks of a network with their names, in the order in which it holds them.

    They are children of its lists (nn.ModuleList and nn.Sequential), such as `blocks`, `stages` or
    `layer1` of timm: those of the classes that transformers' `_no_split_modules` names, or all that
    have children. A block lies in no other one.

    Raises:
        DistapError: no blocks hold half of the parameters, or two share a parameter.
    """
    declared = {
        name
        for module in network.modules()
        for name in getattr(module, "_no_split_modules", None) or ()
    }
    for classes in (declared, ()):
        blocks = list(_outermost("", network, classes, numel(network)))
        if sum(numel(block) for _, block in blocks) >= LEAST_SHARE * numel(network):
            break
    else:
        raise DistapError(
            "network.no_blocks",
            f"{type(network).__name__} has no list of blocks (nn.ModuleList or nn.Sequential) that"
            " hold half of its parameters; set engine.unit to network, and leave engine.gather and"
            " engine.reshard out",
        )
    owners = dict[nn.Parameter, str]()
    for name, block in blocks:
        for parameter in block.parameters():
            if owners.setdefault(parameter, name) != name:
                raise DistapError(
                    "network.no_blocks",
                    f"the blocks {owners[parameter]} and {name} share a parameter, so that they"
                    " cannot be gathered apart; set engine.unit to network, and leave engine.gather"
                    " and engine.reshard out",
                )
    return blocks


def compile_blocks(network: nn.Module, device: torch.device) -> None:
    """Compile the forward pass of a network's blocks, in place, as one function for all of them.

    Modules and parameters keep their names. The last micro-batch, which is smaller, is compiled
    once more, for any number of images.

    Raises:
        DistapError: the network does not repeat one block, or draws at random, or there is no
            compiler.
    """
    try:
        blocks = [block for _, block in blocks_of(network)]
    except DistapError:
        blocks = []
    shapes = {tuple(parameter.shape for parameter in block.parameters()) for block in blocks}
    if len(blocks) < 2 or len(shapes) > 1 or len({type(block) for block in blocks}) > 1:
        raise DistapError(
            "network.no_blocks",
            f"model.compile is blocks, but {type(network).__name__} does not repeat one block: it"
            f" has {len(blocks)} of {len(shapes)} shapes, and each would be compiled by itself;"
            " leave it out, or choose a vision transformer",
        )
    reason = why_cut_matters(network)
    if reason is not None:
        raise DistapError(
            "network.draws_at_random",
            f"model.compile is blocks, but {reason}, which compiled code would do in another way"
            " with a graph than without one: leave it out, or the rate of that layer",
        )
    # Compilers are missing in many ways: no C++ compiler, a Triton that is too old, a full disk.
    try:
        torch.compile(torch.neg)(torch.ones(2, device=device))
    except Exception as error:
        message = shorten(f"{type(error).__name__}: {error}", 200)
        raise DistapError(
            "package.no_compiler",
            f"model.compile is blocks, but torch.compile fails on {device.type} here: {message};"
            " install a C++ compiler such as g++ (and Triton for a GPU), or leave the key out",
        ) from error
    from torch._dynamo import config as of_dynamo  # here, since it takes a second

    of_dynamo.recompile_limit = MOST_GRAPHS
    # Not `block.compile()`, which would compile each block by itself, with the hooks of FSDP.
    shared = torch.compile(type(blocks[0]).forward)
    for block in blocks:
        block.forward = partial(shared, block)


def _outermost(
    path: str, module: nn.Module, classes: Collection[str], total: int
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks in a module, of these classes or of any; `total` parameters are in all."""
    for key, child in module.named_children():
        name = f"{path}.{key}".lstrip(".")
        is_block = _is_list(module) and not _is_list(child) and numel(child) > 0
        if not (is_block and (type(child).__name__ in classes or (not classes and _nests(child)))):
            yield from _outermost(name, child, classes, total)
            continue
        inner = list(_outermost(name, child, (), total))
        is_cut = sum(numel(block) for _, block in inner) > LEAST_SHARE * numel(child)
        if is_cut and numel(child) > LARGEST_SHARE * total:
            yield from inner
        else:
            yield name, child


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential)


def _nests(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def numel(module: nn.Module) -> int:
    """Return the number of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())

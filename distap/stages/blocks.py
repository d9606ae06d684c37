"""Find the blocks of a network: the modules that repeat along its depth."""

from collections.abc import Collection, Iterator

from torch import nn

from distap.errors import DistapError

# A block that holds more than this share of the parameters is cut into those of its own lists, such
# as the third stage of a ConvNeXt.
LARGEST_SHARE = 1 / 8
LEAST_SHARE = 0.5  # of the parameters that blocks have to hold together


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

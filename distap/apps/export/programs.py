"""Export a network with torch.export and ONNX, from the pixels of an image to its descriptor."""

import copy
import importlib.util
import logging
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection, export
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from distap.errors import DistapError
from distap.model.multiscale import MultiScaleNetwork

Format = Literal["pt2", "onnx", "safetensors"]
Range = tuple[int, int | None]  # smallest and largest, None for no limit
OPSET, SMALLEST_OPSET = 20, 18  # antialiased scaling and torch's translations begin with 18
NAMES = {0: "batch", 2: "height", 3: "width"}  # of the axes that may vary
ONNX_MODULES = ("onnx", "onnxruntime", "onnxscript")
SMALLEST = 2  # as a lower bound of torch, this means any length, since torch never traces with 0 or 1


def parse_formats(names: Sequence[str]) -> tuple[Format, ...]:
    """Return the named formats, each once; raise a DistapError for an unknown name."""
    known: tuple[Format, ...] = get_args(Format)
    for name in names:
        if name not in known:
            raise DistapError(f"--format {name!r}: expected {', '.join(known)}")
    return tuple(each for each in known if each in names)


def require_onnx() -> None:
    """Raise a DistapError unless all packages for ONNX are installed."""
    missing = [name for name in ONNX_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise DistapError(
            f"--format onnx needs {', '.join(missing)}, not installed here: pip install 'distap[onnx]', or leave the "
            "format out"
        )


def exportable(network: MultiScaleNetwork) -> MultiScaleNetwork:
    """Return a copy on the CPU, in evaluation mode, without gradients, in the contiguous memory format."""
    copied = copy.deepcopy(network).cpu().eval().requires_grad_(False).to(memory_format=torch.contiguous_format)
    copied.network.memory_format = torch.contiguous_format
    return copied


def program_of(network: MultiScaleNetwork, image_size: int, dynamic_size: bool) -> ExportedProgram:
    """Trace the network with torch.export, for any number of images.

    Args:
        network: a result of `exportable`.
        image_size: height and width in pixels.
        dynamic_size: allow any other height and width as well.
    Raises:
        DistapError: the network cannot be traced; the message names the module at fault.
    """
    # The lengths differ, so that torch takes none for another, and none is 1, which torch takes for a constant.
    shape = (2, 3, image_size, image_size + (image_size // 4 if dynamic_size else 0))
    example = torch.zeros(shape, dtype=torch.uint8)
    shapes = ShapesCollection()
    shapes[example] = dict.fromkeys(NAMES if dynamic_size else (0,), Dim.DYNAMIC)
    with torch.no_grad(), _quiet(), _modules_noted(network) as inside:
        try:
            return export(network, (example,), dynamic_shapes=shapes)
        except Exception as error:  # torch has many, some of them internal
            where = _described(network, inside[-1]) if inside else "the network"
            size = "of any size; leave --dynamic-size out" if dynamic_size else f"of {image_size} x {image_size}"
            raise DistapError(
                f"{where} cannot be exported for images {size}: torch.export: {type(error).__name__}: {_first(error)}"
            ) from error


def size_ranges(program: ExportedProgram, image_size: int) -> tuple[Range, Range]:
    """Return the heights and widths that a program takes, in pixels; the smallest is found by trying.

    Args:
        image_size: height and width that it takes for certain.
    """
    heights, widths = (_range(program, length) for length in _shape(program)[2:])
    smallest = max(heights[0], widths[0])
    if smallest < image_size:
        # torch's guards refuse an image whose map would be one pixel, and no range shows that.
        smallest = _smallest_square(program, smallest, image_size)
    return (smallest, heights[1]), (smallest, widths[1])


def save_program(program: ExportedProgram, path: Path, about: Mapping[str, str]) -> None:
    """Write a program for torch.export.load, with texts by name; raise a DistapError if torch cannot."""
    try:
        with _quiet():
            torch.export.save(program, path, extra_files=dict(about))
    except OSError:
        raise
    except Exception as error:  # the serialiser raises AssertionErrors and others
        raise DistapError(
            f"{path.name}: torch.export can trace this network but not write it: {_first(error)}; leave "
            "--dynamic-size out, or --format pt2"
        ) from error


def save_onnx(
    network: MultiScaleNetwork,
    program: ExportedProgram,
    path: Path,
    about: Mapping[str, str],
    opset: int = OPSET,
) -> None:
    """Write a program as ONNX and check that it is well formed; weights above 2 GB go to a file beside it.

    Args:
        network: a result of `exportable`, and `program` its trace.
        about: texts to store in the file, by name.
        opset: version of ONNX's operators.
    Raises:
        DistapError: ONNX lacks an operator; the message names the module if it is known.
    """
    import onnx

    shape = _shape(program)
    axes = {axis: name for axis, name in NAMES.items() if isinstance(shape[axis], torch.SymInt)}
    try:
        with _quiet():
            translated = torch.onnx.export(
                program,
                input_names=["images"],
                output_names=["descriptors"],
                opset_version=opset,
                dynamic_shapes=(axes,),
                dynamo=True,
                verbose=False,
            )
        assert translated is not None
        translated.model.metadata_props.update(about)
        translated.save(path)
        onnx.checker.check_model(path, full_check=True)
    except OSError:
        raise
    except Exception as error:  # torch, ONNX and onnxscript have their own
        where, why = _blamed(network, program, error), _first(_causes(error)[-1])
        raise DistapError(f"{where} cannot be exported to ONNX with opset {opset}: {why}") from error
    found = translated.model.opset_imports[""]
    if found != opset:
        raise DistapError(f"--opset {opset}: torch wrote opset {found} instead; leave --opset at {OPSET}")


@contextmanager
def _modules_noted(network: nn.Module) -> Iterator[list[str]]:
    """Track the names of the modules that a forward pass is inside of, or was when it failed; the innermost last."""
    inside: list[str] = []
    handles: list[RemovableHandle] = []

    def note(name: str, module: nn.Module) -> None:
        def enter(_: nn.Module, __: tuple[Tensor, ...]) -> None:
            inside.append(name)

        def leave(_: nn.Module, __: tuple[Tensor, ...], ___: Tensor) -> None:
            inside.pop()

        handles.extend((module.register_forward_pre_hook(enter), module.register_forward_hook(leave)))

    for name, module in network.named_modules():
        note(name, module)
    try:
        yield inside
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of the exporters about their internals; their results are compared afterwards."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _described(network: nn.Module, name: str) -> str:
    module = network.get_submodule(name)
    return f"{name.removeprefix('network.') or 'the network'} ({type(module).__name__})"


def _blamed(network: MultiScaleNetwork, program: ExportedProgram, error: BaseException) -> str:
    """Return the module that calls the operator in an exporter's message, or the network.

    A forward pass finds it, since the exporter's graph does not keep the modules of decomposed operators.
    """
    named = set(re.findall(r"target=torch\.ops\.([\w.]+)", " ".join(str(each) for each in _causes(error))))
    with torch.no_grad(), _modules_noted(network) as inside:
        try:
            with _Stopping(named):
                network(*program.example_inputs[0])
        except _FoundError:
            return _described(network, inside[-1])
    return "the network"


class _FoundError(Exception):
    """An operator is about to be called."""


class _Stopping(TorchDispatchMode):
    """Stop a forward pass at the first operator with one of these names."""

    def __init__(self, names: Set[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) in self.names:
            raise _FoundError
        return func(*args, **(kwargs or {}))


def _causes(error: BaseException) -> list[BaseException]:
    """Return an exception and the chain of its causes, the first cause last."""
    return [error] if error.__cause__ is None else [error, *_causes(error.__cause__)]


def _shape(program: ExportedProgram) -> Sequence[int | torch.SymInt]:
    """Return the shape of the images that a program takes."""
    images = next(node for node in program.graph.nodes if node.name == program.graph_signature.user_inputs[0])
    shape: Sequence[int | torch.SymInt] = images.meta["val"].shape
    return shape


def _smallest_square(program: ExportedProgram, smallest: int, largest: int) -> int:
    """Find the side of the smallest square image that a program takes; it takes `largest`."""
    describe = program.module()
    while smallest < largest:
        side = (smallest + largest) // 2
        try:
            with torch.inference_mode():
                describe(torch.zeros(1, 3, side, side, dtype=torch.uint8))
            largest = side
        except Exception:  # a guard's AssertionError, or a kernel's RuntimeError
            smallest = side + 1
    return largest


def _range(program: ExportedProgram, length: int | torch.SymInt) -> Range:
    if isinstance(length, int):
        return length, length
    found = program.range_constraints[length.node.expr]
    smallest, largest = float(found.lower), float(found.upper)
    return 1 if smallest <= SMALLEST else int(smallest), None if math.isinf(largest) else int(largest)


def _first(error: BaseException) -> str:
    """Shorten a message that may fill pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:400] or type(error).__name__

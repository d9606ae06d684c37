"""Write a network with torch.export and as ONNX, from pixels to descriptors, and compare what was written with it."""

import copy
import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram, ShapesCollection, export
from torch.nn.functional import interpolate

from distap.errors import DistapError
from distap.model.multiscale import MultiScaleNetwork

OPSET = 20  # of ONNX's operators
AXIS_NAMES = {0: "batch", 2: "height", 3: "width"}  # of the axes that may vary
EXPORT_TOLERANCE = 1e-4  # of a component of a descriptor of length 1, computed in float32
BATCHES_TRIED = (1, 2, 7)
ONNX_MODULES = ("onnx", "onnxruntime", "onnxscript")
logging.getLogger("torch.onnx").setLevel(logging.ERROR)


def missing_for_onnx() -> list[str]:
    return [name for name in ONNX_MODULES if importlib.util.find_spec(name) is None]


def exportable(network: MultiScaleNetwork) -> MultiScaleNetwork:
    """Return a copy of a network for export: on the CPU, in evaluation mode, without gradients, contiguous."""
    copied = copy.deepcopy(network).cpu().eval().requires_grad_(False).to(memory_format=torch.contiguous_format)
    copied.network.memory_format = torch.contiguous_format
    return copied


def program_of(network: MultiScaleNetwork, image_size: int, dynamic_size: bool) -> ExportedProgram:
    """Trace a network from `exportable` for any number of images, and for any size with `dynamic_size`.

    Raise a DistapError with torch's reason if that fails.
    """
    # The lengths differ, so that torch takes none for another, and none is 1, which torch takes for a constant.
    shape = (2, 3, image_size, image_size + (image_size // 4 if dynamic_size else 0))
    example = torch.zeros(shape, dtype=torch.uint8)
    shapes = ShapesCollection()
    shapes[example] = dict.fromkeys(AXIS_NAMES if dynamic_size else (0,), Dim.DYNAMIC)
    size = "of any size; leave --dynamic-size out" if dynamic_size else f"of {image_size} x {image_size}"
    with torch.no_grad(), _exporting(f"the network cannot be exported for images {size}: torch.export"):
        return export(network, (example,), dynamic_shapes=shapes)


def save_program(program: ExportedProgram, path: Path, about: Mapping[str, str]) -> None:
    """Save a program for torch.export.load with the texts `about` it; raise a DistapError if torch cannot."""
    remedy = "leave --dynamic-size out, or --format pt2"
    with _exporting(f"{path.name}: torch.export cannot write this network; {remedy}"):
        torch.export.save(program, path, extra_files=dict(about))


def save_onnx(program: ExportedProgram, path: Path, about: Mapping[str, str]) -> None:
    """Write a program from `program_of` as ONNX with the texts `about` it, and check that the file is well formed.

    Weights above 2 GB go to a second file next to the first. A DistapError names the operator that ONNX lacks.
    """
    import onnx

    images = next(node for node in program.graph.nodes if node.name == program.graph_signature.user_inputs[0])
    shape = images.meta["val"].shape
    axes = {axis: name for axis, name in AXIS_NAMES.items() if isinstance(shape[axis], torch.SymInt)}
    with _exporting(f"the network cannot be exported to ONNX with opset {OPSET}"):
        translated = torch.onnx.export(
            program,
            input_names=["images"],
            output_names=["descriptors"],
            opset_version=OPSET,
            dynamic_shapes=(axes,),
            dynamo=True,
            verbose=False,
        )
        assert translated is not None
        translated.model.metadata_props.update(about)
        translated.save(path)
        onnx.checker.check_model(path, full_check=True)


@contextmanager
def _exporting(problem: str) -> Iterator[None]:
    """Turn the errors of an exporter, of many kinds and some pages long, into a DistapError with the first cause.

    The exporters warn about their internals; their results are compared afterwards.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except OSError:
        raise
    except Exception as error:
        why: BaseException = error
        while why.__cause__ is not None:  # the first cause names the operator
            why = why.__cause__
        raise DistapError(f"{problem}: {shorten(str(why), 400) or type(why).__name__}") from error


Describe = Callable[[Tensor], Tensor]
Case = tuple[Tensor, Tensor]  # images (n, 3, height, width) uint8, and the network's descriptors (n, D) of them


def cases_of(network: Describe, image_size: int, dynamic_size: bool = False) -> list[Case]:
    """Return batches of test images with their descriptors by a network in evaluation mode.

    With `dynamic_size`, add upright and wide images.
    """
    longer = image_size * 4 // 3
    others = [(longer, image_size), (image_size, longer)] if dynamic_size else []
    cases = []
    for size in [(image_size, image_size), *others]:
        for batch in BATCHES_TRIED:
            images = _example_images(batch, size)
            if batch % 2 == 0:  # the order of pixels in memory must not matter
                images = images.to(memory_format=torch.channels_last)
            with torch.inference_mode():
                expected = network(images).cpu()
            if not expected.isfinite().all():
                raise DistapError("the checkpoint's network gives numbers that are not finite; export an earlier one")
            cases.append((images, expected))
    return cases


def difference(name: str, describe: Describe, cases: Sequence[Case]) -> float:
    """Return the largest difference of a component between the descriptors of an exported file and the network's.

    Raises:
        DistapError: it is above EXPORT_TOLERANCE, or the file fails.
    """
    largest = 0.0
    for images, expected in cases:
        shape = tuple(images.shape)
        try:
            with torch.inference_mode():
                found = describe(images)
        except Exception as error:  # torch, ONNX Runtime: each has its own
            raise DistapError(f"{name}: what was exported fails on images {shape}: {error}") from error
        given, wanted = (found.dtype, *found.shape), (torch.float32, *expected.shape)
        if given != wanted:
            raise DistapError(f"{name}: what was exported gives {given} for images {shape}, expected {wanted}")
        here = float((found - expected).abs().max())
        if not here <= EXPORT_TOLERANCE:
            raise DistapError(
                f"{name}: for images {shape} its descriptors differ from the network's by {here:.2g}, more "
                f"than {EXPORT_TOLERANCE:g}; nothing was written. Leave this format out, or report the network"
            )
        largest = max(largest, here)
    return largest


def onnx_describer(path: Path) -> Describe:
    """Load an .onnx file into ONNX Runtime on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def describe(images: Tensor) -> Tensor:
        (descriptors,) = session.run(["descriptors"], {"images": images.contiguous().numpy()})
        return torch.from_numpy(descriptors)

    return describe


def _example_images(count: int, size: tuple[int, int]) -> Tensor:
    """Return (count, 3, height, width) uint8 of detail that differs, from single colours to noise."""
    generator = torch.Generator().manual_seed(count)
    sides = [4 ** (number % 4) for number in range(2, count + 2)]
    images = [interpolate(torch.rand(1, 3, side, side, generator=generator), size, mode="bilinear") for side in sides]
    return (255 * torch.cat(images)).to(torch.uint8)

"""Write a network with torch.export and as ONNX, from pixels to descriptors."""

import copy
import importlib.util
import logging
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from textwrap import shorten

import torch
from torch.export import Dim, ExportedProgram, ShapesCollection, export

from distap.errors import DistapError
from distap.model.multiscale import MultiScaleNetwork

OPSET = 20  # of ONNX's operators
AXIS_NAMES = {0: "batch", 2: "height", 3: "width"}  # of the axes that may vary
ONNX_MODULES = ("onnx", "onnxruntime", "onnxscript")
# The exporters warn about their internals; their results are compared afterwards.
_without_warnings = partial(warnings.catch_warnings, action="ignore")
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
    with torch.no_grad(), _without_warnings():
        try:
            return export(network, (example,), dynamic_shapes=shapes)
        except Exception as error:  # torch has many, some of them internal
            size = "of any size; leave --dynamic-size out" if dynamic_size else f"of {image_size} x {image_size}"
            raise DistapError(
                f"the network cannot be exported for images {size}: torch.export: {type(error).__name__}: "
                f"{_first(error)}"
            ) from error


def save_program(program: ExportedProgram, path: Path, about: Mapping[str, str]) -> None:
    """Save a program for torch.export.load with the texts `about` it; raise a DistapError if torch cannot."""
    try:
        with _without_warnings():
            torch.export.save(program, path, extra_files=dict(about))
    except OSError:
        raise
    except Exception as error:  # the serialiser raises AssertionErrors and others
        remedy = "leave --dynamic-size out, or --format pt2"
        raise DistapError(
            f"{path.name}: torch.export cannot write this network: {_first(error)}; {remedy}"
        ) from error


def save_onnx(program: ExportedProgram, path: Path, about: Mapping[str, str]) -> None:
    """Write a program from `program_of` as ONNX with the texts `about` it, and check that the file is well formed.

    Weights above 2 GB go to a second file next to the first. A DistapError names the operator that ONNX lacks.
    """
    import onnx

    images = next(node for node in program.graph.nodes if node.name == program.graph_signature.user_inputs[0])
    shape = images.meta["val"].shape
    axes = {axis: name for axis, name in AXIS_NAMES.items() if isinstance(shape[axis], torch.SymInt)}
    try:
        with _without_warnings():
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
    except OSError:
        raise
    except Exception as error:  # torch, ONNX and onnxscript have their own
        why: BaseException = error
        while why.__cause__ is not None:  # the first cause names the operator
            why = why.__cause__
        raise DistapError(f"the network cannot be exported to ONNX with opset {OPSET}: {_first(why)}") from error


def _first(error: BaseException) -> str:
    """Shorten a message that may be pages long."""
    return shorten(str(error), 400) or type(error).__name__

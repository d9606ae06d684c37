"""Export a checkpoint into a folder, in one step, after comparing every file with the network.

Programs, by torch.export and as ONNX, take pixels and give descriptors.
"""

import copy
import importlib.util
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram, ShapesCollection, export
from torch.nn.functional import interpolate

import distap
from distap.apps.export.card import model_card
from distap.checkpoint.finding import opened_checkpoint
from distap.errors import DistapError, first_cause, memory_ran_out
from distap.evaluation.describing import describing_of
from distap.evaluation.extraction.image_describer import ImageDescriber
from distap.model.multiscale import MultiScaleNetwork
from distap.storage.atomic import new_folder, require_free
from distap.training.build import trained_network
from distap.training.descriptor_network import DescriptorNetwork
from distap.world import World

OPSET = 20  # of ONNX's operators
EXPORT_TOLERANCE = 1e-4  # of a component of a descriptor of length 1, computed in float32
BATCHES_TRIED = (1, 2, 7)
ONNX_MODULES = ("onnx", "onnxruntime", "onnxscript")
Describe = Callable[[Tensor], Tensor]
# Images (n, 3, height, width) uint8, and the network's descriptors (n, D) of them.
Case = tuple[Tensor, Tensor]
logging.getLogger("torch.onnx").setLevel(logging.ERROR)


def missing_for_onnx() -> list[str]:
    return [name for name in ONNX_MODULES if importlib.util.find_spec(name) is None]


def exportable(network: MultiScaleNetwork) -> MultiScaleNetwork:
    """Return a copy of a network for export: on the CPU, without gradients, contiguous."""
    copied = copy.deepcopy(network).cpu().eval().requires_grad_(False)
    copied.network.memory_format = torch.contiguous_format
    return copied.to(memory_format=torch.contiguous_format)


def program_of(network: MultiScaleNetwork, image_size: int) -> ExportedProgram:
    """Trace a network from `exportable` for any number of images.

    Raises:
        DistapError: torch cannot trace it; the message gives torch's reason.
    """
    # Two images, since torch takes a length of 1 for a constant.
    example = torch.zeros(2, 3, image_size, image_size, dtype=torch.uint8)
    shapes = ShapesCollection()
    shapes[example] = {0: Dim.DYNAMIC}
    problem = f"the network cannot be exported for images of {image_size} x {image_size}"
    with torch.no_grad(), _exporting(f"{problem}: torch.export"):
        return export(network, (example,), dynamic_shapes=shapes)


def save_program(program: ExportedProgram, path: Path, texts: Mapping[str, str]) -> None:
    """Save a program with texts about it for torch.export.load; raise a DistapError on failure."""
    # In memory first: torch's own writer ends the process with C++'s terminate if the disk is full.
    buffer = BytesIO()
    with _exporting(f"{path.name}: torch.export cannot write this network; leave --format pt2 out"):
        torch.export.save(program, buffer, extra_files=dict(texts))
    path.write_bytes(buffer.getbuffer())


def load_program(path: Path) -> Describe:
    return torch.export.load(path).module()


def save_onnx(program: ExportedProgram, path: Path, texts: Mapping[str, str]) -> None:
    """Write a program from `program_of` as ONNX with texts about it, and check the file.

    Weights above 2 GB go to a second file next to the first.

    Raises:
        DistapError: ONNX lacks an operator; the message names it.
    """
    import onnx

    with _exporting(f"the network cannot be exported to ONNX with opset {OPSET}"):
        translated = torch.onnx.export(
            program,
            input_names=["images"],
            output_names=["descriptors"],
            opset_version=OPSET,
            dynamic_shapes=({0: "batch"},),
            dynamo=True,
            verbose=False,
        )
        assert translated is not None
        translated.model.metadata_props.update(texts)
        translated.save(path)
        onnx.checker.check_model(path, full_check=True)


@contextmanager
def _exporting(problem: str) -> Iterator[None]:
    """Raise a DistapError with the first cause in place of an exporter's errors.

    They are of many kinds and some pages long. The exporters warn about their internals; their
    results are compared afterwards.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except OSError:
        raise
    except Exception as error:
        if memory_ran_out(error):
            raise
        cause = first_cause(error)  # it names the operator
        reason = shorten(str(cause), 400) or type(cause).__name__
        raise DistapError("export.failed", f"{problem}: {reason}") from error


def cases_of(network: Describe, image_size: int) -> list[Case]:
    """Return batches of test images with their descriptors by a network in evaluation mode."""
    cases = []
    for batch in BATCHES_TRIED:
        images = _example_images(batch, image_size)
        if batch % 2 == 0:  # the order of pixels in memory must not matter
            images = images.to(memory_format=torch.channels_last)
        with torch.inference_mode():
            expected = network(images).cpu()
        if not expected.isfinite().all():
            raise DistapError(
                "export.not_finite",
                "the checkpoint's network gives numbers that are not finite; export an earlier one",
            )
        cases.append((images, expected))
    return cases


def difference(name: str, describe: Describe, cases: Sequence[Case]) -> float:
    """Return the largest difference between an exported file's descriptors and the network's.

    It is that of one component.

    Raises:
        DistapError: it is above EXPORT_TOLERANCE, or the file fails.
    """
    largest = 0.0
    for images, expected in cases:
        shape = tuple(images.shape)
        try:
            with torch.inference_mode():
                descriptors = describe(images)
        except Exception as error:  # torch, ONNX Runtime: each has its own
            raise DistapError(
                "export.file_fails", f"{name}: what was exported fails on images {shape}: {error}"
            ) from error
        output = (descriptors.dtype, *descriptors.shape)
        expected_output = (torch.float32, *expected.shape)
        if output != expected_output:
            raise DistapError(
                "export.other_output",
                f"{name}: what was exported gives {output} for images {shape}, expected"
                f" {expected_output}",
            )
        error_here = float((descriptors - expected).abs().max())
        if not error_here <= EXPORT_TOLERANCE:
            raise DistapError(
                "export.inexact",
                f"{name}: for images {shape} its descriptors differ from the network's by"
                f" {error_here:.2g}, more than {EXPORT_TOLERANCE:g}; nothing was written. Leave"
                " this format out, or report the network",
            )
        largest = max(largest, error_here)
    return largest


def onnx_describer(path: Path) -> Describe:
    """Load an .onnx file into ONNX Runtime on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def describe(images: Tensor) -> Tensor:
        (descriptors,) = session.run(["descriptors"], {"images": images.contiguous().numpy()})
        return torch.from_numpy(descriptors)

    return describe


def _example_images(count: int, size: int) -> Tensor:
    """Return (count, 3, size, size) uint8 of detail that differs, from single colours to noise."""
    generator = torch.Generator().manual_seed(count)
    sides = [4 ** (number % 4) for number in range(2, count + 2)]
    images = [
        interpolate(torch.rand(1, 3, side, side, generator=generator), size, mode="bilinear")
        for side in sides
    ]
    return (255 * torch.cat(images)).to(torch.uint8)


class Program(NamedTuple):
    """A format of a program: its file, and the functions that write and load it."""

    name: str
    save: Callable[[ExportedProgram, Path, Mapping[str, str]], None]
    load: Callable[[Path], Describe]


PROGRAMS = {
    "pt2": Program("model.pt2", save_program, load_program),
    "onnx": Program("model.onnx", save_onnx, onnx_describer),
}
EXPORT_FORMATS = (*PROGRAMS, "safetensors", "adapter")


def export_to_folder(
    checkpoint: Path | str,
    output: Path,
    formats: Sequence[str] = (),
    whitening: Path | None = None,
    best: bool = False,
    overrides: Sequence[str] = (),
    trust: bool = False,
) -> tuple[ImageDescriber, dict[str, float]]:
    """Write a checkpoint's network in several formats, and a model card, which describes them.

    Programs take images of the recipe's crop, or of data.image_size if the recipe takes whole
    images. Nothing is left behind if the network cannot be exported or a file differs from it.

    Args:
        checkpoint: a run folder, one of its checkpoints, or the URL of either.
        output: a new folder or an empty one.
        formats: of EXPORT_FORMATS; none takes all but `adapter`, and onnx where it is installed.
        whitening: a file of `distap whiten`, applied last.
        best: with a run folder, take its best checkpoint, not its newest.
        overrides: changes of the recipe, such as `evaluation.scales=[1,0.7]`.
        trust: let the checkpoint's record name classes that are not distap's, and have files read
            elsewhere.
    Returns:
        The describer of images, and by program the largest difference of a component of its
        descriptors.
    """
    formats = formats or _formats_here()
    _require_formats(formats)
    output = output.resolve()
    require_free(output)
    with opened_checkpoint(checkpoint, best) as opened:
        # Take this checkpoint's own path, since a training may write a newer one meanwhile.
        recipe, network = trained_network(opened.path, World(), overrides=overrides, trusted=trust)
        state = opened.state("recipe", "figures")
        manifest = opened.manifest
    sizing = recipe.sizing if "crop" in recipe.sizing else f"crop {recipe.data.image_size}"
    describer = describing_of(recipe, network, World(), sizing, whitening=whitening).describer

    with new_folder(output) as folder:
        image_size = describer.sizing.pixels or recipe.data.image_size
        programs = _write_programs(describer, image_size, formats, folder)
        if {"adapter", "safetensors"} & set(formats):
            described = DescriptorNetwork(describer, recipe)
            described.trusts = trust
            described.write(folder, changes_only="adapter" in formats)
        card = model_card(state, manifest, recipe, describer, programs, formats)
        (folder / "README.md").write_text(card, "utf-8")
    return describer, programs


def _formats_here() -> list[str]:
    formats = ["pt2", "onnx", "safetensors"]
    if missing_for_onnx():
        formats.remove("onnx")
    return formats


def _require_formats(formats: Sequence[str]) -> None:
    unknown = set(formats) - set(EXPORT_FORMATS)
    if unknown:
        raise DistapError(
            "export.unknown_format",
            f"--format {min(unknown)!r}: expected {', '.join(EXPORT_FORMATS)}",
        )
    if {"adapter", "safetensors"} <= set(formats):
        raise DistapError(
            "export.same_files",
            "--format adapter and safetensors write the same files; choose one",
        )
    missing = missing_for_onnx()
    if "onnx" in formats and missing:
        raise DistapError(
            "package.missing",
            f"--format onnx needs {', '.join(missing)}, not installed here: pip install"
            " 'distap[onnx]', or leave the format out",
        )


def _write_programs(
    describer: ImageDescriber, image_size: int, formats: Sequence[str], folder: Path
) -> dict[str, float]:
    """Write the programs among the formats; return their differences from the network by file."""
    chosen = [PROGRAMS[name] for name in PROGRAMS if name in formats]
    if not chosen:
        return {}
    network = describer.network.eval()
    record = {"version": distap.__version__, "described_by": asdict(describer.described_by)}
    texts = {"distap": json.dumps(record)}
    traced = program_of(exportable(network), image_size)
    cases = cases_of(network, image_size)
    differences = dict[str, float]()
    for program in chosen:
        path = folder / program.name
        program.save(traced, path, texts)
        differences[program.name] = difference(program.name, program.load(path), cases)
    return differences

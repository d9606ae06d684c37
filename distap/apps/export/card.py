"""The model card beside an export: what the run knows of the network, and code that loads it."""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import timm
import torch
import yaml

import distap
from distap.apps.export.backbone import BackboneFile
from distap.apps.export.checking import Agreement
from distap.apps.export.origin import Origin
from distap.apps.export.programs import Range
from distap.apps.export.snippets import ONNX, PIXELS, PROGRAM, TIMM
from distap.evaluation.extraction.image_describer import ImageDescriber
from distap.registry import name_of
from distap.retrieval.whitening import Whitening
from distap.storage.redact import without_secrets

CARD_FILE = "README.md"
UNKNOWN = "not known"


@dataclass(frozen=True)
class Card:
    """What is said of an export.

    Args:
        describer: what was exported.
        origin: where it is from.
        programs: how near each file is to the network.
        backbone: how timm loads its weights, where they were written.
        sizes: heights and widths that the programs take.
        whitening: what is applied last.
    """

    describer: ImageDescriber
    origin: Origin
    programs: Mapping[str, Agreement]
    backbone: BackboneFile | None
    sizes: tuple[Range, Range]
    whitening: Whitening | None

    def text(self) -> str:
        """The card as Markdown, with the fields that the Hugging Face hub reads at its top."""
        parts = [
            f"---\n{_yaml(self._fields())}---",
            f"# {self._name}",
            self._what_it_is(),
            _table(self._facts()),
            "## Loading it",
            self._loading(),
            "## What it was trained on",
            self._data(),
            "## Figures",
            self._figures(),
            "## How it was trained",
            self._training(),
            "## What is not known",
            NOT_KNOWN,
        ]
        return without_secrets("\n\n".join(parts) + "\n")

    @property
    def _name(self) -> str:
        return f"{self.origin.recipe.model.architecture} for image retrieval"

    @property
    def _size(self) -> int:
        assert self.describer.sizing.pixels is not None  # an export has a usual size
        return self.describer.sizing.pixels

    @property
    def _takes_other_sizes(self) -> bool:
        return any(smallest != largest for smallest, largest in self.sizes)

    def _fields(self) -> dict[str, Any]:
        recipe = self.origin.recipe
        fields: dict[str, Any] = {
            "license": "unknown",
            "library_name": "distap",
            "pipeline_tag": "image-feature-extraction",
            "tags": ["image-retrieval", "image-feature-extraction", "distap", "timm"],
        }
        if "model.onnx" in self.programs:
            fields["tags"].append("onnx")
        pretrained = self._pretrained()
        if pretrained.get("hf_hub_id"):
            fields["base_model"] = pretrained["hf_hub_id"]
        if self.origin.figures:
            fields["model-index"] = [
                {
                    "name": recipe.run.name,
                    "results": [
                        {
                            "task": {"type": "image-retrieval"},
                            "dataset": {"name": name, "type": name},
                            "metrics": [
                                {"type": figure, "value": round(value, 6)} for figure, value in of_set.items()
                            ],
                        }
                        for name, of_set in self.origin.figures.items()
                    ],
                }
            ]
        return fields

    def _pretrained(self) -> dict[str, Any]:
        """What timm says of the weights that training began with, where they were timm's."""
        model = self.origin.recipe.model
        config = timm.get_pretrained_cfg(model.architecture) if name_of("weights", model.weights) == "timm" else None
        return {} if config is None else dict(config.to_dict())

    def _what_it_is(self) -> str:
        steps = []
        scales = self.describer.network.scales
        if len(scales) > 1:
            steps.append(f"described at the scales {_numbers(scales)} and averaged")
        elif scales != (1.0,):
            steps.append(f"described at {_numbers(scales)} of its size")
        if self.whitening is not None:
            steps.append("whitened")
        then = f", {' and '.join(steps)}" if steps else ""
        return _filled(
            f"Turns an image into a descriptor of {self.describer.dimensions} numbers and length 1{then}. Images of "
            "the same thing are to have a large product of their descriptors, which is the cosine of their angle. "
            f"Trained by distap; this is its state after step {self.origin.step} of {self.origin.recipe.steps}."
            + ("" if self.programs else " This folder holds the weights of its backbone alone.")
        )

    def _facts(self) -> dict[str, str]:
        network, model = self.describer.network, self.origin.recipe.model
        mean, std = ((values.flatten() / 255).tolist() for values in (network.network.mean, network.network.std))
        size = f"{self._size} x {self._size} pixels"
        if self._takes_other_sizes:
            size += f"; others too, height {_limits(*self.sizes[0])}, width {_limits(*self.sizes[1])}"
        facts = {
            "backbone": f"`{model.architecture}` of timm",
            "pooling": repr(network.network.pooling),
            "projection": "none" if model.projection is None else f"linear, {model.projection} dimensions",
            "input": f"(n, 3, height, width) uint8, RGB; {size}",
            "normalisation": f"inside: value / 255, minus {_numbers(mean)}, divided by {_numbers(std)}",
            "output": f"(n, {self.describer.dimensions}) float32",
            "scales": _numbers(network.scales)
            + (f", mean of power {network.power:g}" if len(network.scales) > 1 else ""),
            "whitening": "none",
            "network's SHA-256": f"`{self.describer.described_by.network}`",
        }
        if self.whitening is not None:
            facts["whitening"] = (
                f"{self.whitening.kind}, power {self.whitening.power:g}, learned from "
                f"`{self.whitening.learned_from}`; SHA-256 `{self.whitening.fingerprint}`"
            )
        for name, agreement in self.programs.items():
            facts[f"`{name}`"] = (
                f"differs from the network by {agreement.largest_difference:.1e} at most, where images differ by "
                f"{agreement.apart:.1e}; smallest cosine {agreement.smallest_cosine:.7f}"
            )
        return facts

    def _loading(self) -> str:
        blocks = ["An image first: upright, and its central square, as distap takes it:", _code(PIXELS % self._size)]
        if "model.pt2" in self.programs:
            blocks += ["With PyTorch alone:", _code(PROGRAM)]
        if "model.onnx" in self.programs:
            blocks += ["With ONNX Runtime:", _code(ONNX)]
        if self.backbone is not None:
            network = self.describer.network.network
            mean, std = ([round(v, 6) for v in (t.flatten() / 255).tolist()] for t in (network.mean, network.std))
            blocks += [
                _filled(
                    "With timm, the backbone alone, to go on training or to take its features. Pooling, projection "
                    "and whitening are in the other files only."
                ),
                _code(
                    TIMM.format(
                        name=self.origin.recipe.model.architecture,
                        arguments=self.backbone.arguments,
                        mean=mean,
                        std=std,
                    )
                ),
            ]
        return "\n\n".join(blocks)

    def _data(self) -> str:
        data, model, pretrained = self.origin.data, self.origin.recipe.model, self._pretrained()
        begun = {
            "random": "random weights",
            "file": "a file of weights, named in the recipe",
            "package": "the weights of a package, named in the recipe",
        }.get(name_of("weights", model.weights), f"timm's `{pretrained.get('hf_hub_id') or model.architecture}`")
        if pretrained.get("license"):
            begun += f", which timm says to be under {pretrained['license']}"
        return _table(
            {
                "data set": f"`{data.source}`",
                "images": UNKNOWN if data.images is None else f"{data.images:,}",
                "classes": UNKNOWN if data.classes is None else f"{data.classes:,}",
                "fingerprint": UNKNOWN if data.fingerprint is None else f"`{data.fingerprint}`",
                "began with": begun,
            }
        )

    def _figures(self) -> str:
        if not self.origin.figures:
            return "This state was not evaluated while it was trained, so no figure is given here."
        rows = [
            f"| `{name}` | {figure} | {100 * value:.2f} |"
            for name, of_set in self.origin.figures.items()
            for figure, value in of_set.items()
        ]
        table = "\n".join(["| data set | figure | percent |", "|---|---|---|", *rows])
        validation, parts = self.origin.validation, [table]
        if validation is not None:
            parts.append(
                f"`{validation.data}`: {validation.images:,} images, {validation.queries:,} of them queries; "
                f"fingerprint `{validation.fingerprint}`."
            )
        parts.append(_filled(PROTOCOL))
        recipe = self.origin.recipe
        size = recipe.data.image_size
        alike = self.describer.network.scales == (1.0,) and self.whitening is None and self._size == size
        if not alike:
            parts.append(
                _filled(
                    f"On the validation set images were described at {size} x {size} pixels, at one scale, without "
                    "whitening. These files describe images in another way, whose figures are not known."
                )
            )
        return "\n\n".join(parts)

    def _training(self) -> str:
        recipe = self.origin.recipe
        settings = recipe.model_dump(mode="json")
        # A card is passed on, and there may be keys to someone's storage in it.
        settings["data"]["remote"]["options"] = {}
        terms = settings["loss"].get("terms") or [(1, settings["loss"])]
        loss = " + ".join(f"{weight:g} {part['name']}" for weight, part in terms)
        said = _filled(
            f"Loss: {loss}. Steps: {self.origin.step} of {recipe.steps}. Exported by distap {distap.__version__}, "
            f"PyTorch {torch.__version__}; with which versions it was trained is not recorded. This is the recipe in "
            "full, but for data.remote.options; its paths are those of the machine it was trained on:"
        )
        return f"{said}\n\n{_code(_yaml(settings), 'yaml')}"


PROTOCOL = (
    "Of the validation set every image is a query against all others, itself left out. mAP is the mean over the "
    "queries of the average precision, the finite sum over the whole ranking, a positive standing after the "
    "negatives that it ties with. mAP@R is the same over the first R places, R the number of positives. R@k is the "
    "share of queries with a positive among the first k. Queries without a positive are left out. Other sets with a "
    "ground truth follow the protocol of their authors."
)
NOT_KNOWN = """\
- **Licence.** That of these weights is not known here. It depends on the data and on the weights that training began
  with; settle it before you pass them on, and change `license` at the top.
- **Intended use.** Searching images like those it was trained on is what it was trained for. How it does on other
  images has not been measured, beyond the figures above.
- **Who and what is in the data.** Nothing is recorded of people in the images, of their consent, or of what the data
  leaves out. Do not identify people by it."""


def _table(facts: Mapping[str, str]) -> str:
    return "\n".join(
        ["| | |", "|---|---|", *(f"| {name} | {value.replace('|', '&#124;')} |" for name, value in facts.items())]
    )


def _code(text: str, language: str = "python") -> str:
    return f"```{language}\n{text.strip()}\n```"


def _filled(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def _numbers(values: Any) -> str:
    return ", ".join(f"{value:.6g}" for value in values)


def _limits(smallest: int, largest: int | None) -> str:
    return f"from {smallest}" if largest is None else f"from {smallest} to {largest}"


def _yaml(values: dict[str, Any]) -> str:
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return text

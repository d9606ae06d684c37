"""One table of everything that a recipe chooses by name, and the construction of objects from
names.

To add one of ours, write a class and add its line to REGISTRY. To use a class of your own, write
`name: "package.module:Class"` in the recipe; no line here is needed. Either way the class is a
dataclass or a pydantic model: its fields are the keys next to `name`, and METHODS names the method
that it needs.
"""

import ast
import importlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    GetCoreSchemaHandler,
    PydanticSchemaGenerationError,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import (
    InitErrorDetails,
    PydanticCustomError,
    PydanticSerializationError,
    core_schema,
)

from distap.errors import DistapError, problems_of, suggestion

TIMM_OPTIMIZERS = (
    *(
        "adam",
        "adamw",
        "nadamw",
        "radam",
        "sgd",
        "momentum",
        "rmsprop",
        "lamb",
        "lars",
        "lion",
        "adafactor",
    ),
    *("adopt", "adadelta", "adamax", "cadamw", "radamw", "sgdw"),
)
POOLINGS = ("native", "mean", "spoc", "max", "cls", "cls_mean")


def _in(module: str, **classes: str) -> dict[str, str]:
    return {name: f"distap.{module}:{found}" for name, found in classes.items()}


REGISTRY: dict[str, dict[str, str]] = {
    "loss": {
        **_in("ranking.losses.quantized", ap_q="QuantizedAP", ap_t="TieAwareAP", fast_ap="FastAP"),
        # what Ramzi et al. 2021 call AP_Q
        **_in("ranking.losses.quantized", softbin="QuantizedAP"),
        **_in("ranking.losses.smooth", smooth_ap="SmoothAP", sup_ap="SupAP", pnp="PNP"),
        **_in("ranking.losses.smooth", recall_at_k="RecallAtK", sup_recall_at_k="SupRecallAtK"),
        **_in(
            "ranking.losses.graded",
            h_ap="HierarchicalAP",
            smooth_ndcg="SmoothNDCG",
            sup_ndcg="SupNDCG",
        ),
        **_in("ranking.losses.calibration", calibration="Calibration", roadmap="Roadmap"),
        **_in("ranking.losses.blackbox", blackbox_ap="BlackBoxAP"),
        **_in(
            "ranking.losses.pairs",
            multi_similarity="MultiSimilarity",
            sup_con="SupCon",
            info_nce="InfoNCE",
        ),
        **_in(
            "ranking.losses.pairs", sigmoid="Sigmoid", contrastive="Contrastive", triplet="Triplet"
        ),
        **_in(
            "ranking.losses.proxies",
            proxy_nca="ProxyNCA",
            proxy_anchor="ProxyAnchor",
            arc_face="ArcFace",
        ),
        **_in("ranking.losses.proxies", cos_face="CosFace", normalized_softmax="NormalizedSoftmax"),
        **_in("ranking.losses.proxies", csl="CrossScaleLearning"),
        **_in("ranking.losses.sums", matryoshka="Matryoshka", sum="WeightedSum"),
        **_in("ranking.losses.simix", simix="SiMix"),
    },
    "sampling": {
        **_in("data.sampling.random_images", random="RandomSampling"),
        **_in("data.sampling.every_class", classes="ClassesSampling"),
        **_in("data.sampling.mined", mined="MinedSampling"),
        **_in("data.sampling.p_by_k", p_by_k="PByKSampling"),
        **_in("data.sampling.super_p_by_k", super_p_by_k="SuperPByKSampling"),
    },
    "augmentation": _in(
        "data.images.augmentation",
        crop_flip_colour="CropFlipColour",
        torchvision="TorchvisionSteps",
    ),
    "source": {
        **_in("data.loading.indexed", indexed="IndexedSource"),
        **_in("data.loading.streamed", streamed="StreamedSource"),
    },
    "backbone": _in("model.backbone", timm="TimmBackbone"),
    "weights": {
        **_in("model.backbone", timm="TimmWeights", random="RandomWeights", file="FileWeights"),
        **_in("model.backbone", package="PackageWeights"),
        **_in("model.trained", run="RunWeights"),
    },
    "pooling": {
        **_in("model.pooling", auto="AutoPooling", gem="GeMPooling"),
        **dict.fromkeys(POOLINGS, "distap.model.pooling:NamedPooling"),
    },
    "adapter": dict.fromkeys(("lora", "dora"), "distap.model.adapters:Adapter"),
    "optimizer": dict.fromkeys(TIMM_OPTIMIZERS, "distap.training.optimizer:TimmOptimizer"),
    "schedule": dict.fromkeys(
        ("constant", "linear", "cosine", "multistep"), "distap.training.schedule:RateSchedule"
    ),
    "engine": _in(
        "training.engines", ddp="DDPSettings", fsdp="FSDPSettings", deepspeed="DeepSpeedSettings"
    ),
    "logger": _in("telemetry.runlog", tensorboard="TensorBoard", wandb="WeightsAndBiases"),
}

METHODS = dict.fromkeys(REGISTRY, "build") | {
    **{
        "loss": "value_and_gradient",
        "sampling": "batch",
        "augmentation": "transform",
        "source": "open",
    },
    **{"weights": "load", "adapter": "adapt", "schedule": "factor", "logger": "open"},
}

LOSS_BASE = "distap.ranking.loss:Loss"  # has methods that most losses do not write themselves

# Prefixes of networks that timm does not list: `hf-hub:ORGANISATION/NAME` and `local-dir:FOLDER`.
SOURCES = ("hf-hub:", "local-dir:")
WAY_TO_TRUST = "--trust on the command line or trust=True in Python"
# kinds and names of others' classes that this process has been told to import
_CHOSEN: set[tuple[str, str]] = set()

GIVEN = "given"  # in the record of a run, the name of an object in Python that no recipe can name


def class_of(kind: str, name: str) -> type:
    """Import the class of a name of this kind or of "package.module:Class"; raise a ValueError if
    there is none.
    """
    check_name(kind, name)
    if name not in REGISTRY[kind]:
        _CHOSEN.add((kind, name))
    module, _, attribute = REGISTRY[kind].get(name, name).partition(":")
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{kind} {name!r}: {error}; is its folder on PYTHONPATH, or its package installed?"
        ) from error
    found = getattr(loaded, attribute, None)
    if found is None:
        raise ValueError(f"{name!r}: the module {module} has no {attribute}")
    if not isinstance(found, type) or not (is_dataclass(found) or issubclass(found, BaseModel)):
        of_function = ", or a function under @distap.loss" if kind == "loss" else ""
        raise ValueError(
            f"{name!r}: expected a dataclass or a pydantic model, whose fields are the"
            f" keys{of_function}"
        )
    lack = _lack(kind, found)
    if lack:
        raise ValueError(f"{name!r}: a {kind} {lack}")
    return found


def _lack(kind: str, found: type) -> str:
    """Return what a class lacks to be of this kind; "" if it lacks nothing."""
    if not callable(getattr(found, METHODS[kind], None)):
        return f"needs a method {METHODS[kind]!r}, which {found.__name__} has not"
    if kind == "loss" and LOSS_BASE not in map(place_of, found.__mro__):
        return (
            f"has to be a subclass of {LOSS_BASE.replace(':', '.')}, which {found.__name__} is not"
        )
    return ""


def check_name(kind: str, name: str) -> None:
    """Raise a ValueError unless a name is known or of the form "package.module:Class"; import
    nothing.
    """
    module, colon, attribute = str(name).partition(":")
    of_others = (
        bool(colon)
        and attribute.isidentifier()
        and all(part.isidentifier() for part in module.split("."))
    )
    if str(name) not in REGISTRY[kind] and not of_others:
        of_yours = ", or package.module:Class" if "." in str(name) else ""
        raise ValueError(
            f"{kind} {name!r} is unknown; {suggestion(str(name), REGISTRY[kind])}{of_yours}"
        )


def require_trusted(kind: str, name: str) -> None:
    """Raise a ValueError for a class that a record names, unless it is ours or a recipe here names
    it too.

    To import a class is to run code, and records of networks come from strangers.
    """
    if name not in (*REGISTRY[kind], GIVEN) and (kind, name) not in _CHOSEN:
        raise ValueError(
            f"{kind} {name!r} is a class that the record of a network names, and importing it would"
            f" run its code; if you trust who wrote it, say so by {WAY_TO_TRUST}"
        )


def name_of(kind: str, part: object) -> str:
    """Return the recipe's name for an object of this kind."""
    # a class that serves several names keeps the one it was given
    own = getattr(part, "name", None)
    if isinstance(own, str):
        return own
    place = place_of(part)
    return next((name for name, known in REGISTRY[kind].items() if known == place), place)


def place_of(part: object) -> str:
    """Return "package.module:Class" of an object, or "package.module:function" of a function."""
    named = part if hasattr(part, "__qualname__") else type(part)
    return f"{named.__module__}:{named.__qualname__}"


def fields_of(chosen: type) -> list[str]:
    return (
        [one.name for one in fields(chosen)]
        if is_dataclass(chosen)
        else list(getattr(chosen, "model_fields", ()))
    )


@cache
def adapter_of(chosen: Any) -> TypeAdapter[Any]:
    """Return what validates and writes the fields of a class; it takes milliseconds to make."""
    return TypeAdapter(chosen)


@cache
def fields_in_source(place: str) -> list[str]:
    """Return the fields of a class of ours as its source names them: importing it may take torch's
    seconds.
    """
    module, _, name = place.partition(":")
    tree = ast.parse(
        Path(__file__).parents[1].joinpath(*module.split(".")).with_suffix(".py").read_text("utf-8")
    )
    homes = {
        each.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for each in node.names
    }
    (written,) = (
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name
    )
    bases = [f"{homes.get(base, module)}:{base}" for base in map(ast.unparse, written.bases)]
    found = {
        key: True for base in bases if base.startswith("distap.") for key in fields_in_source(base)
    }
    for node in (each for each in written.body if isinstance(each, ast.AnnAssign)):
        found[ast.unparse(node.target)] = "ClassVar" not in ast.unparse(node.annotation)
    return [key for key, is_field in found.items() if is_field]


def build_recorded(kind: str, settings: Any, trusted: bool) -> Any:
    """Build the part that a network's record describes; a DistapError for a class that needs
    trust."""
    try:
        part = adapter_of(Annotated[Any, Chosen(kind)]).validate_python(
            settings, context=builds_recorded(trusted)
        )
        # a record of an object cannot be built, and says so
        return part.build() if isinstance(part, Part) else part
    except ValidationError as error:
        raise DistapError(
            f"model.{kind}: {'; '.join(problems_of(map(dict, error.errors())))}"
        ) from error
    except ValueError as error:
        raise DistapError(str(error)) from error


def builds_recorded(trusted: bool) -> "Builds":
    """Return the context in which `Chosen` builds the parts of a record, but for objects in
    Python."""

    def builds(part: Part) -> bool:
        if not trusted:
            require_trusted(part.kind, part.name)
        return part.name != GIVEN

    return builds


def build_part(kind: str, name: str, **options: Any) -> Any:
    """Build an object of this kind; a DistapError names each wrong name, key or value."""
    try:
        return Part(kind, name, options).build()
    except ValidationError as error:
        raise DistapError(
            f"{kind} {name}: {'; '.join(problems_of(map(dict, error.errors())))}"
        ) from error
    except ValueError as error:
        raise DistapError(str(error)) from error


def sum_in_full(loss: Any) -> Any:
    """Write {sup_ap: 0.5, calibration: {weight: 0.5, beta: 0.5}} as a sum; return losses of other
    forms unchanged.
    """
    if not isinstance(loss, Mapping) or "name" in loss or not loss.keys() & REGISTRY["loss"].keys():
        return loss
    terms = []
    for name, value in loss.items():
        options = dict(value) if isinstance(value, Mapping) else {"weight": value}
        terms.append((options.pop("weight", 1.0), {**options, "name": name}))
    return terms[0][1] if len(terms) == 1 and terms[0][0] == 1 else {"name": "sum", "terms": terms}


@dataclass(frozen=True)
class Part:
    """A part that a recipe chooses by name, with its keys, before its class is imported; or an
    object's record.
    """

    kind: str
    name: str
    keys: Mapping[str, Any]

    def build(self, context: "Builds | None" = None) -> Any:
        """Import the class and build the object; raise ValidationError for a wrong key, ValueError
        for the name.
        """
        if self.name == GIVEN:
            raise ValueError(
                f"an object in Python, {self.keys.get('of')}, was here; distap.train(...) takes it"
                " again"
            )
        chosen = class_of(self.kind, self.name)
        options = dict(self.keys)
        own = fields_of(chosen)
        self.require_known(own)
        presets: Mapping[str, Mapping[str, Any]] = getattr(chosen, "presets", {})
        preset = options.pop("preset", None)
        if preset is not None:
            if str(preset) not in presets:
                raise ValueError(
                    f"{self.kind} {self.name} has no preset {preset!r};"
                    f" {suggestion(str(preset), presets)}"
                )
            options = {**presets[str(preset)], **options}
        named = {"name": self.name} if "name" in own else {}
        return adapter_of(chosen).validate_python(options | named, context=context)

    def require_known(self, own: Collection[str]) -> None:
        """Raise a ValidationError for each key that is neither among the fields `own` of the class
        nor a preset.
        """
        known = [field for field in own if field != "name"]
        wrong = list[InitErrorDetails]()
        for key in (key for key in self.keys if key not in (*known, "preset")):
            told = PydanticCustomError(
                "unknown_key", "unknown key; {hint}", {"hint": suggestion(str(key), known)}
            )
            wrong.append(InitErrorDetails(type=told, loc=(key,), input=self.keys[key]))
        if wrong:
            raise ValidationError.from_exception_data(f"{self.kind} {self.name}", wrong)


Builds = Callable[[Part], bool]


@dataclass(frozen=True)
class Chosen:
    """Annotate a field that a recipe chooses by name: `loss: Annotated[Any, Chosen("loss")] =
    "ap_q"`.

    A recipe gives a name, or a mapping of `name` and keys. The field then holds the object that
    they describe. If the validation has a context, it is a function of a `Part` that tells whether
    to build it: others stay as they are. It raises a ValueError for one that must not be built.
    """

    kind: str  # a key of REGISTRY
    otherwise: str | None = None  # the name of a mapping that gives none

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.with_info_plain_validator_function(
            self._validate,
            serialization=core_schema.plain_serializer_function_ser_schema(
                self._dump, info_arg=True
            ),
        )

    def _validate(self, value: Any, info: core_schema.ValidationInfo) -> Any:
        if isinstance(value, str):
            value = {"name": value}
        if not isinstance(value, Mapping):
            if not _lack(self.kind, type(value)):
                return value
            raise ValueError("expected a name, or a mapping with `name` and keys")
        name = value.get("name", self.otherwise)
        if name is None:
            raise ValueError(
                f"the name of the {self.kind} is missing; {suggestion('', REGISTRY[self.kind])}"
            )
        if name != GIVEN:
            check_name(self.kind, name)
        part = Part(self.kind, str(name), {key: value[key] for key in value if key != "name"})
        place = REGISTRY[self.kind].get(part.name, "")
        if place.startswith("distap."):
            part.require_known(fields_in_source(place))
        return part.build(info.context) if info.context is None or info.context(part) else part

    def _dump(self, part: Any, info: core_schema.SerializationInfo) -> Any:
        if isinstance(part, Part):
            return {"name": part.name, **part.keys}
        if _can_be_named(self.kind, part):
            mode: Literal["json", "python"] = "json" if info.mode == "json" else "python"
            return {
                "name": name_of(self.kind, part),
                **adapter_of(part.__class__).dump_python(part, mode=mode),
            }
        settings: dict[str, Any] = {}
        with suppress(PydanticSchemaGenerationError, PydanticSerializationError):
            settings = adapter_of(part.__class__).dump_python(part, mode="json")
        return {"name": GIVEN, "of": place_of(getattr(part, "given", part)), **settings}


def _can_be_named(kind: str, part: object) -> bool:
    """Tell whether another process could build this part by name; not if it wraps an object as
    `given`.
    """
    if hasattr(part, "given") or type(part).__module__ == "__main__":
        return False
    try:
        return class_of(kind, name_of(kind, part)) is type(part)
    except ValueError:
        return False


def by_path(
    entry: Mapping[str, Any], separator: str, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings, such as a recipe, with the keys that lead to each."""
    for key, value in entry.items():
        if isinstance(value, Mapping) and value:
            yield from by_path(value, separator, f"{prefix}{key}{separator}")
        else:
            yield f"{prefix}{key}", value

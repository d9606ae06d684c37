"""The losses by the names of the configuration, and the presets of their reference implementations."""

import difflib
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from distap.errors import DistapError
from distap.ranking.losses.blackbox import BlackBoxAP
from distap.ranking.losses.calibration import Calibration, Roadmap
from distap.ranking.losses.metric_learning import MetricLearning
from distap.ranking.losses.quantized import FastAP, QuantizedAP, TieAwareAP
from distap.ranking.losses.smooth import SmoothAP, SupAP
from distap.ranking.protocol import Loss

LOSSES: dict[str, type] = {
    "ap_q": QuantizedAP,
    "ap_t": TieAwareAP,
    "fast_ap": FastAP,
    "smooth_ap": SmoothAP,
    "sup_ap": SupAP,
    "calibration": Calibration,
    "roadmap": Roadmap,
    "blackbox_ap": BlackBoxAP,
    "metric_learning": MetricLearning,
}

# Those that are 1 - AP, so that 1 - loss says how well a batch is ranked.
AP_LOSSES = frozenset({"ap_q", "ap_t", "fast_ap", "smooth_ap", "sup_ap", "blackbox_ap"})

# Options that give the numbers of a published implementation: `dirtorch` is the code of Revaud et al. 2019,
# `released` that of Ramzi et al. 2021.
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "ap_q": {"dirtorch": {"bins": 25, "low": 0.0, "high": 1.0}},
    "ap_t": {"dirtorch": {"bins": 25, "low": 0.0, "high": 1.0, "form": "full"}},
    "sup_ap": {"released": {"offset": 1.44, "delta": 0.05}},
    "calibration": {"released": {"form": "violating"}},
    "roadmap": {"released": {"offset": 1.44, "delta": 0.05, "form": "violating"}},
}


def build_loss(loss: str | Loss, weights: str = "uniform", **options: Any) -> Loss:
    """A loss by its name.

    Args:
        loss: one of LOSSES; or a loss, which is returned as it is.
        weights: of the queries.
        options: other fields of the loss; or `preset`, one of its PRESETS, over which options go first.
    Raises:
        DistapError: the loss, the preset, an option or its value is unknown; or options are given to a loss.
    """
    if not isinstance(loss, str):
        if options or weights != "uniform":
            raise DistapError(f"{loss} is a loss already; options and weights go with names of losses only")
        return loss
    if loss not in LOSSES:
        raise DistapError(f"loss {loss!r} is unknown; {suggestion(loss, LOSSES)}")
    known = [field.name for field in fields(LOSSES[loss])]
    try:
        settings = with_preset({"name": loss, "weights": weights, **options})
        for option in settings:
            if option not in known:
                raise ValueError(f"loss {loss} has no option {option!r}; {suggestion(option, known)}")
        built: Loss = TypeAdapter(LOSSES[loss]).validate_python(settings)
    except ValidationError as error:
        raise DistapError(f"loss {loss}: {'; '.join(map(_complaint, error.errors()))}") from error
    except ValueError as error:
        raise DistapError(str(error)) from error
    return built


def _complaint(error: ErrorDetails) -> str:
    """One wrong option."""
    said = error["msg"].removeprefix("Value error, ")
    where = ".".join(map(str, error["loc"]))
    return f"{where} is {error['input']!r}: {said[:1].lower()}{said[1:]}" if where else said


def with_preset(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a loss with those of its `preset` filled in.

    Raises:
        ValueError: the loss has no such preset.
    """
    settings = dict(settings)
    preset = settings.pop("preset", None)
    if preset is None:
        return settings
    known = PRESETS.get(str(settings["name"]), {})
    if preset not in known:
        raise ValueError(f"loss {settings['name']} has no preset {preset!r}; {suggestion(str(preset), known)}")
    return {**known[preset], **settings}


def suggestion(word: str, known: Collection[str]) -> str:
    """What may have been meant."""
    close = difflib.get_close_matches(word, known, n=1)
    if close:
        return f"did you mean {close[0]}?"
    return f"expected one of {', '.join(known)}" if known else "it has none"

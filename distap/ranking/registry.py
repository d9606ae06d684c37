"""The losses by the names of the configuration, and the presets of their reference implementations."""

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from distap.errors import DistapError
from distap.ranking.blackbox import BlackBoxAP
from distap.ranking.calibration import Calibration, Roadmap
from distap.ranking.metric_learning import MetricLearning
from distap.ranking.protocol import Loss
from distap.ranking.quantized import FastAP, QuantizedAP, TieAwareAP
from distap.ranking.smooth import SmoothAP, SupAP

LOSSES: dict[str, Callable[..., Loss]] = {
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


def build_loss(name: str, **options: Any) -> Loss:
    """A loss by its name.

    Args:
        name: one of LOSSES.
        options: its fields; or `preset`, one of its PRESETS, over which other options go first.
    Raises:
        DistapError: the loss, the preset, an option or its value is unknown.
    """
    if name not in LOSSES:
        raise DistapError(f"loss {name!r} is unknown; {suggestion(name, LOSSES)}")
    try:
        options = with_preset({"name": name, **options})
    except ValueError as error:
        raise DistapError(str(error)) from error
    known = get_type_hints(LOSSES[name])
    for option, value in options.items():
        if option not in known:
            raise DistapError(f"loss {name} has no option {option!r}; {suggestion(option, known)}")
        if get_origin(known[option]) is Literal and value not in get_args(known[option]):
            raise DistapError(
                f"loss {name}: {option} is {value!r}; {suggestion(str(value), get_args(known[option]))}"
            )
    try:
        return LOSSES[name](**options)
    except (TypeError, ValueError) as error:
        raise DistapError(f"loss {name}: {error}") from error


def with_preset(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a loss with those of its `preset` filled in.

    Raises:
        ValueError: the loss has no such preset.
    """
    settings = dict(settings)
    preset = settings.pop("preset", None)
    if preset is None:
        return settings
    known = PRESETS.get(str(settings.get("name", "ap_q")), {})
    if preset not in known:
        raise ValueError(f"loss {settings.get('name')} has no preset {preset!r}; {suggestion(str(preset), known)}")
    return {**known[preset], **settings}


def suggestion(word: str, known: Collection[str]) -> str:
    """What may have been meant."""
    close = difflib.get_close_matches(word, known, n=1)
    if close:
        return f"did you mean {close[0]}?"
    return f"expected one of {', '.join(known)}" if known else "it has none"

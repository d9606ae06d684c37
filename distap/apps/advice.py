"""Write a first recipe for one's own images, with the reason for each choice."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from distap.apps.looking import Look
from distap.data.shards.parallel import usable_cores

# Batches. With fewer classes than these, a batch of every class has many images of each.
MANY_CLASSES = 100
SMALL_BATCH = 60  # images of few classes
BATCH_IMAGES_PER_CLASS = 4  # K of a batch of many classes
# In an hour on a CPU, more updates gain more than larger batches.
LARGEST_BATCH = {"cpu": 96, "cuda": 1024}
BATCHES_AN_EPOCH = 8  # at least, of many classes
EPOCHS = 10
LEAST_STEPS = 200
WARMUP_SHARE = 10  # a tenth of the steps
EVALUATIONS = 10
# Several sets weigh alike until the largest has this many times the images of the smallest: equal
# weights go through the smallest as many times while the largest is seen once.
SIZES_APART = 4


class Family(NamedTuple):
    """Settings for backbones whose names match a pattern, and the source that found them."""

    pattern: str
    rate: float  # of Adam
    layer_decay: float | None
    source: str


FAMILIES = (
    Family(
        r"(vit|eva).*(dinov[23]|siglip|clip|pe_|aimv2)|eva02",
        rate=1e-6,
        layer_decay=None,
        source="Berton et al. 2025, best for DINOv2",
    ),
    Family(
        r"beit|.*[._]mae",
        rate=1e-5,
        layer_decay=0.75,
        source="Ramzi et al. 2021 for DeiT on SOP; the layer decay of He et al. 2022",
    ),
    Family(
        r"vit|deit|swin|eva|cait|xcit",
        rate=1e-5,
        layer_decay=None,
        source="Ramzi et al. 2021 for DeiT on SOP",
    ),
)
# Rates of Adam for other backbones, by their weights.
RANDOM_RATE = 1e-3
PRETRAINED_RATE = 3e-4
CAREFUL_RATE = 1e-4

# Sides of images, pixels. Networks pretrained on photographs see little in less than the smallest.
SMALLEST_SIDE = 64
LARGEST_SIDE = {"cpu": 128, "cuda": 224}
STEP_OF_SIDE = 32
# Sides in evaluations, relative to random crops in training (Touvron et al. 2019).
LARGER = 1.25
# Families whose networks take images of any size; others, such as Swin, are built for one.
TAKES_ANY_SIZE = r"(tf_)?(efficientnet|mobilenet|regnet|resnet|convnext)"

# Devices of NVIDIA's driver, on Jetsons, in WSL, of AMD's driver.
GPU_DEVICES = ("nvidiactl", "nvmap", "dxg", "kfd")
CPU_FACTS = Path("/proc/cpuinfo")
DEFAULT_BACKBONE = {"cpu": "tf_efficientnet_lite0", "cuda": "resnet50"}
RECIPE_TEMPLATES = Environment(
    loader=PackageLoader("distap.apps"),
    undefined=StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
)
# Quoted, since YAML would read a number or a colon in a name.
RECIPE_TEMPLATES.filters["quoted"] = partial(json.dumps, ensure_ascii=False)


def gpus_here() -> tuple[int, bool]:
    """Return how many GPUs torch sees, and whether they, or else the CPU, compute in bf16."""
    # Without a device there is no need to wait for torch, which loads for seconds.
    if not any(Path("/dev", name).exists() for name in GPU_DEVICES):
        return 0, CPU_FACTS.is_file() and "avx512_bf16" in CPU_FACTS.read_text()
    from torch import cuda

    count = cuda.device_count()
    return count, count > 0 and cuda.is_bf16_supported(including_emulation=False)


def recipe_for(
    looks: Mapping[str, Look], run: str, backbone: str | None, weights: str, size: int | None
) -> str:
    """Return the text of a recipe for images, with the reasons for its settings.

    Args:
        looks: the data sets by name, see `looking.look_at_each`.
        run: the recipe's run folder.
        backbone: an architecture of timm; None chooses one for this machine.
        weights: to begin with, as in a recipe.
        size: width and height of the network's input, pixels; None chooses them.
    """
    gpus, takes_bf16 = gpus_here()
    device = "cuda" if gpus else "cpu"
    seen = [*looks.values()]
    total = sum(look.images for look in seen)
    shared = sum(look.shared for look in seen)
    pair_sizes = np.concatenate([look.pair_sizes for look in seen])
    images_of_class = int(np.median(pair_sizes))
    set_weights = _weights(seen)
    classes, images = _batch(seen, set_weights, images_of_class, device)
    batch = classes * images
    steps = max(round(EPOCHS * total / batch), LEAST_STEPS)

    backbone = backbone or DEFAULT_BACKBONE[device]
    architecture = Path(backbone).name
    takes_any = re.match(TAKES_ANY_SIZE, architecture)
    seen_side = int(np.median([look.side for look in seen]))
    side = size or _input_side(seen_side, backbone, device)
    larger = -int(-LARGER * side // STEP_OF_SIDE) * STEP_OF_SIDE if takes_any else side

    is_small = len(pair_sizes) < MANY_CLASSES
    family = _family(architecture) if weights != "random" else None
    # Fitted to few classes, pretrained features tell other classes apart less well.
    is_careful = weights != "random" and is_small and not shared and family is None
    return RECIPE_TEMPLATES.get_template("recipe.yaml").render(
        **_places_in(looks),
        run=run,
        total=total,
        shared=shared,
        seen_side=seen_side,
        times=_times(seen),
        has_roots=len({*set_weights}) > 1,
        count=len(pair_sizes),
        images_of_class=images_of_class,
        is_small=is_small,
        is_careful=is_careful,
        side=side,
        larger=larger,
        takes_any=takes_any,
        classes=classes,
        images=images,
        batch=batch,
        small_batch=SMALL_BATCH,
        steps=steps,
        warmup=steps // WARMUP_SHARE,
        every=steps // EVALUATIONS,
        backbone=backbone,
        weights=weights,
        rate=_rate(weights, family, is_careful),
        family=family,
        gpus=gpus,
        takes_bf16=takes_bf16,
        workers=max(2, usable_cores() // max(1, gpus) - 1),
    )


def _places_in(looks: Mapping[str, Look]) -> dict[str, Any]:
    """Return what the template says about where the data sets are, and which are evaluated."""
    validation = dict[str, str]()
    searched = dict[str, Mapping[str, str]]()  # with a gallery
    unseen = list[str]()
    for name, look in looks.items():
        if "gallery" in look.sets:
            searched[name] = look.sets
        elif "validation" in look.sets:
            validation[name] = look.sets["validation"]
        else:
            unseen.append(name)
    return {
        "sets": {name: look.sets for name, look in looks.items()},
        "validation": validation,
        "searched": searched,
        "unseen": unseen,
        "held_out": [name for name, place in validation.items() if place.endswith("]")],
    }


def _family(architecture: str) -> Family | None:
    return next((family for family in FAMILIES if re.match(family.pattern, architecture)), None)


def _rate(weights: str, family: Family | None, is_careful: bool) -> float:
    """Return the rate of Adam."""
    if family is not None:
        return family.rate
    if weights == "random":
        return RANDOM_RATE
    return CAREFUL_RATE if is_careful else PRETRAINED_RATE


def _times(seen: Sequence[Look]) -> float:
    """Return how many times the images of the smallest data set the largest has."""
    images = [look.images for look in seen]
    return max(images) / min(images)


def _weights(seen: Sequence[Look]) -> list[float]:
    """Return the weight of each data set in batches: 1, or the square root of its images."""
    if _times(seen) <= SIZES_APART:
        return [1.0] * len(seen)
    return [math.sqrt(look.images) for look in seen]


def _batch(
    seen: Sequence[Look], weights: Sequence[float], images_of_class: int, device: str
) -> tuple[int, int]:
    """Return P and K of p_by_k; a small batch holds all of few classes."""

    def most(images: int) -> int:
        """Return the greatest P of which each data set can provide its share."""
        of_sets = zip(seen, weights, strict=True)
        return min(
            int(look.classes.most(images) * sum(weights) / weight) for look, weight in of_sets
        )

    if sum(len(look.pair_sizes) for look in seen) >= MANY_CLASSES:
        images = min(BATCH_IMAGES_PER_CLASS, images_of_class)
        total = sum(look.images for look in seen)
        batch = min(total // BATCHES_AN_EPOCH, LARGEST_BATCH[device])
        return min(batch // images, most(images)), images
    count = most(2)
    images = max(2, min(SMALL_BATCH // min(count, SMALL_BATCH // 2), images_of_class))
    classes = min(SMALL_BATCH // images, count)
    while images > 2 and most(images) < classes:  # some classes are small
        images -= 1
    return classes, images


def _input_side(side: int, backbone: str, device: str) -> int:
    """Return the width and height of a network's input for images of this shorter side, pixels."""
    patch = re.search(r"patch(\d+)", backbone)
    multiple = int(patch[1]) if patch else STEP_OF_SIDE
    smallest = -(-SMALLEST_SIDE // multiple)
    largest = max(1, LARGEST_SIDE[device] // multiple)
    return multiple * int(np.clip(round(side / multiple), smallest, largest))

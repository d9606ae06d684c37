"""Look at one's own images, and write a first recipe for them."""

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from distap.data.images.damage import DamagedImageError
from distap.data.loading.reader import ImageSet
from distap.data.plan import Classes
from distap.data.shards.index import Index, load_index
from distap.data.shards.parallel import usable_cores
from distap.errors import DistapError, logger
from distap.randomness import permutation
from distap.storage.locations import part_of

# Names of folders.
TRAIN = ("train", "training")
TEST = ("test", "validation", "val", "valid")
LISTS = (".csv", ".tsv")  # of images, which `distap data pack` reads

# If there is no set to evaluate on, this share of the classes is held out, if they are enough.
HELD_OUT = 0.25
LEAST_TO_HOLD_OUT = 20
SIZES_LOOKED_AT = 200  # images that are opened for their size if the index does not know it

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


@dataclass(frozen=True)
class Look:
    """The images that a recipe is for."""

    # Data sets as a recipe names them: train and, if there are, validation and gallery.
    sets: dict[str, str]
    classes: Classes
    shared: int  # classes that training shares with the other sets
    images: int
    side: int  # median of the shorter sides, pixels

    @property
    def alone(self) -> int:
        """Number of classes with one image."""
        return self.classes.count - len(self.classes.with_pairs)


def gpus_here() -> tuple[int, bool]:
    """Return how many GPUs torch sees, and whether they, or else the CPU, compute in bf16."""
    # Without a device there is no need to wait for torch, which loads for seconds.
    if not any(Path("/dev", name).exists() for name in GPU_DEVICES):
        return 0, CPU_FACTS.is_file() and "avx512_bf16" in CPU_FACTS.read_text()
    from torch import cuda

    count = cuda.device_count()
    return count, count > 0 and cuda.is_bf16_supported(including_emulation=False)


def look(place: str) -> Look:
    """Inspect a folder with a sub-folder per class, shards, or a folder with `train` and `test`.

    Raises:
        DistapError: there are no images, or no class has two.
    """
    folder = Path(place)
    paths = (folder, *sorted(folder.glob("*")))
    lists = [path for path in paths if path.suffix in LISTS and path.is_file()]
    hint = ""
    if lists:
        hint = f"; `distap data pack {lists[0]} shards` packs its images, then `distap init shards`"
    if folder in lists:
        raise DistapError("data.not_packed", f"{place}: a list of images, not the images{hint}")

    sets = _sets_in(folder) if folder.is_dir() else {"train": place}
    try:
        index = load_index(sets["train"])
    except DistapError as error:
        raise DistapError(error.code, f"{error}{hint}") from error
    if len(sets) == 1 and len(index.classes.with_pairs) >= LEAST_TO_HOLD_OUT:
        sets = {
            "train": part_of(sets["train"], 0, 1 - HELD_OUT),
            "validation": part_of(sets["train"], 1 - HELD_OUT, 1),
        }
        index = index.of_classes(0, 1 - HELD_OUT)
    classes = index.classes
    pairs = len(classes.with_pairs)
    if pairs < 2:
        raise DistapError(
            "data.too_few_classes",
            f"{sets['train']}: {classes.count} classes, of which {pairs} have two images or more;"
            " training needs two such classes at least: an image learns from others of its class"
            f" and of other classes{hint}",
        )
    evaluated = {
        name for key in sets if key != "train" for name in load_index(sets[key]).class_name
    }
    shared = evaluated.intersection(index.class_name)
    return Look(sets, classes, len(shared), len(index), _median_side(sets["train"], index))


def recipe_for(seen: Look, run: str, backbone: str | None, weights: str, size: int | None) -> str:
    """Return the text of a recipe for images, with the reasons for its settings.

    Args:
        run: the recipe's run folder.
        backbone: an architecture of timm; None chooses one for this machine.
        weights: to begin with, as in a recipe.
        size: width and height of the network's input, pixels; None chooses them.
    """
    gpus, takes_bf16 = gpus_here()
    device = "cuda" if gpus else "cpu"
    pairs = seen.classes.with_pairs
    images_of_class = int(np.median(seen.classes.sizes[pairs]))
    classes, images = _batch(seen, images_of_class, device)
    batch = classes * images
    steps = max(round(EPOCHS * seen.images / batch), LEAST_STEPS)

    backbone = backbone or DEFAULT_BACKBONE[device]
    architecture = Path(backbone).name
    takes_any = re.match(TAKES_ANY_SIZE, architecture)
    side = size or _input_side(seen.side, backbone, device)
    larger = -int(-LARGER * side // STEP_OF_SIDE) * STEP_OF_SIDE if takes_any else side

    is_small = len(pairs) < MANY_CLASSES
    is_pretrained = weights != "random"
    family = next((family for family in FAMILIES if re.match(family.pattern, architecture)), None)
    if not is_pretrained:
        family = None
    # Fitted to few classes, pretrained features tell other classes apart less well.
    is_careful = is_pretrained and is_small and not seen.shared and family is None
    if family is not None:
        rate = family.rate
    elif is_careful:
        rate = CAREFUL_RATE
    else:
        rate = PRETRAINED_RATE if is_pretrained else RANDOM_RATE
    return RECIPE_TEMPLATES.get_template("recipe.yaml").render(
        run=run,
        seen=seen,
        count=len(pairs),
        images_of_class=images_of_class,
        is_small=is_small,
        is_careful=is_careful,
        side=side,
        larger=larger,
        takes_any=takes_any,
        classes=classes,
        images=images,
        batch=batch,
        steps=steps,
        warmup=steps // WARMUP_SHARE,
        every=steps // EVALUATIONS,
        backbone=backbone,
        weights=weights,
        rate=rate,
        family=family,
        gpus=gpus,
        takes_bf16=takes_bf16,
        workers=max(2, usable_cores() // max(1, gpus) - 1),
    )


def _batch(seen: Look, images_of_class: int, device: str) -> tuple[int, int]:
    """Return P and K of p_by_k; a small batch holds all of few classes."""
    count = len(seen.classes.with_pairs)
    if count >= MANY_CLASSES:
        images = min(BATCH_IMAGES_PER_CLASS, images_of_class)
        batch = min(seen.images // BATCHES_AN_EPOCH, LARGEST_BATCH[device])
        return min(batch // images, seen.classes.most(images)), images
    images = max(2, min(SMALL_BATCH // min(count, SMALL_BATCH // 2), images_of_class))
    classes = min(SMALL_BATCH // images, count)
    while images > 2 and seen.classes.most(images) < classes:  # some classes are small
        images -= 1
    return classes, images


def _input_side(side: int, backbone: str, device: str) -> int:
    """Return the width and height of a network's input for images of this shorter side, pixels."""
    patch = re.search(r"patch(\d+)", backbone)
    multiple = int(patch[1]) if patch else STEP_OF_SIDE
    smallest = -(-SMALLEST_SIDE // multiple)
    largest = max(1, LARGEST_SIDE[device] // multiple)
    return multiple * int(np.clip(round(side / multiple), smallest, largest))


def _sets_in(folder: Path) -> dict[str, str]:
    """Return the data sets in a folder by their keys in a recipe.

    They are called as people or `distap data pack` call them.
    """

    def first(names: Iterable[str]) -> Path | None:
        return next((folder / name for name in names if _holds_classes(folder / name)), None)

    train = first(TRAIN)
    if train is None:
        return {"train": _source(folder)}
    sets = {"train": train}
    test = first(TEST)
    queries = first(("query", *(f"{name}-query" for name in TEST)))
    gallery = first(("gallery", *(f"{name}-gallery" for name in TEST)))
    if test:
        sets["validation"] = test
    elif queries and gallery:
        sets["validation"] = queries
        sets["gallery"] = gallery
    skipped = [
        path.name
        for path in sorted(folder.iterdir())
        if path not in sets.values() and _holds_classes(path)
    ]
    if skipped:
        logger.warning(
            "%s: not taken: %s; expected train and test, or train, query and gallery",
            folder,
            skipped,
        )
    return {key: _source(path) for key, path in sets.items()}


def _holds_classes(folder: Path) -> bool:
    """Return whether a folder holds classes: `train` may also be a class, of pictures of trains."""
    return folder.is_dir() and any(
        path.is_dir() or path.suffix == ".tar" for path in folder.iterdir()
    )


def _source(folder: Path) -> str:
    return str(folder) if any(folder.glob("*.tar")) else f"imagefolder:{folder}"


def _median_side(source: str, index: Index) -> int:
    """Return the median of the images' shorter sides, pixels."""
    has_size = index.width > 0
    if has_size.any():
        return int(np.median(np.minimum(index.width, index.height)[has_size]))
    images = ImageSet(source, index)
    sides = list[int]()
    for sample in permutation(len(index), 0)[:SIZES_LOOKED_AT].tolist():
        with suppress(DamagedImageError):
            sides.append(min(images.encoded(sample).size))
    if not sides:
        raise DistapError(
            "data.no_readable_image",
            f"{source}: none of {SIZES_LOOKED_AT} images that were looked at can be read",
        )
    return int(np.median(sides))

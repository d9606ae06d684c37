"""Look at one's own images, and write a first recipe for them."""

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

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

# names of folders
TRAIN = ("train", "training")
TEST = ("test", "validation", "val", "valid")
LISTS = (".csv", ".tsv")  # of images, which `distap data pack` reads
# share of the classes that is held out if no set is, and of how many
HELD_OUT = 0.25
LEAST_TO_HOLD_OUT = 20
SIZES_LOOKED_AT = 200  # images whose size is looked at if the index does not say it
MANY_CLASSES = 100  # with fewer, a batch of every class has many images of each
SMALL_BATCH = 60  # of few classes
BATCH_IMAGES_PER_CLASS = 4  # K of a batch of many classes
# in an hour on a CPU, more updates gain more than larger batches
LARGEST_BATCH = {"cpu": 96, "cuda": 1024}
BATCHES_AN_EPOCH = 8  # at least, of many classes
EPOCHS = 10
LEAST_STEPS = 200
# a tenth of the steps, and after each tenth
WARMUP_SHARE = 10
EVALUATIONS = 10
# of Adam, by weights
RANDOM_RATE = 1e-3
PRETRAINED_RATE = 3e-4
CAREFUL_RATE = 1e-4
FAMILIES = (  # beginnings of a backbone's name, Adam's rate, layer decay, and what they rest on
    (
        r"(vit|eva).*(dinov[23]|siglip|clip|pe_|aimv2)|eva02",
        1e-6,
        None,
        "Berton et al. 2025, best for DINOv2",
    ),
    (
        r"beit|.*[._]mae",
        1e-5,
        0.75,
        "Ramzi et al. 2021 for DeiT on SOP; the layer decay of He et al. 2022",
    ),
    (r"vit|deit|swin|eva|cait|xcit", 1e-5, None, "Ramzi et al. 2021 for DeiT on SOP"),
)
# pixels; networks pretrained on photographs see little in fewer
SMALLEST_SIDE = 64
STEP_OF_SIDE = 32
# sides of images in evaluations, next to random crops in training (Touvron et al. 2019)
LARGER = 1.25
# Families whose networks take images of any size; others, such as Swin, are built for one.
TAKES_ANY_SIZE = r"(tf_)?(efficientnet|mobilenet|regnet|resnet|convnext)"
# of NVIDIA's driver, on Jetsons, in WSL, of AMD's driver
GPU_DEVICES = ("nvidiactl", "nvmap", "dxg", "kfd")
CPU_FACTS = Path("/proc/cpuinfo")
LARGEST_SIDE = {"cpu": 128, "cuda": 224}
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
    # data sets as a recipe names them: train and, if there are, validation and gallery
    sets: dict[str, str]
    classes: Classes
    shared: int  # classes that training shares with the others
    images: int
    side: int  # median of the shorter sides, pixels

    @property
    def device(self) -> str:
        return "cuda" if gpus_here()[0] else "cpu"

    @property
    def alone(self) -> int:
        """Number of classes with one image."""
        return self.classes.count - len(self.classes.with_pairs)


def gpus_here() -> tuple[int, bool]:
    """Return how many GPUs torch sees, and whether they, or else the CPU, compute in bf16."""
    # torch, which loads for seconds, may wait
    if not any(Path("/dev", name).exists() for name in GPU_DEVICES):
        return 0, CPU_FACTS.is_file() and "avx512_bf16" in CPU_FACTS.read_text()
    from torch import cuda

    return cuda.device_count(), cuda.device_count() > 0 and cuda.is_bf16_supported(
        including_emulation=False
    )


def look(place: str) -> Look:
    """Inspect a folder with a sub-folder per class, shards, or a folder with `train` and `test` of
    these.

    Raises:
        DistapError: there are no images, or no class has two.
    """
    folder = Path(place)
    lists = [
        each
        for each in (folder, *sorted(folder.glob("*")))
        if each.suffix in LISTS and each.is_file()
    ]
    pack = (
        f"; `distap data pack {lists[0]} shards` packs its images, then `distap init shards`"
        if lists
        else ""
    )
    if folder in lists:
        raise DistapError(f"{place}: a list of images, not the images{pack}")
    sets = _sets_in(folder) if folder.is_dir() else {"train": place}
    try:
        index = load_index(sets["train"])
    except DistapError as error:
        raise DistapError(f"{error}{pack}") from error
    if len(sets) == 1 and len(index.classes.with_pairs) >= LEAST_TO_HOLD_OUT:
        kept, held_out = (
            part_of(sets["train"], *ends) for ends in ((0, 1 - HELD_OUT), (1 - HELD_OUT, 1))
        )
        sets = {"train": kept, "validation": held_out}
        index = index.of_classes(0, 1 - HELD_OUT)
    classes = index.classes
    pairs = len(classes.with_pairs)
    if pairs < 2:
        raise DistapError(
            f"{sets['train']}: {classes.count} classes, of which {pairs} have two images or more;"
            " training needs two such classes at least: an image learns from others of its class"
            f" and of other classes{pack}"
        )
    others = [
        name for key, each in sets.items() if key != "train" for name in load_index(each).class_name
    ]
    shared = len({*index.class_name} & {*others})
    return Look(sets, classes, shared, len(index), _side(sets["train"], index))


def recipe_for(seen: Look, run: str, backbone: str | None, weights: str, size: int | None) -> str:
    pairs = seen.classes.with_pairs
    count = len(pairs)
    a_class = int(np.median(seen.classes.sizes[pairs]))
    is_small = count < MANY_CLASSES
    if is_small:
        images = max(2, min(SMALL_BATCH // min(count, SMALL_BATCH // 2), a_class))
        classes = min(SMALL_BATCH // images, count)
        while images > 2 and seen.classes.most(images) < classes:  # some classes are small
            images -= 1
    else:
        images = min(BATCH_IMAGES_PER_CLASS, a_class)
        wanted = min(seen.images // BATCHES_AN_EPOCH, LARGEST_BATCH[seen.device])
        classes = min(wanted // images, seen.classes.most(images))
    batch = classes * images
    steps = max(round(EPOCHS * seen.images / batch), LEAST_STEPS)
    backbone = backbone or DEFAULT_BACKBONE[seen.device]
    multiple = int((re.search(r"patch(\d+)", backbone) or [0, STEP_OF_SIDE])[1])
    least = -(-SMALLEST_SIDE // multiple)
    most = max(1, LARGEST_SIDE[seen.device] // multiple)
    side = size or multiple * int(np.clip(round(seen.side / multiple), least, most))
    name = "" if weights == "random" else Path(backbone).name
    of_family = (found for names, *found in FAMILIES if re.match(names, name))
    rate, decay, source = next(of_family, (RANDOM_RATE, None, ""))
    takes_any = re.match(TAKES_ANY_SIZE, Path(backbone).name)
    larger = -int(-LARGER * side // STEP_OF_SIDE) * STEP_OF_SIDE if takes_any else side
    # Fitted to few classes, pretrained features tell others apart less well.
    is_careful = weights != "random" and is_small and not seen.shared and not source
    if name and not source:
        rate = CAREFUL_RATE if is_careful else PRETRAINED_RATE
    gpus, takes_bf16 = gpus_here()
    of_images = {
        "seen": seen,
        "count": count,
        "a_class": a_class,
        "is_small": is_small,
        "is_careful": is_careful,
    }
    of_sizes = {"side": side, "larger": larger, "takes_any": takes_any}
    of_steps = {
        "classes": classes,
        "images": images,
        "batch": batch,
        "steps": steps,
        "warmup": steps // WARMUP_SHARE,
    }
    of_network = {
        "backbone": backbone,
        "weights": weights,
        "rate": rate,
        "decay": decay,
        "source": source,
    }
    of_machine = {
        "gpus": gpus,
        "takes_bf16": takes_bf16,
        "workers": max(2, usable_cores() // max(1, gpus) - 1),
    }
    of_run = {"run": run, "every": steps // EVALUATIONS}
    values = of_run | of_images | of_sizes | of_steps | of_network | of_machine
    return RECIPE_TEMPLATES.get_template("recipe.yaml").render(values)


def _sets_in(folder: Path) -> dict[str, str]:
    """Return the data sets in a folder by their keys in a recipe: as a person or `distap data pack`
    names them.
    """

    def first(names: tuple[str, ...]) -> Path | None:
        return next((folder / name for name in names if _holds_classes(folder / name)), None)

    train = first(TRAIN)
    if train is None:
        return {"train": _named(folder)}
    queries, gallery = (
        first((part, *(f"{name}-{part}" for name in TEST))) for part in ("query", "gallery")
    )
    held_out = {"validation": queries, "gallery": gallery} if queries and gallery else {}
    found = {"train": train, **({"validation": test} if (test := first(TEST)) else held_out)}
    others = [
        one.name
        for one in sorted(folder.iterdir())
        if one not in found.values() and _holds_classes(one)
    ]
    if others:
        logger.warning(
            "%s: not taken: %s; expected train and test, or train, query and gallery",
            folder,
            others,
        )
    return {key: _named(each) for key, each in found.items()}


def _holds_classes(folder: Path) -> bool:
    """Tell whether a folder holds classes: `train` may also be a class, of pictures of trains."""
    return folder.is_dir() and any(
        each.is_dir() or each.suffix == ".tar" for each in folder.iterdir()
    )


def _named(folder: Path) -> str:
    return str(folder) if any(folder.glob("*.tar")) else f"imagefolder:{folder}"


def _side(source: str, index: Index) -> int:
    known = index.width > 0
    if known.any():
        return int(np.median(np.minimum(index.width, index.height)[known]))
    images = ImageSet(source, index)
    sides = list[int]()
    for sample in permutation(len(index), 0)[:SIZES_LOOKED_AT].tolist():
        with suppress(DamagedImageError):
            sides.append(min(images.encoded(sample).size))
    if not sides:
        raise DistapError(
            f"{source}: none of {SIZES_LOOKED_AT} images that were looked at can be read"
        )
    return int(np.median(sides))

"""Look at one's own images, and write a first recipe for them."""

import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from distap.data.images.decoding import DamagedImageError, image_size
from distap.data.loading.indexed import Reader
from distap.data.plan import Classes
from distap.data.shards.index import Index
from distap.data.shards.load_index import load_index
from distap.data.shards.statistics import most_classes
from distap.errors import DistapError
from distap.evaluation.sets import seen_classes
from distap.randomness import permutation
from distap.storage.locations import parse_source

TRAIN, TEST = ("train", "training"), ("test", "validation", "val", "valid")  # names of folders
SIZES_LOOKED_AT = 200  # images whose size is looked at if the index does not say it
MANY_CLASSES = 100  # with fewer, a batch of every class has many images of each
SMALL_BATCH = 60  # of few classes
BATCH_IMAGES_PER_CLASS = 4  # K of a batch of many classes
LARGEST_BATCH = {"cpu": 96, "cuda": 1024}  # in an hour on a CPU, more updates gain more than larger batches
BATCHES_AN_EPOCH = 8  # at least, of many classes
EPOCHS, LEAST_STEPS = 10, 200
RANDOM_RATE, PRETRAINED_RATE, CAREFUL_RATE = 1e-3, 3e-4, 1e-4  # of Adam, by weights
EVALUATIONS = 10
SMALLEST_SIDE, STEP_OF_SIDE = 64, 32  # pixels; networks pretrained on photographs see little in fewer
LARGEST_SIDE = {"cpu": 128, "cuda": 224}
DEFAULT_BACKBONE = {"cpu": "tf_efficientnet_lite0", "cuda": "resnet50"}


@dataclass(frozen=True)
class Look:
    train: str  # data set, as a recipe names it
    validation: str | None
    shared: int  # classes of both
    images: int
    classes: int  # with two images or more
    alone: int  # classes with one image
    images_a_class: int  # the median of classes with two or more
    side: int  # median of the shorter sides, pixels
    gpus: int

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"


def look(place: str) -> tuple[Look, Classes]:
    """Inspect a folder with a sub-folder per class, shards, or a folder with `train` and `test` of these.

    Raises:
        DistapError: there are no images, or no class has two.
    """
    train, validation = _sets_in(place)
    index = load_index(train)
    classes = index.classes
    pairs = classes.with_pairs
    if len(pairs) < 2:
        raise DistapError(
            f"{train}: {classes.count} classes, of which {len(pairs)} have two images or more; training needs two "
            "such classes at least: an image learns from others of its class and of other classes"
        )
    a_class = int(np.median(classes.sizes[pairs]))
    shared = 0 if validation is None else len(seen_classes(index.class_name, load_index(validation).class_name))
    counts = shared, len(index), len(pairs), classes.count - len(pairs), a_class
    return Look(train, validation, *counts, _side(train, index), torch.cuda.device_count()), classes


def recipe_for(seen: Look, classes: Classes, run: str, backbone: str | None, weights: str, size: int | None) -> str:
    return "\n".join(_lines(seen, classes, run, backbone or DEFAULT_BACKBONE[seen.device], weights, size)) + "\n"


def _lines(seen: Look, data: Classes, run: str, backbone: str, weights: str, size: int | None) -> Iterator[str]:
    if seen.classes < MANY_CLASSES:
        images = max(2, min(SMALL_BATCH // min(seen.classes, SMALL_BATCH // 2), seen.images_a_class))
        classes = min(SMALL_BATCH // images, seen.classes)
        while images > 2 and most_classes(data, images) < classes:  # some classes are small
            images -= 1
        loss = "multi_similarity"
        why = "A small batch has all of the few classes; a large one would only have more images of them, for fewer "
        why += "updates in the same time. So distap's large batches are the wrong tool here."
    else:
        images = min(BATCH_IMAGES_PER_CLASS, seen.images_a_class)
        wanted = min(seen.images // BATCHES_AN_EPOCH, LARGEST_BATCH[seen.device])
        classes = min(wanted // images, most_classes(data, images))
        loss = "smooth_ap"
        why = "In the same time small batches make more updates, and gain more than larger ones until the figures "
        why += "stop rising; then go on with a larger one, which ranks an image against more classes."
    batch = classes * images
    steps = max(round(EPOCHS * seen.images / batch), LEAST_STEPS)
    every = max(steps // EVALUATIONS, 1)
    nearest = round(seen.side / STEP_OF_SIDE) * STEP_OF_SIDE
    side = size or int(np.clip(nearest, SMALLEST_SIDE, LARGEST_SIDE[seen.device]))
    yield from _comment(
        f"Written by `distap init` for {seen.images:,} images. {seen.classes:,} classes have two images or more, "
        f"{seen.images_a_class} in the median. The images' shorter side is {seen.side} px in the median."
    )
    yield f"run: {_quoted(run)}"
    yield f"steps: {steps}  # {steps * batch / seen.images:.1f} epochs of {seen.images / batch:.1f} steps"
    yield ""
    yield "data:"
    yield f"  train: {_quoted(seen.train)}"
    if seen.validation is not None:
        yield f"  validation: {_quoted(seen.validation)}"
        if seen.shared:
            yield f"  unseen_classes: false  # {seen.shared:,} of its classes are trained on; unseen ones tell more"
    else:
        yield "  # No classes are held out, so no figures show what training gains. `distap data pack --split 0.5`"
        yield "  # packs half of them apart. validation: shards/test"
    yield f"  image_size: {side}  # more sees more detail, and costs more"
    yield "  augmentation: {crop: 0.5, flip: 0.5, colour: 0.4, grey: 0.1}  # flip: 0 if left and right differ"
    yield ""
    yield from _comment(why)
    yield f"sampling: {{name: p_by_k, classes: {classes}, images: {images}}}  # {batch} images a batch"
    yield ""
    yield "model:"
    yield f"  backbone: {_quoted(backbone)}"
    told = "pretrained, downloaded once" if weights == "timm" else "as asked for"
    yield f"  weights: {weights}  # {told}; {{name: run, path: RUN}} goes on from another training"
    yield ""
    # Fitted to few classes, pretrained features tell others apart less well.
    is_careful = weights != "random" and seen.classes < MANY_CLASSES and not seen.shared
    rate = RANDOM_RATE if weights == "random" else CAREFUL_RATE if is_careful else PRETRAINED_RATE
    yield f"loss: {loss}"
    yield f"optimizer: {{name: adam, learning_rate: {rate}}}"
    if is_careful:
        yield from _comment("If even the first evaluation is the best one, few classes do not help: train on more.")
    yield "schedule: {name: linear, warmup: 20}"
    yield "replay: {size: auto, keep: auto}  # the fastest micro-batch, and all graphs for which there is memory"
    yield ""
    if seen.validation is not None:
        yield f"evaluation: {{every: {every}}}"
    yield f"checkpoint: {{every: {every}}}"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, 110, initial_indent="# ", subsequent_indent="# ")


def _quoted(text: str) -> str:
    """Quote a text for YAML, which would otherwise read a number or a colon in a name."""
    return json.dumps(text, ensure_ascii=False)


def _sets_in(place: str) -> tuple[str, str | None]:
    folder = Path(place)
    if not folder.is_dir():
        return place, None
    train = next((folder / name for name in TRAIN if _holds_classes(folder / name)), None)
    if train is None:
        return _named(folder), None
    test = next((folder / name for name in TEST if _holds_classes(folder / name)), None)
    return _named(train), None if test is None else _named(test)


def _holds_classes(folder: Path) -> bool:
    """Tell whether a folder holds classes: `train` may also be a class, of pictures of trains."""
    return folder.is_dir() and any(each.is_dir() or each.suffix == ".tar" for each in folder.iterdir())


def _named(folder: Path) -> str:
    return str(folder) if any(folder.glob("*.tar")) else f"imagefolder:{folder}"


def _side(source: str, index: Index) -> int:
    known = index.width > 0
    if known.any():
        return int(np.median(np.minimum(index.width, index.height)[known]))
    reader, sides = Reader(parse_source(source), index), list[int]()
    for sample in permutation(len(index), 0)[:SIZES_LOOKED_AT].tolist():
        try:
            sides.append(min(image_size(reader.data(sample))))
        except DamagedImageError:
            continue
    if not sides:
        raise DistapError(f"{source}: none of {SIZES_LOOKED_AT} images that were looked at can be read")
    return int(np.median(sides))

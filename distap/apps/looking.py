"""Look at one's own images: how many, of which classes, how large, and what to evaluate on."""

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distap.config.evaluation_sections import MEAN, MERGED
from distap.data.images.damage import DamagedImageError
from distap.data.loading.reader import LISTS, ImageSet
from distap.data.plan import Classes
from distap.data.shards.index import Index, load_index
from distap.errors import DistapError, logger
from distap.randomness import Numbers, permutation
from distap.storage.locations import part_of

# Names of folders.
TRAIN = ("train", "training")
TEST = ("test", "validation", "val", "valid")

# If there is no set to evaluate on, this share of the classes is held out, if they are enough.
HELD_OUT = 0.25
LEAST_TO_HOLD_OUT = 20
SIZES_LOOKED_AT = 200  # images that are opened for their size if the index does not know it


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
    def pair_sizes(self) -> Numbers:
        """(n,) number of images of each class that has two or more."""
        return self.classes.sizes[self.classes.with_pairs]

    @property
    def alone(self) -> int:
        """Number of classes with one image."""
        return self.classes.count - len(self.classes.with_pairs)


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


def look_at_each(places: Sequence[str]) -> dict[str, Look]:
    """Inspect data sets for one recipe, and name each after its folder; see `look`.

    The name of a single one is empty.

    Raises:
        DistapError: there is no such data set, or a folder is named twice.
    """
    if len(places) == 1:
        return {"": look(places[0])}
    whole = [str(Path(place).resolve()) if Path(place).is_dir() else place for place in places]
    twice = next((place for place in whole if whole.count(place) > 1), None)
    if twice is not None:
        raise DistapError(
            "data.named_twice", f"{twice}: named twice, so the recipe would train twice on it"
        )
    return {name: look(place) for name, place in zip(_names_of(whole), places, strict=True)}


def _names_of(places: Sequence[str]) -> list[str]:
    """Return a name for each place, of its last folders: one, or more until no two are alike."""
    folders = [
        [name for part in place.split("/") if (name := re.sub(r"[^\w.-]+", "-", part).strip("-."))]
        for place in places
    ]
    names = list[str]()
    for depth in range(1, max(map(len, folders)) + 1):
        names = ["-".join(parts[-depth:]) for parts in folders]
        # Evaluations of several sets have figures of these names.
        if len({MEAN, MERGED, "validation", "", *names}) == len(names) + 4:
            return names
    return [f"{name or 'set'}-{number}" for number, name in enumerate(names, 1)]


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

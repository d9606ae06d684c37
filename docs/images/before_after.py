"""Draw before_after.png from a run of the demo: `python docs/images/before_after.py
runs/demo/train`.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from distap.randomness import permutation

IMAGES = Path("data/emoji/images/test")
QUERIES = 6
HITS = 5
SIDE = 72
GAP = 10
RIGHT = "#2e9e5b"
WRONG = "#d64545"
TEXT = "#1f2933"


def results(folder: Path) -> list[tuple[str, list[str]]]:
    """Return keys of the queries and of their nearest images, of queries drawn at random."""
    retrieved = np.load(folder / "retrieved.npz")
    keys = retrieved["key"].tolist()
    nearest = retrieved["neighbours"].reshape(len(keys), -1)
    drawn = permutation(len(nearest), 1)[:QUERIES]
    return [(keys[int(row)], [keys[int(hit)] for hit in nearest[row, :HITS]]) for row in drawn]


def picture(key: str) -> Image.Image:
    """Return the image of a key on white."""
    image = Image.open(IMAGES / key).convert("RGBA").resize((SIDE, SIDE))
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def main(run: str) -> None:
    """Draw one row a query: the query, what was nearest before training, and what is nearest after
    it.
    """
    folders = sorted(Path(run, "evaluations").iterdir())
    before = results(folders[0])
    after = results(folders[-1])
    trained = f"after {int(folders[-1].name.removeprefix('step-'))} steps"
    cell = SIDE + GAP
    block = HITS * (SIDE + GAP)
    canvas = Image.new("RGB", (cell + 2 * block + 5 * GAP, QUERIES * cell + 44), "white")
    draw = ImageDraw.Draw(canvas)
    font = ImageFont.load_default(18)
    starts = (GAP, cell + 2 * GAP, cell + block + 4 * GAP)
    for start, title in zip(starts, ("query", "before training", trained), strict=True):
        draw.text((start, 12), title, TEXT, font)
    for row, ((query, found), (_, found_after)) in enumerate(zip(before, after, strict=True)):
        top = 44 + row * cell
        canvas.paste(picture(query), (starts[0], top))
        for start, hits in zip(starts[1:], (found, found_after), strict=True):
            for column, hit in enumerate(hits):
                left = start + column * cell
                right = hit.split("/")[0] == query.split("/")[0]
                canvas.paste(picture(hit), (left, top))
                box = (left - 3, top - 3, left + SIDE + 2, top + SIDE + 2)
                draw.rectangle(box, outline=RIGHT if right else WRONG, width=3)
    canvas.quantize(128).save(Path(__file__).with_suffix(".png"), optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

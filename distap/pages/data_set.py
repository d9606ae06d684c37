"""Show the statistics of a data set: as tables in the terminal, as a page with images, as JSON."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Column, Table

from distap.data.images.whole_images import Thumbnails
from distap.data.loading.indexed import Reader
from distap.data.shards.statistics import Histogram, Statistics
from distap.errors import DistapError
from distap.pages.page import write_page
from distap.randomness import permutation
from distap.storage.atomic import write_whole
from distap.telemetry.terminal import text_table

BAR = 40  # letters of the longest bar in the terminal
SHOWN_CLASSES, SHOWN_IMAGES = 8, 10
THUMBNAIL = 192  # pixels
MIXED_ENOUGH = 0.5
SPREAD_COLUMNS = ["", "min", "5%", "median", "mean", "95%", "max"]
RANDOM_COLUMNS = ["random: images a batch", "with a positive in it, on average"]
P_BY_K_COLUMNS = ["p_by_k: K images a class", "classes with K or more", "classes a batch, at most"]


def statistics_tables(figures: Statistics) -> list[Table | str]:
    return [
        _table([], _facts(figures).items(), show_header=False),
        text_table("", "", SPREAD_COLUMNS, _spreads(figures)),
        *(_bars(title, bins) for title, bins in _histograms(figures).items()),
        *(text_table("", "", columns, rows) for columns, rows in _samplings(figures)),
        *_sampling(figures),
    ]


def write_statistics(path: Path, figures: Statistics, title: str, reader: Reader) -> None:
    """Write the statistics in the format of path's suffix: .json, or .html with charts and some images."""
    if path.suffix == ".json":
        write_whole(path, json.dumps(figures, indent=2) + "\n")
        return
    if path.suffix != ".html":
        raise DistapError(f"{path}: statistics are written as .json or .html")
    index = reader.index
    thumbnails = Thumbnails(reader, np.arange(len(index)), THUMBNAIL)
    examples = []
    for label in permutation(len(index.class_name), 0)[:SHOWN_CLASSES].tolist():
        samples = np.flatnonzero(index.label == label)
        pictures = [(reader.where(sample), thumbnails.jpeg(sample)) for sample in samples[:SHOWN_IMAGES].tolist()]
        examples.append((str(index.class_name[label]), len(samples), pictures))
    write_page(
        path,
        "data_set.html",
        title=title,
        facts=_facts(figures),
        spreads=(SPREAD_COLUMNS, _spreads(figures)),
        histograms=_histograms(figures),
        sampling=_samplings(figures),
        sentences=_sampling(figures),
        largest=figures["largest"],
        groups=figures["group_sizes"],
        examples=examples,
    )


def _facts(figures: Statistics) -> dict[str, str]:
    groups = f"{figures['groups']:,}" if figures["groups"] else "none"
    if figures["groups"] and figures["without_group"]:
        groups += f"; {figures['without_group']:,} classes have none"
    looked_at, formats = figures["looked_at"], figures["formats"].items()
    kinds = ", ".join(f"{name} {100 * count / looked_at:.3g}%" for name, count in formats)
    is_mixed = figures["mixed"] >= MIXED_ENOUGH or figures["classes"] == 1
    by_class = "class by class: fine for reading by the index; for streamed reading pack with --shuffle"
    return {
        "images": f"{figures['images']:,}",
        "classes": f"{figures['classes']:,}",
        "super-categories": groups,
        "classes of one image": f"{figures['singletons']:,}",
        "bytes of images": f"{figures['bytes'] / 1e6:,.1f} MB in {figures['shards']:,} shards",
        "formats": f"{kinds} (of {looked_at} images looked at)",
        "classes a shard": f"{figures['classes_a_shard']['median']:,.0f}, {'well mixed' if is_mixed else by_class}",
        "fingerprint": figures["fingerprint"][:16],
    }


def _spreads(figures: Statistics) -> list[list[str]]:
    rows = (
        ("images a class", "images_a_class", ",.4g"),
        ("width, pixels", "width", ",.0f"),
        ("height, pixels", "height", ",.0f"),
        ("shorter side, pixels", "shorter_side", ",.0f"),
        ("megapixels", "megapixels", ",.3g"),
        ("width / height", "aspect", ".3g"),
        ("bytes an image", "image_bytes", ",.0f"),
    )
    return [[name, *(f"{each:{form}}" for each in figures[key].values())] for name, key, form in rows if figures[key]]


def _histograms(figures: Statistics) -> dict[str, Histogram]:
    histograms = {
        "Classes by images a class": figures["images_a_class_histogram"],
        "Images by shorter side, pixels": figures["shorter_side_histogram"],
        "Images by megapixels": figures["megapixels_histogram"],
        "Images by width : height": figures["aspect_histogram"],
        "Images by bytes an image": figures["image_bytes_histogram"],
    }
    return {title: bins for title, bins in histograms.items() if bins}


def _samplings(figures: Statistics) -> list[tuple[list[str], list[list[str]]]]:
    """Columns and rows of the tables that are not empty."""
    tables = [(RANDOM_COLUMNS, _random(figures)), (P_BY_K_COLUMNS, _p_by_k(figures))]
    return [(columns, rows) for columns, rows in tables if rows]


def _random(figures: Statistics) -> list[list[str]]:
    return [[f"{batch['size']:,}", f"{100 * batch['with_positive']:.1f}%"] for batch in figures["random"]]


def _p_by_k(figures: Statistics) -> list[list[str]]:
    """Rows up to the first K that no class has images enough for."""
    rows = [each for each in figures["p_by_k"] if each["most_classes"]]
    shown = sum(each["classes"] > 0 for each in rows) + 1
    return [[f"{each['images']}", f"{each['classes']:,}", f"{each['most_classes']:,}"] for each in rows[:shown]]


def _sampling(figures: Statistics) -> list[str]:
    """Sentences on the other kinds of sampling."""
    groups, single = figures["groups"], figures["singletons"]
    pairs = "not possible; it needs two super-categories or more, and one for every class."
    if groups >= 2 and not figures["without_group"]:
        pairs = f"{groups * (groups - 1) // 2:,} pairs of super-categories."
    lines = [f"classes: batches of {figures['smallest_classes_batch']:,} images or more.", f"super_p_by_k: {pairs}"]
    if single:
        lines.append(f"{single:,} classes have one image: it is never a query, and no batch of p_by_k has it.")
    return lines


def _bars(title: str, bins: Histogram) -> Table:
    columns = [Column(justify="right"), Column(), Column(justify="right")]
    most = max(count for _, count in bins)
    rows = ((name, "█" * round(BAR * count / most) or "▏" * bool(count), f"{count:,}") for name, count in bins)
    return _table(columns, rows, title=title, show_header=False, box=None, title_justify="left")


def _table(columns: list[Any], rows: Iterable[Iterable[str]], **options: Any) -> Table:
    table = Table(*columns, **options)
    for row in rows:
        table.add_row(*row)
    return table

"""What a data set holds: tables for the terminal, a page, and JSON."""

import base64
import json
from dataclasses import asdict
from html import escape
from pathlib import Path

import numpy as np
from rich.table import Table

from distap.data.images.decoding import DamagedImageError
from distap.data.images.thumbnails import thumbnail
from distap.data.loading.reading import Reader
from distap.data.shards.index import Index
from distap.data.shards.statistics import Histogram, Spread, Statistics
from distap.errors import DistapError
from distap.pages.charts import bar_chart
from distap.pages.page import write_page
from distap.randomness import permutation
from distap.storage.atomic import write_whole

BAR = 40  # letters of the longest bar in the terminal
SHOWN_CLASSES, SHOWN_IMAGES = 8, 10
THUMBNAIL = 112  # pixels
MIXED_ENOUGH = 0.5


def tables(figures: Statistics) -> list[Table | str]:
    """The figures for the terminal."""
    facts = Table(show_header=False)
    for fact in _facts(figures).items():
        facts.add_row(*fact)
    return [
        facts,
        _numbers(SPREAD_COLUMNS, _spreads(figures)),
        *(_bars(name, bins) for name, bins in _histograms(figures).items()),
        _numbers(RANDOM_COLUMNS, _random(figures)),
        _numbers(P_BY_K_COLUMNS, _p_by_k(figures)),
        *_sampling(figures),
    ]


def write_statistics(path: Path, figures: Statistics, title: str, index: Index, reader: Reader) -> None:
    """Write the figures as path's suffix says, whole or not at all: .json, or .html with charts and some images.

    Raises:
        DistapError: the suffix is another one, or the file cannot be written.
    """
    if path.suffix not in (".json", ".html"):
        raise DistapError(f"{path}: statistics are written as .json or .html")
    if path.suffix == ".html":
        write_page(path, title, _page(figures, index, reader))
    else:
        write_whole(path, json.dumps(asdict(figures), indent=2) + "\n")


SPREAD_COLUMNS = ["", "min", "5%", "median", "mean", "95%", "max"]
RANDOM_COLUMNS = ["random: images a batch", "with a positive in it, on average"]
P_BY_K_COLUMNS = ["p_by_k: K images a class", "classes with K or more", "classes a batch, at most"]


def _facts(figures: Statistics) -> dict[str, str]:
    groups = f"{figures.groups:,}" if figures.groups else "none"
    if figures.groups and figures.without_group:
        groups += f"; {figures.without_group:,} classes have none"
    kinds = ", ".join(f"{name} {100 * count / figures.looked_at:.3g}%" for name, count in figures.formats.items())
    return {
        "images": f"{figures.images:,}",
        "classes": f"{figures.classes:,}",
        "super-categories": groups,
        "classes of one image": f"{figures.singletons:,}",
        "bytes of images": f"{figures.bytes / 1e6:,.1f} MB in {figures.shards:,} shards",
        "formats": f"{kinds} (of {figures.looked_at} images looked at)" if kinds else "not looked at",
        "classes a shard": f"{figures.classes_a_shard.median:,.0f}, {_mixing(figures)}",
        "fingerprint": figures.fingerprint[:16],
    }


def _mixing(figures: Statistics) -> str:
    if figures.mixed >= MIXED_ENOUGH or figures.classes == 1:
        return "well mixed"
    return "class by class: fine for reading by the index; for streamed reading pack with --shuffle"


def _spreads(figures: Statistics) -> list[list[str]]:
    rows: dict[str, tuple[Spread, str]] = {
        "images a class": (figures.images_a_class, ",.4g"),
        "width, pixels": (figures.width, ",.0f"),
        "height, pixels": (figures.height, ",.0f"),
        "shorter side, pixels": (figures.shorter_side, ",.0f"),
        "megapixels": (figures.megapixels, ",.3g"),
        "width / height": (figures.aspect, ".3g"),
        "bytes an image": (figures.image_bytes, ",.0f"),
    }
    return [
        [name, *(format(value, form) for value in asdict(spread).values())] for name, (spread, form) in rows.items()
    ]


def _histograms(figures: Statistics) -> dict[str, Histogram]:
    return {
        "images a class": figures.images_a_class_histogram,
        "shorter side, pixels": figures.shorter_side_histogram,
        "megapixels": figures.megapixels_histogram,
        "width : height": figures.aspect_histogram,
        "bytes an image": figures.image_bytes_histogram,
    }


def _counted(name: str) -> str:
    return "classes" if name == "images a class" else "images"


def _title(name: str) -> str:
    return f"{_counted(name).capitalize()} by {name}"


def _random(figures: Statistics) -> list[list[str]]:
    return [[f"{batch.size:,}", f"{100 * batch.with_positive:.1f}%"] for batch in figures.random]


def _p_by_k(figures: Statistics) -> list[list[str]]:
    """As far as some class has K images, and one K more."""
    rows = [each for each in figures.p_by_k if each.most_classes]
    shown = sum(each.classes > 0 for each in rows) + 1
    return [[f"{each.images}", f"{each.classes:,}", f"{each.most_classes:,}"] for each in rows[:shown]]


def _sampling(figures: Statistics) -> list[str]:
    """What the other ways of sampling would make of the data set, in sentences."""
    lines = [f"classes: batches of {figures.smallest_classes_batch:,} images or more."]
    if figures.groups >= 2 and not figures.without_group:
        pairs = figures.groups * (figures.groups - 1) // 2
        lines.append(f"super_p_by_k: {pairs:,} pairs of super-categories.")
    else:
        lines.append("super_p_by_k: not possible; it needs a super-category for every class, and two or more.")
    if figures.singletons:
        lines.append(
            f"{figures.singletons:,} classes have one image: it is never a query, and no batch of p_by_k has it."
        )
    return lines


def _numbers(heading: list[str], rows: list[list[str]]) -> Table:
    table = Table(heading[0])
    for name in heading[1:]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _bars(name: str, bins: Histogram) -> Table:
    table = Table(title=_title(name), show_header=False, box=None, title_justify="left")
    table.add_column(justify="right")
    table.add_column()
    table.add_column(justify="right")
    most = max(count for _, count in bins)
    for text, count in bins:
        table.add_row(text, "█" * round(BAR * count / most) or ("▏" if count else ""), f"{count:,}")
    return table


def _page(figures: Statistics, index: Index, reader: Reader) -> str:
    facts = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in _facts(figures).items())
    charts = "".join(
        f"<figure><h3>{_title(name)}</h3>{bar_chart(bins, name, _counted(name))}</figure>"
        for name, bins in _histograms(figures).items()
    )
    largest = [[name, f"{count:,}"] for name, count in figures.largest.items()]
    groups = [[name, f"{classes:,}", f"{images:,}"] for name, (classes, images) in figures.group_sizes.items()]
    return (
        f"<dl>{facts}</dl>\n<h2>Sizes</h2>{_table(SPREAD_COLUMNS, _spreads(figures))}"
        '<p class="note">Width and height are those of the file, whatever EXIF says of its orientation.</p>\n'
        f'<div class="charts">{charts}</div>\n'
        f"<h2>Sampling</h2>{_table(RANDOM_COLUMNS, _random(figures))}{_table(P_BY_K_COLUMNS, _p_by_k(figures))}"
        '<p class="note">Classes with fewer than K images are filled up from others.</p>'
        + "".join(f"<p>{escape(line)}</p>" for line in _sampling(figures))
        + f"<h2>Largest classes</h2>{_table(['class', 'images'], largest)}"
        + (f"<h2>Super-categories</h2>{_table(['', 'classes', 'images'], groups)}" if groups else "")
        + f"<h2>Some classes</h2>{_examples(index, reader)}"
    )


def _table(heading: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heading)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide">{table}</div>\n' if len(heading) > 3 else f"{table}\n"


def _examples(index: Index, reader: Reader) -> str:
    """Classes drawn at random, each with its first images."""
    parts = ['<p class="note">Drawn at random.</p>']
    for label in permutation(len(index.class_name), 0)[:SHOWN_CLASSES].tolist():
        samples = np.flatnonzero(index.label == label)
        pictures = "".join(_picture(reader, sample) for sample in samples[:SHOWN_IMAGES].tolist())
        name = f"<b>{escape(str(index.class_name[label]))}</b><p class='note'>{len(samples):,} images</p>"
        parts.append(
            f'<div class="example"><div class="query">{name}</div><div class="hits">{pictures}</div></div>\n'
        )
    return "".join(parts)


def _picture(reader: Reader, sample: int) -> str:
    where = escape(reader.where(sample))
    try:
        image = reader.image(sample)
    except DamagedImageError as error:
        return f'<div class="hit wrong" title="{where}">{escape(error.reason)}</div>'
    data = base64.b64encode(thumbnail(image, THUMBNAIL, quality=85)).decode()
    source = f"data:image/jpeg;base64,{data}"
    return f'<div class="hit plain"><img src="{source}" alt="{where}" title="{where}" loading="lazy"></div>'

"""Tables that `distap data stats` prints."""

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from distap.telemetry.terminal import text_table

if TYPE_CHECKING:
    from distap.data.shards.statistics import Statistics

SPREADS = ("images_a_class", "width", "height", "shorter_side", "megapixels", "aspect", "image_bytes")


def statistics_tables(figures: "Statistics") -> list[Table]:
    """Return tables of a data set's contents, its image sizes, and the batches of each sampling."""
    spreads = [
        (name.replace("_", " "), *(f"{each:,.4g}" for each in figures[name].values()))
        for name in SPREADS
        if figures[name]
    ]
    random = [(f"{each['size']:,}", f"{100 * each['with_positive']:.1f}%") for each in figures["random"]]
    p_by_k = [
        (str(each["images"]), f"{each['classes']:,}", f"{each['most_classes']:,}")
        for each in figures["p_by_k"]
        if each["most_classes"]
    ]
    about = "Width, height and side in pixels, of the files; aspect is width over height."
    three = ("p_by_k: K images a class", "classes with K or more", "classes a batch, at most")
    tables = [
        text_table("", "", ("", ""), _facts(figures).items()),
        text_table("", about, ("", "min", "5%", "median", "mean", "95%", "max"), spreads),
        text_table("", "", ("random: images a batch", "with a positive in it, on average"), random),
        text_table("", "", three, p_by_k),
    ]
    return [table for table in tables if table.row_count]


def _facts(figures: "Statistics") -> dict[str, str]:
    groups, without = figures["group_sizes"], figures["without_group"]
    pairs = len(groups) * (len(groups) - 1) // 2 if groups and not without else 0
    return {
        "images": f"{figures['images']:,}, {figures['bytes'] / 1e6:,.1f} MB in {figures['shards']:,} shards",
        "classes": f"{figures['classes']:,}",
        "classes of one image": f"{figures['singletons']:,}, never queries and in no batch of p_by_k",
        "largest classes": ", ".join(f"{escape(name)} {size:,}" for name, size in figures["largest"].items()),
        "super-categories": f"{len(groups):,}; {without:,} classes have none",
        "super_p_by_k": f"{pairs:,} pairs" if pairs else "needs two super-categories, and one for every class",
        "sampling by classes": f"batches of {figures['smallest_classes_batch']:,} images or more",
        "fingerprint": figures["fingerprint"][:16],
    }

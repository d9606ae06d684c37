"""A page: one HTML file that needs no network and runs no script."""

from html import escape
from importlib.resources import files
from pathlib import Path

from distap.storage.atomic import write_whole


def write_page(path: Path, title: str, body: str) -> None:
    """Write the page, whole or not at all.

    Args:
        path: of the HTML file; its folder is made.
        title: heading of the page, as plain text.
        body: HTML.
    """
    style = files("distap.telemetry").joinpath("report.css").read_text(encoding="utf-8")
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )
    write_whole(path, page)

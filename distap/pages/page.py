"""Render the templates of HTML pages."""

import base64
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from distap.data.images.decoding import EncodedImage
from distap.data.images.whole_images import thumbnail
from distap.errors import without_secrets
from distap.storage.atomic import write_whole

THUMBNAIL = 320  # longer side of a picture, pixels
# of the pictures in a page, of which about two hundred take a megabyte
SIDE = 224
WEBP_QUALITY = 70


def page_text(template: str, **values: Any) -> str:
    """Render a template as HTML; every value is escaped."""
    # collected to be written once each
    return TEMPLATES.get_template(template).render(values, pictures={})


def write_page(path: Path, template: str, **values: Any) -> None:
    """Write a page as one file without scripts or links to the network."""
    write_whole(path, page_text(template, **values))


def page_asset(name: str) -> bytes:
    """Return a file of templates/ unchanged, such as the stylesheet."""
    return files("distap.pages").joinpath("templates", name).read_bytes()


TEMPLATES = Environment(
    loader=PackageLoader("distap.pages"),
    autoescape=True,
    undefined=StrictUndefined,  # a misspelt name is an error, not a gap in the page
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters |= {
    "percent": lambda share: "–" if share is None or share != share else f"{100 * share:.1f}",
    "as_webp": (
        lambda image: base64.b64encode(
            thumbnail(EncodedImage(image), SIDE, "WEBP", WEBP_QUALITY)
        ).decode()
    ),
    "public": without_secrets,
    "date": lambda seconds: f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}",
}

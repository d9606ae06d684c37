"""The site of docs/, built strictly: a broken link or a name that does not exist ends the build."""

import re
import subprocess
import sys

import pytest
from launching import ROOT

import distap
from docs.error_codes import made_errors
from docs.recipe_keys import recipe_keys

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    built = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(built, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_fetches_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        fetched = re.findall(
            r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?(https?://[^\" >]+)", page.read_text()
        )
        assert fetched == [], page


def test_the_reference_has_every_public_name_and_every_key(site):
    python, recipe = (
        site.joinpath("reference", page).read_text() for page in ("api.html", "recipe.html")
    )
    assert [
        name
        for name in set(dir(distap)) - {"__version__"}
        if f"{name}</" not in python and f">{name}<" not in python
    ] == []
    assert [key.path for key in recipe_keys() if f"<code>{key.path}</code>" not in recipe] == []


def test_the_reference_has_every_error_code(site):
    page = site.joinpath("reference", "errors.html").read_text()
    codes = {error.code for error in made_errors()}
    assert [code for code in codes if f"<code>{code}</code>" not in page] == []

"""What a person does with the page of a report, in a real browser, and what it tells of older and restarted runs."""

import json
import re

import numpy as np
import pytest
from browser import DESKTOP, PHONE
from PIL import Image
from run_folders import retrieved, write_retrieved, write_run

from benchmarks.photos import pack
from distap.data.shards.index import load_index
from distap.pages.report import report


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """40 large images with much detail, as photographs have, packed."""
    folder, random = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for number in range(40):
        path = folder / "images" / f"class-{number % 5}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = random.integers(0, 256, (40, 30, 3)).astype(np.uint8)
        Image.fromarray(coarse).resize((600, 800), Image.Resampling.BICUBIC).save(path)
    pack(folder / "images", folder / "shards")
    return folder / "shards"


@pytest.fixture(scope="module")
def page(photos, tmp_path_factory):
    run, index = write_run(tmp_path_factory.mktemp("runs") / "run"), load_index(photos)
    for step in (0, 24):
        about = {"data": str(photos), "fingerprint": index.fingerprint}
        write_retrieved(run, step, retrieved(step, index), **about)
    return report(run)[0]


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_the_contents_lead_to_every_part_and_unfold_it(page, browser, size):
    browser.open(page, size)
    driver = browser.driver
    links = driver.find_elements("css selector", ".contents a")
    assert [link.text for link in links] == [each.text for each in driver.find_elements("tag name", "h2")]
    assert driver.execute_script("return document.querySelectorAll('.section:not([open])').length") == 2
    for link in links:
        link.click()
        part = driver.execute_script("return document.querySelector(location.hash).closest('details')")
        assert part.get_attribute("open") and part.find_element("tag name", "h2").text == link.text
        top, bottom = driver.execute_script(
            "r = arguments[0].getBoundingClientRect(); return [r.top, r.bottom]", part
        )
        assert -1 <= top < size[1] and bottom > 0
        driver.execute_script("scrollTo(0, 0)")
    assert browser.sideways() <= 0 and not browser.errors()


def starts(run, *hosts):
    """Let a run have been started on these hosts, an hour after each other."""
    told = {"device": "cpu", "distap": "0.1.0", "torch": "2.4", "python": "3.11"}
    lines = [
        {"step": 4 * number, "time": 1.7e9 + 3600 * number, "host": host, **told} for number, host in enumerate(hosts)
    ]
    (run / "starts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def fact(page, name):
    return re.search(f"<dt>{name}</dt><dd>(.*?)</dd>", page.read_text())[1]


def test_a_run_that_was_started_again_names_all_its_hosts(tmp_path):
    run = write_run(tmp_path / "run")
    starts(run, "node-1", "node-2", "node-1")
    page, _ = report(run)
    assert fact(page, "trained") == "2023-11-14 22:13 to 2023-11-15 00:13 UTC, in 3 parts"
    assert fact(page, "host") == "node-1, cpu; node-2, cpu"
    assert fact(page, "versions") == "distap 0.1.0, torch 2.4, Python 3.11"


def test_the_recipe_on_the_page_has_no_secrets(tmp_path):
    data = {"train": "https://user:hunter2@host/train", "validation": "d", "image_size": 32}
    page, _ = report(write_run(tmp_path / "run", data=data))
    recipe = page.read_text().split("<h2>Recipe")[1]
    assert "image_size: 32" in recipe
    assert "hunter2" not in page.read_text()

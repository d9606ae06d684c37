import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from browser import DESKTOP, PHONE
from commands import distap
from images import damage
from launching import Program, started
from run_folders import ODD, oddly_named_shards, retrieved, step, write_retrieved, write_run
from small_trainings import recipe
from trainings import Run

from distap import RELEASE
from distap.data.shards.index import load_index
from distap.errors import RESTART, DistapError
from distap.evaluation.saved import folder_of_step
from distap.pages.report import report, sheets_of, training_charts
from distap.pages.run import read_run
from distap.trainer import Trainer
from distap.training.prepared import prepare
from distap.world import World

VOID = {"meta", "wbr"}


class Page(HTMLParser):
    """Checks that tags close in order, and collects classes and references."""

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.classes = []
        self.references = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.classes.append(attributes.get("class"))
        self.references += [attributes[name] for name in ("src", "href") if name in attributes]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.classes.append(dict(attrs).get("class"))


def text_of(folder, **options):
    text = report(folder, **options)[0].read_text()
    Page(text)
    return text


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """A folder of a run with evaluations of images with odd names; not to be written to."""
    folder = tmp_path_factory.mktemp("evaluated")
    shards = oddly_named_shards(folder)
    run = write_run(folder / f"{ODD}a")
    index = load_index(shards)
    for seed, number in enumerate((0, 24)):
        write_retrieved(
            run, number, retrieved(seed, index), data=str(shards), fingerprint=index.fingerprint
        )
    return folder


@pytest.fixture
def run(tmp_path, evaluated):
    """A copy of the first run, to change."""
    return shutil.copytree(evaluated / f"{ODD}a", tmp_path / "copy" / "a")


@pytest.fixture(scope="module")
def page(evaluated, tmp_path_factory):
    """The first run's page."""
    return text_of(evaluated / f"{ODD}a", output=tmp_path_factory.mktemp("page"))


def test_the_page_needs_no_network_and_runs_no_script(page):
    assert all(
        reference.startswith(("data:image/webp", "#")) for reference in Page(page).references
    )
    assert "http" not in page and "<script" not in page
    assert ODD not in page and "&lt;b&gt;&amp;" in page


def test_each_picture_is_in_the_page_once(page):
    references = Page(page).references
    pictures = [item for item in references if item.startswith("data:")]
    assert (
        len(pictures)
        == len(set(pictures))
        <= 40
        < references.count("#p0") + references.count("#p1") + 200
    )
    assert {item for item in references if re.match("#p[0-9]", item)} == {
        f"#p{n}" for n in range(len(pictures))
    }


def test_before_and_after_stand_side_by_side(page):
    assert (
        '<th scope="row">mAP@R</th><td>19.0</td><td>29.0</td><td><span'
        ' class="gain">+10.0</span></td>' in page
    )
    assert "7.6% of a step is outside the network" in page


def test_right_hits_are_framed_and_marked_apart_from_wrong_ones(page):
    sheets = page[page.index("<h2>Neighbours of some queries") : page.index("<h2>Recipe")]
    classes = re.findall('class="(.*?)"', sheets)
    assert classes.count("hit right") == sheets.count(">✓<") > 30
    assert classes.count("hit wrong") == sheets.count(">✗<") > 150
    assert re.search(
        r"<b>before</b>: \d right among the first 6, AP \d+.0%, first right at rank [123]<", sheets
    )


@pytest.mark.parametrize(
    "shown",
    [{"size": DESKTOP}, {"size": PHONE}, {"size": DESKTOP, "dark": True}],
    ids=["desktop", "phone", "dark"],
)
def test_a_browser_shows_the_page_without_complaint_and_without_scrolling_sideways(
    tmp_path, evaluated, browser, shown
):
    path, _ = report(evaluated / f"{ODD}a", tmp_path)
    browser.open(path, **shown)
    assert browser.errors() == []
    assert browser.sideways() <= 0
    assert browser.broken_pictures() == []
    assert browser.requests() == []
    ask = browser.driver.execute_script
    assert ask("return document.querySelectorAll('.zoom use').length") > 100
    assert ask(
        "return [...document.querySelectorAll('.zoom summary')].every(each => each.title.trim())"
    )
    assert ask(
        "return [...document.querySelectorAll('svg[role=img]')].every(each =>"
        " each.ariaLabel.trim())"
    )
    levels = ask(
        "return [...document.querySelectorAll('h1, h2, h3')].map(each => Number(each.tagName[1]))"
    )
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    # Nothing is cut off: what does not fit scrolls within its own box, which the keyboard reaches.
    assert (
        ask(
            """return [...document.querySelectorAll('body *')].filter(each =>
        each.scrollWidth > each.clientWidth + 1
        && getComputedStyle(each).overflowX == 'auto' && each.tabIndex != 0).length"""
        )
        == 0
    )
    assert (
        ask(
            "return [...document.querySelectorAll('svg text')].filter(each => {const own ="
            " each.getBoundingClientRect(), all ="
            " each.ownerSVGElement.getBoundingClientRect();return own.left < all.left - 1 ||"
            " own.right > all.right + 1 }).map(each => each.textContent)"
        )
        == []
    )


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_the_contents_lead_to_every_part_and_unfold_it(tmp_path, evaluated, browser, size):
    browser.open(report(evaluated / f"{ODD}a", tmp_path)[0], size)
    driver = browser.driver
    links = driver.find_elements("css selector", ".contents a")
    assert [link.text for link in links] == [
        item.text for item in driver.find_elements("tag name", "h2")
    ]
    assert (
        driver.execute_script("return document.querySelectorAll('.section:not([open])').length")
        == 2
    )
    for link in links:
        link.click()
        section = driver.execute_script(
            "return document.querySelector(location.hash).closest('details')"
        )
        assert (
            section.get_attribute("open")
            and section.find_element("tag name", "h2").text == link.text
        )
        top, bottom = driver.execute_script(
            "r = arguments[0].getBoundingClientRect(); return [r.top, r.bottom]", section
        )
        assert -1 <= top < size[1] and bottom > 0
        driver.execute_script("scrollTo(0, 0)")
    assert browser.sideways() <= 0 and not browser.errors()


def test_a_training_leaves_all_that_a_report_needs(tmp_path, training_shards):
    Trainer(
        prepare(
            recipe(
                tmp_path / "run",
                training_shards,
                data__validation=str(training_shards[1]),
                evaluation={"every": 1},
                steps=2,
            ),
            World(),
        ),
        World(),
    ).train()
    path, summary = report(tmp_path / "run")
    assert path == tmp_path / "run" / "report.html"
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    validations = [line["validation"] for line in lines if "validation" in line]
    for when, figures in (("before", validations[0]), ("after", validations[-1])):
        assert summary[when] == {name: figures[name] for name in ("mAP", "mAP@R", "R@1")}
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    text = path.read_text()
    headings = re.findall("<h2>(.*?)</h2>", text)
    assert headings[:5] == ["Figures", "Training", "Where the time goes", *headings[3:5]]
    assert {"Neighbours of some queries", "Hardest queries"} <= set(headings)
    # When, where and with what it was trained.
    assert re.search(r"<dt>trained</dt><dd>\d{4}-\d\d-\d\d \d\d:\d\d to .* UTC<", text)
    assert f"<dt>host</dt><dd>{socket.gethostname()}, cpu<" in text
    matches = re.search("<dd>distap (.*?), torch (.*?), Python (.*?)</dd>", text)
    assert matches[2] == torch.__version__ and matches[3] == platform.python_version()
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    release, _, of_checkout = matches[1].partition("+g")
    assert release == RELEASE and commit.stdout.startswith(of_checkout.removesuffix(".dirty"))
    assert "\noptimizer:\n" in text[text.index("<h2>Recipe") :]


@pytest.mark.parametrize("lost", [None, float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_leaves_a_gap_and_no_broken_chart(tmp_path, lost):
    steps = [step(n, loss=lost if n == 5 else 0.5, gradient_norm=lost) for n in range(1, 10)]
    text = text_of(write_run(tmp_path / "run", steps))
    assert "nan" not in text.lower()
    assert "inf," not in text


def change_evaluations(run, steps=(0, 24), **changes):
    for number in steps:
        path = folder_of_step(run, number) / "result.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_memory_of_a_device_is_in_log_line_and_page(
    tmp_path, training_shards, monkeypatch, capsys
):
    """torch manages no memory of a CPU; here it says something of it, as of a GPU."""
    stats = {
        "allocated_bytes.all.current": 3 * 10**9,
        "allocated_bytes.all.peak": 5 * 10**9,
        "reserved_bytes.all.current": 7 * 10**9,
    }
    settings = recipe(tmp_path / "cpu", training_shards, steps=1)
    Trainer(prepare(settings, World()), World()).train()
    monkeypatch.setattr(torch.cpu, "memory_stats", lambda device: stats, raising=False)
    settings = recipe(tmp_path / "gpu", training_shards, steps=2)
    Trainer(prepare(settings, World()), World()).train()
    _, *entries = [entry for entry in read_run(tmp_path / "gpu").entries if "loss" in entry]
    expected = {"allocated": 3 * 10**9, "peak": 5 * 10**9, "reserved": 7 * 10**9}
    assert [entry["device_memory"] for entry in entries] == [expected]
    assert re.search(r"images/s\s+5 GB", capsys.readouterr().err)
    assert "Greatest GPU memory of rank 0" in training_charts(read_run(tmp_path / "gpu"))
    assert "Greatest GPU memory of rank 0" not in training_charts(read_run(tmp_path / "cpu"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "gone"}, "gone"),
        ({"fingerprint": "0" * 64}, "the data set has changed since it was evaluated"),
    ],
)
def test_without_the_data_set_a_note_stands_for_the_pictures(run, changes, message):
    change_evaluations(run, **changes)
    text = text_of(run)
    assert message in text[text.index("This page has no pictures") :].splitlines()[0]
    assert "data:image" not in text
    assert "Where the time goes" in text


def test_a_damaged_image_leaves_its_place_in_the_sheet(tmp_path, evaluated, run):
    shards = shutil.copytree(evaluated / "shards", tmp_path / "shards")
    [evaluations] = read_run(run).evaluations().values()
    hits = {name: evaluation.retrieved() for name, evaluation in evaluations.items()}
    (query, _), *_ = sheets_of(hits, lambda _: None)["Hardest queries"][1]
    damage(shards, np.flatnonzero(load_index(shards).key == query.key))
    change_evaluations(run, data=str(shards))
    text = text_of(run)
    labels = re.findall('class="lost" role="img" aria-label="([^"]*)"', text)
    roles, names = zip(*(unescape(label).split(": ", 1) for label in labels), strict=True)
    assert "query" in roles
    assert set(names) == {f"{query.label}, {query.key}, no picture"}
    assert text.count(">no picture</div>") == len(labels)
    assert "data:image/webp" in text


def test_a_run_without_evaluations_gives_its_curves_and_says_what_is_missing(run):
    shutil.rmtree(run / "evaluations")
    path, summary = report(run)
    text = path.read_text()
    assert "The run kept no evaluation" in text
    assert "Loss of the global batch" in text
    assert summary["before"] is None and summary["after"] is None
    assert "data:image" not in text


def test_evaluations_from_before_an_interruption_are_left_out(run):
    log = run / "metrics.jsonl"
    lines = [line for line in log.read_text().splitlines() if json.loads(line)["step"] < 24]
    log.write_text("\n".join([*lines, ""]))
    read = read_run(run)
    assert [evaluation.step for evaluation in read.before.values()] == [0]
    assert read.after == {}


def test_a_folder_with_another_recipe_is_refused(run):
    (run / "recipe.yaml").write_text("steps: 3\n")
    with pytest.raises(
        DistapError,
        match=r"recipe.yaml: not readable as `distap train` writes it: KeyError\('data'\)",
    ):
        read_run(run)


def test_evaluations_of_different_data_are_not_compared(run):
    change_evaluations(run, [24], fingerprint="0" * 64)
    with pytest.raises(DistapError, match="are of different data"):
        report(run)


def test_the_hardest_queries_are_those_with_the_lowest_precision():
    first = retrieved()
    last = retrieved(1)
    _, hardest = sheets_of({"before": first, "after": last}, lambda _: None)["Hardest queries"]
    queries = np.flatnonzero((first.first_positive > 0) & (last.first_positive > 0)).tolist()
    lowest = sorted(queries, key=lambda row: (last.average_precision[row], row))[:8]
    assert [query.key for query, _ in hardest] == [f"key-{row}" for row in lowest]
    for (_, answers), row in zip(hardest, lowest, strict=True):
        hits = answers[1].hits
        assert [hit.key for hit in hits] == [f"key-{hit}" for hit in last.neighbours[row]]
        assert [hit.right for hit in hits] == [
            last.class_name[hit] == last.class_name[row] for hit in last.neighbours[row]
        ]


@pytest.mark.slow
def test_a_page_follows_a_training_until_it_stops(tmp_path, training_shards):
    run = Run(tmp_path, training_shards, steps=100_000)
    page = run.folder / "report.html"
    command = ("-m", "distap.cli", "report", str(run.folder), "--follow", "1")
    with run.started(1) as training:
        training.wait_until(lambda: run.has_done(2))
        with started(Program(command, tmp_path), tmp_path / "following") as following:
            following.wait_until(page.exists)
            first = page.read_text()
            assert '<meta http-equiv="refresh" content="1">' in first
            following.wait_until(lambda: page.read_text() != first)
            assert page.read_text().rstrip().endswith("</html>")
            os.kill(training.process.pid, signal.SIGTERM)
            assert training.status() == RESTART
            assert following.status() == 0
    assert "http-equiv" not in page.read_text()


def test_the_page_of_a_run_that_does_not_train_is_written_once(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", 3, validated=False)
    (run / "lease.json").write_text("{}")
    os.utime(run / "lease.json", (0, 0))  # of a training that was killed
    assert distap(monkeypatch, "report", run, "--follow", "3600") == 0
    assert "http-equiv" not in (run / "report.html").read_text()


def starts(run, *hosts):
    """Let a run have been started on these hosts, an hour after each other."""
    message = {"device": "cpu", "distap": "0.1.0", "torch": "2.4", "python": "3.11"}
    lines = [
        {"step": 4 * number, "time": 1.7e9 + 3600 * number, "host": host, **message}
        for number, host in enumerate(hosts)
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
    assert "image_size: 32" in page.read_text().split("<h2>Recipe")[1]
    assert "hunter2" not in page.read_text()

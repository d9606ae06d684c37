"""The page of a training that runs: a real server over a real run folder, in a real browser."""

import os
import signal
import time

import httpx
import pytest
from browser import DESKTOP, PHONE
from commands import distap
from proxies import proxy
from run_folders import ODD, oddly_named_shards, retrieved, step, write_retrieved, write_run
from servers import free_ports
from trainings import Run
from watching import parts_of, text_of, watching

from distap.data.shards.load_index import load_index
from distap.errors import MISTAKE, RESTART, DistapError
from distap.pages.live import LiveRun
from distap.telemetry.endpoint import Endpoint, run_key
from distap.telemetry.runlog import log_start


def live_text(run, part="state"):
    return text_of(LiveRun(run).parts()[part])


def append(run, text):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(text)


@pytest.mark.slow
def test_a_browser_sees_a_training_go_on_without_loading_the_page_again(tmp_path, training_shards, browser):
    data = {"train": str(training_shards[0]), "validation": str(training_shards[1]), "image_size": 32, "workers": 0}
    port, evaluation = free_ports(2), {"every": 5, "at_start": True}
    run = Run(tmp_path, training_shards, steps=100_000, data=data, evaluation=evaluation, metrics={"port": port})
    ask = browser.driver.execute_script

    def shown(selector="#state"):
        return " ".join(str(ask(f"return document.querySelector('{selector}')?.innerText ?? ''")).split())

    def steps_done():
        return int(shown("#state dd").partition(" of ")[0].replace(",", "") or 0)

    with watching(run.folder, tmp_path / "watch") as (url, server):
        browser.open(url)
        assert "waiting" in shown()
        ask("window.isFirst = true")
        with run.started(2) as training:
            training.wait_until(lambda: shown("#neighbours h2").startswith("Newest neighbours"))
            training.wait_until(lambda: shown("#state td:nth-child(2)") == "training")
            ask("scrollTo(0, 700)")
            before, newest = steps_done(), shown("#neighbours h2")
            training.wait_until(lambda: steps_done() > before + 5 and shown("#neighbours h2") != newest)
            assert ask("return window.isFirst && scrollY") == 700
            assert ask("return document.querySelectorAll('#state tbody tr').length") == 2
            assert ask("return document.querySelectorAll('#curves svg[role=img]').length") >= 4
            assert ask("return document.querySelectorAll('#neighbours .hit').length") > 20
            assert ask("return document.title").endswith(f"of 100,000, training: {run.folder}")
            os.kill(training.process.pid, signal.SIGTERM)
            assert training.status() == RESTART
        server.wait_until(lambda: shown("#state b") == "stopped")
        assert browser.errors() == []
        os.kill(server.process.pid, signal.SIGINT)
        assert server.status() == 0
    deadline = time.monotonic() + 20
    while not browser.driver.find_element("id", "lost").is_displayed():
        assert time.monotonic() < deadline
    assert "stopped" in shown()


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """A run with an evaluation of images with odd names; not to be written to."""
    folder = tmp_path_factory.mktemp("evaluated")
    shards = oddly_named_shards(folder)
    run, index = write_run(folder / f"{ODD}a"), load_index(shards)
    write_retrieved(run, 24, retrieved(1, index), data=str(shards), fingerprint=index.fingerprint)
    return run


@pytest.mark.parametrize("shown", [{"size": DESKTOP}, {"size": PHONE, "dark": True}], ids=["desktop", "phone, dark"])
def test_a_browser_shows_all_parts_without_complaint_and_without_scrolling_sideways(
    evaluated, tmp_path, browser, shown
):
    with watching(evaluated, tmp_path) as (url, _):
        browser.open(url, **shown)
        assert browser.errors() == []
        assert browser.sideways() <= 0
        headings = browser.driver.execute_script("return [...document.querySelectorAll('h2')].map(h => h.innerText)")
        assert headings[:4] == ["Ranks", "Curves", "Where the time goes", "Newest neighbours: step 24"]
        assert ODD in browser.driver.execute_script("return document.querySelector('#neighbours h3').innerText")


@pytest.mark.parametrize("root_path", ["", "/team/run"], ids=["of a proxy that takes it away", "of --root-path"])
def test_the_page_works_below_a_path(evaluated, tmp_path, browser, root_path):
    with watching(evaluated, tmp_path, "--root-path", root_path) as (url, server), proxy(url, "/team/run/") as below:
        browser.open(f"{url}{root_path}/" if root_path else below)
        server.wait_until(lambda: any("/team/run/parts?" in each for each in browser.requests()))
        assert browser.errors() == []
        assert browser.driver.execute_script("return getComputedStyle(document.body).maxWidth") != "none"


def test_the_title_of_the_page_is_escaped(tmp_path):
    run = tmp_path / "<b>&amp;"
    with watching(run, tmp_path) as (url, _):
        assert parts_of(url)["title"]["html"] == "<b>&amp;: waiting"  # a script takes it as text
        assert "<title>&lt;b&gt;&amp;amp;: waiting</title>" in httpx.get(url).text


def test_parts_are_sent_again_only_if_they_have_changed(evaluated, tmp_path):
    with watching(evaluated, tmp_path) as (url, _):
        first = parts_of(url)
        assert set(first) == {"title", "state", "curves", "neighbours"}
        again = parts_of(url, **{name: part["mark"] for name, part in first.items()})
        assert set(again) <= {"state"}  # which says how old the last line is


def test_requests_of_other_sites_and_under_other_names_are_refused(evaluated, tmp_path):
    with watching(evaluated, tmp_path, "--allowed-host", "train.example", "--root-path", "/one/") as (url, _):

        def status(path="/parts", method="GET", **headers):
            return httpx.request(method, url + path, headers=headers).status_code

        assert [status(Host=name) for name in ("attacker.example", "train.example", "localhost:1")] == [421, 200, 200]
        assert status("/", Host="attacker.example") == 421
        assert status(Origin="https://attacker.example") == 403
        assert status(**{"Sec-Fetch-Site": "cross-site"}) == 403
        assert status("/", **{"Sec-Fetch-Site": "cross-site"}) == 200  # a link leads here
        assert status("/", Origin="https://attacker.example") == 403
        assert status(method="POST") == 405
        assert status("/other") == 404
        page = httpx.get(f"{url}/one/")
        assert 'src="/one/watch.js"' in page.text and status("/one/watch.js") == 200
        assert "frame-ancestors 'none'" in page.headers["content-security-policy"]


def test_a_line_that_is_half_written_is_shown_once_it_is_whole(tmp_path):
    run = write_run(tmp_path / "run", 3, validated=False)
    log = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(log[:-30])
    assert "step 2 of 3" in live_text(run)
    (run / "metrics.jsonl").write_text(log)
    assert "step 3 of 3" in live_text(run)


def test_the_page_waits_for_a_training_that_has_not_begun(tmp_path):
    run = tmp_path / "run"
    live = LiveRun(run)
    assert "waiting" in text_of(live.parts()["state"])
    write_run(run, [], validated=False)
    assert "No step has been done yet" in live_text(run, "curves")


def test_a_folder_that_is_no_run_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "photo.jpg").touch()
    assert distap(monkeypatch, "watch", tmp_path) == MISTAKE
    assert "not the folder of a run" in capsys.readouterr().err
    run = write_run(tmp_path / "run")
    (run / "recipe.yaml").write_text("batch: 1")
    with pytest.raises(DistapError, match="not the recipe of a run"):
        LiveRun(run)


def test_a_log_that_is_damaged_while_it_is_watched_is_told_with_its_line(tmp_path):
    run = write_run(tmp_path / "run", 3, validated=False)
    live = LiveRun(run)
    append(run, "no JSON\n")
    assert "line 4: damaged" in text_of(live.parts()["state"])


def test_a_run_tells_whether_it_is_written_stopped_finished_or_silent(tmp_path):
    run = write_run(tmp_path / "run", 5, validated=False)
    assert "finished" in live_text(run)
    log = run / "metrics.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:3]))
    with log.open():  # as `tail -f` does
        assert "stopped" in live_text(run)
    with log.open("a"):
        assert "training" in live_text(run)
    (run / "starts.jsonl").write_text('{"step": 0, "time": 1, "host": "elsewhere", "ranks": 4, "device": "cpu"}\n')
    assert "training" in live_text(run)  # somewhere else
    os.utime(log, (0, time.time() - 7200))
    assert "silent Its log has had no line for 2:00:00; it was started on elsewhere" in live_text(run)
    assert "4 ranks on cpu" in live_text(run)


def test_ranks_are_asked_by_their_endpoints_and_those_of_other_runs_are_left_out(tmp_path):
    port = free_ports(3)
    run = write_run(tmp_path / "run", 3, validated=False, metrics={"port": port, "address": "127.0.0.1"})
    log_start(run, 0, ranks=3, steps=5, device="cpu")
    with (
        Endpoint(0, run_key(tmp_path / "other")).served(port, "127.0.0.1"),
        Endpoint(1, run_key(run)).served(port + 1, "127.0.0.1"),
        Endpoint(0, run_key(run)).served(port, "127.0.0.1"),  # at the next port that is free
    ):
        text = live_text(run)
    assert "0 starting 0 – 0 0 MB 1 starting 0 – 0 0 MB Without an answer" in text
    assert "rank 2. Such a rank" in text


def test_without_a_metrics_port_the_page_says_what_it_knows_of_ranks(tmp_path):
    run = write_run(tmp_path / "run", [step(7, ranks=2)], validated=False, metrics={"port": None})
    assert "2 ranks on an unknown device. Ranks end a step together, so each has done 7 steps." in live_text(run)
    assert "metrics.port=9400" in live_text(run)

"""Runs of a folder or bucket, listed and pruned."""

import json
import os
import shutil
import time
from dataclasses import replace

import pytest
from commands import distap
from raising import raises
from servers import s3_files
from small_trainings import train

from distap.apps.runs import listed_runs, prune, why_kept
from distap.checkpoint.lease import ENDED_SECONDS, Lease
from distap.errors import MISTAKE
from distap.storage.files import Storage
from distap.world import World


@pytest.fixture(scope="module")
def trained(tmp_path_factory, training_shards):
    """A folder with a run that is done, whose best checkpoint is not its newest."""
    folder = tmp_path_factory.mktemp("trained")
    train(
        World(),
        folder / "team/first",
        training_shards,
        steps=4,
        data__validation=str(training_shards[1]),
        evaluation={"every": 1},
        checkpoint={"every": 1, "keep": 4},
    )
    [run] = listed_runs(str(folder))
    if run.best == run.newest:  # the test needs two
        manifests = sorted(folder.glob("team/first/checkpoints/*/manifest.json"))
        shutil.rmtree(manifests[-1].parent)
    return folder


@pytest.fixture
def runs(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "runs")
    return tmp_path / "runs"


def lease_of_another_host(run, renewed):
    lease = {
        "host": "elsewhere",
        "pid": 1,
        "process": "boot pid:[1] 1",
        "training": "x",
        "started": renewed,
        "renewed": renewed,
    }
    (run / "lease.json").write_text(json.dumps(lease))


def test_a_run_is_listed_with_its_state_its_best_figure_and_its_size(runs):
    [run] = listed_runs(str(runs))
    files = (runs / "team/first/checkpoints").rglob("*")
    assert (run.name, run.steps, run.user) == ("team/first", 4, os.environ.get("USER", "uid 0"))
    assert run.state == ("done" if run.step == 4 else "stopped")
    assert run.size == sum(path.stat().st_size for path in files if path.is_file())
    assert run.score == run.checkpoints.manifest(run.best).score
    assert abs(run.written - time.time()) < 3600


@pytest.mark.parametrize("keep", ["best", "newest"])
def test_one_checkpoint_stays(runs, keep):
    [run] = listed_runs(str(runs))
    assert len(run.checkpoints.names()) > 1
    assert why_kept(run, keep, older=3600) == "younger than --older"
    prune(run, keep)
    assert run.checkpoints.names() == [run.best if keep == "best" else run.newest]
    [pruned] = listed_runs(str(runs))
    assert why_kept(pruned, keep, older=0) == "nothing to remove"
    assert not (runs / "team/first/lease.json").exists()


def test_a_run_that_was_done_stays_done_when_its_last_checkpoint_goes(tmp_path, training_shards):
    validation = {"data__validation": str(training_shards[1]), "evaluation": {"every": 1}}
    folder = tmp_path / "run"
    every = {"every": 1, "keep": 4}
    train(World(), folder, training_shards, steps=2, checkpoint=every, **validation)
    [run] = listed_runs(str(folder))
    earlier = replace(run, best=run.names[0])
    prune(earlier, "best")
    [pruned] = listed_runs(str(folder))
    assert pruned.names == (run.names[0],)
    assert (pruned.state, pruned.step) == ("done", 2)
    train(World(), folder, training_shards, steps=3, checkpoint=every, **validation)
    [later] = listed_runs(str(folder))
    assert (later.state, later.step) == ("done", 3)
    shutil.rmtree(folder / "checkpoints" / later.newest)
    [cut] = listed_runs(str(folder))
    assert (cut.state, cut.step) == ("stopped", 2)


def test_a_checkpoint_that_was_written_after_the_listing_stays(runs):
    """A training may have gone on, and ended, while other runs were listed."""
    [run] = listed_runs(str(runs))
    later = "step-00000099"
    folder = runs / "team/first/checkpoints"
    shutil.copytree(folder / run.newest, folder / later)
    prune(run, "best")
    assert run.checkpoints.names() == [run.best, later]


def test_a_live_run_is_never_pruned(runs):
    folder = runs / "team/first"
    before = sorted(path.name for path in (folder / "checkpoints").iterdir())
    lease = Lease("run", Storage(str(folder)))
    lease.take()
    [run] = listed_runs(str(runs))
    assert run.state == "live"
    assert f"process {os.getpid()} of this host" in why_kept(run, "best", older=0)
    with raises("run.in_use", folder):
        prune(run, "best")
    lease.release()
    lease_of_another_host(folder, time.time() - ENDED_SECONDS / 2)
    [run] = listed_runs(str(runs))
    assert "host elsewhere" in why_kept(run, "best", older=0)
    lease_of_another_host(folder, time.time() - 2 * ENDED_SECONDS)
    [run] = listed_runs(str(runs))
    assert run.state != "live" and why_kept(run, "best", older=0) == ""
    (folder / "lease.json").write_text("{")
    [run] = listed_runs(str(runs))
    assert "lease.json is damaged" in why_kept(run, "best", older=0)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == before


def test_the_others_stay_if_the_one_to_keep_is_damaged(runs):
    [run] = listed_runs(str(runs))
    names = run.checkpoints.names()
    [shard] = run.checkpoints.path(run.best).glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with raises("checkpoint.damaged", run.best):
        prune(run, "best")
    assert run.checkpoints.names() == names


def test_the_command_says_what_it_would_do_and_does_it(runs, monkeypatch, capsys):
    def printed(*options):
        assert distap(monkeypatch, "runs", runs, *options) == 0
        return capsys.readouterr().out

    [entry] = json.loads(printed("--json", "--prune"))
    [run] = listed_runs(str(runs))
    assert (entry["run"], entry["bytes"], entry["best"]) == (run.name, run.size, run.score)
    would = printed("--prune", "--older", "0m", "--dry-run")
    assert f"team/first: would remove {', '.join(run.removable('best'))}" in would
    assert "younger than --older" in printed("--prune")
    printed("--prune", "--older", "0m")
    assert run.checkpoints.names() == [run.best]


def test_wrong_options_are_named(runs, monkeypatch, capsys):
    assert distap(monkeypatch, "runs", runs, "--older", "a month") == MISTAKE
    assert "a month" in capsys.readouterr().err
    assert distap(monkeypatch, "runs", runs, "--dry-run") == MISTAKE
    assert "--prune" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_runs_of_a_bucket_are_listed_and_pruned(runs, s3):
    files = s3_files()
    files.put(str(runs), "shards/all", recursive=True)
    [run] = listed_runs("s3://shards/all")
    assert run.name == "team/first" and run.user
    prune(run, "best")
    assert [entry.checkpoints.names() for entry in listed_runs("s3://shards/all")] == [[run.best]]


def test_a_run_that_patience_ended_is_done(runs):
    state = next(iter(sorted((runs / "team/first/checkpoints").iterdir(), reverse=True)))
    content = json.loads((state / "state.json").read_text())
    content["recipe"]["evaluation"]["patience"] = 2
    content["recipe"]["steps"] = 900
    for since_best, expected in ((1, "stopped"), (2, "done")):
        content["since_best"] = since_best
        (state / "state.json").write_text(json.dumps(content))
        (runs / "team/first/starts.jsonl").write_text('{"step": 0, "steps": 900}')
        assert [run.state for run in listed_runs(str(runs))] == [expected]


def test_a_damaged_recipe_hides_no_other_run(runs, caplog):
    (runs / "team/second").mkdir()
    (runs / "team/second/recipe.yaml").write_text("{")
    assert [run.name for run in listed_runs(str(runs))] == ["team/first"]
    assert "team/second/recipe.yaml" in caplog.text


def test_a_place_without_runs_is_named(tmp_path):
    with raises("run.none", tmp_path, "recipe.yaml"):
        list(listed_runs(str(tmp_path)))

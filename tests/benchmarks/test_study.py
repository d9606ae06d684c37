"""Studies: the grid, its equal conditions, what is kept after a kill, and the figures of the
table."""

import re

import pytest
import yaml
from browser import DESKTOP, PHONE, chromium
from launching import HELPERS, ROOT, Program, started
from scipy import stats
from servers import free_ports

from benchmarks.study.grid import Grid
from benchmarks.study.results import (
    Result,
    Results,
    interval,
    markdown,
    read_results,
    table,
    write_study,
)
from benchmarks.study.running import StudyRun
from distap.errors import DistapError

EQUAL = ["data", "model", "evaluation"]
STUDY = {
    "title": "Three losses",
    "recipe": "base.yaml",
    "changes": {"steps": 2, "evaluation": {"every": None}},
    "axes": {
        "loss": {
            "ap_q": {"loss": "ap_q"},
            "own": {"loss": "plug_ins:HardestNegative", "loss.margin": 0.2},
        }
    },
    "search": {"optimizer.learning_rate": [1e-3, 1e-2]},
    "seeds": 2,
    "figures": ["validation/mAP@R", "validation/R@1"],
    "against": "ap_q",
}


@pytest.fixture
def study(tmp_path, training_shards, monkeypatch):
    """Write base.yaml and a study with changes beside it; return the study's file."""
    monkeypatch.chdir(tmp_path)
    train, test = map(str, training_shards)
    base = {
        "run": "runs/any",
        "steps": 5,
        "data": {"train": train, "validation": test, "image_size": 32, "workers": 0},
        "sampling": {"name": "p_by_k", "classes": 8, "images": 3},
        "model": {"backbone": "test_resnet", "weights": {"name": "random"}},
    }
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))

    def write(**changes):
        file = tmp_path / "study.yaml"
        file.write_text(yaml.safe_dump(STUDY | changes, sort_keys=False))
        return file

    return write


@pytest.mark.slow
@pytest.mark.nightly
def test_a_killed_study_repeats_nothing_and_goes_on_after_a_training_that_fails(study, tmp_path):
    """One loss is not ours, and another point cannot write its checkpoints."""
    unwritable = {"loss": "ap_q", "checkpoint.store": "file:///dev/null/store"}
    axes = {"loss": STUDY["axes"]["loss"] | {"many": unwritable}}
    changes = STUDY["changes"] | {"metrics.port": free_ports(1)}
    file = study(axes=axes, changes=changes, search={}, seeds=1, equal=EQUAL)
    folder = tmp_path / "out"
    program = Program(("-m", "benchmarks", "study", str(file), "--output", str(folder)), tmp_path)
    path = f"{ROOT}:{HELPERS}"
    with started(program, tmp_path / "first", PYTHONPATH=path) as first:
        first.wait_until(lambda: read_results(folder / "results.jsonl"))
        with pytest.raises(DistapError, match="another process is training a study there"):
            next(StudyRun(Grid(file, folder), seeds=1, jobs=1, ranks=1).train())
        first.process.kill()
        first.process.wait()
    before = (folder / "results.jsonl").read_text()
    assert len(before.splitlines()) == 1
    with started(program, tmp_path / "again", PYTHONPATH=path) as again:
        assert again.status() == 2, again.said
    assert len(re.findall("done before", again.said)) == 1
    assert re.search(
        r"many, seed 0: ended with status 2: .*/dev/null/store.* \(\S+output\.log\)", again.said
    )
    assert (folder / "results.jsonl").read_text().startswith(before)
    results = read_results(folder / "results.jsonl")
    assert [result.names for result in results] == [{"loss": "ap_q"}, {"loss": "own"}]
    assert all(
        (r.steps, r.images) == (2, 48) and r.memory_bytes > 1e8 and r.processor_seconds > 0
        for r in results
    )
    assert sum(bool(result.before) for result in results) == 1
    headings, cells, _ = table(Results(Grid(file, folder), 1, results))
    assert [row[0] for row in cells] == ["before training", "ap_q", "own"]
    assert all(len(row) == len(headings) for row in cells)
    assert "own" in (folder / "study.html").read_text() and not list(folder.rglob("checkpoints"))


def test_the_grid_has_every_combination_but_those_left_out(study, tmp_path):
    axes = {"loss": STUDY["axes"]["loss"], "optimizer.layer_decay": [0.5, 0.7]}
    file = study(axes=axes, leave_out=[{"loss": "own", "optimizer.layer_decay": "0.7"}])
    grid = Grid(file, tmp_path)
    assert list(map(str, grid.points)) == ["ap_q, 0.5", "ap_q, 0.7", "own, 0.5"]
    recipes = [job.recipe for job in grid.jobs(grid.points[1], seed=3)]
    assert [recipe.optimizer.learning_rate for recipe in recipes] == [1e-3, 1e-2]
    assert {(recipe.optimizer.layer_decay, recipe.seed, recipe.steps) for recipe in recipes} == {
        (0.7, 3, 2)
    }
    assert list(map(str, Grid(file, tmp_path, ["own"]).points)) == ["own, 0.5"]
    assert Grid(file, tmp_path, overrides=["steps=7"]).jobs(grid.points[0], 0)[0].recipe.steps == 7
    # A rate that is given is not searched, and the base recipe may change while others train.
    inputs = Grid(file, tmp_path, overrides=["optimizer.learning_rate=0.1"])
    assert [job.recipe.optimizer.learning_rate for job in inputs.jobs(inputs.points[0], 0)] == [0.1]
    (tmp_path / "base.yaml").write_text("steps: 3")
    assert [job.recipe for job in grid.jobs(grid.points[1], seed=3)] == recipes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {
                "axes": {"batch": {"a": {"sampling.classes": 4}, "b": {"sampling.classes": 5}}},
                "against": None,
            },
            r'study.yaml: equal: images differs: \[24, "images"\] of a, \[30, "images"\] of b',
        ),
        (
            {"axes": {"loss": {"a": {"loss": "ap_w"}}}, "against": None},
            "study.yaml: a: .*did you mean ap_t",
        ),
        ({"against": "ap"}, "study.yaml: against: there is no 'ap'; did you mean ap_q?"),
        ({"seads": 3}, "study.yaml: seads: unknown key; did you mean seeds"),
        ({"axes": {}}, "study.yaml: axes: "),
        (
            {"leave_out": [{"los": "own"}]},
            "study.yaml: leave_out: there is no 'los'; did you mean loss",
        ),
        ({"leave_out": [{}]}, "study.yaml: leave_out leaves nothing to train"),
        (
            {"figures": ["tset/mAP"]},
            "study.yaml: figures: ap_q is not evaluated by 'tset/mAP'.* one of validation",
        ),
        ({"changes": {"evaluation.every": 0}}, "study.yaml: ap_q: a study needs data.validation"),
        ({"recipe": "nothing.yaml"}, "nothing.yaml"),
    ],
)
def test_mistakes_are_named_before_anything_is_trained(study, tmp_path, changes, message):
    with pytest.raises(DistapError, match=message):
        Grid(study(**changes), tmp_path)


@pytest.mark.parametrize(
    ("chosen_by", "figures", "expected"),
    [
        (None, None, "validation/mAP@R"),
        (None, ["mAP", "R@1"], "validation/mAP"),
        ("R@1", None, "validation/R@1"),
        ("validation/R@1", None, "validation/R@1"),
        ("mAP/trapezoids", None, "validation/mAP/trapezoids"),
        ("test/mAP", None, "test/mAP"),
    ],
)
def test_the_figure_that_chooses_may_name_its_set(study, tmp_path, chosen_by, figures, expected):
    also = {"test": {"data": str(tmp_path)}}
    evaluation = {"every": None, "also": also} | ({"figures": figures} if figures else {})
    file = study(changes={"steps": 2, "evaluation": evaluation}, chosen_by=chosen_by)
    assert Grid(file, tmp_path).chosen_by == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chosen_by": "mAP@r"}, "chosen_by: ap_q.* has no validation/mAP@r; did you mean"),
        ({"figures": ["validation/R@7"]}, "figures: ap_q.* has no validation/R@7; did you mean"),
        ({"changes": {"sampling.classes": 500}, "equal": ["data"]}, "ap_q.*is 500.*or less"),
        (
            {"changes": {"steps": 2, "data.train": "gone/train"}},
            "ap_q.*gone/train.*relative paths of data begin in the current folder",
        ),
    ],
)
def test_data_and_figures_are_checked_before_the_first_training(study, tmp_path, changes, message):
    run = StudyRun(Grid(study(**changes), tmp_path / "out"), seeds=1, jobs=1, ranks=1)
    with pytest.raises(DistapError, match=message):
        next(run.train())
    assert not (tmp_path / "out" / "trainings").exists()


def made_results(grid, figures):
    """Results of all trainings of a grid; `figures` gives the value by the point's text, rate and
    seed.
    """
    results = Results(grid, 3)
    for point in grid.points:
        for job in [job for seed in range(3) for job in grid.jobs(point, seed)]:
            rate = job.searched["optimizer.learning_rate"]
            seed = job.recipe.seed
            value = figures(str(point), rate, seed)
            reached = {"validation/mAP@R": value, "validation/R@1": value / 2}
            names = dict(point.names)
            searched = dict(job.searched)
            results.add(Result(names, searched, seed, job.fingerprint, reached, {}, 2, 48, 1, 1, 1))
    return results


def test_means_intervals_and_paired_differences(study, tmp_path):
    values = {"ap_q": [0.30, 0.34, 0.35], "own": [0.33, 0.36, 0.39]}
    grid = Grid(study(), tmp_path)
    results = made_results(
        grid, lambda point, rate, seed: values[point][seed] - (0.1 if rate == 1e-3 else 0)
    )
    for row in results.rows():
        samples = values[str(row.point)]
        low, high = stats.t.interval(0.95, 2, loc=sum(samples) / 3, scale=stats.sem(samples))
        actual = row.interval("validation/mAP@R")
        assert actual.mean - actual.half == pytest.approx(low, abs=1e-4)
        assert actual.mean + actual.half == pytest.approx(high, abs=1e-4)
    headings, cells, notes = table(results)
    assert headings[1:5] == [
        "learning rate",
        "validation/mAP@R",
        "validation/R@1",
        "validation/mAP@R, less ap_q",
    ]
    # the better one is the last that was tried
    assert [row[1] for row in cells] == ["0.01*", "0.01*"]
    assert cells[1][4] == "+3.0 ± 2.5" and cells[0][4] == ""  # of 3, 2 and 4 points
    assert any(note.startswith("* ") for note in notes)
    assert markdown(results).splitlines()[3].startswith("| own | 0.01* | 36.0 ± 7.5 |")
    assert interval([0.5]).half is None


def test_the_page_of_a_study_shows_all_columns_and_its_title(study, tmp_path):
    """At the width of a desktop; a phone scrolls table and drawing, whose text stays legible."""
    file = study(title="Losses that learn rankings of products, each at its best rate of two")
    grid = Grid(file, tmp_path)
    sets = ("validation", "products", "digits")
    figures = tuple(f"{name}/{figure}" for name in sets for figure in ("mAP@R", "R@1"))
    grid.study = grid.study.model_copy(update={"figures": figures})
    results = made_results(grid, lambda point, rate, seed: rate + seed / 9)
    for result in results.done:
        for name in figures:
            result.figures.setdefault(name, result.figures["validation/mAP@R"])
    page = write_study(results, file)
    beyond = """return [...document.querySelectorAll(".wide")].filter(
        box => box.scrollWidth > box.clientWidth).length"""
    height = """return Math.min(...[...document.querySelectorAll(".drawing text")].map(
        text => text.getBoundingClientRect().height).filter(Boolean))"""
    with chromium(tmp_path / "profile") as browser:
        for size in (DESKTOP, PHONE):
            browser.open(page, size)
            assert (browser.sideways(), browser.errors()) == (0, [])
            assert grid.study.title in browser.driver.find_element("css selector", "h3").text
            assert browser.driver.execute_script(height) > 10
            assert size == PHONE or browser.driver.execute_script(beyond) == 0

import json
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml
from browser import DESKTOP, PHONE
from images import write_images
from small_trainings import recipe

from distap.data.shards.index import load_index
from distap.data.shards.packing import pack
from distap.errors import DistapError
from distap.evaluation.saved import (
    Retrieved,
    folder_of_step,
    keep_few,
    read_evaluation,
    saved_steps,
    write_evaluation,
)
from distap.pages.run_report import report
from distap.pages.run_report.retrieval import Gallery
from distap.pages.run_report.runs import differing_settings, names_of, read_run
from distap.trainer import Trainer
from distap.world import World


@pytest.fixture(scope="module")
def runs(tmp_path_factory, training_shards):
    """Two trainings of two steps, on classes that look alike; not to be written to."""
    folder = tmp_path_factory.mktemp("runs")
    alike = {f"class-{number}": 4 for number in range(6)}
    for part, seed in (("one", 1), ("two", 1), ("three", 2)):
        write_images(folder / "images" / part, alike, size=24, seed=seed)
    for label in alike:  # images of another class in each, so that some queries fail
        shutil.copy(folder / "images" / "three" / label / "0.png", folder / "images" / "one" / label / "odd.png")
    pack(folder / "images" / "one", folder / "shards")
    for name, rate in (("a", 1e-3), ("b", 1e-2)):
        settings = {"data__validation": str(folder / "shards"), "evaluation": {"every": 1}, "steps": 2}
        made = recipe(folder / name, training_shards, **settings, optimizer={"learning_rate": rate})
        Trainer(made, World()).train()
    return folder


@pytest.fixture
def run(tmp_path, runs):
    """A copy of the first, to change."""
    return copied(runs / "a", tmp_path / "a")


def copied(run, to):
    return shutil.copytree(run, to, ignore=shutil.ignore_patterns("checkpoints"))


def text_of(folders, output, **options):
    return report(folders, output, **options)[0].read_text()


@pytest.mark.parametrize(
    "shown", [{"size": DESKTOP}, {"size": PHONE}, {"size": DESKTOP, "dark": True}], ids=["desktop", "phone", "dark"]
)
@pytest.mark.parametrize("names", [["a"], ["a", "b"]], ids=["one run", "two runs"])
def test_a_browser_shows_the_page_without_complaint_and_without_scrolling_sideways(
    tmp_path, runs, browser, names, shown
):
    page, _ = report([runs / name for name in names], tmp_path)
    browser.open(page, **shown)
    assert browser.errors() == []
    assert browser.sideways() <= 0
    assert browser.broken_pictures() == []
    assert browser.requests() == []
    ask = browser.driver.execute_script
    assert ask("return document.images.length") > 100
    assert ask("return [...document.images].every(each => each.alt.trim())")
    assert ask("return [...document.querySelectorAll('svg[role=img]')].every(each => each.ariaLabel.trim())")
    levels = ask("return [...document.querySelectorAll('h1, h2, h3')].map(each => Number(each.tagName[1]))")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    # What does not fit is cut off nowhere: it scrolls within its own box, which the keyboard reaches.
    assert (
        ask("""return [...document.querySelectorAll('body *')].filter(each => each.scrollWidth > each.clientWidth + 1
        && getComputedStyle(each).overflowX == 'auto' && each.tabIndex != 0).length""")
        == 0
    )
    assert (
        ask(
            "return [...document.querySelectorAll('svg text')].filter(each => {"
            "const own = each.getBoundingClientRect(), all = each.ownerSVGElement.getBoundingClientRect();"
            "return own.left < all.left - 1 || own.right > all.right + 1 }).map(each => each.textContent)"
        )
        == []
    )


def test_a_run_alone_tells_what_it_was_before_and_after(tmp_path, runs):
    page, summary = report([runs / "a"], tmp_path)
    lines = [json.loads(line) for line in (runs / "a" / "metrics.jsonl").read_text().splitlines()]
    validations = [line["validation"] for line in lines if "validation" in line]
    for when, figures in (("before", validations[0]), ("after", validations[-1])):
        assert summary[when] == {name: figures[name] for name in ("mAP", "mAP@R", "R@1")}
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    text = page.read_text()
    for heading in (
        "Training",
        "Where the time goes",
        "Precision and recall",
        "Neighbours of some queries",
        "Hardest queries",
        "Most confused classes",
        "Classes with the lowest mAP",
    ):
        assert f"<h2>{heading}</h2>" in text
    assert page == tmp_path / "report.html"


def test_without_an_output_the_page_lies_in_the_run_or_around_the_runs(tmp_path, runs, run):
    other = copied(runs / "b", tmp_path / "b")
    assert report([run])[0] == run / "report.html"
    assert report([run, other])[0] == tmp_path / "report.html"


def test_two_runs_stand_side_by_side_with_the_settings_in_which_they_differ(tmp_path, runs):
    page, summary = report([runs / "a", runs / "b"], tmp_path)
    assert list(summary["runs"]) == ["a", "b"]
    text = page.read_text()
    assert '<th scope="row">optimizer.<wbr>learning_<wbr>rate</th><td>0.001</td><td>0.01</td>' in text
    after = [100 * summary["runs"][name]["after"]["mAP"] for name in ("a", "b")]
    assert f'<th scope="row">mAP</th><td>{after[0]:.1f}</td><td>{after[1]:.1f}</td>' in text
    assert "<b>a</b>: " in text and "<b>b</b>: " in text


def test_pictures_are_left_out_with_a_note_where_the_data_set_is_gone(tmp_path, runs, run):
    recipe_file = run / "recipe.yaml"
    for step in saved_steps(run):
        path = folder_of_step(run, step) / "result.json"
        path.write_text(path.read_text().replace(str(runs / "shards"), str(tmp_path / "gone")))
    recipe_file.write_text(recipe_file.read_text().replace(str(runs / "shards"), str(tmp_path / "gone")))
    text = text_of([run], tmp_path)
    assert "No pictures, since their data set cannot be read" in text
    assert "<img" not in text
    assert "Precision over recall" in text


def test_a_data_set_that_is_another_one_now_is_not_shown(tmp_path, runs, run):
    for step in saved_steps(run):
        path = folder_of_step(run, step) / "result.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"fingerprint": "0" * 64}))
    assert "the data set is another one than was evaluated" in text_of([run], tmp_path)


def test_a_damaged_image_leaves_its_place_in_the_sheet(tmp_path, runs, run):
    shards = shutil.copytree(runs / "shards", tmp_path / "shards")
    index = load_index(shards)
    with (shards / str(index.shard_name[0])).open("r+b") as file:
        file.seek(int(index.offset[0]))
        file.write(b"damage")
    for path in (run / "recipe.yaml", *(folder_of_step(run, step) / "result.json" for step in saved_steps(run))):
        path.write_text(path.read_text().replace(str(runs / "shards"), str(shards)))
    text = text_of([run], tmp_path)
    assert "not readable" in text
    assert "data:image/jpeg" in text


def test_a_run_without_evaluations_gives_its_curves_and_says_what_is_missing(tmp_path, run):
    shutil.rmtree(run / "evaluations")
    page, summary = report([run], tmp_path)
    text = page.read_text()
    assert "no evaluation is kept in the run" in text
    assert "Loss of the global batch" in text
    assert summary["before"] is None and summary["after"] is None
    assert "<img" not in text


def test_evaluations_from_before_an_interruption_are_not_told(tmp_path, run):
    log = run / "metrics.jsonl"
    lines = [line for line in log.read_text().splitlines() if json.loads(line)["step"] < 2]
    log.write_text("\n".join(lines) + "\n")
    assert saved_steps(run)[-1] == 2
    told = [each.step for each in (read_run(run).before, read_run(run).after) if each]
    assert told == [step for step in saved_steps(run) if step < 2]


def test_a_first_evaluation_in_the_midst_of_a_training_is_not_told_as_one_before_it(tmp_path, run):
    log = run / "metrics.jsonl"
    lines = [line for line in log.read_text().splitlines() if json.loads(line)["step"] > 0]
    log.write_text("\n".join(lines) + "\n")
    shutil.copytree(folder_of_step(run, 2), folder_of_step(run, 1), dirs_exist_ok=True)
    path = folder_of_step(run, 1) / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"step": 1}))
    told = read_run(run)
    assert [line["step"] for line in told.validations] == [1, 2]
    assert list(told.evaluations()) == ["step 1", "after"]


def test_a_folder_with_another_recipe_is_refused(run):
    (run / "recipe.yaml").write_text("steps: 3\n")
    with pytest.raises(DistapError, match=r"recipe.yaml: no recipe of a run: data, loss, model, sampling missing"):
        read_run(run)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"folders": ["a", "b"], "before": "a"}, "of one run"),
        ({"folders": ["a", "a"]}, "named twice"),
        ({"folders": ["images"]}, "no such run log"),
        ({"folders": ["a"], "after": "images"}, "result.json: not readable"),
    ],
)
def test_what_cannot_be_told_is_refused(tmp_path, runs, arguments, message):
    paths = {name: runs / value for name, value in arguments.items() if name != "folders"}
    with pytest.raises(DistapError, match=message):
        report([runs / name for name in arguments["folders"]], tmp_path, **paths)
    assert list(tmp_path.iterdir()) == []


def test_evaluations_of_different_data_are_not_compared(tmp_path, runs, run):
    other = shutil.copytree(folder_of_step(run, 0), tmp_path / "other")
    result = json.loads((other / "result.json").read_text())
    (other / "result.json").write_text(json.dumps(result | {"fingerprint": "0" * 64}))
    with pytest.raises(DistapError, match="evaluations of different data"):
        report([run], tmp_path, before=other)
    shutil.copy(other / "result.json", folder_of_step(run, 2) / "result.json")
    text = text_of([run, runs / "b"], tmp_path)
    assert "evaluated on different data" in text
    assert "<img" not in text


def retrieved(seed=0, rows=40, classes=5):
    """Random labels, precisions and neighbours."""
    random = np.random.default_rng(seed)
    label = random.integers(0, classes, rows)
    others = [random.permutation(np.delete(np.arange(rows), row))[:6] for row in range(rows)]
    return Retrieved(
        sample=np.arange(rows) * 3,
        key=np.array([f"key-{row}" for row in range(rows)]),
        label=label,
        average_precision=random.random(rows).round(1),
        average_precision_at_r=random.random(rows),
        first_positive=random.integers(0, 4, rows),
        class_name=np.array([f"class-{name}" for name in range(classes)]),
        neighbours=np.stack(others),
    )


def test_the_hardest_queries_are_those_with_the_lowest_precision():
    last = retrieved(1)
    sheets = {
        sheet.title: sheet for sheet in Gallery({"before": retrieved(), "after": last}, lambda _: None).sheets()
    }
    queries = sorted(set(np.flatnonzero(retrieved().first_positive)) & set(np.flatnonzero(last.first_positive)))
    lowest = sorted(queries, key=lambda row: (last.average_precision[row], row))[:8]
    hardest = sheets["Hardest queries"].examples
    assert [example.query.key for example in hardest] == [f"key-{row}" for row in lowest]
    for example, row in zip(hardest, lowest, strict=True):
        answer = example.answers[1]
        assert [hit.picture.key for hit in answer.hits] == [f"key-{hit}" for hit in last.neighbours[row]]
        assert [hit.right for hit in answer.hits] == [
            last.label[hit] == last.label[row] for hit in last.neighbours[row]
        ]


def test_gains_and_losses_are_the_greatest_of_all_queries():
    first, last = retrieved(), retrieved(1)
    sheets = {sheet.title: sheet for sheet in Gallery({"a": first, "b": last}, lambda _: None).sheets()}
    queries = sorted(set(np.flatnonzero(first.first_positive)) & set(np.flatnonzero(last.first_positive)))
    gains = sorted((last.average_precision[row] - first.average_precision[row] for row in queries), reverse=True)
    for title, expected in (("gains", gains[:4]), ("losses", gains[::-1][:4])):
        answers = [example.answers for example in sheets[f"Greatest {title} from a to b"].examples]
        assert [b.average_precision - a.average_precision for a, b in answers] == pytest.approx(expected)


def test_confused_classes_are_counted_by_query_and_nearest_image():
    both = {"before": retrieved(), "after": retrieved(1)}
    counts = {name: Counter() for name in both}
    for name, each in both.items():
        for row in range(40):
            pair = each.label[row], each.label[each.neighbours[row, 0]]
            if each.first_positive[row] and pair[0] != pair[1]:
                counts[name][f"class-{pair[0]}", f"class-{pair[1]}"] += 1
    pairs = Gallery(both, lambda _: None).confusions()
    assert [pair.counts["after"] for pair in pairs] == [count for _, count in counts["after"].most_common(12)]
    for pair in pairs:
        names = pair.query.label, pair.found.label
        assert pair.counts == {name: counts[name][names] for name in both}
        label = int(names[0].removeprefix("class-"))
        after = both["after"]
        assert pair.queries == sum((after.label == label) & (after.first_positive > 0))
    assert len({(pair.query.label, pair.found.label) for pair in pairs}) == len(pairs)


def write_some(run, step, score):
    each = retrieved(step)
    columns = {name: getattr(each, name) for name in Retrieved.__dataclass_fields__ if name != "neighbours"}
    columns["neighbour"] = each.sample[each.neighbours].ravel()
    result = {"step": step, "data": "d", "fingerprint": "f", "images": 40, "queries": 30, "figures": {"mAP": score}}
    return write_evaluation(folder_of_step(run, step), result, columns).parent


def test_the_first_the_best_and_the_newest_evaluation_stay(tmp_path):
    for step, score in enumerate([0.1, 0.2, 0.9, 0.4, 0.3]):
        write_some(tmp_path, step, score)
        keep_few(tmp_path, step)
    assert saved_steps(tmp_path) == [0, 2, 4]


def test_evaluations_of_steps_that_were_undone_go(tmp_path):
    for step, score in enumerate([0.1, 0.2, 0.9, 0.4]):
        write_some(tmp_path, step, score)
    keep_few(tmp_path, 1)
    assert saved_steps(tmp_path) == [0, 1]


def test_what_was_written_is_read_again(tmp_path):
    read, written = read_evaluation(write_some(tmp_path, 3, 0.5)).retrieved(), retrieved(3)
    for name in Retrieved.__dataclass_fields__:
        assert np.array_equal(getattr(read, name), getattr(written, name))


def cut(path):
    path.write_bytes(path.read_bytes()[:-30])


def spoil_neighbours(path):
    with path.open("rb") as file, np.load(file) as arrays:
        changed = {**arrays, "neighbour": arrays["neighbour"] + 1}
    np.savez(path, **changed)


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("queries.npz", cut, "queries.npz: not readable"),
        ("neighbours.npz", cut, "neighbours.npz: not readable"),
        ("neighbours.npz", Path.unlink, "neighbours.npz: not readable"),
        ("neighbours.npz", spoil_neighbours, "not of one evaluation"),
        ("result.json", cut, "result.json: not readable"),
        ("result.json", lambda path: path.write_text("[]"), "not the result of an evaluation"),
        ("result.json", lambda path: path.write_text('{"figures": 3}'), "not the result of an evaluation"),
    ],
)
def test_a_damaged_evaluation_is_refused(tmp_path, file, damage, message):
    folder = write_some(tmp_path, 0, 0.5)
    damage(folder / file)
    with pytest.raises(DistapError, match=message):
        read_evaluation(folder).retrieved()


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["runs/a", "runs/b"], ["a", "b"]),
        (["demo/a/train", "demo/b/train"], ["a", "b"]),
        (["x", "x/y"], ["x", "x/y"]),
        (["one/a", "other/b"], ["one/a", "other/b"]),
    ],
)
def test_runs_are_named_by_the_part_of_their_paths_in_which_they_differ(tmp_path, run, folders, names):
    copies = []
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for file in ("recipe.yaml", "metrics.jsonl"):
            shutil.copy(run / file, tmp_path / folder / file)
        copies.append(read_run(tmp_path / folder))
    assert names_of(copies) == names


def test_settings_that_only_one_run_has_differ(tmp_path, runs, run):
    recipe_file = run / "recipe.yaml"
    changed = yaml.safe_load(recipe_file.read_text())
    del changed["optimizer"]["warmup"]
    recipe_file.write_text(yaml.safe_dump(changed))
    differing = differing_settings([read_run(run), read_run(runs / "a")])
    assert differing == {"optimizer.warmup": ["–", "0"]}

"""`distap compare`: what it opens, what it leaves out, what it prints and draws."""

import csv
import io
import json
import re
import shutil
from html import unescape

import numpy as np
import pytest
import yaml
from browser import DESKTOP, PHONE, chromium
from commands import distap as command
from raising import raises
from small_trainings import train

import distap
from distap.apps.compare import Comparison, compare
from distap.apps.side_names import names_of_sides
from distap.evaluation.comparing import Difference
from distap.evaluation.described_images import descriptors_of
from distap.evaluation.extraction.extracting import Describing
from distap.evaluation.saved import (
    QUERIED,
    Retrieved,
    folder_of_step,
    read_evaluation,
    save_evaluations,
)
from distap.evaluation.sets import open_set
from distap.library import load
from distap.pages import comparison as comparison_page
from distap.retrieval.descriptor_files import DescribedBy, DescriptorSet, write_described
from distap.world import World

CLASSES = np.repeat([f"class-{number}" for number in range(40)], np.arange(40) % 7 + 2)
KEYS = np.array([f"image-{row:03d}" for row in range(len(CLASSES))])
LABELS = np.unique(CLASSES, return_inverse=True)[1]


def described(noise: float, seed: int = 0) -> np.ndarray:
    """Descriptors of length 1, near those of their class; the same for a seed, but for noise."""
    random = np.random.default_rng(seed)
    centres = np.random.default_rng(100).normal(size=(40, 16))
    values = centres[LABELS] + noise * random.normal(size=(len(LABELS), 16))
    return (values / np.linalg.norm(values, axis=1, keepdims=True)).astype(np.float32)


def folder(path, values, keys=KEYS, classes=CLASSES):
    """A folder as `distap extract` writes it."""
    stored = DescriptorSet(values, keys, classes, DescribedBy("n", "crop 32"), "data")
    write_described(
        path, stored, {"descriptors.npy": lambda file: np.save(file, values, allow_pickle=False)}
    )
    return path


@pytest.fixture(scope="module")
def better() -> Comparison:
    return compare(described(1.4), described(0.7), labels=CLASSES, names=KEYS.tolist())


def test_a_better_side_is_told_by_points_interval_and_p(better):
    [pair] = better.compared
    first = pair.overall[0]
    assert first.figure == "mAP"
    assert first.holds
    assert first.low > 0
    evaluated = [distap.evaluate(described(noise), CLASSES)["mAP"] for noise in (1.4, 0.7)]
    assert (first.baseline, first.other) == pytest.approx(tuple(evaluated), abs=1e-12)
    assert f"better on mAP by {100 * first.value:.1f} points" in better.verdicts[0]
    assert "Holm over 8 figures" in better.verdicts[0]


def test_networks_that_differ_by_chance_are_not_told_apart():
    comparison = compare(described(1.4), described(1.4, seed=1), labels=CLASSES)
    assert not any(result.holds for result in comparison.compared[0].overall)
    assert "no difference is shown on mAP" in comparison.verdicts[0]


def test_each_side_is_compared_with_the_first():
    sides = [described(1.4), described(0.7), described(1.4, seed=1)]
    [better, alike] = compare(*sides, labels=CLASSES).compared
    assert better.baseline == alike.baseline
    assert (better.overall[0].holds, alike.overall[0].holds) == (True, False)


def test_means_over_runs_are_compared():
    runs = [[described(noise, seed) for seed in range(3)] for noise in (1.4, 0.7)]
    comparison = compare(*runs, labels=CLASSES)
    expected = np.mean([distap.evaluate(run, CLASSES)["mAP"] for run in runs[0]])
    assert comparison.compared[0].overall[0].baseline == pytest.approx(expected, abs=1e-12)
    assert comparison.compared[0].overall[0].holds
    assert comparison.notes == []


def test_queries_are_broken_down_by_right_images(better):
    [pair] = better.compared
    by_size = pair.breakdowns["right images of a query"]
    assert [*by_size] == ["1", "2 to 3", "4 to 7"]
    assert sum(result.queries for result in by_size.values()) == pair.overall[0].queries


def test_queries_are_broken_down_by_domain(tmp_path):
    """Those of a ground truth name their part."""
    queries = [
        {
            "name": key,
            "positives": [
                key_of_class
                for key_of_class in KEYS[name == CLASSES].tolist()
                if key_of_class != key
            ],
            "part": "even" if int(name[6:]) % 2 == 0 else "odd",
        }
        for key, name in zip(KEYS.tolist(), CLASSES.tolist(), strict=True)
    ]
    truth = tmp_path / "truth.json"
    truth.write_text(json.dumps({"figures": ["mAP"], "queries": queries}))
    sides = [folder(tmp_path / name, described(noise)) for name, noise in (("a", 1.4), ("b", 0.7))]
    images = tmp_path / "described"
    folder(images, described(1.4))
    comparison = compare(*sides, data=f"described:{images}", truth=truth)
    [pair] = comparison.compared
    assert {*pair.breakdowns["domain"]} == {"even", "odd"}
    plain = compare(*[described(noise) for noise in (1.4, 0.7)], labels=CLASSES, figures=["mAP"])
    expected = plain.compared[0].overall[0]
    assert (pair.overall[0].baseline, pair.overall[0].other) == pytest.approx(
        (expected.baseline, expected.other)
    )


def test_folders_of_descriptors_are_joined_by_name(tmp_path, better):
    order = np.random.default_rng(1).permutation(len(KEYS))
    first = folder(tmp_path / "a", described(1.4))
    second = folder(tmp_path / "b", described(0.7)[order], KEYS[order], CLASSES[order])
    [pair] = compare(first, second).compared
    expected = better.compared[0].overall
    assert [result.value for result in pair.overall] == pytest.approx(
        [result.value for result in expected], abs=1e-12
    )


def test_queries_that_one_side_lacks_are_named(tmp_path):
    first = folder(tmp_path / "a", described(1.4))
    second = folder(tmp_path / "b", described(0.7)[5:], KEYS[5:], CLASSES[5:])
    comparison = compare(first, second)
    text = "\n".join(comparison.notes)
    assert "5 of the" in text
    assert "image-000, image-001, image-002" in text
    assert comparison.compared[0].overall[0].queries <= len(KEYS) - 5


def test_queries_whose_galleries_differ_are_named(tmp_path):
    """Without two images of a class, the others have fewer right images."""
    rows = np.flatnonzero(KEYS[-1] != KEYS)
    first = folder(tmp_path / "a", described(1.4))
    second = folder(tmp_path / "b", described(0.7)[rows], KEYS[rows], CLASSES[rows])
    assert any("galleries differ" in note for note in compare(first, second).notes)


def test_sides_without_a_common_query_are_refused(tmp_path):
    first = folder(tmp_path / "a", described(1.4))
    second = folder(tmp_path / "b", described(0.7), np.char.add("other-", KEYS))
    with raises("comparison.nothing_shared", "image-000", "other-image-000"):
        compare(first, second)


def test_queries_without_any_right_image_are_refused():
    with raises("evaluation.no_positives"):
        compare(described(1.4), described(0.7), labels=KEYS)


def save(comparison: Comparison, path):
    """Keep the evaluations of both sides, as `distap eval --output` does."""
    for number, runs in enumerate(comparison.evaluations.values()):
        runs[0].save(path / str(number))
    return path / "0", path / "1"


def test_saved_evaluations_are_compared_without_networks(tmp_path, better):
    [pair] = compare(*save(better, tmp_path)).compared
    assert pair.overall == better.compared[0].overall


def kept_by_runs(better, path):
    """Runs without checkpoints that keep evaluations of two sets, as those of a study do."""
    runs = []
    for number, [evaluation] in enumerate(better.evaluations.values()):
        run = path / "trainings" / f"{'ab'[number]}--seed-0-{number}"
        for step in (0, 12):
            by_set = {"shards/validation": evaluation, "products": evaluation}
            save_evaluations(folder_of_step(run, step), by_set, step=step)
        runs.append(run)
    return runs


def test_a_run_without_checkpoints_gives_its_newest_evaluation(tmp_path, better):
    runs = kept_by_runs(better, tmp_path)
    comparison = compare(*runs)
    assert comparison.compared[0].overall == better.compared[0].overall
    [[evaluation], _] = comparison.evaluations.values()
    assert (evaluation.step, evaluation.set) == (12, "shards/validation")
    of_products = compare(*runs, set_name="products")
    [[evaluation], _] = of_products.evaluations.values()
    assert evaluation.folder == runs[0] / "evaluations/step-00000012/set-products"
    with raises("comparison.no_set", "product", "products"):
        compare(*runs, set_name="product")
    with raises("comparison.set_of_data", "products"):
        compare(*runs, set_name="products", data="shards/test")
    with raises("checkpoint.none", str(runs[0])):  # other images need a network
        compare(*runs, data="shards/test")


def test_sides_are_named_by_what_their_paths_do_not_share(tmp_path, better):
    assert [*compare(*kept_by_runs(better, tmp_path)).evaluations] == ["a--seed-0-0", "b--seed-0-1"]


@pytest.mark.parametrize(
    ("sides", "names"),
    [
        ([["runs/before"], ["runs/after"]], ["before", "after"]),
        (
            [
                [f"study/{loss}--rate-0.1--seed-{seed}-ea{seed}/set-x" for seed in range(2)]
                for loss in ("ap_q", "log_rank")
            ],
            ["ap_q (2 runs)", "log_rank (2 runs)"],
        ),
        ([["a-0", "a-1", "a-2"], ["b-0"]], ["a (3 runs)", "b-0"]),
        ([["runs/0.npy", "runs/1.npy"], ["runs/2.npy"]], ["0.npy (2 runs)", "2.npy"]),
        ([["runs/a"], ["runs/a/checkpoints/step-8"]], ["a", "a/checkpoints/step-8"]),
        ([["runs/a"], ["runs/a"]], ["a (1)", "a (2)"]),
        ([[np.ones(2)], [np.ones(2)]], ["descriptors (1)", "descriptors (2)"]),
    ],
)
def test_default_names_are_short_and_differ(sides, names):
    assert names_of_sides(sides) == names


def test_names_may_be_given(tmp_path, better, monkeypatch, capsys):
    sides = save(better, tmp_path)
    page = tmp_path / "page.html"
    arguments = [*map(str, sides), "--as", "ap_q, log_rank", "--output", page, "--table", "latex"]
    assert command(monkeypatch, "compare", *arguments) == 0
    assert r"\% & ap\_q & log\_rank & difference" in capsys.readouterr().out
    assert "log_rank is better on mAP" in page.read_text()
    for names in (["a"], ["a", "a"], ["a", "b", "c"]):
        with raises("comparison.wrong_names", *names):
            compare(*sides, side_names=names)


def test_runs_are_compared_by_the_figures_of_their_recipes(tmp_path, training_shards):
    """If the recipes agree; a set of the user's own has its own figures."""
    evaluation = {"figures": ["mAP", "R@7"], "every": 0}
    train(
        World(),
        tmp_path / "a",
        training_shards,
        steps=1,
        evaluation=evaluation,
        data__validation=str(training_shards[1]),
    )
    recipe = yaml.safe_load((tmp_path / "a" / "recipe.yaml").read_text())
    shutil.copytree(tmp_path / "a", tmp_path / "b")

    def figures_next_to(other, **settings):
        [pair] = compare(tmp_path / "a", other, **settings).compared
        return [result.figure for result in pair.overall]

    assert figures_next_to(tmp_path / "b") == ["mAP", "R@7"]
    [checkpoint] = (tmp_path / "b" / "checkpoints").glob("step-*")
    assert figures_next_to(checkpoint) == ["mAP", "R@7"]
    assert figures_next_to(tmp_path / "b", figures=["R@2"]) == ["R@2"]
    assert len(figures_next_to(tmp_path / "b", data=training_shards[1])) == 8
    recipe["evaluation"]["figures"] = ["mAP", "R@3"]
    (tmp_path / "b" / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert len(figures_next_to(tmp_path / "b")) == 8


def test_figures_that_one_run_lacks_are_named(tmp_path, better):
    first, second = save(better, tmp_path)
    reduced = read_evaluation(second)
    values = reduced.query_values()
    chosen = np.isin(values.figure, ["mAP", "R@1"])
    reduced.by_query = type(values)(
        **{**vars(values), "figure": values.figure[chosen], "values": values.values[:, chosen]}
    )
    reduced.save(second)
    comparison = compare(first, second)
    assert [result.figure for result in comparison.compared[0].overall] == ["mAP", "R@1"]
    assert any("6 of the 8 figures" in note and "mAP@R" in note for note in comparison.notes)


def test_the_first_figure_that_is_asked_for_is_judged(tmp_path, better, training_shards):
    first, second = save(better, tmp_path)
    [pair] = compare(first, second, figures=["R@1", "mAP"]).compared
    assert [result.figure for result in pair.overall] == ["R@1", "mAP"]
    with raises("comparison.no_figure", "R@3", "mAP@R"):
        compare(first, second, figures=["R@1", "R@3"])
    # A set with classes evaluates mAP too, which counts no test if nobody asked for it.
    random = np.random.default_rng(0)
    rows = len(open_set(str(training_shards[1])).images.sets[0])
    for name in ("a.npy", "b.npy"):
        values = random.normal(size=(rows, 8))
        np.save(tmp_path / name, values / np.linalg.norm(values, axis=1, keepdims=True))
    sides = [tmp_path / name for name in ("a.npy", "b.npy")]
    [pair] = compare(*sides, data=training_shards[1], figures=["R@1"]).compared
    assert [result.figure for result in pair.overall] == ["R@1"]


def test_an_evaluation_among_other_images_is_told(tmp_path, better):
    """Queries may be the same, with the same right images, and the rest of the gallery another."""
    first, second = save(better, tmp_path)
    assert not any("different images" in note for note in compare(first, second).notes)
    read_evaluation(second).model_copy(update={"images": 1000}).save(second)
    assert any("1,000 images" in note for note in compare(first, second).notes)


def test_a_missing_side_is_refused_before_anything_is_described(tmp_path):
    with raises("comparison.missing", "gone"):
        compare(described(1.4), tmp_path / "gone")


def test_an_image_of_the_gallery_may_have_the_name_of_a_query(tmp_path, better, monkeypatch):
    count = len(KEYS)
    hits = Retrieved(
        sample=np.arange(2 * count),
        key=np.concatenate([KEYS, KEYS]),
        class_name=np.concatenate([CLASSES, CLASSES]),
        average_precision=np.ones(count),
        first_positive=np.ones(count, np.int64),
        neighbours=np.arange(count)[:, None] + count,
    )
    about = {"fingerprint": "f", "protocol": QUERIED, "hits": hits}
    evaluations = {
        name: [runs[0].model_copy(update=about)] for name, runs in better.evaluations.items()
    }
    monkeypatch.setattr(comparison_page, "thumbnails", lambda evaluation: lambda sample: None)
    comparison_page.write_comparison(tmp_path / "page.html", better.compared, evaluations)
    assert "No pictures" not in (tmp_path / "page.html").read_text()


def test_queries_of_several_runs_have_their_means(tmp_path, monkeypatch):
    """They are chosen by these, and the neighbours are those of one run."""
    runs = [[described(noise, seed) for seed in range(2)] for noise in (1.4, 0.7)]
    comparison = compare(*runs, labels=CLASSES, names=KEYS.tolist(), side_names=["a", "b"])
    hits = Retrieved(
        sample=np.arange(len(KEYS)),
        key=KEYS,
        class_name=CLASSES,
        average_precision=np.ones(len(KEYS)),
        first_positive=np.ones(len(KEYS), np.int64),
        neighbours=np.arange(len(KEYS))[:, None],
    )
    about = {"fingerprint": "f", "protocol": QUERIED, "hits": hits}  # as of runs on one set
    evaluations = {
        name: [run.model_copy(update=about) for run in of_side]
        for name, of_side in comparison.evaluations.items()
    }
    monkeypatch.setattr(comparison_page, "thumbnails", lambda evaluation: lambda sample: None)
    comparison_page.write_comparison(tmp_path / "page.html", comparison.compared, evaluations)
    text = (tmp_path / "page.html").read_text()
    [pair] = comparison.compared
    row = int(np.argmax(pair.after - pair.before))
    assert f"<b>a, mean mAP {100 * pair.before[row]:.1f}%; its first run</b>" in text
    assert f"<b>b, mean mAP {100 * pair.after[row]:.1f}%; its first run</b>" in text
    assert "Neighbours are those of the first run of each side" in text


def test_an_evaluation_of_before_is_refused(tmp_path, better):
    first, second = save(better, tmp_path)
    (second / "queries.npz").unlink()
    with raises("descriptors.missing", "queries.npz"):
        compare(first, second)


def test_few_classes_are_told():
    chosen = np.flatnonzero(LABELS < 12)
    sides = [described(noise)[chosen] for noise in (1.4, 0.7)]
    comparison = compare(*sides, labels=CLASSES[chosen])
    assert any("there are 12 classes" in note for note in comparison.notes)


def test_labels_and_a_second_side_are_asked_for(tmp_path):
    with raises("comparison.no_labels", "descriptors"):
        compare(described(1.4), described(0.7))
    np.save(tmp_path / "rows.npy", described(1.4))
    with raises("evaluation.no_data", "rows.npy"):
        compare(tmp_path / "rows.npy", tmp_path / "rows.npy")
    with raises("comparison.too_few_sides", "1"):
        compare(described(1.4), labels=CLASSES)


def test_rows_in_the_order_of_a_data_set_are_compared(tmp_path, training_shards):
    """Runs, .npy files of their descriptors, and folders of these give the same figures."""
    train(World(), tmp_path / "run", training_shards, steps=1)
    settings = {"data": training_shards[1], "figures": ["mAP", "R@1"]}
    network = load(tmp_path / "run", device="cpu")
    images = open_set(str(training_shards[1])).images
    describing = Describing(network.describer, World(), workers=0)
    _, values = descriptors_of(describing, images.sets[0], {})
    np.save(tmp_path / "rows.npy", values)
    folder(tmp_path / "rows", values, images.keys, images.classes)
    network.save_pretrained(tmp_path / "saved")
    sources = [tmp_path / name for name in ("run", "rows.npy", "rows", "saved")]
    comparison = compare(*sources, **settings)
    for pair in comparison.compared:
        assert [result.value for result in pair.overall] == pytest.approx([0, 0], abs=1e-6)
    np.save(tmp_path / "short.npy", values[1:])
    with raises("descriptors.wrong_shape", "short.npy", str(len(values))):
        compare(tmp_path / "rows.npy", tmp_path / "short.npy", **settings)


def test_tables_are_those_of_papers(better):
    markdown, latex, text = (better.table(form) for form in ("markdown", "latex", "csv"))
    first = better.compared[0].overall[0]
    assert f"{100 * first.baseline:.1f} | {100 * first.other:.1f} | +" in markdown
    assert rf"$\mathbf{{+{100 * first.value:.1f}}}$" in latex
    assert latex.startswith(r"\begin{tabular}")
    assert r"figure, \%" in latex
    assert "& $<$ 0.001" in latex
    rows = [*csv.DictReader(io.StringIO(text))]
    assert float(rows[0]["difference"]) == first.value
    assert (rows[0]["holds"], rows[0]["figure"]) == ("True", "mAP")
    # Numbers below zero have a minus, not a hyphen.
    worse = compare(described(0.7), described(1.4), labels=CLASSES).table("latex")
    assert re.search(r"\$\\mathbf\{-[\d.]+\}\$ & \$-[\d.]+\$ to \$-[\d.]+\$ &", worse)
    with raises("comparison.unknown_table", "html"):
        better.table("html")


def test_the_command_groups_runs_by_colons(tmp_path, monkeypatch, capsys):
    for number, noise in enumerate((1.4, 1.4, 0.7, 0.7)):
        np.save(tmp_path / f"{number}.npy", described(noise, number))
    (tmp_path / "labels.txt").write_text("\n".join(CLASSES) + "\n")
    names = [str(tmp_path / f"{number}.npy") for number in range(4)]
    labels = ("--labels", tmp_path / "labels.txt")
    assert command(monkeypatch, "compare", *names[:2], ":", *names[2:], *labels, "--json") == 0
    [record] = json.loads(capsys.readouterr().out)["compared"]
    assert record["runs"] == [2, 2]
    assert record["differences"][0]["figure"] == "mAP"


def test_the_page_fits_and_names_what_changed(tmp_path, better):
    comparison_page.write_comparison(tmp_path / "page.html", better.compared, better.evaluations)
    text = (tmp_path / "page.html").read_text()
    assert better.verdicts[0] in unescape(text)
    assert "Queries that gained most" in text
    # Long names break, so that a table and its last column stay within the desktop's page.
    long_names = [f"runs/study/trainings/{'log_rank' * 8}-{side}" for side in "ab"]
    named = compare(
        *(described(noise) for noise in (1.4, 0.7)), labels=CLASSES, side_names=long_names
    )
    comparison_page.write_comparison(tmp_path / "long.html", named.compared, named.evaluations)
    beyond = """return [...document.querySelectorAll(".wide")].filter(
        box => box.scrollWidth > box.clientWidth).length"""
    cut = """return [...document.querySelectorAll("svg[role=img]")].flatMap(svg => {
        const edge = svg.getBoundingClientRect();
        return [...svg.querySelectorAll("text")].map(text => text.getBoundingClientRect())
            .filter(box => box.left < edge.left - 1 || box.right > edge.right + 1)}).length"""
    with chromium(tmp_path / "profile") as browser:
        for page in ("page.html", "long.html"):
            for size in (DESKTOP, PHONE):
                browser.open(tmp_path / page, size)
                assert (browser.sideways(), browser.errors()) == (0, [])
                assert browser.driver.execute_script(cut) == 0
                assert size == PHONE or browser.driver.execute_script(beyond) == 0


@pytest.mark.parametrize(
    ("low", "high"), [(-0.161, 0.05), (-0.0004, 0.0003), (0.01, 0.5), (-0.4, 0.49), (0, 0.021)]
)
def test_the_axis_of_intervals_has_marks_as_they_fit(low, high):
    result = Difference("mAP", 0.5, 0.5, low, high, 0.1, 9, 9)
    marks = comparison_page.Intervals([result]).marks()
    assert 3 <= len(marks) <= 6
    assert "0" in [text for _, text in marks]

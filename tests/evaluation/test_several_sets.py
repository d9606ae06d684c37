"""Several data sets evaluated together: merged gallery, means, names, and the best checkpoint."""

import json
import shutil
from dataclasses import dataclass, replace

import numpy as np
import pytest
import yaml
from commands import distap
from dataset_trees import TREES
from images import write_images
from launching import Program, output_of
from raising import raises
from ranks import on_ranks
from retrieval_reference import figure_of
from small_trainings import recipe, train
from stores import checkpoints_of, found_checkpoint

from benchmarks.photos import pack
from distap.config.reading import load_recipe, recorded_recipe
from distap.data.converters.dataset import convert
from distap.evaluation.describing import describing_of
from distap.evaluation.saved import folder_of_step, read_evaluations
from distap.evaluation.sets import open_set
from distap.evaluation.several_sets import (
    evaluate_merged,
    merged_figure_names,
    with_mean,
)
from distap.pages.report import report
from distap.pages.run import read_run
from distap.retrieval.figures import LABELLED_FIGURES
from distap.retrieval.refinement import Refinement
from distap.telemetry.runlog import read_run_log
from distap.training.build import network_of, trained_network
from distap.training.run_state import require_same
from distap.world import World


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Folders of shards by name: cars and birds with a class of one name, and a gallery for each.

    The gallery of birds has the files of its queries too. Each class has images of several
    patterns, and so has the other set, so that many are confused.
    """
    folder = tmp_path_factory.mktemp("sets")
    patterns = write_images(folder / "patterns", dict.fromkeys("abc", 20), 40, seed=1)
    images = {name: sorted((patterns / name).iterdir()) for name in "abc"}
    classes = {
        "cars": {"red": "aaab", "blue": "bbc", "alone": "c"},
        "cars-gallery": {"red": "aab", "blue": "bc", "black": "abc"},
        "birds": {"red": "aab", "green": "bbcca"},
        "birds-gallery": {"red": "ac", "green": "b", "grey": "abc"},
    }
    for name, patterns_of in classes.items():
        for class_name, letters in patterns_of.items():
            target = folder / f"{name}-images" / class_name
            target.mkdir(parents=True)
            for letter in letters:
                image = images[letter].pop()
                shutil.copy(image, target / f"{letter}{image.name}")
    shutil.copytree(
        folder / "birds-images",
        folder / "birds-gallery-images",
        dirs_exist_ok=True,
    )
    for name in classes:
        pack(folder / f"{name}-images", folder / name)
    return {name: str(folder / name) for name in classes}


@pytest.fixture(scope="module")
def describing(tmp_path_factory, training_shards):
    settings = recipe(tmp_path_factory.mktemp("network"), training_shards)
    return describing_of(settings, network_of(settings, World()), World())


@dataclass(frozen=True)
class Shown:
    """An image of a set, as a query or in the gallery."""

    row: np.ndarray
    domain: str
    label: str
    file: int  # what its file holds

    def answers(self, query: "Shown") -> bool:
        return self.domain == query.domain and self.label == query.label

    def is_copy_of(self, query: "Shown") -> bool:
        return self.domain == query.domain and self.file == query.file


def shown_images(domain, described) -> tuple[list[Shown], list[Shown]]:
    """Queries and gallery of a set."""
    rows = list(np.asarray(described.queries))
    if described.evaluation_set.gallery:
        rows += list(np.asarray(described.gallery))
    labels = described.classes.tolist()
    files = described.evaluation_set.images.contents[described.samples].tolist()
    images = [
        Shown(row, domain, label, file)
        for row, label, file in zip(rows, labels, files, strict=True)
    ]
    count = len(described.queries)
    return images[:count], images[count:] or images


def relevance_by_hand(query: Shown, gallery: list[Shown]) -> list[int]:
    ranked = sorted(
        (-float(query.row @ image.row), image.answers(query))
        for image in gallery
        if not image.is_copy_of(query)
    )
    return [int(is_right) for _, is_right in ranked]


def merged_by_hand(described, names=LABELLED_FIGURES):
    """Figures of the merged gallery by a loop over queries, from the sets' own descriptors."""
    queries = list[Shown]()
    gallery = list[Shown]()
    for domain, described_set in described.items():
        of_queries, of_gallery = shown_images(domain, described_set)
        queries += of_queries
        gallery += of_gallery
    ranked = [(query.domain, relevance_by_hand(query, gallery)) for query in queries]
    answered = [(domain, relevance) for domain, relevance in ranked if any(relevance)]
    figures = {}
    for name in names:
        figures[name] = np.mean([figure_of(name, relevance) for _, relevance in answered])
        means = []
        for chosen in described:
            of_domain = [
                figure_of(name, relevance) for domain, relevance in answered if domain == chosen
            ]
            means.append(np.mean(of_domain))
            figures[f"{chosen} {name}"] = means[-1]
        figures[f"mean {name}"] = np.mean(means)
    return figures


@pytest.mark.parametrize("with_gallery", [(), ("cars",), ("birds",), ("cars", "birds")], ids=str)
def test_merged_figures_are_those_by_hand(sets, describing, with_gallery):
    opened = {
        name: open_set(
            sets[name],
            name,
            gallery=sets[f"{name}-gallery"] if name in with_gallery else None,
        )
        for name in ("cars", "birds")
    }
    described = {name: described_set.describe(describing) for name, described_set in opened.items()}
    evaluation = evaluate_merged(described)
    assert evaluation.figures == pytest.approx(merged_by_hand(described), abs=1e-6)
    assert list(evaluation.figures) == merged_figure_names(opened)
    # The other set has a class of that name, whose images are all wrong.
    for name, described_set in described.items():
        assert evaluation.figures[f"{name} mAP"] < described_set.evaluate().figures["mAP"] < 1


def test_images_are_described_once_and_refined_together(sets, describing):
    described = {
        name: open_set(sets[name], name).describe(describing) for name in ("cars", "birds")
    }
    apart = {**described}
    apart["birds"] = open_set(sets["birds"], "birds", gallery=sets["birds-gallery"]).describe(
        describing
    )
    expanded = evaluate_merged(described, Refinement(expand=2.0, neighbours=3))
    assert expanded.refinement != "plain"
    assert expanded.figures != evaluate_merged(described).figures
    with raises("evaluation.queries_in_gallery", "merged"):
        evaluate_merged(apart, Refinement(expand=2.0, neighbours=3))


def test_what_cannot_be_merged_is_left_out_or_refused(sets, describing):
    cars, birds = (open_set(sets[name], name) for name in ("cars", "birds"))
    drawn = open_set(sets["birds"], "drawn", gallery_draws=2)
    assert merged_figure_names({"cars": cars, "birds": birds, "drawn": drawn}) == (
        merged_figure_names({"cars": cars, "birds": birds})
    )
    with raises("evaluation.not_merged", "cars", "drawn"):
        merged_figure_names({"cars": cars, "drawn": drawn})
    with raises("evaluation.not_merged", "cars", "again", sets["cars"]):
        merged_figure_names({"cars": cars, "again": open_set(sets["cars"])})
    graded = replace(cars, figures=("R@1", "NDCG", "mAP"))
    assert {name.split()[-1] for name in merged_figure_names({"cars": graded, "birds": birds})} == {
        "R@1",
        "mAP",
    }


def test_a_mean_is_of_what_all_sets_have():
    figures = {
        "a": {"mAP": 0.5, "R@1": 1.0},
        "b": {"mAP": 0.25},
        "merged": {"mAP": 0.0},
    }
    assert with_mean(figures) == figures | {"mean": {"mAP": 0.375}}
    assert with_mean({"a": {"mAP": 0.5}, "merged": {"mAP": 0.1}}).keys() == {"a", "merged"}
    assert with_mean({"a": {"mAP": 0.5}, "b": {"R@1": 0.1}}).keys() == {
        "a",
        "b",
    }


@pytest.mark.parametrize(
    ("name", "place", "figures"),
    [
        ("roxford5k", "", ()),
        ("gldv2", "", ()),
        ("uned", "", ()),
        ("dyml-product", "test", ("R@1", "H-AP", "ASI/level")),
    ],
)
def test_names_of_figures_are_known_before_an_evaluation(
    tmp_path, describing, name, place, figures
):
    TREES[name](tmp_path / "source")
    convert(name, tmp_path / "source", tmp_path / name)
    opened = open_set(str(tmp_path / name / place), figures=figures)
    assert opened.figure_names == list(opened.describe(describing).evaluate().figures)


def settings_of(sets, **changes):
    return {
        "steps": 2,
        "data__validation": {name: sets[name] for name in ("cars", "birds")},
        "evaluation": {"every": 1, "merged": True, **changes},
        "checkpoint": {"every": 1, "keep": 9},
    }


def test_a_training_of_two_ranks_reports_sets_merged_and_mean_and_goes_on(
    tmp_path, training_shards, sets, monkeypatch, capfd, browser
):
    run = tmp_path / "run"
    best = {"set": "merged", "figure": "cars R@1"}
    settings = recipe(run, training_shards, **settings_of(sets, best=best))
    config = tmp_path / "recipe.yaml"
    config.write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    command = ("-m", "distap.cli", "train", str(config), "--ranks", "2")
    output_of(Program(command), tmp_path)
    train(
        World(),
        run,
        training_shards,
        **settings_of(sets, best=best) | {"steps": 3},
    )

    lines = {entry["step"]: entry for entry in read_run_log(run) if "validation" in entry}
    assert sorted(lines) == [0, 1, 2, 3]
    for line in lines.values():
        assert list(line["also"]) == ["birds", "cars", "merged", "mean"]
        assert line["validation"] == line["also"]["mean"]
        for figure, value in line["validation"].items():
            assert value == pytest.approx(
                (line["also"]["cars"][figure] + line["also"]["birds"][figure]) / 2
            )
        assert line["score"] == {
            "merged cars R@1 of birds, cars": line["also"]["merged"]["cars R@1"]
        }
    chosen = found_checkpoint(run, best=True)
    scores = [line["also"]["merged"]["cars R@1"] for step, line in lines.items() if step]
    assert chosen.manifest.score == max(scores)

    trained, network = trained_network(run, World())
    described = {
        name: open_set(sets[name], name).describe(describing_of(trained, network, World()))
        for name in ("cars", "birds")
    }
    by_hand = merged_by_hand(described)
    assert lines[3]["also"]["merged"] == pytest.approx(by_hand, abs=1e-6)

    capfd.readouterr()
    assert distap(monkeypatch, "eval", "--checkpoint", run, "--merged", "--json") == 0
    printed = json.loads(capfd.readouterr().out)["sets"]
    assert printed["merged"]["plain"] == pytest.approx(by_hand, abs=1e-6)
    assert printed["birds"]["plain"] == pytest.approx(lines[3]["also"]["birds"], abs=1e-6)

    page, summary = report(run)
    evaluations = read_evaluations(folder_of_step(run, 3))
    assert {name: evaluation.figures for name, evaluation in evaluations.items()} == {
        name: pytest.approx(lines[3]["also"][name]) for name in ("birds", "cars", "merged")
    }
    assert list(summary["sets"]) == ["birds", "cars", "merged"]
    assert summary["sets"]["cars"]["before"]["R@1"] == lines[0]["also"]["cars"]["R@1"]
    assert summary["sets"]["cars"]["after"]["R@1"] == lines[3]["also"]["cars"]["R@1"]
    text = page.read_text()
    for name in ("birds", "cars"):
        assert f"<h2>Neighbours of some queries, {name}</h2>" in text
    assert "merged: neighbours are kept neither" in text
    assert "2 on 2 ranks, 1 on 1 rank" in text
    browser.open(page)
    assert browser.errors() == [] and browser.sideways() <= 0
    table = browser.driver.find_element("css selector", "#data-sets table").text.splitlines()
    assert [line.rsplit(" ", 8)[0] for line in table[1:]] == [
        *(
            "birds",
            "cars",
            "merged",
            "merged birds",
            "merged cars",
            "merged mean",
            "mean",
        )
    ]
    assert f"mean {100 * lines[3]['validation']['mAP']:.1f}" in table[-1]
    assert "highest merged cars R@1 of birds, cars" in browser.driver.page_source


def test_the_log_has_one_table(tmp_path, training_shards, sets, caplog):
    caplog.set_level("INFO")
    also = {
        "drawn": {
            "data": sets["birds"],
            "gallery_draws": 2,
            "figures": ["R@1"],
        }
    }
    changes = settings_of(sets, also=also, figures=["mAP", "R@1"], at_start=False)
    train(World(), tmp_path, training_shards, **changes | {"steps": 1})
    lines = [line.partition("step 1: ")[2] for line in caplog.messages if "step 1: " in line]
    heading, *rows = [line.split() for line in lines]
    assert heading == ["set", "mAP", "R@1"]
    assert [row[:-2] for row in rows] == [
        *(["birds"], ["cars"], ["drawn"], ["merged"]),
        *(["merged", name] for name in ("birds", "cars", "mean")),
        ["mean"],
    ]
    assert len({len(line) for line in lines}) == 1
    assert any("birds, cars, drawn, merged of birds, cars" in line for line in caplog.messages)


def test_another_best_begins_a_comparison_of_its_own(tmp_path, training_shards, sets):
    changes = settings_of(sets)
    train(World(), tmp_path, training_shards, **changes)
    means = [entry["also"]["mean"] for entry in read_run_log(tmp_path) if "also" in entry][1:]
    first = found_checkpoint(tmp_path, best=True)
    assert first.manifest.score == max(figures["mAP"] for figures in means)
    # Lower than every score so far: it would never be the best of these.
    changes["evaluation"]["best"] = {"set": "merged", "figure": "mP@10"}
    train(World(), tmp_path, training_shards, **changes | {"steps": 3})
    last = read_run_log(tmp_path)[-2]
    best = found_checkpoint(tmp_path, best=True)
    assert (best.step, best.manifest.score) == (
        3,
        last["also"]["merged"]["mP@10"],
    )
    assert best.manifest.score < first.manifest.score
    assert checkpoints_of(tmp_path).best("mean mAP of birds, cars")[0] == first.manifest.score
    name, value, step = read_run(tmp_path).highest_score
    assert (name, value, step) == (
        "merged mP@10 of birds, cars",
        best.manifest.score,
        3,
    )


@pytest.mark.parametrize(
    ("best", "names"),
    [
        ({"set": "fish"}, ["fish", "cars", "birds", "merged", "mean"]),
        ({"figure": "R@7"}, ["R@7", "mAP", "R@1"]),
        ({"set": "merged", "figure": "fish R@1"}, ["fish R@1", "cars R@1"]),
    ],
)
def test_an_unknown_best_is_refused_before_the_first_step(
    tmp_path, training_shards, sets, best, names
):
    with raises("evaluation.unknown_figure", "evaluation.best", *names):
        train(
            World(),
            tmp_path,
            training_shards,
            **settings_of(sets, best=best),
        )
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"data__validation": {}}, ["data.validation", "1 item"]),
        ({"data__validation": {"a/b": "x"}}, ["data.validation.a/b"]),
        ({"data__validation": {"a": 5}}, ["data.validation.a", "5"]),
        ({"data__validation": {"mean": "x"}}, ["data.validation", "mean"]),
        (
            {"evaluation__also": {"cars": {"data": "x"}}},
            ["evaluation.also", "cars"],
        ),
        (
            {"data__gallery": "x"},
            ["gallery", "cars, birds", "evaluation.also"],
        ),
        (
            {"data__gallery_draws": 2},
            ["gallery_draws", "cars, birds", "evaluation.also"],
        ),
        (
            {"data__validation": None, "evaluation__merged": True},
            ["evaluation.merged"],
        ),
    ],
)
def test_wrong_names_of_sets_are_refused(tmp_path, training_shards, sets, changes, names):
    validation = {"data__validation": {"cars": "a", "birds": "b"}}
    with raises("recipe.value", *names):
        recipe(tmp_path, training_shards, **validation | changes)


def test_overrides_replace_sets_and_a_record_has_their_places(tmp_path, training_shards):
    base = recipe(tmp_path, training_shards, data__validation="a").model_dump(mode="json")
    for override in (
        {"data.validation": {"cars": "b"}},
        "data.validation={cars: b}",
    ):
        changed = load_recipe(base, [override])
        assert changed.data.validation == {"cars": "b"} == changed.data.validation_sets
    with raises("recipe.override", "validation"):
        load_recipe(base, ["data.validation.cars=b"])
    again = load_recipe(
        changed.model_dump(mode="json"),
        [{"data": {"validation": {"c": "d"}}}],
    )
    assert again.data.validation == {"c": "d"}
    record = recorded_recipe(changed.model_dump(mode="json"), "record", str(tmp_path))
    assert record.data.validation == {"cars": str(tmp_path / "b")}


def validation_names(world, folder, shards):
    places = {
        "cars": f"cars on {world.rank}",
        "birds": f"birds on {world.rank}",
    }
    require_same(recipe(folder, shards, data__validation=places), world)
    name = "fish" if world.rank else "birds"
    with raises("ranks.other_recipe", "evaluation sets", "fish", "birds"):
        require_same(
            recipe(folder, shards, data__validation={"cars": "a", name: "b"}),
            world,
        )


def test_ranks_may_have_sets_elsewhere_but_not_others(tmp_path, training_shards):
    on_ranks(2, validation_names, tmp_path, training_shards)

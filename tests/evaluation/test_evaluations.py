import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import distap
from dataset_trees import TREES
from extractions import describe_files, encoded
from PIL import Image
from raising import raises
from retrieval_reference import figure_of, labelled_figures, order_of, trapezoid_average_precision
from small_trainings import recipe, train

import benchmarks.photos
from benchmarks.photos import pack
from distap.data.converters.dataset import convert
from distap.data.images.decoding import EncodedImage
from distap.data.loading.reader import open_images
from distap.data.shards.image_files import ImageFile
from distap.errors import DistapError
from distap.evaluation.describing import describing_of
from distap.evaluation.extraction.extracted_folder import extract_to_folder
from distap.evaluation.extraction.extracting import Extraction
from distap.evaluation.ground_truth import read_truth
from distap.evaluation.query_values import GALLERY
from distap.evaluation.saved import folder_of_step, read_evaluation, saved_steps
from distap.evaluation.sets import open_set
from distap.library import load
from distap.randomness import permutation
from distap.retrieval.descriptor_files import read_descriptors
from distap.retrieval.refinement import Refinement
from distap.telemetry.runlog import read_run_log
from distap.training.build import network_of
from distap.world import World


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    """Tiny Revisited Oxford, its distractors and Google Landmarks v2, as `distap data convert`
    writes them.
    """
    folder = tmp_path_factory.mktemp("converted")
    for name in ("roxford5k", "revisitop1m", "gldv2", "uned", "ijb-c"):
        TREES[name](folder / "source" / name)
        convert(name, folder / "source" / name, folder / name)
    return folder


def describing(folder, shards, world=None, sizing="original", **settings):
    configuration = recipe(folder / "run", shards)
    world = world or World()
    return describing_of(configuration, network_of(configuration, world), world, sizing, **settings)


def ranking(similarities: list[float], positives: set[int], junk: set[int]) -> list[bool]:
    """Which places of a query's ranking hold a positive."""
    return [row in positives for row in order_of(similarities, positives, junk)]


def similarities_of(
    describing, source: Path, queries: dict[str, list[float]]
) -> dict[str, list[float]]:
    """Each query's similarity to the six images of the gallery, from the files that were
    converted."""
    images = source / "jpg"
    gallery = describe_files(
        describing.describer, [path.read_bytes() for path in sorted(images.glob("all_souls*"))]
    )
    result = {}
    for name, box in queries.items():
        crop = Image.open(images / f"{name}.jpg").crop([round(edge) for edge in box])
        described = describe_files(describing.describer, [encoded(crop)])
        result[name] = (described @ gallery.t())[0].tolist()
    return result


def test_the_figures_of_revisited_oxford_are_those_of_its_files(
    converted, training_shards, tmp_path
):
    extraction = describing(tmp_path, training_shards)
    evaluation = open_set(str(converted / "roxford5k")).describe(extraction).evaluate()
    boxes = {"bodleian_000107": [1.5, 2.0, 8.0, 7.5], "keble_000214": [0.0, 0.0, 9.0, 6.0]}
    similarities = similarities_of(extraction, converted / "source/roxford5k", boxes)
    first = similarities["bodleian_000107"]
    second = similarities["keble_000214"]
    expected = {
        "Easy mAP/trapezoids": [ranking(first, {0, 1}, {5, 2})],
        "Medium mAP/trapezoids": [ranking(first, {0, 1, 2}, {5}), ranking(second, {3, 4}, set())],
        "Hard mAP/trapezoids": [ranking(first, {2}, {5, 0, 1}), ranking(second, {3, 4}, set())],
    }
    for name, rankings in expected.items():
        assert evaluation.figures[name] == pytest.approx(
            np.mean([trapezoid_average_precision(r) for r in rankings])
        )
    assert (evaluation.queries, evaluation.left_out) == (2, 1)


def test_the_figures_of_google_landmarks_count_100_images(converted, training_shards, tmp_path):
    extraction = describing(tmp_path, training_shards)
    evaluation = open_set(str(converted / "gldv2")).describe(extraction).evaluate()
    evaluation.save(tmp_path / "saved", network="a checkpoint")
    saved = json.loads((tmp_path / "saved" / "result.json").read_text())
    assert (
        saved["protocol"] == "gldv2"
        and saved["queries"] == 2
        and saved["network"] == "a checkpoint"
    )
    source = converted / "source/gldv2"
    names = ["1111111111111111", "2222222222222222", "3333333333333333"]
    gallery = describe_files(
        extraction.describer, [photo(source / "index", name) for name in names]
    )
    expected = []
    for name, positives in (("4444444444444444", {0, 2}), ("6666666666666666", {1})):
        similarities = (
            describe_files(extraction.describer, [photo(source / "test", name)]) @ gallery.t()
        )[0].tolist()
        expected.append(figure_of("mAP@100", ranking(similarities, positives, set())))
    assert saved["figures"]["mAP@100"] == pytest.approx(np.mean(expected))


def test_uned_and_ijb_c_are_evaluated_by_their_files(converted, training_shards, tmp_path):
    extraction = describing(tmp_path, training_shards)
    evaluation = open_set(str(converted / "uned")).describe(extraction).evaluate()
    domains = [
        f"{name} R@1"
        for name in ("cars", "sop", "inat", "food2k", "rp2k", "inshop", "met", "gldv2")
    ]
    assert {*domains, "mean R@1", "mean mP@5/min"} < evaluation.figures.keys()
    assert (evaluation.images, evaluation.queries, evaluation.left_out) == (20 + 3 + 20 + 6, 23, 0)
    assert evaluation.figures["mean R@1"] == pytest.approx(
        np.mean([evaluation.figures[name] for name in domains])
    )
    folder = converted / "source/uned/images"
    index = [
        f"{item}/test/{n}" for item in ("cars", "sop", "inat", "food2k", "rp2k") for n in range(4)
    ]
    index += [f"{item}/index/{n}" for item in ("inshop", "met", "gldv2") for n in range(2)]
    described = describe_files(
        extraction.describer, [(folder / f"{name}.jpg").read_bytes() for name in index]
    )
    query = describe_files(extraction.describer, [(folder / "gldv2/test/0.jpg").read_bytes()])
    best = (described @ query[0]).argsort(descending=True)[:2].tolist()
    # two are right
    assert evaluation.figures["gldv2 mP@5/min"] == np.mean([place in (24, 25) for place in best])
    evaluation = open_set(str(converted / "ijb-c")).describe(extraction).evaluate()
    assert (evaluation.images, evaluation.queries) == (20, 10)


def photo(folder: Path, name: str) -> bytes:
    return (folder / name[0] / name[1] / name[2] / f"{name}.jpg").read_bytes()


def slow_figures(describing, queries: list[Path], gallery: list[Path]) -> dict[str, float]:
    """Figures of image files, whose class is their folder's name."""
    asking, remaining = (
        describe_files(describing.describer, [path.read_bytes() for path in files])
        for files in (queries, gallery)
    )
    orders = {}
    for row, (own_row, query) in enumerate(
        zip((asking @ remaining.t()).tolist(), queries, strict=True)
    ):
        positives = {
            place for place, path in enumerate(gallery) if path.parent.name == query.parent.name
        }
        if positives:
            orders[row] = ranking(own_row, positives, set())
    return labelled_figures(orders, (1, 5, 10))


@pytest.fixture(scope="module")
def query_and_gallery(tmp_path_factory):
    """Shards of queries and of a gallery, and the files in them; the gallery lacks a class of the
    queries.
    """
    folder = tmp_path_factory.mktemp("parts")
    classes = {"a": 4, "b": 5, "c": 3, "d": 2, "e": 6}
    files = [
        folder / "images" / name / f"{number}.png"
        for name in classes
        for number in range(classes[name])
    ]
    # no network tells these classes apart, so that no figure is 1
    for seed, path in enumerate(files):
        path.parent.mkdir(parents=True, exist_ok=True)
        benchmarks.photos.photo(40, 36, seed).save(path)
    files_by_part = {
        "query": files[::3],
        "gallery": [path for path in files if path not in files[::3]],
    }
    files_by_part["gallery"] = [
        path for path in files_by_part["gallery"] if path.parent.name != "c"
    ]
    for name, files_of_part in files_by_part.items():
        pack([ImageFile(path, path.parent.name) for path in files_of_part], folder / name)
    return folder, files_by_part


def test_queries_retrieve_the_gallery_of_other_shards(query_and_gallery, training_shards, tmp_path):
    folder, files_by_part = query_and_gallery
    extraction = describing(tmp_path, training_shards)
    opened = open_set(str(folder / "query"), gallery=str(folder / "gallery"))
    described = opened.describe(extraction)
    evaluation = described.evaluate()
    assert evaluation.figures == pytest.approx(
        slow_figures(extraction, files_by_part["query"], files_by_part["gallery"])
    )
    assert evaluation.figures["mAP"] < 0.9
    lost = sum(path.parent.name == "c" for path in files_by_part["query"])
    assert (evaluation.queries, evaluation.left_out) == (
        len(files_by_part["query"]) - lost,
        lost,
    ) and lost > 0
    evaluation.save(tmp_path / "saved")
    retrieved = read_evaluation(tmp_path / "saved").retrieved()
    keys = [path.stem for path in files_by_part["query"]]
    asking, remaining = (
        describe_files(extraction.describer, [path.read_bytes() for path in paths])
        for paths in files_by_part.values()
    )
    for row in range(len(keys)):
        nearest = (remaining @ asking[row]).argsort(descending=True)[:10] + len(keys)
        assert retrieved.neighbours[row].tolist() == nearest.tolist()
    refined = described.evaluate(Refinement(augment=2.0, expand=0.0, neighbours=2, rerank=20))
    assert refined.figures != evaluation.figures and refined.gallery == str(folder / "gallery")


def test_a_gallery_that_holds_the_queries_leaves_each_out_for_itself(training_shards, tmp_path):
    TREES["dyml-animal"](tmp_path / "source")
    convert("dyml-animal", tmp_path / "source", tmp_path / "out")
    extraction = describing(tmp_path, training_shards)
    place = str(tmp_path / "out/fine-query")
    actual = (
        open_set(place, gallery=place.replace("query", "gallery"), figures=["R@1", "ASI"])
        .describe(extraction)
        .evaluate()
    )
    files = sorted((tmp_path / "source/bmk_fine/gallery").iterdir())
    described = describe_files(extraction.describer, [path.read_bytes() for path in files])
    # Images 2 and 3 of the gallery are the queries; 1 is of the class of the first, and 0 of that
    # of the second.
    nearest = (described[2:4] @ described.t()).masked_fill(torch.eye(5)[2:4].bool(), -1).argmax(1)
    share = float((nearest == torch.tensor([1, 0])).float().mean())
    assert [actual.figures[name] for name in ("R@1", "ASI")] == [share, share]


def test_a_gallery_is_drawn_as_vehicle_id_does(query_and_gallery, training_shards, tmp_path):
    folder, files_by_part = query_and_gallery
    files = files_by_part["gallery"]
    extraction = describing(tmp_path, training_shards)
    evaluation = open_set(str(folder / "gallery"), gallery_draws=10).describe(extraction).evaluate()
    figures = []
    galleries = set()
    for draw in range(10):
        gallery = {}
        for place in permutation(len(files), GALLERY, draw).tolist():
            gallery.setdefault(files[place].parent.name, files[place])
        drawn = list(gallery.values())
        figures.append(
            slow_figures(extraction, [path for path in files if path not in drawn], drawn)
        )
        galleries.add(frozenset(drawn))
    assert len(galleries) > 5
    for name in ("mAP", "R@1", "R@5"):
        assert evaluation.figures[name] == pytest.approx(
            np.mean([figures_of_draw[name] for figures_of_draw in figures])
        )
    assert (evaluation.queries, evaluation.left_out) == (
        len(files) - len({path.parent for path in files}),
        0,
    )


def test_training_and_eval_know_the_gallery(
    query_and_gallery, training_shards, tmp_path, monkeypatch
):
    folder, _ = query_and_gallery
    run = tmp_path / "run"
    query = str(folder / "query")
    gallery = str(folder / "gallery")
    also = {
        "drawn": {"data": gallery, "gallery_draws": 3},
        "other": {"data": gallery, "gallery": query},
    }
    data = {"data__validation": query, "data__gallery": gallery}
    train(World(), run, training_shards, steps=1, evaluation={"every": 1, "also": also}, **data)
    last = [entry for entry in read_run_log(run) if "validation" in entry][-1]
    for name, figures, options in (
        ("remembered", last["validation"], []),
        ("asked", last["also"]["other"], [f"--data={gallery}", f"--gallery={query}"]),
        ("drawn", last["also"]["drawn"], [f"--data={gallery}", "--gallery-draws=3"]),
    ):
        assert (
            distap(monkeypatch, "eval", "--checkpoint", run, *options, "--output", tmp_path / name)
            == 0
        )
        assert read_evaluation(tmp_path / name).figures == pytest.approx(figures)
    assert (
        distap(monkeypatch, "eval", "--checkpoint", run, f"--gallery={query}", "--gallery-draws=3")
        == 2
    )
    with pytest.raises(DistapError, match="these are the queries themselves"):
        open_set(query, gallery=query)
    assert distap(monkeypatch, "report", run) == 0
    assert (run / "report.html").read_text().count("data:image/webp") > 10
    for step in saved_steps(run):
        shutil.copytree(tmp_path / "drawn", folder_of_step(run, step), dirs_exist_ok=True)
    assert distap(monkeypatch, "report", run) == 0
    assert "kept neither of galleries that are drawn" in (run / "report.html").read_text()
    with pytest.raises(DistapError, match="which names none"):
        recipe(run, training_shards, data__gallery=gallery)
    with raises("data.seen_classes", "data.validation", "4"):
        batch = {"name": "random", "batch_size": 8}
        train(
            World(),
            tmp_path,
            [gallery],
            sampling=batch,
            **data | {"data__validation": str(training_shards[1])},
        )


def test_distractors_lower_figures_as_images_of_the_gallery_do(
    converted, training_shards, tmp_path
):
    extraction = describing(tmp_path, training_shards)
    distractors = tmp_path / "extracted"
    oxford = str(converted / "roxford5k")
    images = open_images(str(converted / "revisitop1m/distractors"))
    extract_to_folder(Extraction(extraction, images), distractors)
    plain = open_set(oxford)
    apart = open_set(oxford, distractors=[str(distractors)]).describe(extraction)
    whole = replace(plain, gallery=(*plain.gallery, images)).describe(extraction)
    for refinement in (Refinement(), Refinement(expand=2.0, neighbours=3, rerank=20)):
        assert apart.evaluate(refinement).figures == pytest.approx(
            whole.evaluate(refinement).figures, abs=1e-6
        )
    first = apart.evaluate().figures
    without = plain.describe(extraction).evaluate().figures
    assert all(first[name] <= without[name] + 1e-12 for name in without) and first != without
    with pytest.raises(DistapError, match="are not augmented"):
        apart.evaluate(Refinement(augment=2.0))
    sized = describing(tmp_path, training_shards, sizing="side 8")
    with pytest.raises(DistapError, match=r"extracted: described by .*expected .*'side 8'"):
        open_set(oxford, distractors=[str(distractors)]).describe(sized).evaluate()


def test_a_trained_network_remembers_how_it_was_evaluated(training_shards, tmp_path, monkeypatch):
    validation = str(training_shards[1])
    run = tmp_path / "run"
    sizing = "resize 40x48 crop 36"
    of_own = {"data": validation, "figures": ["mAP", "R@3"]}
    also = {"same": of_own, "square": {**of_own, "sizing": "crop 32", "scales": [1.0]}}
    settings = {
        "sizing": sizing,
        "scales": [1.0, 0.75],
        "every": 1,
        "also": also,
        "figures": ["mAP", "R@3"],
    }
    settings |= {"antialias": False}
    train(World(), run, training_shards, steps=1, data__validation=validation, evaluation=settings)
    last = [entry for entry in read_run_log(run) if "validation" in entry][-1]
    assert last["also"]["same"] == last["validation"] != last["also"]["square"]
    assert list(last["validation"]) == ["mAP", "R@3"]
    describer = load(run).describer
    assert (str(describer.sizing), describer.network.scales) == (sizing, (1.0, 0.75))

    figures = {}
    for name, options in {
        "remembered": [],
        "asked for": [f"evaluation.sizing={sizing}", "evaluation.scales=[1,0.75]"],
        "by override": ["evaluation.sizing=null", "evaluation.scales=[1]"],
    }.items():
        assert (
            distap(monkeypatch, "eval", "--checkpoint", run, *options, "--output", tmp_path / name)
            == 0
        )
        figures[name] = read_evaluation(tmp_path / name).figures
    assert figures["remembered"] == figures["asked for"] == pytest.approx(last["validation"])
    assert figures["by override"] == pytest.approx(last["also"]["square"])
    assert (
        distap(monkeypatch, "extract", validation, tmp_path / "descriptors", "--checkpoint", run)
        == 0
    )
    assert read_descriptors(tmp_path / "descriptors").described_by.sizing == sizing
    assert distap(monkeypatch, "export", run, tmp_path / "export", "--format=safetensors") == 0
    exported = load(tmp_path / "export").describer
    assert str(exported.sizing) == sizing and not exported.antialias
    card = (tmp_path / "export" / "README.md").read_text()
    names = {}
    exec(re.search(r"```python\n(import torch\n.*?)\n\nimages = ", card, re.DOTALL)[1], names)
    (tmp_path / "photo.png").write_bytes(encoded(Image.effect_noise((90, 50), 80)))
    image = EncodedImage((tmp_path / "photo.png").read_bytes())
    assert torch.equal(names["pixels"](tmp_path / "photo.png")[0], describer.sizing(image))


def test_a_wrong_way_of_taking_images_is_refused_when_the_recipe_is_read(training_shards, tmp_path):
    for wrong in ({"sizing": "crop"}, {"sizing": "resize 24 crop 32"}, {"scales": []}):
        with pytest.raises(
            DistapError, match=r"evaluation\.sizing: .*M of N or more|at least 1 item"
        ):
            recipe(tmp_path, training_shards, evaluation=wrong)


def test_several_sets_are_evaluated_in_one_call(converted, training_shards, tmp_path, monkeypatch):
    configuration = recipe(tmp_path / "run", training_shards)
    (tmp_path / "recipe.yaml").write_text(json.dumps(configuration.model_dump(mode="json")))
    sets = [f"--data=oxford={converted / 'roxford5k'}", f"--data=own={training_shards[1]}"]
    expanded = "--query-expansion=2"
    options = [expanded, "evaluation.sizing=original", f"--output={tmp_path / 'out'}"]
    configured = ["eval", "--checkpoint", tmp_path / "recipe.yaml"]
    assert distap(monkeypatch, *configured, *sets[:1], *options) == 0
    assert distap(monkeypatch, *configured, *sets, expanded, f"--output={tmp_path / 'both'}") == 0
    assert (
        distap(
            monkeypatch,
            *configured,
            *sets,
            "--figures=R@2,mP@3/min",
            f"--output={tmp_path / 'named'}",
        )
        == 0
    )
    assert list(read_evaluation(tmp_path / "named/own").figures) == ["mAP", "R@2", "mP@3/min"]
    assert list(read_evaluation(tmp_path / "named/oxford").figures)[:2] == [
        "Easy R@2",
        "Easy mP@3/min",
    ]
    assert distap(monkeypatch, *configured, *sets[1:], "--figures=R") == 2
    assert read_evaluation(tmp_path / "both/own").refinement == "query expansion"
    assert json.loads((tmp_path / "out/result.json").read_text())["protocol"] == "roxford5k"


def test_a_ground_truth_may_name_one_folder_as_a_text(converted, tmp_path):
    shutil.copytree(converted / "roxford5k", tmp_path / "text")
    file = tmp_path / "text/ground_truth.json"
    truth = json.loads(file.read_text())
    [folder] = truth["query"]
    file.write_text(json.dumps(truth | {"query": folder}))
    expected = open_set(str(converted / "roxford5k"))
    actual = open_set(str(tmp_path / "text"))
    assert actual.images.fingerprint == expected.images.fingerprint


def test_a_ground_truth_that_leads_out_of_its_folder_is_refused(converted, tmp_path):
    truth = json.loads((converted / "roxford5k/ground_truth.json").read_text())
    (tmp_path / "ground_truth.json").write_text(json.dumps(truth | {"query": ["../query"]}))
    with pytest.raises(
        DistapError, match=r"ground_truth\.json: .*is not the name of a folder next to it"
    ):
        open_set(str(tmp_path))


def test_a_folder_of_photographs_is_evaluated_by_a_truth_of_a_few_lines(
    training_shards, tmp_path, monkeypatch, capsys
):
    configuration = recipe(tmp_path / "run", training_shards)
    (tmp_path / "recipe.yaml").write_text(json.dumps(configuration.model_dump(mode="json")))
    (tmp_path / "photos").mkdir()
    names = ["mug", "mug-again", "mug-behind", "pen", "pen-again"]
    for number, name in enumerate(names):
        pixels = np.random.default_rng(number).integers(0, 256, (24, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{name}.png")
    (tmp_path / "truth.json").write_text("""{"figures": ["mAP", "R@1", "mP@2/min"],
            "queries": [{"name": "mug.png", "positives": ["mug-again.png"],
                         "junk": ["mug-behind.png"]},
                        {"name": "pen.png", "positives": ["pen-again.png"], "part": "pens"}]}""")
    recipe_and_data = ["--checkpoint", tmp_path / "recipe.yaml", f"--data={tmp_path / 'photos'}"]
    configured = ["eval", *recipe_and_data, "evaluation.sizing=original"]
    assert distap(monkeypatch, *configured, f"--truth={tmp_path / 'truth.json'}", "--json") == 0
    figures = json.loads(capsys.readouterr().out)["sets"]["photos"]["plain"]
    extraction = describing(tmp_path, training_shards)
    described = describe_files(
        extraction.describer, [(tmp_path / "photos" / f"{name}.png").read_bytes() for name in names]
    )
    similarities = described @ described.t()
    rankings = [
        ranking(similarities[0].tolist(), {1}, {0, 2}),
        ranking(similarities[3].tolist(), {4}, {3}),
    ]
    places = [1 + places.index(True) for places in rankings]
    assert figures["mAP"] == pytest.approx(np.mean([1 / place for place in places]))
    assert figures["pens R@1"] == (places[1] == 1) and "mean mP@2/min" in figures
    gallery = [*configured, f"--gallery={training_shards[1]}", f"--truth={tmp_path / 'truth.json'}"]
    assert distap(monkeypatch, *gallery) == 2
    assert "query mug.png: the gallery lacks 1 of the 1 images" in capsys.readouterr().err


def test_what_cannot_be_evaluated_says_why(converted, training_shards, tmp_path):
    with pytest.raises(DistapError, match=r"no descriptors in it; expected \.npy"):
        open_set(str(training_shards[1]), distractors=[str(training_shards[0])])
    with pytest.raises(DistapError, match="says nothing of classes"):
        open_set(str(converted / "source/roxford5k/jpg"))
    truth = json.loads((converted / "roxford5k/ground_truth.json").read_text())
    boxed = json.loads(json.dumps(truth))
    truth["queries"][0]["name"] = "somewhere_else"
    boxed["queries"][1]["box"] = [5, 0, 5, 1]
    for split in ("query", "gallery"):
        (tmp_path / split).symlink_to(converted / "roxford5k" / split)
    for changed, message in (
        (truth, "query somewhere_else and 0 more are not in it"),
        (boxed, "expected left, top"),
    ):
        (tmp_path / "ground_truth.json").write_text(json.dumps(changed))
        with pytest.raises(DistapError, match=message):
            open_set(str(tmp_path)).describe(describing(tmp_path, training_shards))


def test_a_network_that_is_broken_for_some_images_gets_no_figure(
    training_shards, tmp_path, monkeypatch
):
    extraction = describing(tmp_path, training_shards, sizing="crop 32")
    call = type(extraction.describer).__call__

    def broken(describer, pixels):
        descriptors = call(describer, pixels).clone()
        descriptors[0, 0] = torch.nan
        return descriptors

    monkeypatch.setattr(type(extraction.describer), "__call__", broken)
    with pytest.raises(
        DistapError, match=r"descriptors are not finite, such as that of .*: the network is broken"
    ):
        open_set(str(training_shards[1])).describe(extraction)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            '{"queries": [{"name": "a"}], "queries": [{"name": "b"}]}',
            "the key 'queries' stands twice",
        ),
        (
            '{"queries": [{"name": "a", "junk": ["b"], "junk": ["c"]}]}',
            "the key 'junk' stands twice",
        ),
        ('{"queries": [{"name": "a"}], "radius": 1e999}', "the number 1e999 is not finite"),
        ('{"queries": [{"name": "a"}], "radius": NaN}', "the number NaN is not finite"),
        ('{"queries": [{"name": "a"}], "radius": -1}', "radius: Input should be greater than 0"),
        ('{"queries": ' + "[" * 3000, "recursion limit"),
    ],
)
def test_a_truth_that_a_person_has_mistyped_is_refused(text, problem, tmp_path):
    (tmp_path / "truth.json").write_text(text)
    with pytest.raises(DistapError, match=f"truth.json: {problem}"):
        read_truth(tmp_path / "truth.json")

"""Queries of one network in the gallery that another has described."""

import json
from dataclasses import replace

import numpy as np
import pytest
from commands import distap
from dataset_trees import TREES
from extractions import (
    describe_files,
    describer,
    encoded,
    extract,
)
from images import write_images
from postprocessing_reference import write_descriptors
from raising import raises
from ranks import on_ranks
from retrieval_reference import figure_of, order_of
from small_trainings import recipe, train

from benchmarks.photos import pack, photo
from distap.data.converters.dataset import convert
from distap.data.sizing import Sizing
from distap.evaluation.extraction.extracting import (
    Describing,
)
from distap.evaluation.extraction.image_describer import (
    ImageDescriber,
)
from distap.evaluation.query_values import GALLERY
from distap.evaluation.saved import read_evaluation
from distap.evaluation.sets import open_set
from distap.pages.report import report
from distap.randomness import permutation
from distap.retrieval.descriptor_files import (
    DescriptorSet,
    read_descriptors,
)
from distap.retrieval.refinement import Refinement
from distap.retrieval.whitening import learned_whitening
from distap.telemetry.runlog import read_run_log
from distap.training.build import trained_network
from distap.world import World


def whitened(seed):
    """A network with random weights. Whitening spreads its descriptors, so that rankings are the
    same in float32 and float64.
    """
    plain = describer("crop 32", seed)
    values = describe_files(
        plain,
        [encoded(photo(40, 36, 100 + n)) for n in range(64)],
    ).numpy()
    names = np.arange(len(values)).astype(str)
    described = DescriptorSet(values, names, names, plain.described_by, "photos")
    return describer(
        "crop 32",
        seed,
        whitening=learned_whitening(described),
    )


NEW = whitened(1)
OLD = whitened(2)
FIGURES = ("mAP", "mAP@R", "R@1", "mP@5")
PREFIXES = ("", "new-to-old ", "old-to-new ", "old-to-old ")
CLASSES = {"a": 4, "b": 5, "c": 2, "d": 1, "e": 6}


def new(world=None):
    return Describing(NEW, world or World(), workers=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Shards `query` and `gallery`, and the descriptors of each by both networks.

    The images of a class are of several patterns, and so are those of other classes, so that many
    are confused.
    """
    folder = tmp_path_factory.mktemp("rows")
    patterns = write_images(
        folder / "patterns",
        dict.fromkeys("pqr", 36),
        40,
        seed=3,
    )
    files = {name: sorted((patterns / name).iterdir()) for name in "pqr"}
    letters = np.random.default_rng(4)
    for name in ("gallery", "query"):
        for class_name, count in CLASSES.items():
            target = folder / f"{name}-images" / class_name
            target.mkdir(parents=True)
            for number in range(count):
                image = files[letters.choice(["p", "q", "r"])].pop()
                image.replace(target / f"{name}-{class_name}-{number}.png")
        pack(
            folder / f"{name}-images",
            folder / name,
            images_per_shard=7,
        )
        extract(folder / name, folder / f"old-{name}", maker=OLD)
        extract(folder / name, folder / f"new-{name}", maker=NEW)
    return folder


def rows_of(folder, network, name):
    return read_descriptors(folder / f"{network}-{name}").descriptors.astype(np.float64)


def reference(queries, gallery, positives, ignored, figures=FIGURES):
    """Mean figures from all similarities in float64; positives and ignored are sets of rows."""
    rankings = []
    for query, right, left_out in zip(queries, positives, ignored, strict=True):
        if right:
            order = order_of((gallery @ query).tolist(), right, left_out)
            rankings.append([row in right for row in order])
    return {
        name: float(np.mean([figure_of(name, ranking) for ranking in rankings])) for name in figures
    }


def in_all_directions(figures_of, of_new, of_old):
    """The figures of each direction, by a function of queries and gallery: (queries, gallery) of
    each network."""
    sides = {
        "": (of_new[0], of_new[1]),
        "new-to-old ": (of_new[0], of_old[1]),
        "old-to-new ": (of_old[0], of_new[1]),
        "old-to-old ": (of_old[0], of_old[1]),
    }
    return {
        f"{prefix}{name}": value
        for prefix, side in sides.items()
        for name, value in figures_of(*side).items()
    }


def of_class(classes, own=True):
    """The rows of each image's class, and the image's own row, which does not count."""
    positives = [
        {row for row, other in enumerate(classes) if other == name and row != query}
        for query, name in enumerate(classes)
    ]
    return positives, [{query} for query in range(len(classes))]


def test_each_image_of_a_labelled_set_queries_all_others_in_both_networks(
    folder,
):
    opened = open_set(
        str(folder / "gallery"),
        figures=FIGURES,
        gallery_rows=[folder / "old-gallery"],
    )
    actual = opened.describe(new()).evaluate().figures
    truth = of_class(read_descriptors(folder / "old-gallery").classes.tolist())
    sides = [[rows_of(folder, name, "gallery")] * 2 for name in ("new", "old")]
    expected = in_all_directions(lambda *side: reference(*side, *truth), *sides)
    assert actual == pytest.approx(expected, abs=1e-9)
    assert opened.joined_rows.directions == (
        "new-to-old",
        "old-to-new",
        "old-to-old",
    )
    assert [*actual] == opened.figure_names
    # With the own row left in, as a positive or not, the figures are others.
    classes = read_descriptors(folder / "old-gallery").classes.tolist()
    left_in = [positives | own for positives, own in zip(*truth, strict=True)]
    for positives in (left_in, truth[0]):
        wrong = reference(
            sides[0][0],
            sides[1][0],
            positives,
            [set()] * len(classes),
        )
        assert all(wrong[name] != actual[f"new-to-old {name}"] for name in ("mAP", "mP@5"))


def test_a_network_against_itself_has_the_same_figures_in_all_directions(
    folder,
):
    rows = [folder / "new-gallery"]
    actual = open_set(str(folder / "gallery"), gallery_rows=rows).describe(new()).evaluate().figures
    plain = open_set(str(folder / "gallery")).describe(new()).evaluate().figures
    assert actual == {f"{prefix}{name}": plain[name] for prefix in PREFIXES for name in plain}


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_rows_are_joined_by_name_in_any_order_and_with_others_between(folder, tmp_path, dtype):
    stored = read_descriptors(folder / "old-gallery")
    order = np.random.default_rng(0).permutation(len(stored) + 3)
    more = np.concatenate([stored.descriptors, stored.descriptors[:3]])
    keys = np.concatenate([stored.keys, np.array(["x", "y", "z"])])
    classes = np.concatenate([stored.classes, stored.classes[:3]])
    other = replace(
        stored,
        checksums=None,
        descriptors=more[order].astype(dtype),
        keys=keys[order],
        classes=classes[order],
    )
    write_descriptors(tmp_path / "shuffled", other)
    actual, expected = (
        open_set(str(folder / "gallery"), gallery_rows=[rows]).describe(new()).evaluate().figures
        for rows in (
            tmp_path / "shuffled",
            folder / "old-gallery",
        )
    )
    for name in (
        "new-to-old mAP",
        "old-to-new mAP",
        "old-to-old mAP",
    ):
        tolerance = 1e-9 if dtype == np.float32 else 0.02
        assert actual[name] == pytest.approx(expected[name], abs=tolerance)


def test_queries_of_either_network_search_a_gallery_of_either(folder, caplog):
    place = {
        "gallery": str(folder / "gallery"),
        "figures": FIGURES,
    }
    both = [folder / "old-query", folder / "old-gallery"]
    actual = (
        open_set(
            str(folder / "query"),
            **place,
            gallery_rows=both,
        )
        .describe(new())
        .evaluate()
    )
    classes = [
        read_descriptors(folder / f"old-{name}").classes.tolist() for name in ("query", "gallery")
    ]
    positives = [{row for row, label in enumerate(classes[1]) if label == q} for q in classes[0]]
    sides = [
        (
            rows_of(folder, network, "query"),
            rows_of(folder, network, "gallery"),
        )
        for network in ("new", "old")
    ]
    nothing = [set()] * len(positives)
    expected = in_all_directions(
        lambda *side: reference(*side, positives, nothing),
        *sides,
    )
    assert actual.figures == pytest.approx(expected, abs=1e-9)

    caplog.set_level("INFO", "distap")
    alone = open_set(
        str(folder / "query"),
        **place,
        gallery_rows=[folder / "old-gallery"],
    )
    assert "no figures of old-to-new and old-to-old" in caplog.text
    assert alone.describe(new()).evaluate().figures == {
        name: value for name, value in actual.figures.items() if not name.startswith("old-")
    }
    with raises(
        "descriptors.missing_rows",
        folder / "old-query",
        folder / "gallery",
        18,
    ):
        open_set(
            str(folder / "query"),
            **place,
            gallery_rows=[folder / "old-query"],
        )


def test_galleries_are_drawn_alike_for_both_networks(
    folder,
):
    opened = open_set(
        str(folder / "gallery"),
        gallery_draws=4,
        figures=FIGURES,
        gallery_rows=[folder / "old-gallery"],
    )
    actual = opened.describe(new()).evaluate().figures
    classes = read_descriptors(folder / "old-gallery").classes

    def drawn(queries, gallery):
        figures = []
        for draw in range(4):
            order = permutation(len(classes), GALLERY, draw)
            chosen = [next(row for row in order if classes[row] == name) for name in CLASSES]
            asked = [row for row in range(len(classes)) if row not in chosen]
            positives = [
                {place for place, row in enumerate(chosen) if classes[row] == classes[query]}
                for query in asked
            ]
            nothing = [set()] * len(asked)
            figures.append(
                reference(
                    queries[asked],
                    gallery[chosen],
                    positives,
                    nothing,
                )
            )
        return {name: np.mean([of_draw[name] for of_draw in figures]) for name in FIGURES}

    sides = [[rows_of(folder, name, "gallery")] * 2 for name in ("new", "old")]
    assert actual == pytest.approx(in_all_directions(drawn, *sides), abs=1e-9)


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_listed_truth_leaves_junk_and_the_query_itself_out(folder, tmp_path, is_apart):
    keys = read_descriptors(folder / "old-gallery").keys.tolist()
    asked = read_descriptors(folder / "old-query").keys.tolist() if is_apart else keys
    queries = [
        {
            "name": asked[2],
            "positives": keys[4:9],
            "junk": keys[10:13],
        },
        {
            "name": asked[7],
            "positives": [keys[0], keys[16]],
        },
        {
            "name": asked[11],
            "positives": keys[12:14],
            "junk": [keys[3]],
        },
    ]
    path = tmp_path / "truth.json"
    path.write_text(json.dumps({"figures": FIGURES, "queries": queries}))
    source = folder / ("query" if is_apart else "gallery")
    rows = [
        folder / "old-gallery",
        *[folder / "old-query"] * is_apart,
    ]
    opened = open_set(
        str(source),
        gallery=str(folder / "gallery"),
        truth=path,
        gallery_rows=rows,
    )
    actual = opened.describe(new()).evaluate().figures
    places = [asked.index(query["name"]) for query in queries]
    positives = [{keys.index(name) for name in query["positives"]} for query in queries]
    ignored = [{keys.index(name) for name in query.get("junk", [])} for query in queries]
    if not is_apart:
        ignored = [{*junk, place} for junk, place in zip(ignored, places, strict=True)]
    sides = [
        (
            rows_of(folder, network, source.name)[places],
            rows_of(folder, network, "gallery"),
        )
        for network in ("new", "old")
    ]
    expected = in_all_directions(
        lambda *side: reference(*side, positives, ignored),
        *sides,
    )
    assert actual == pytest.approx(expected, abs=1e-9)


def convert_and_extract(name, folder):
    """Convert a data set, and describe each of its folders of queries and gallery by both."""
    TREES[name](folder / "source")
    convert(name, folder / "source", folder / "out")
    truth = json.loads((folder / "out/ground_truth.json").read_text())
    splits = [*dict.fromkeys((*truth["query"], *truth["gallery"]))]
    for split in splits:
        extract(
            folder / "out" / split,
            folder / f"new-{split}",
            maker=NEW,
        )
        extract(
            folder / "out" / split,
            folder / f"old-{split}",
            maker=OLD,
        )
    return truth, [folder / f"old-{split}" for split in splits]


def named_rows(folder, network, splits, truth):
    """Names of the images of some splits and their rows, instances as the means of their images."""
    rows = {}
    for split in splits:
        values = rows_of(folder, network, split)
        names = read_descriptors(folder / f"{network}-{split}").classes.tolist()
        if not truth.get("queries"):  # where several images have the name of their class
            names = [(split, row, name) for row, name in enumerate(names)]
        rows |= dict(zip(names, values, strict=True))
    for name, members in truth.get("instances", {}).items():
        mean = sum(rows.pop(member) for member in members) / len(members)
        rows[name] = mean / np.linalg.norm(mean)
    return rows


@pytest.mark.parametrize("name", ["ijb-c", "uned", "market-1501", "gldv2"])
def test_converted_sets_are_ranked_by_their_truth_in_all_directions(name, tmp_path):
    truth, folders = convert_and_extract(name, tmp_path)
    opened = open_set(str(tmp_path / "out"), gallery_rows=folders)
    actual = opened.describe(new()).evaluate().figures
    assert {*actual} == {*opened.figure_names}
    sides = []
    for network in ("new", "old"):
        asked = named_rows(tmp_path, network, truth["query"], truth)
        gallery = named_rows(tmp_path, network, truth["gallery"], truth)
        queries = truth.get("queries") or [
            {
                "name": query,
                "positives": [right for right in gallery if is_right(query, right)],
            }
            for query in asked
        ]
        place = {image: row for row, image in enumerate(gallery)}
        positives = [{place[image] for image in query["positives"]} for query in queries]
        ignored = [
            {
                place[image]
                for image in (
                    query["name"],
                    *query.get("junk", []),
                )
                if image in place
            }
            for query in queries
        ]
        of_queries = np.stack([asked[query["name"]] for query in queries])
        sides.append((of_queries, np.stack([*gallery.values()])))

    def figures_of(*side):
        return reference(*side, positives, ignored, truth["figures"])

    expected = in_all_directions(figures_of, *sides)
    assert {figure: actual[figure] for figure in expected} == pytest.approx(expected, abs=1e-6)


def is_right(query, image):
    """UnED: images of one of the query's classes, and not the query itself."""
    return image[2] in query[2].split("|") and image != query


def test_boxes_of_queries_have_no_old_rows(tmp_path):
    _, folders = convert_and_extract("roxford5k", tmp_path)
    opened = open_set(str(tmp_path / "out"), gallery_rows=folders)
    assert opened.joined_rows.directions == ("new-to-old",)
    figures = opened.describe(new()).evaluate().figures
    assert "new-to-old Easy mAP/trapezoids" in figures and [*figures] == opened.figure_names


def test_names_that_two_sets_share_are_told_apart_by_their_data_sets(folder, tmp_path):
    """Query and gallery of the same names: each folder is its own data set's."""
    for name in ("gallery", "query"):
        images = write_images(
            tmp_path / f"{name}-images",
            CLASSES,
            40,
            seed=len(name),
        )
        pack(images, tmp_path / name)
        extract(
            tmp_path / name,
            tmp_path / f"old-{name}",
            maker=OLD,
        )
    place = (
        str(tmp_path / "query"),
        {"gallery": str(tmp_path / "gallery")},
    )
    alone = open_set(
        place[0],
        **place[1],
        gallery_rows=[tmp_path / "old-gallery"],
    )
    assert alone.joined_rows.directions == ("new-to-old",)
    both = [
        tmp_path / "old-query",
        tmp_path / "old-gallery",
    ]
    joined = open_set(place[0], **place[1], gallery_rows=both).joined_rows
    assert [rows.folder for rows in joined.of_set.values()] == both
    for path in both:  # as another program would write them
        (path / "extraction.json").unlink()
    with raises("descriptors.ambiguous_rows", both[0], both[1]):
        open_set(place[0], **place[1], gallery_rows=both)
    with raises(
        "descriptors.ambiguous_rows",
        both[1],
        place[0],
        "a/0.png",
    ):
        open_set(place[0], **place[1], gallery_rows=both[1:])


def augmented(rows, queries=None, exponent=2.0, neighbours=3):
    """Each row moved towards its neighbours, itself apart; or queries of the same images, towards
    rows.
    """
    asked = rows if queries is None else queries
    similarities = asked @ rows.T
    np.fill_diagonal(similarities, -np.inf)
    near = np.argsort(-similarities, axis=1)[:, :neighbours]
    weights = (
        np.maximum(
            np.take_along_axis(similarities, near, axis=1),
            0,
        )
        ** exponent
    )
    moved = asked + np.einsum("qk,qkc->qc", weights, rows[near])
    return moved / np.linalg.norm(moved, axis=1, keepdims=True)


@pytest.mark.parametrize(
    "refinement",
    [
        Refinement(augment=2.0, neighbours=3),
        Refinement(expand=2.0, neighbours=3),
    ],
)
def test_refinements_leave_each_image_out_in_every_direction(folder, refinement):
    rows = [folder / "old-gallery"]
    opened = open_set(
        str(folder / "gallery"),
        figures=FIGURES,
        gallery_rows=rows,
    )
    actual = opened.describe(new()).evaluate(refinement).figures
    truth = of_class(read_descriptors(rows[0]).classes.tolist())

    def figures_of(queries, gallery):
        if refinement.augment is not None:
            return reference(
                augmented(queries),
                augmented(gallery),
                *truth,
            )
        return reference(augmented(gallery, queries), gallery, *truth)

    sides = [[rows_of(folder, name, "gallery")] * 2 for name in ("new", "old")]
    expected = in_all_directions(figures_of, *sides)
    # Neighbours are nearly equal after augmentation, and some tie in float32.
    tolerance = 1e-9 if refinement.augment is None else 1e-3
    assert actual == pytest.approx(expected, abs=tolerance)


def test_re_ranking_leaves_the_query_out_of_its_head(
    folder,
):
    opened = open_set(
        str(folder / "gallery"),
        gallery_rows=[folder / "new-gallery"],
    )
    figures = opened.describe(new()).evaluate(Refinement(rerank=4)).figures
    assert figures["new-to-old mAP"] == figures["mAP"]
    assert figures["mAP"] != opened.describe(new()).evaluate().figures["mAP"]


def test_distractors_are_refused(folder):
    with raises(
        "evaluation.rows_and_distractors",
        folder / "gallery",
        "gallery_rows",
    ):
        rows = folder / "old-gallery"
        open_set(
            str(folder / "gallery"),
            distractors=[str(rows)],
            gallery_rows=[rows],
        )


def changed(folder, tmp_path, **changes):
    """The rows of the gallery by the old network with some changes."""
    stored = read_descriptors(folder / "old-gallery")
    values = {name: change(getattr(stored, name)) for name, change in changes.items()}
    write_descriptors(tmp_path / "rows", replace(stored, checksums=None, **values))
    return tmp_path / "rows"


def not_finite(values):
    return np.where(np.arange(len(values))[:, None] == 5, np.nan, values)


@pytest.mark.parametrize(
    ("code", "changes", "names"),
    [
        (
            "descriptors.missing_rows",
            {
                name: lambda values: values[:-2]
                for name in (
                    "descriptors",
                    "keys",
                    "classes",
                )
            },
            ("2", "18", "gallery-e-4.png"),
        ),
        (
            "descriptors.missing_rows",
            {"keys": lambda keys: np.char.add(keys, "x")},
            ("18",),
        ),
        (
            "descriptors.repeated_names",
            {"keys": lambda keys: np.array([*keys[:-1], keys[0]])},
            ("1",),
        ),
        (
            "descriptors.not_finite",
            {"descriptors": not_finite},
            ("5",),
        ),
        (
            "descriptors.wrong_length",
            {"descriptors": lambda values: 2 * values},
            ("0",),
        ),
        (
            "descriptors.wrong_shape",
            {"descriptors": lambda v: v.astype(np.int64)},
            ("int64",),
        ),
    ],
)
def test_rows_of_something_else_are_refused(folder, tmp_path, code, changes, names):
    rows = changed(folder, tmp_path, **changes)
    with raises(code, rows, *names):
        open_set(str(folder / "gallery"), gallery_rows=[rows])


def test_rows_of_other_dimensions_are_refused(folder, tmp_path):
    values = np.eye(18, 8, dtype=np.float32)
    values[:, 0] += values.sum(1) == 0
    rows = changed(folder, tmp_path, descriptors=lambda _: values)
    opened = open_set(str(folder / "gallery"), gallery_rows=[rows])
    with raises("descriptors.wrong_dimensions", rows, 8, 16):
        opened.describe(new())


def test_a_cut_file_and_a_missing_folder_are_named(folder, tmp_path):
    rows = changed(folder, tmp_path)
    whole = (rows / "descriptors.npy").read_bytes()
    (rows / "descriptors.npy").write_bytes(whole[:-4])
    with raises(
        "descriptors.damaged",
        rows / "descriptors.npy",
        len(whole) - 4,
    ):
        open_set(str(folder / "gallery"), gallery_rows=[rows])
    with raises("descriptors.missing", tmp_path / "none"):
        open_set(
            str(folder / "gallery"),
            gallery_rows=[tmp_path / "none"],
        )


def test_an_image_that_neither_network_can_take_is_left_out(folder, tmp_path):
    images = write_images(tmp_path / "images", CLASSES, 40, seed=3)
    (images / "a/0.png").write_bytes((images / "a/0.png").read_bytes()[:90])
    extract(images, tmp_path / "old", maker=OLD)
    source = f"imagefolder:{images}"
    opened = open_set(source, gallery_rows=[tmp_path / "old"])
    evaluation = opened.describe(new()).evaluate()
    assert (
        evaluation.images,
        len(read_descriptors(tmp_path / "old")),
    ) == (17, 17)
    assert "old-to-old mAP" in evaluation.figures


def test_an_image_that_the_other_network_left_out_is_left_out_of_all_directions(
    folder, tmp_path, caplog
):
    stored = read_descriptors(folder / "old-gallery")
    part = replace(
        stored,
        checksums=None,
        descriptors=stored.descriptors[1:],
        keys=stored.keys[1:],
        classes=stored.classes[1:],
        left_out={str(stored.keys[0]): "too large"},
    )
    write_descriptors(tmp_path / "rows", part)
    opened = open_set(str(folder / "gallery"), figures=FIGURES, gallery_rows=[tmp_path / "rows"])
    assert f"{stored.keys[0]}: too large" in caplog.text
    actual = opened.describe(new()).evaluate().figures
    truth = of_class(part.classes.tolist())
    sides = [[rows_of(folder, name, "gallery")[1:]] * 2 for name in ("new", "old")]
    expected = in_all_directions(lambda *side: reference(*side, *truth), *sides)
    assert actual == pytest.approx(expected, abs=1e-9)


def evaluated_on_a_rank(world, folder):
    rows = [folder / "old-gallery"]
    opened = open_set(str(folder / "gallery"), gallery_rows=rows)
    return opened.describe(new(world)).evaluate().figures


def test_ranks_compute_the_same_figures_in_all_directions(
    folder,
):
    alone = evaluated_on_a_rank(World(), folder)
    assert on_ranks(2, evaluated_on_a_rank, folder) == [
        alone,
        alone,
    ]


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory, training_shards):
    """A run that evaluates on the gallery, with rows of the same architecture and other values."""
    other = tmp_path_factory.mktemp("old") / "run"
    train(World(), other, training_shards, steps=1, seed=5)
    network = trained_network(other, World())[1]
    extract(
        folder / "gallery",
        other.parent / "rows",
        maker=ImageDescriber(network, Sizing("crop", 32)),
    )
    also = {
        "upgrade": {
            "data": str(folder / "gallery"),
            "gallery_rows": str(other.parent / "rows"),
        }
    }
    run = other.parent / "new"
    best = {"set": "upgrade", "figure": "new-to-old mAP"}
    evaluation = {"every": 2, "also": also, "best": best}
    validation = str(training_shards[1])
    train(
        World(),
        run,
        training_shards,
        steps=4,
        evaluation=evaluation,
        data__validation=validation,
    )
    return run


def test_a_training_chooses_its_best_by_queries_in_the_old_gallery(
    run,
):
    lines = [entry for entry in read_run_log(run) if "also" in entry]
    figures = [line["also"]["upgrade"] for line in lines]
    assert len(figures) == 3
    assert len({of_step["old-to-old mAP"] for of_step in figures}) == 1
    assert len({of_step["new-to-old mAP"] for of_step in figures}) > 1
    assert [line["score"] for line in lines] == [
        {"upgrade new-to-old mAP": of_step["new-to-old mAP"]} for of_step in figures
    ]
    page, _ = report(run)
    last = figures[-1]
    verdict = "holds" if last["new-to-old mAP"] > last["old-to-old mAP"] else "fails"
    assert f"upgrade: upgrade {verdict} (Shen et al. 2020)" in page.read_text()


def test_old_queries_are_ranked_in_the_old_gallery_once(
    folder,
):
    opened = open_set(
        str(folder / "gallery"),
        gallery_rows=[folder / "old-gallery"],
    )
    first = opened.describe(new()).evaluate().figures
    (key,) = opened.joined_rows.constant
    opened.joined_rows.constant[key] = {"mAP": 0.123}
    again = opened.describe(new()).evaluate().figures
    assert again["old-to-old mAP"] == 0.123 != first["old-to-old mAP"]
    assert again["old-to-new mAP"] == first["old-to-new mAP"]


def test_a_training_refuses_rows_of_other_dimensions_at_its_start(
    folder, tmp_path, training_shards
):
    also = {
        "upgrade": {
            "data": str(folder / "gallery"),
            "gallery_rows": [str(folder / "old-gallery")],
        }
    }
    settings = {
        "evaluation": {"also": also},
        "data__validation": str(training_shards[1]),
    }
    with raises(
        "descriptors.wrong_dimensions",
        folder / "old-gallery",
        16,
        96,
    ):
        train(
            World(),
            tmp_path / "run",
            training_shards,
            steps=1,
            **settings,
        )
    section = recipe(tmp_path, training_shards, **settings).evaluation.also["upgrade"]
    assert section.gallery_rows == [folder / "old-gallery"]


def test_eval_shows_all_directions_in_one_table(folder, run, tmp_path, monkeypatch, capsys):
    rows = run.parent / "rows"
    options = (
        "--checkpoint",
        run,
        "--data",
        folder / "gallery",
        "--gallery-rows",
        rows,
    )
    assert (
        distap(
            monkeypatch,
            "eval",
            *options,
            "--output",
            tmp_path / "out",
        )
        == 0
    )
    printed = capsys.readouterr().out
    heading = next(line for line in printed.splitlines() if "new-to-new" in line)
    assert heading.split() == [
        "new-to-new",
        "new-to-old",
        "old-to-new",
        "old-to-old",
    ]
    saved = read_evaluation(tmp_path / "out").figures
    row = next(line for line in printed.splitlines() if line.split()[:1] == ["mAP"])
    assert row.split()[1:] == [f"{100 * saved[f'{prefix}mAP']:.1f}" for prefix in PREFIXES]
    is_above = saved["new-to-old mAP"] > saved["old-to-old mAP"]
    assert f"upgrade {'holds' if is_above else 'fails'}" in printed
    assert distap(monkeypatch, "eval", *options, "--json") == 0
    assert json.loads(capsys.readouterr().out)["sets"]["gallery"]["plain"] == saved
    last = [entry for entry in read_run_log(run) if "also" in entry][-1]["also"]["upgrade"]
    assert {name: saved[name] for name in last} == pytest.approx(last)

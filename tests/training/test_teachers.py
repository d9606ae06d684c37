"""Rows of a teacher that a recipe names, and what Multistage makes of the same rows."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import distap
from images import damage, pack_eight_shards, pack_sets
from postprocessing_reference import write_descriptors
from raising import raises
from ranks import on_ranks
from row_folders import teacher_rows, write_rows, write_table
from servers import web_server
from small_trainings import (
    DESCENT,
    are_same,
    losses,
    parameters,
    recipe,
    train,
)

import distap as library
from distap.checkpoint.checkpoints import CHECKPOINTS_FOLDER
from distap.data.joined import MixedImages
from distap.data.loading.reader import ImageSet
from distap.data.shards.index import load_index
from distap.retrieval.descriptor_files import (
    DESCRIPTORS_FILE,
    Networks,
    read_descriptors,
)
from distap.training.prepared import prepare
from distap.training.start_checks import open_rows
from distap.world import World

STEPS = 3
LOSS = {"ap_q": 1.0, "row_folders:of_relations": 0.5}
SETTINGS = {
    "steps": STEPS,
    "loss": LOSS,
    "sampling": {"name": "random", "batch_size": 12},
    "optimizer": DESCENT,
    "checkpoint": {"every": 1, "keep": 9},
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return pack_eight_shards(tmp_path_factory.mktemp("packed"))


@pytest.fixture(scope="module")
def teacher(shards):
    """The row of each image, by its name."""
    return teacher_rows(load_index(shards).names)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, teacher):
    return write_rows(tmp_path_factory.mktemp("rows") / "teacher", teacher)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, shards, folder):
    """A run of one rank."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train_with(World(), run, shards, folder)
    return run


def settings_with(shards, folder, **changes):
    return {
        **SETTINGS,
        "data__train": str(shards),
        "data__rows": {"teacher": str(folder)},
        **changes,
    }


def train_with(world, run, shards, folder, **changes):
    train(
        world,
        run,
        (None, None),
        **settings_with(shards, folder, **changes),
    )


def by_multistage(run, teacher, **settings):
    """Parameters and losses of a plain loop over the same batches."""
    prepared = prepare(recipe(run, (None, None), **settings), World())
    images = prepared.images
    read_from = images.read_from
    sets = read_from.sets if isinstance(read_from, MixedImages) else [read_from]
    rows = torch.tensor(np.stack([teacher[str(key)] for of_set in sets for key in of_set.keys]))
    loss = prepared.step.stages.loss
    multistage = library.Multistage(prepared.network, loss, 4, normalise=False)
    values = []
    for share in images.shares(range(STEPS), STEPS):
        pixels = share.images(slice(0, len(share.present)))
        samples = share.samples[share.present]
        value = multistage(
            pixels[share.present],
            share.labels[share.present],
            samples,
            extra={"teacher": rows[samples]},
        )
        value.backward()
        prepared.step.learner.update(prepared.length.rate(share.step))
        values.append(value.item())
    return dict(prepared.network.state_dict()), values


def require_equal(run, expected, within=0.0):
    """Require the parameters and losses of a plain loop, bit for bit."""
    reference, values = expected
    assert losses(run) == pytest.approx(values, abs=1e-6)
    for name, tensor in parameters(run).items():
        other = reference[name.removeprefix("network.")]
        torch.testing.assert_close(tensor, other, rtol=0, atol=within)


def test_the_recipe_trains_as_multistage_does(tmp_path, shards, folder, teacher, whole):
    settings = settings_with(shards, folder)
    require_equal(whole, by_multistage(tmp_path / "loop", teacher, **settings))
    other = write_rows(tmp_path / "other", teacher_rows(teacher, seed=1))
    train_with(World(), tmp_path / "run", shards, other)
    assert losses(tmp_path / "run")[0] != losses(whole)[0]


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_two_ranks_train_alike(tmp_path, shards, folder, whole, engine):
    on_ranks(
        2,
        train_by,
        tmp_path / "run",
        shards,
        folder,
        {"engine": engine},
    )
    assert losses(tmp_path / "run") == pytest.approx(losses(whole), abs=1e-5)


def train_by(world, run, shards, folder, changes):
    train_with(world, run, shards, folder, **changes)


def test_windows_keep_image_and_row_together_on_any_ranks(tmp_path, shards, folder, teacher):
    changes = {
        "sampling": {"name": "random", "batch_size": 12, "window": 2},
        "data__workers": 1,
    }
    train_with(World(), tmp_path / "one", shards, folder, **changes)
    settings = settings_with(shards, folder, **changes)
    require_equal(
        tmp_path / "one",
        by_multistage(tmp_path / "loop", teacher, **settings),
    )
    on_ranks(2, train_by, tmp_path / "two", shards, folder, changes)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)


# A place that stays empty cuts the loop's micro-batches elsewhere, so that sums round differently.
@pytest.mark.parametrize(("damaged", "within"), [([1], 0), ([1, 3, 4, 5], 1e-6)])
def test_a_stand_in_brings_its_own_row(tmp_path, shards, folder, teacher, damaged, within):
    """Or, where all images of a class are damaged, none takes the place."""
    shutil.copytree(shards, tmp_path / "shards")
    damage(tmp_path / "shards", damaged)
    changes = {
        "data__max_damaged": 1.0,
        "sampling": {"name": "p_by_k", "classes": 8, "images": 2},
    }
    train_with(
        World(),
        tmp_path / "run",
        tmp_path / "shards",
        folder,
        **changes,
    )
    settings = settings_with(tmp_path / "shards", folder, **changes)
    expected = by_multistage(tmp_path / "loop", teacher, **settings)
    require_equal(tmp_path / "run", expected, within)


def test_each_set_of_a_mixture_has_rows_of_its_own(tmp_path):
    pack_sets(
        tmp_path,
        "shards-{}".format,
        {"a": (6, 3), "b": (5, 2)},
        size=40,
    )
    keys = {name: load_index(tmp_path / f"shards-{name}").names for name in "ab"}
    # The names of the two sets' images are the same, so rows of the wrong set would fit.
    assert {*keys["b"]} < {*keys["a"]}
    sets = dict[str, dict]()
    by_place = list[np.ndarray]()
    for number, name in enumerate("ab"):
        rows = teacher_rows(keys[name], seed=number)
        write_rows(tmp_path / name, rows)
        sets[name] = {
            "data": str(tmp_path / f"shards-{name}"),
            "rows": {"teacher": str(tmp_path / name)},
        }
        by_place += [rows[str(key)] for key in keys[name]]
    settings = SETTINGS | {"data__train": sets}
    run = tmp_path / "run"
    train(World(), run, (None, None), **settings)
    prepared = prepare(recipe(tmp_path / "other", (None, None), **settings), World())
    shares = prepared.images.shares(range(1))
    share = next(shares)
    share.images(slice(0, 12))
    np.testing.assert_array_equal(
        share.extra["teacher"].numpy(),
        np.stack(by_place)[share.samples.numpy()],
    )
    on_ranks(2, train_sets, tmp_path / "two", settings)
    assert losses(tmp_path / "two") == pytest.approx(losses(run), abs=1e-5)


def train_sets(world, run, settings):
    train(world, run, (None, None), **settings)


def test_a_run_resumes_with_the_same_rows_wherever_they_are(tmp_path, shards, folder, whole):
    shutil.copytree(folder, tmp_path / "moved")
    checkpoint = f"{CHECKPOINTS_FOLDER}/step-{1:08}"
    run = tmp_path / "resumed"
    shutil.copytree(whole / checkpoint, run / checkpoint)
    train_with(World(), run, shards, tmp_path / "moved")
    assert losses(run) == losses(whole)[1:] and are_same(whole, run)


def test_a_run_does_not_resume_with_other_rows(tmp_path, shards, teacher, whole):
    other = write_rows(
        tmp_path / "other",
        teacher | teacher_rows([next(iter(teacher))], seed=5),
    )
    shutil.copytree(whole, tmp_path / "run")
    with raises("run.other_recipe", "data.rows.teacher"):
        train_with(World(), tmp_path / "run", shards, other, steps=STEPS + 1)


def opened(shards, folder, world=World(), **changes):  # noqa: B008 - it is frozen
    """The training's parts, up to its rows."""
    settings = settings_with(shards, folder, **changes)
    return prepare(
        recipe(Path(folder).parent / "run", (None, None), **settings),
        world,
    )


def rows_of_share(prepared, count=12):
    shares = prepared.images.shares(range(1))
    share = next(shares)
    share.images(slice(0, count))
    keys = prepared.images.read_from.keys[share.samples.numpy()]
    return keys.tolist(), share.extra["teacher"]


def test_halves_become_float32_and_further_rows_do_not_matter(tmp_path, shards, teacher):
    halves = teacher_rows([*teacher, "another/0.png"], dtype=np.float16)
    folder = write_rows(tmp_path / "rows", halves)
    keys, rows = rows_of_share(opened(f"{shards}[:0.75]", folder))
    assert rows.dtype == torch.float32
    np.testing.assert_array_equal(rows.numpy(), np.stack([halves[key] for key in keys]))


def test_a_row_of_one_dimension_is_a_number(tmp_path, shards, teacher):
    weights = {key: row[:1] ** 2 + 1 for key, row in teacher.items()}
    folder = write_rows(tmp_path / "rows", weights)
    train_with(
        World(),
        tmp_path / "run",
        shards,
        folder,
        loss={"name": "ap_q", "weights": "given"},
        data__rows={"weights": str(folder)},
    )
    assert len(losses(tmp_path / "run")) == STEPS


def test_descriptors_in_place_of_images_have_rows(tmp_path, shards, folder, teacher):
    """Those of a frozen backbone, which the training describes once, and stored ones."""
    settings = settings_with(
        shards,
        folder,
        model__projection=8,
        model__freeze="backbone",
        data__augmentation={
            "name": "crop_flip_colour",
            "crop": 1,
            "flip": 0,
        },
        model__pooling="native",
        model__unit_length=True,
    )
    prepared = prepare(recipe(tmp_path / "run", (None, None), **settings), World())
    assert prepared.recipe.data.is_described
    keys, rows = rows_of_share(prepared)
    np.testing.assert_array_equal(rows.numpy(), np.stack([teacher[key] for key in keys]))


@pytest.mark.parametrize(
    ("change", "code", "names"),
    [
        (lambda rows: teacher_rows(["a/0.png"]), "descriptors.missing_rows",
         ["48", "class-00/0.png"]),
        (lambda rows: {**rows, "class-02/1.png": rows["class-00/0.png"] * np.nan},
         "descriptors.not_finite", ["class-02/1.png"]),
        (lambda rows: {key: row.astype(np.float64) for key, row in rows.items()},
         "descriptors.wrong_shape", ["float64"]),
        (lambda rows: {key: np.arange(3) for key in rows}, "descriptors.wrong_shape", ["int64"]),
    ],
    ids=["another set", "not finite", "float64", "whole numbers"],
)  # fmt: skip
def test_wrong_rows_are_named(tmp_path, shards, teacher, change, code, names):
    folder = write_rows(tmp_path / "rows", change(teacher))
    with raises(code, "data.rows.teacher", *names):
        opened(shards, folder)


def test_a_missing_row_is_counted_with_its_reason(tmp_path, shards, teacher):
    *_, before, last = teacher
    rows = {key: row for key, row in teacher.items() if key not in (before, last)}
    folder = write_rows(
        tmp_path / "rows",
        rows,
        left_out={last: "truncated: 3 bytes of 9"},
    )
    with raises(
        "descriptors.missing_rows",
        "2 of the 48 images",
        before,
        f"{last} (truncated",
    ):
        opened(shards, folder)


def test_a_name_that_stands_twice_is_refused(tmp_path, shards, teacher, folder):
    shutil.copytree(folder, tmp_path / "rows")
    keys = read_descriptors(folder).keys.copy()
    keys[3] = keys[5]
    values = read_descriptors(folder).descriptors
    write_table(tmp_path / "rows", keys, values)
    with raises(
        "descriptors.repeated_names",
        "data.rows.teacher",
        "1 names",
        str(keys[3]),
    ):
        opened(shards, tmp_path / "rows")


@pytest.mark.parametrize("name", ["descriptors.npy", "keys.npy"])
def test_a_cut_file_is_named(tmp_path, shards, folder, name):
    shutil.copytree(folder, tmp_path / "rows")
    with (tmp_path / "rows" / name).open("r+b") as file:
        file.truncate(200)
    with raises("descriptors.damaged", name, "200 bytes"):
        opened(shards, tmp_path / "rows")


def test_loss_and_rows_have_to_fit(tmp_path, shards, folder):
    with raises("loss.needs_extra", "teacher", "data.rows"):
        opened(shards, folder, data__rows={})
    with raises("loss.unused_rows", "data.rows", "teacher"):
        opened(shards, folder, loss="ap_q")
    with raises("recipe.value", "streamed", "data.rows"):
        opened(shards, folder, data__reading="streamed")
    with raises("recipe.value", "data.train.a.rows"):
        opened(shards, folder, data__train={"a": str(shards)})
    sets = {
        "a": {"data": str(shards), "rows": {"teacher": str(folder)}},
        "b": str(shards),
    }
    with raises("recipe.value", "train.b.rows are none"):
        recipe(tmp_path, (None, None), **SETTINGS | {"data__train": sets})
    with raises("data.bad_source", "data.rows.teacher"):
        opened(shards, folder, data__rows={"teacher": f"{folder}/*"})


def test_hosts_with_other_rows_are_named(tmp_path, shards, teacher):
    for rank in range(2):
        write_rows(
            tmp_path / f"rows-{rank}",
            teacher_rows(teacher, seed=rank),
        )
    on_ranks(2, require_refused, tmp_path, shards)


def require_refused(world, folder, shards):
    host = World(**{**vars(world), "local_rank": 0})
    with raises("ranks.differ", "data.rows.teacher", "rank 1"):
        opened(shards, folder / f"rows-{world.rank}", world=host)


def test_a_dry_run_tries_the_rows(tmp_path, shards, folder, monkeypatch):
    text = f"""
run: {tmp_path}/run
steps: 2
data: {{train: {shards}, image_size: 32, workers: 0, rows: {{teacher: {folder}}}}}
sampling: {{name: p_by_k, classes: 6, images: 2}}
loss: {{ap_q: 1.0, "row_folders:of_relations": 0.5}}
model: {{backbone: test_resnet, weights: random}}
"""
    (tmp_path / "recipe.yaml").write_text(text)
    assert (
        distap(
            monkeypatch,
            "train",
            tmp_path / "recipe.yaml",
            "--dry-run",
        )
        == 0
    )
    other = write_rows(tmp_path / "other", teacher_rows(["a/0.png"]))
    changed = f"data.rows.teacher={other}"
    assert (
        distap(
            monkeypatch,
            "train",
            tmp_path / "recipe.yaml",
            "--dry-run",
            changed,
        )
        != 0
    )


def test_ranks_of_a_host_copy_a_store_s_rows_once(tmp_path, shards, folder, teacher):
    with web_server(folder) as server:
        on_ranks(
            2,
            require_copied,
            server.url,
            tmp_path / "cache",
            shards,
            teacher,
        )
        of_rows = [request for request in server.requests if DESCRIPTORS_FILE in request]
        assert sum("bytes=" in request for request in of_rows) == 1


def require_copied(world, url, cache, shards, teacher):
    settings = settings_with(
        shards,
        url,
        data__cache={"folder": str(cache), "bytes": 10**6},
    )
    stored = open_rows(recipe(cache / "run", (None, None), **settings), world)
    images = ImageSet(str(shards), load_index(shards))
    rows = stored.joined(images)(np.arange(5))["teacher"]
    np.testing.assert_array_equal(rows, np.stack([teacher[str(key)] for key in images.keys[:5]]))


def test_an_unreachable_store_is_a_reason_to_start_again(tmp_path, shards, folder):
    with web_server(folder) as server:
        server.faults = ["503"] * 99
        with raises("storage.unreachable", server.url):
            opened(shards, folder, data__rows={"teacher": server.url})


@pytest.fixture(scope="module")
def of_two_networks(folder, tmp_path_factory):
    stored = read_descriptors(folder)
    makers = stored.described_by, replace(stored.described_by, network="another")
    networks = Networks(makers, (np.arange(len(stored)) % 2).astype(np.uint16))
    several = tmp_path_factory.mktemp("several") / "rows"
    write_descriptors(several, replace(stored, networks=networks))
    return several


def test_rows_of_several_networks_are_refused(shards, of_two_networks, tmp_path):
    with raises("descriptors.several_networks", "data.rows.teacher", "another"):
        opened(shards, of_two_networks)
    cache = {"folder": str(tmp_path / "cache"), "bytes": 10**6}
    with (
        web_server(of_two_networks) as server,
        raises("descriptors.several_networks", "data.rows.teacher", "another"),
    ):
        opened(shards, of_two_networks, data__rows={"teacher": server.url}, data__cache=cache)


def test_copies_are_kept_from_other_users(shards, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with web_server(folder) as server:
        opened(shards, folder, data__rows={"teacher": server.url})
        (place,) = tmp_path.glob("distap-*")
        assert place.stat().st_mode & 0o777 == 0o700
        monkeypatch.setattr("os.getuid", lambda: 12345)
        with raises("storage.cannot_write", tmp_path / "distap-12345"):
            opened(shards, folder, data__rows={"teacher": server.url})


def test_a_rank_that_alone_cannot_open_rows_stops_all(tmp_path, shards, folder):
    shutil.copytree(folder, tmp_path / "rows-0")
    assert on_ranks(2, require_stopped, tmp_path, shards) == [None, None]


def require_stopped(world, folder, shards):
    with raises("descriptors.missing", "rank 1"):
        opened(shards, folder / f"rows-{world.rank}", world=world)

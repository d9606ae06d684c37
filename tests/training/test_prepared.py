"""Prepare a training: what is opened and built before its first step."""

import numpy as np
from images import write_images
from raising import raises
from small_trainings import are_same, recipe

from distap.errors import FINISHED
from distap.trainer import Trainer
from distap.training.dry_run import _rows_to_rank, dry_run
from distap.training.prepared import prepare
from distap.world import World

WHITENED = {"backbone": "test_resnet", "weights": "random", "projection": 8, "whitening": 40}


def images_with_a_loose_file(folder):
    write_images(folder, {f"class-{number}": 4 for number in range(8)}, 40, 1)
    (folder / "class-0" / "notes.txt").write_text("no image")
    return f"imagefolder:{folder}"


def test_a_data_set_is_opened_once_so_that_what_is_left_out_is_told_once(tmp_path, caplog):
    where = images_with_a_loose_file(tmp_path / "images")
    settings = recipe(tmp_path / "run", (where,), model=WHITENED)
    prepare(settings, World())
    assert caplog.text.count("left out") == 1
    assert "the projection begins as the whitening of 50 images" in caplog.text


def test_a_dry_run_prepares_once_and_leaves_no_run_behind(tmp_path, caplog):
    where = images_with_a_loose_file(tmp_path / "images")
    dry_run(recipe(tmp_path / "run", (where,), model=WHITENED), 2)
    assert caplog.text.count("left out") == 1
    assert "begins as the whitening" not in caplog.text and not (tmp_path / "run").exists()


def test_a_dry_run_refuses_more_ranks_than_a_batch_has_images(tmp_path, training_shards):
    settings = recipe(tmp_path, training_shards, sampling={"name": "random", "batch_size": 4})
    dry_run(settings, 4)
    with raises("sampling.too_small", "4", "5"):
        dry_run(settings, 5)


def test_the_whitening_leaves_the_training_its_own_reader(tmp_path, training_shards):
    for run in ("one", "other"):
        prepared = prepare(
            recipe(
                tmp_path / run,
                training_shards,
                steps=2,
                model=WHITENED,
                data__image_sizes={0: 16, 0.5: 32},
            ),
            World(),
        )
        assert prepared.images.job.steps == 0 and prepared.images.stopwatch.seconds == {}
        assert [size for _, size, _ in prepared.images.job.sizes] == [16, 32]
        assert Trainer(prepared, World()).train() == FINISHED
    assert are_same(tmp_path / "one", tmp_path / "other")


def test_a_dry_run_ranks_no_rows_where_no_image_has_a_class():
    assert _rows_to_rank(np.full(4, -1)).tolist() == []
    assert sorted(_rows_to_rank(np.array([-1, 7, 7, 3])).tolist()) == [1, 2, 3]

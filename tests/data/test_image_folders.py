"""Images that are not packed: `imagefolder:FOLDER` in the place of shards."""

from pathlib import Path

import numpy as np
import pytest
from images import write_images
from raising import raises
from small_trainings import losses, parameters, train

from benchmarks.photos import pack
from distap.data.loading.checking import check
from distap.data.shards.index import load_index
from distap.data.shards.indexing import index_shards
from distap.errors import DistapError
from distap.telemetry.runlog import read_run_log
from distap.world import World


@pytest.fixture
def folders(tmp_path):
    """Two folders with a sub-folder a class, and their shards."""
    for split, seed in (("train", 1), ("test", 2)):
        images = write_images(
            tmp_path / split,
            {f"{split}-{number}": 3 + number % 4 for number in range(12)},
            40,
            seed,
        )
        pack(images, tmp_path / f"{split}-shards", images_per_shard=20)
    return tmp_path


def test_training_and_evaluation_are_those_of_the_packed_images(folders):
    runs = {}
    for name, before, after in (("packed", "", "-shards"), ("files", "imagefolder:", "/")):
        train_on, test_on = (f"{before}{folders / split}{after}" for split in ("train", "test"))
        runs[name] = folders / name
        train(
            World(),
            runs[name],
            [train_on],
            data__validation=test_on,
            evaluation={"every": 3},
            steps=3,
            data__workers=1,
        )
    assert losses(runs["files"]) == losses(runs["packed"]) and len(losses(runs["files"])) == 3
    ours, remaining = (parameters(run) for run in runs.values())
    assert all(np.array_equal(ours[name], remaining[name]) for name in remaining)
    figures = [
        [line["validation"] for line in read_run_log(run) if "validation" in line]
        for run in runs.values()
    ]
    assert figures[0] == figures[1] and figures[0]


def test_a_folder_without_classes_is_refused(tmp_path):
    with raises("data.missing"):
        load_index(f"imagefolder:{tmp_path / 'none'}")
    with raises("data.empty"):
        load_index(f"imagefolder:{tmp_path}")
    with pytest.raises(DistapError, match="expected a folder"):
        load_index("imagefolder:")


def test_a_check_decodes_each_image_and_sees_what_changed_since(folders):
    source = f"imagefolder:{folders / 'test'}"
    index, damaged = check(source)
    assert len(index) == len(load_index(folders / "test-shards")) and damaged == []
    cut = folders / "test" / "test-0" / "0.png"
    empty = folders / "test" / "test-1" / "0.png"
    cut.write_bytes(cut.read_bytes()[:-40])
    empty.write_bytes(b"")
    assert [damage.name for damage in check(source)[1]] == ["test-0/0.png", "test-1/0.png"]


def test_links_are_followed_but_no_image_is_listed_twice(folders):
    folder = folders / "test" / "test-0"
    (folder / "above").symlink_to(folder.parent / "test-0")
    (folders / "test" / "elsewhere").symlink_to(folders / "train" / "train-0")
    (folder / "gone.png").symlink_to(folder / "nothing")
    index = load_index(f"imagefolder:{folders / 'test'}")
    names = index.key.tolist()
    assert [name for name in names if name.startswith("else")] == [
        f"elsewhere/{k}.png" for k in range(3)
    ]
    assert len(set(names)) == len(names)
    assert [(Path(name).name, reason) for name, reason in index.left_out] == [
        ("above", "links to a folder that is listed already"),
        ("gone.png", "links to nothing"),
    ]


def test_what_needs_shards_or_an_index_is_refused(folders):
    source = f"imagefolder:{folders / 'test'}"
    with raises("data.no_shards"):
        index_shards(source)

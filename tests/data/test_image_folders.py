"""Images that are not packed: `imagefolder:FOLDER` in the place of shards."""

import numpy as np
import pytest
from images import write_images
from small_trainings import losses, parameters, train

from distap.data.images.decoding import DamagedImageError
from distap.data.shards.index import load_index
from distap.data.shards.packing import pack
from distap.errors import DistapError
from distap.evaluation.sets import open_set
from distap.telemetry.runlog import read_run_log
from distap.world import World


@pytest.fixture
def folders(tmp_path):
    """Two folders with a sub-folder a class, and their shards."""
    for part, seed in (("train", 1), ("test", 2)):
        images = write_images(tmp_path / part, {f"{part}-{number}": 3 + number % 4 for number in range(12)}, 40, seed)
        pack(images, tmp_path / f"{part}-shards", images_per_shard=20)
    return tmp_path


def test_training_and_evaluation_are_those_of_the_packed_images(folders):
    runs = {}
    for name, before, after in (("packed", "", "-shards"), ("files", "imagefolder:", "/")):
        train_on, test_on = (f"{before}{folders / part}{after}" for part in ("train", "test"))
        changes = {"data__validation": test_on, "evaluation": {"every": 3}, "steps": 3, "data__workers": 1}
        runs[name] = folders / name
        train(World(), runs[name], [train_on], **changes)
    assert losses(runs["files"]) == losses(runs["packed"]) and len(losses(runs["files"])) == 3
    ours, others = (parameters(run) for run in runs.values())
    assert all(np.array_equal(ours[name], others[name]) for name in others)
    figures = [[line["validation"] for line in read_run_log(run) if "validation" in line] for run in runs.values()]
    assert figures[0] == figures[1] and figures[0]


def test_an_image_that_has_changed_is_damaged(folders):
    opened = open_set(f"imagefolder:{folders / 'test'}")
    assert opened.images.reader.where(0) == "test-0/0.png"
    assert len(opened.images) == len(load_index(folders / "test-shards"))
    path = folders / "test" / "test-0" / "0.png"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DamagedImageError, match="truncated"):
        opened.images.reader.encoded(0)


def test_a_folder_without_classes_is_refused(tmp_path):
    with pytest.raises(DistapError, match="no such folder"):
        load_index(f"imagefolder:{tmp_path / 'none'}")
    with pytest.raises(DistapError, match="one sub-folder a class"):
        load_index(f"imagefolder:{tmp_path}")

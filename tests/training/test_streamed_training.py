import shutil

from raising import raises
from small_trainings import DESCENT, losses, recipe
from streamed import SPOILT, write_by_webdataset

from distap.trainer import Trainer
from distap.training.prepared import prepare
from distap.world import World


def test_that_validation_classes_are_unseen_is_checked_where_there_is_an_index(
    tmp_path, training_shards, caplog
):
    changes = {
        "data__reading": "streamed",
        "data__validation": str(training_shards[1]),
        "sampling": {"name": "random", "batch_size": 8},
    }
    with raises("data.seen_classes"):
        both = (training_shards[1], training_shards[1])
        Trainer(prepare(recipe(tmp_path / "run", both, **changes), World()), World())
    without = tmp_path / "shards"
    shutil.copytree(training_shards[1], without)
    (without / "index.npz").unlink()
    Trainer(prepare(recipe(tmp_path / "run", (without,), **changes), World()), World())
    message = (
        f"{without} has no index, so nothing checks whether it shares classes with"
        f" {training_shards[1]}"
    )
    assert message in caplog.text


def test_shards_of_others_train_without_an_index_and_a_run_goes_on(tmp_path):
    shards = write_by_webdataset(tmp_path / "shards", spoil=SPOILT.items())
    for steps in (2, 4):
        Trainer(
            prepare(
                recipe(
                    tmp_path / "run",
                    (shards,),
                    steps=steps,
                    data__reading={"name": "streamed", "shuffle": 5},
                    data__workers=1,
                    sampling={"name": "random", "batch_size": 16},
                    checkpoint={"every": 2, "keep": 9},
                    optimizer=DESCENT,
                ),
                World(),
            ),
            World(),
        ).train()
        assert len(losses(tmp_path / "run")) == steps

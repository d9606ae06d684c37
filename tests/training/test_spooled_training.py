from distap.config.reading import recipe_from
from distap.telemetry.runlog import read_run_log
from distap.trainer import Trainer
from distap.world import World


def recipe(run, shards, **pixels):
    settings = {
        "run": str(run),
        "steps": 2,
        "data": {"train": str(shards[0]), "image_size": 32, "workers": 0, "pixels": pixels},
        "sampling": {"name": "random", "batch_size": 24},
        "model": {"backbone": "resnet10t", "weights": {"name": "random"}},
        "replay": {"size": 4},
        "describe": {"size": 6},
    }
    return recipe_from(settings, "test")


def test_a_batch_four_times_larger_than_the_memory_for_pixels_trains_through_the_spool(tmp_path, training_shards):
    limit = 24 * 3 * 32 * 32 // 4
    losses = []
    for name, pixels in {
        "spool": {"memory_bytes": limit, "spool_folder": str(tmp_path)},
        "memory": {"hold": "memory"},
        "reread": {"hold": "reread"},
    }.items():
        Trainer(recipe(tmp_path / name, training_shards, **pixels), World()).train()
        losses.append([entry["loss"] for entry in read_run_log(tmp_path / name) if "loss" in entry])
    assert len(losses[0]) == 2
    assert losses[0] == losses[1] == losses[2]

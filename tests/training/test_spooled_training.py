from small_trainings import losses, recipe

from distap.trainer import Trainer
from distap.world import World


def test_a_batch_four_times_larger_than_the_memory_for_pixels_trains_through_the_spool(tmp_path, training_shards):
    limit = 24 * 3 * 32 * 32 // 4
    curves = []
    for name, pixels in {
        "spool": {"memory_bytes": limit, "spool_folder": str(tmp_path)},
        "memory": {"hold": "memory"},
    }.items():
        changes = {"sampling": {"name": "random", "batch_size": 24}, "describe": {"size": 6}, "data__pixels": pixels}
        Trainer(recipe(tmp_path / name, training_shards, steps=2, **changes), World()).train()
        curves.append(losses(tmp_path / name))
    assert len(curves[0]) == 2
    assert curves[0] == curves[1]

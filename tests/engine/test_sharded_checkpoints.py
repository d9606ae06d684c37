"""A checkpoint of one engine holds what another one needs, whatever the number of ranks."""

import torch
from batches import small_images, small_network
from ranks import on_ranks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from distap.checkpoint import CheckpointWriter, newest_checkpoint
from distap.engine import DDPEngine

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def _train_replicated(world, folder):
    """What two steps of DistributedDataParallel lead to, saved."""
    network = small_network()
    engine = DDPEngine(network, lambda: torch.optim.Adam(network.parameters()), world)
    images, _ = small_images(6)
    for _ in range(2):
        with engine.accumulating(is_last=True):
            descriptors = engine.forward(images[world.rank :: world.size])
            engine.backward(descriptors, torch.ones_like(descriptors).cumsum(1))
        engine.update(1e-2)
    writer = CheckpointWriter(folder, world, keep=1)
    writer.save(2, engine.state_dict(), {}, {})
    assert writer.wait().error is None
    return {name: tensor.clone() for name, tensor in engine.state_dict().items()}


def _restore_sharded(world, folder):
    """The same state, read shard by shard into FSDP2's network and optimiser, and put together again."""
    network = fully_shard(small_network())
    optimizer = torch.optim.Adam(network.parameters())
    checkpoint, _ = newest_checkpoint(folder, world)
    settings = get_optimizer_state_dict(network, optimizer, options=FLAT)
    moments = {f"optimizer.{name}": value for name, value in settings.items() if isinstance(value, torch.Tensor)}
    parameters = {f"network.{name}": tensor for name, tensor in get_model_state_dict(network).items()}
    assert any(isinstance(tensor, DTensor) for tensor in parameters.values())
    checkpoint.tensors("network.", into=parameters)
    checkpoint.tensors("optimizer.", into=moments)
    set_optimizer_state_dict(network, optimizer, settings, options=FLAT)
    state = {f"network.{name}": tensor for name, tensor in get_model_state_dict(network).items()}
    for name, value in get_optimizer_state_dict(network, optimizer, options=FLAT).items():
        if isinstance(value, torch.Tensor):
            state[f"optimizer.{name}"] = value
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}


def test_what_ddp_saved_is_restored_into_the_shards_of_fsdp2_on_another_number_of_ranks(tmp_path):
    saved = on_ranks(2, _train_replicated, tmp_path)[0]
    assert any(name.endswith("exp_avg_sq") for name in saved)
    for restored in on_ranks(3, _restore_sharded, tmp_path):
        assert restored.keys() == saved.keys()
        assert all(torch.equal(restored[name], saved[name]) for name in saved)

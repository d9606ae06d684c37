"""`model.compile: blocks`: a vision transformer whose blocks torch.compile has compiled."""

import pytest
import torch
from batches import TensorBatch
from networks import noise, random_network
from raising import raises
from ranks import on_ranks
from small_trainings import losses, parameters, recipe, train
from steps import learning, step_with
from torch.distributed.tensor import DTensor

from distap.ranking.losses.quantized import QuantizedAP
from distap.stages.blocks import compile_blocks
from distap.stages.micro_batches import MicroBatchSizes
from distap.training.engines import DDPSettings, FSDPSettings
from distap.world import World

# Dynamo reads `.grad` of a block's input, of which torch warns in tests alone.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")
IMAGES = 24
LABELS = torch.arange(IMAGES) // 4
CPU = torch.device("cpu")
VIT = {"backbone": "test_vit", "weights": {"name": "random"}}
COMPILED = VIT | {"compile": "blocks"}


def vit():
    return random_network("test_vit", image_size=32).train()


def moved(world, engine, compiled):
    """How a step of plain descent moves each parameter, with ragged micro-batches of each rank."""
    network = vit()
    before = {name: tensor.detach().clone() for name, tensor in network.named_parameters()}
    learner = engine.build(network, lambda: torch.optim.SGD(network.parameters(), lr=1.0), world)
    if compiled:
        compile_blocks(network, CPU)
    step = step_with(learner, QuantizedAP(), world, 0, MicroBatchSizes(5, describe=8))
    result = step(TensorBatch(noise(IMAGES, 32), LABELS, world), 1.0)
    assert result.skipped is None and result.replay_drift < 1e-5
    moves = {}
    for name, tensor in network.named_parameters():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        moves[name] = before[name] - whole.detach()
    return moves


def moved_by_engines(world):
    return {
        "eager": moved(world, DDPSettings(), compiled=False),
        "ddp": moved(world, DDPSettings(), compiled=True),
        "fsdp": moved(world, FSDPSettings(unit="blocks"), compiled=True),
        "fsdp pass": moved(world, FSDPSettings(reshard="pass"), compiled=True),
    }


@pytest.mark.nightly
def test_a_step_with_compiled_blocks_is_that_without_under_ddp_and_fsdp():
    for answers in on_ranks(2, moved_by_engines):
        expected = answers.pop("eager")
        assert len(answers) == 3
        for engine, moves in answers.items():
            assert moves.keys() == expected.keys()
            for name, move in moves.items():
                difference = (move - expected[name]).norm()
                assert difference <= 1e-3 * expected[name].norm() + 1e-7, (engine, name)


@pytest.mark.nightly
def test_ragged_micro_batches_are_compiled_a_bounded_number_of_times():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    network = vit()
    learner = learning(network, torch.optim.SGD(network.parameters(), lr=1e-3), World())
    compile_blocks(network, CPU)
    graphs = []
    for number, size in enumerate((8, 8, 7, 5, 3, 11)):
        step = step_with(learner, QuantizedAP(), World(), 0, MicroBatchSizes(size))
        step(TensorBatch(noise(IMAGES, 32), LABELS, World(), number), 1e-3)
        graphs.append(counters["stats"]["unique_graphs"])
    # With and without autograd: of the first size, of any size, and of the trial of the compiler.
    # The network has six blocks.
    assert 0 < graphs[0] <= 3
    assert graphs[2] == graphs[-1] <= 5


@pytest.mark.slow
def test_runs_with_and_without_compiled_blocks_have_each_others_checkpoints(
    tmp_path, training_shards
):
    for name, models in (
        ("eager", (VIT, VIT)),
        ("both", (COMPILED, VIT)),
        ("turned", (VIT, COMPILED)),
    ):
        for steps, model in zip((2, 4), models, strict=True):
            run = tmp_path / name
            train(World(), run, training_shards, steps=steps, schedule="constant", model=model)
    for name in ("both", "turned"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "eager"), abs=1e-3)
        assert parameters(tmp_path / name).keys() == parameters(tmp_path / "eager").keys()


@pytest.mark.parametrize("backbone", ["resnet10t", "test_convnext"])
def test_a_network_that_does_not_repeat_one_block_is_refused(backbone):
    with raises("network.no_blocks", "model.compile"):
        compile_blocks(random_network(backbone), CPU)


def test_blocks_that_drop_at_random_are_refused():
    network = random_network("test_vit", arguments={"drop_path_rate": 0.2}).train()
    with raises("network.draws_at_random", "model.compile", "drop_path1"):
        compile_blocks(network, CPU)


def test_a_machine_without_a_compiler_is_told_so(monkeypatch):
    import torch._inductor.config

    torch._dynamo.reset()
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("/nowhere/g++",))
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    network = vit()
    with raises("package.no_compiler", "model.compile", "g++", "cpu"):
        compile_blocks(network, CPU)
    assert all("forward" not in vars(module) for module in network.modules())


def test_a_recipe_of_deepspeed_refuses_compiled_blocks(tmp_path, training_shards):
    with raises("recipe.value", "model.compile", "ddp", "fsdp"):
        recipe(tmp_path, training_shards, model=COMPILED, engine="deepspeed")

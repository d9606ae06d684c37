"""Trainings of a part of the network: the gradient is that of the whole batch, and the rest costs
nothing.
"""

import json
import shutil
from fnmatch import fnmatch

import pytest
import timm
import torch
from batches import TensorBatch
from networks import noise
from raising import raises
from ranks import on_ranks
from safetensors.torch import load_file, save_file
from small_trainings import recipe, train
from stores import found_checkpoint
from torch.distributed.tensor import DTensor

import distap
from distap.apps.export.exporting import export_to_folder
from distap.errors import DistapError
from distap.model.adapters import freeze
from distap.randomness import seed_for
from distap.ranking.losses.smooth import SmoothAP
from distap.ranking.rank import rank
from distap.stages.micro_batches import MicroBatchSizes
from distap.stages.step import DROPOUT, ThreeStages
from distap.telemetry.runlog import read_run_log
from distap.trainer import Trainer
from distap.training.build import learner_of, network_of
from distap.training.learner import TrainingStep
from distap.training.prepared import prepare
from distap.world import World

pytestmark = pytest.mark.slow
IMAGES = 10
SIZE = 2
STEPS = 2
RATE = 0.01
DECAY = 0.8
OF_TIMM = {"backbone": "test_vit", "weights": "random", "arguments": {"drop_path_rate": 0.2}}
ROUNDED = {"precision": "bf16", "evaluation": {"precision": "bf16"}}
PARTS = {
    "head": {"freeze": "backbone", "projection": 6},
    "last blocks": {"freeze": {"blocks": -1}},
    "patterns": {"freeze": ["backbone.blocks.*.attn.*", "backbone.patch_embed.*"]},
    "lora": {"adapter": {"rank": 4, "dropout": 0.3}, "projection": 6},
    "dora": {
        "adapter": {"name": "dora", "rank": 2, "targets": ["fc1", "fc2"]},
        "freeze": ["backbone.blocks.0.*"],
    },
}


def settings_of(subset, engine="ddp"):
    layered = {} if "adapter" in PARTS[subset] else {"layer_decay": 0.7}
    optimizer = {"name": "adamw", "backbone": {"weight_decay": 0.1}, "eps": 1e-4} | layered
    model = OF_TIMM | PARTS[subset]
    return recipe("run", ("none",), model=model, optimizer=optimizer, engine=engine, ema=DECAY)


def learner(world, subset, engine="ddp", dtype=torch.float64):
    read = settings_of(subset, engine)
    network = network_of(read, world).to(dtype).train()
    return learner_of(read, network, world)


def batch():
    return noise(IMAGES, 32), torch.arange(IMAGES) % 3


def trained(world, subset, engine="ddp", dtype=torch.float64, keep=0):
    """State after two steps, whether the first and the last block had a graph, and the greatest
    replay drift.
    """
    network = learner(world, subset, engine, dtype)
    step = TrainingStep(
        ThreeStages(network.replica, SmoothAP(tau=0.1), world, 0, MicroBatchSizes(SIZE, keep=keep)),
        network,
    )
    first, *_, last = network.network.backbone.blocks
    has_graph = {first: False, last: False}
    for block in has_graph:
        block.register_forward_hook(
            lambda module, _, out: has_graph.update(
                {module: has_graph[module] or out.requires_grad}
            )
        )
    drift = max(
        step(TensorBatch(*batch(), world, n), learning_rate=RATE).replay_drift for n in range(STEPS)
    )
    state = {
        k: (t.full_tensor() if isinstance(t, DTensor) else t).clone()
        for k, t in network.state_dict().items()
    }
    again = learner(world, subset, engine, dtype)
    again.load_state_dict(state)
    restored = {
        k: (t.full_tensor() if isinstance(t, DTensor) else t) for k, t in again.state_dict().items()
    }
    assert restored.keys() == state.keys() and all(
        torch.equal(restored[key], state[key]) for key in state
    )
    return state, [*has_graph.values()], drift


def by_autograd(subset, ranks, dtype=torch.float64):
    """The same steps over the whole batch at once, with random numbers drawn as the ranks draw
    them.
    """
    parameter = learner(World(), subset, dtype=dtype)
    (images, labels) = batch()
    for number in range(STEPS):
        descriptors = [None] * IMAGES
        for first in range(ranks):
            for slots in torch.arange(first, IMAGES, ranks).split(SIZE):
                torch.manual_seed(seed_for(DROPOUT, 0, number, int(slots[0])))
                for slot, row in zip(slots.tolist(), parameter.network(images[slots]), strict=True):
                    descriptors[slot] = row
        whole = torch.stack(descriptors)
        whole.backward(rank(whole.detach(), labels, "smooth_ap", tau=0.1).gradient)
        parameter.update(RATE)
    return parameter.state_dict(), {
        name for name, p in parameter.network.named_parameters() if p.requires_grad
    }


def on_each(world, cases):
    return {subset: [trained(world, subset, *case) for case in cases] for subset in PARTS}


@pytest.fixture(scope="module")
def exact():
    by_pass = {"name": "fsdp", "reshard": "pass"}
    return on_ranks(2, on_each, [("ddp",), ("fsdp",), (by_pass,)])


@pytest.fixture(scope="module")
def under_zero():
    pytest.importorskip("deepspeed")
    return on_ranks(2, on_each, [({"name": "deepspeed", "stage": 2}, torch.float32)])


def check(runs, subset, ranks, dtype=torch.float64, **exactness):
    expected, learns = by_autograd(subset, ranks, dtype)
    before = learner(World(), subset, dtype=dtype).network.state_dict()
    for state, has_graph, drift in runs:
        assert drift <= (1e-12 if dtype == torch.float64 else 1e-5)
        for key, tensor in expected.items():
            torch.testing.assert_close(state[key], tensor, **exactness, msg=key)
        moments = {
            key.removeprefix("optimizer.state.").rpartition(".")[0]
            for key in state
            if ".state." in key
        }
        assert (
            moments
            == {key.removeprefix("ema.") for key in state if key.startswith("ema.")}
            == learns
        )
        for key, tensor in before.items():
            assert torch.equal(state[f"network.{key}"], tensor) == (key not in learns), key
        assert has_graph == [subset in ("patterns", "lora"), subset != "head"]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_trains_exactly_on_one_rank(part):
    check([trained(World(), part), trained(World(), part, keep=3)], part, 1, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_trains_exactly_under_ddp_and_fsdp(exact, part):
    for answer in exact:
        check(answer[part], part, 2, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_trains_under_zero(under_zero, part):
    for answer in under_zero:
        check(answer[part], part, 2, torch.float32, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("part", "layer_decay"), [("last blocks", 0.7), ("lora", None)])
def test_a_training_of_a_part_goes_on_as_if_it_had_not_stopped(
    tmp_path, training_shards, part, layer_decay
):
    changes = {"model": OF_TIMM | PARTS[part] | {"projection": 6}, "ema": DECAY, "steps": 3}
    changes |= {
        "optimizer": {"layer_decay": layer_decay, "head_only": 1},
        "checkpoint": {"every": 1},
    }
    changes |= {"data__image_size": 32}
    train(World(), tmp_path / "whole", training_shards, **changes)
    second = "checkpoints/step-00000002"
    shutil.copytree(tmp_path / "whole" / second, tmp_path / "parts" / second)
    train(World(), tmp_path / "parts", training_shards, **changes)
    item, other = (found_checkpoint(tmp_path / run).tensors() for run in ("whole", "parts"))
    assert item.keys() == other.keys() and all(torch.equal(item[key], other[key]) for key in item)
    assert any(".state.backbone.blocks.0." in key for key in item) == (part == "lora")


@pytest.mark.parametrize("base", ["float32", "bf16"])
def test_adapters_are_merged_into_the_base_when_a_run_is_read(tmp_path, training_shards, base):
    adapter = PARTS["lora"]["adapter"] | {"base": base}
    model = OF_TIMM | PARTS["lora"] | {"adapter": adapter}
    changes = {"model": model, "ema": DECAY, "data__image_size": 32}
    if base == "bf16":
        changes |= ROUNDED
    run = tmp_path / "run"
    images = noise(3, 32)
    changes |= {"optimizer": {"learning_rate": 0.02}, "checkpoint": {"every": 1}, "steps": 3}
    train(World(), run, training_shards, **changes | {"steps": 2})
    trainer = Trainer(prepare(recipe(run, training_shards, **changes), World()), World())
    trainer.train()
    network = trainer.network.eval()
    dtypes = {tensor.dtype for tensor in network.state_dict().values()}
    assert (torch.bfloat16 in dtypes) == (base == "bf16")
    network.float()  # which changes no value
    with trainer.learner.averaged(), torch.no_grad():
        expected = network(images)
    base = network_of(recipe("run", ("none",), model=OF_TIMM | {"projection": 6}), World()).eval()
    assert (base(images) - expected).abs().max() > 1e-3
    export_to_folder(run, tmp_path / "export", ("pt2", "safetensors"))
    for source in (run, tmp_path / "export"):
        torch.testing.assert_close(
            distap.load(source, device="cpu")(images), expected, rtol=1e-5, atol=1e-6
        )
    weights = {"name": "run", "path": str(run)}
    later = recipe(
        tmp_path / "later", training_shards, model=OF_TIMM | {"projection": 6, "weights": weights}
    )
    torch.testing.assert_close(
        network_of(later, World()).eval()(images), expected, rtol=1e-5, atol=1e-6
    )


CHANGED = {
    "lora": ({"adapter": {"rank": 2}, "projection": 6}, ["head.bias", "head.weight"]),
    "lora in bf16": (
        {"adapter": {"rank": 2, "base": "bf16"}, "projection": 6},
        ["head.bias", "head.weight"],
    ),
    "dora": ({"adapter": {"name": "dora", "rank": 2, "targets": ["fc1"]}}, []),
    "last block": ({"freeze": {"blocks": -1}}, ["backbone.blocks.5.*", "backbone.norm.*"]),
    "statistics": (
        {"freeze": "backbone", "batchnorm": "batch", "backbone": "test_resnet", "pooling": "gem"},
        ["backbone.*.running_*", "backbone.*.num_batches_tracked", "pooling.power"],
    ),
}


@pytest.mark.parametrize("part", CHANGED)
def test_what_training_changed_is_kept_next_to_the_name_of_its_base(
    tmp_path, training_shards, part
):
    model, patterns = CHANGED[part]
    run = tmp_path / "run"
    small = tmp_path / "small"
    images = noise(3, 32)
    base = timm.create_model(model.get("backbone", "test_vit"), num_classes=0).eval()
    (tmp_path / "base").mkdir()
    weights = tmp_path / "base/model.safetensors"
    save_file(base.state_dict(), weights)
    model |= {"weights": {"name": "file", "path": str(weights)}} | {
        "backbone": base.pretrained_cfg["architecture"]
    }
    if part == "dora":  # a network and its weights by the name of their folder, as those of a hub
        record = {"mean": [0.1, 0.2, 0.3], "input_size": [3, 160, 160], "fixed_input_size": True}
        config = {"architecture": "test_vit", "num_classes": 0, "pretrained_cfg": record}
        (tmp_path / "base/config.json").write_text(json.dumps(config))
        model |= {"weights": "timm", "backbone": f"local-dir:{weights.parent}"}
    train(
        World(),
        run,
        training_shards,
        model=model,
        optimizer={"learning_rate": 0.02},
        data__image_size=32,
        replay={"size": 5},
        steps=2,
        **(ROUNDED if "bf16" in part else {}),
    )
    described_once = [entry["kept_share"] for entry in read_run_log(run) if "kept_share" in entry]
    assert described_once == [0, 1 if model.get("freeze") == "backbone" else 0]
    whole = distap.load(run, device="cpu")
    export_to_folder(run, small, ("adapter",))
    changed = load_file(small / "changed.safetensors")
    assert {next(item for item in patterns if fnmatch(name, item)) for name in changed} == set(
        patterns
    )
    distap.load(small, device="cpu").write(small, changes_only=True)
    again = distap.load(small, device="cpu")
    assert torch.equal(again(images), whole(images)) and again.dimensions == whole.dimensions
    if "adapter" in model and "bf16" not in part:  # peft reads the folder too, but rounds no base
        import peft  # takes a second, which no other test should wait

        adapted = peft.PeftModel.from_pretrained(base, small).merge_and_unload().state_dict()
        state = whole.network.network.backbone.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in adapted.items())
    save_file(
        {name: item + 1 if "1.bias" in name else item for name, item in load_file(weights).items()},
        weights,
    )
    for message in (
        r"small: its base is \S+ with .* tensors differ: backbone\.",
        r"small: its base is .*base",
    ):
        with pytest.raises(DistapError, match=message):
            distap.load(small, device="cpu")
        weights.unlink(missing_ok=True)
    with pytest.raises(DistapError, match="base"):
        whole.write(small, changes_only=True)


@pytest.mark.parametrize(
    ("model", "code", "names"),
    [
        (
            {"adapter": {"targets": ["query"]}},
            "network.unknown_layer",
            ["model.adapter.targets"],
        ),
        (
            {"adapter": {"targets": ["conv_dw"]}, "backbone": "efficientnet_b0", "arguments": {}},
            "network.unknown_layer",
            ["conv_dw", "conv_pwl"],
        ),
        ({"adapter": {"rank": 0}}, "recipe.value", ["model.adapter.rank", "0"]),
        ({"adapter": {"dropout": 1}}, "recipe.value", ["model.adapter.dropout", "1"]),
        ({"adapter": {"name": "loar"}}, "recipe.value", ["lora"]),
        (
            {"adapter": "lora", "backbone": "eva02_tiny_patch14_224", "arguments": {"depth": 1}},
            "network.layer_not_called",
            [],
        ),
        (
            {"freeze": "backbone"},
            "network.nothing_to_train",
            ["model.freeze", "model.projection"],
        ),
        (
            {"freeze": {"blocks": 9}},
            "network.too_few_blocks",
            ["model.freeze.blocks", "9", "VisionTransformer", "6"],
        ),
        (
            {"freeze": ["backbone.block.*"]},
            "network.pattern_fits_nothing",
            ["model.freeze", "backbone.block"],
        ),
        ({"freeze": "head"}, "recipe.value", ["model.freeze", "head"]),
        ({"freeze": {"block": 3}}, "recipe.value", ["model.freeze"]),
        (
            {"freeze": {"blocks": 1}, "backbone": "plug_ins:TwoConvolutions", "arguments": {}},
            "network.unknown_blocks",
            [],
        ),
    ],
)
def test_what_cannot_be_frozen_is_named(model, code, names):
    with raises(code, *names):
        read = recipe("run", ("none",), model=OF_TIMM | model)
        learner_of(read, network_of(read, World()), World())


def test_layer_decay_with_adapters_is_refused():
    with raises("recipe.value", "optimizer.layer_decay"):
        recipe("run", ("none",), model=OF_TIMM | PARTS["lora"], optimizer={"layer_decay": 0.7})


def test_a_factor_of_0_names_the_key_to_use():
    for section, instead in (("backbone", "backbone"), ("pooling", r'\["pooling\.\*"\]')):
        with pytest.raises(
            DistapError, match=rf"optimizer\.{section}: .*set model\.freeze: {instead}"
        ):
            recipe("run", ("none",), optimizer={section: {"factor": 0}})
    assert recipe("run", ("none",), optimizer={"loss": {"factor": 0}}).optimizer.loss.factor == 0


@pytest.mark.parametrize(
    ("backbone", "count", "first", "last"),
    [
        ("test_vit", 0, "patch_embed", "patch_embed"),
        ("resnet10t", 3, "conv1", "layer3.0"),
        ("resnet10t", -1, "conv1", "layer3.0"),
        ("test_convnext", -1, "stem", "stages.2"),
        ("tf_efficientnet_lite0", 16, "conv_stem", "blocks.6"),
    ],
)
def test_the_first_blocks_are_those_of_timm(backbone, count, first, last):
    network = network_of(
        recipe("run", ("none",), model={"backbone": backbone, "weights": "random"}), World()
    )
    freeze(network, {"blocks": count})
    frozen = [
        name
        for name, parameter in network.backbone.named_parameters()
        if not parameter.requires_grad
    ]
    trained = [
        name for name, parameter in network.backbone.named_parameters() if parameter.requires_grad
    ]
    assert any(name.startswith(first) for name in frozen) and any(
        name.startswith(last) for name in frozen
    )
    assert not any(name.startswith((first, last)) for name in trained) and trained

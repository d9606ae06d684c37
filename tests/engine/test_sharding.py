"""Units, dtypes, times and meshes of sharding: each has the gradient of `ddp`, and its messages."""

from dataclasses import replace

import pytest
import timm
import torch
from batches import TensorBatch
from engine_checks import BlockNetwork, small_images
from networks import noise
from raising import raises
from ranks import on_ranks
from small_trainings import recipe
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from distap.errors import DistapError
from distap.ranking.losses.smooth import SmoothAP
from distap.stages.blocks import blocks_of
from distap.stages.fsdp import blocks_to_gather, half_policy, shard
from distap.stages.micro_batches import MicroBatchSizes
from distap.stages.step import ThreeStages
from distap.training.build import learner_of, network_of
from distap.training.engines import DDPSettings, FSDPSettings
from distap.training.optimizer import TimmOptimizer
from distap.world import World

IMAGES = 13
LOST = 5  # its descriptor is not a number
EXACT = 1e-12
SHARDINGS = {
    "network": {"unit": "network"},
    "blocks": {"unit": "blocks"},
    "pass": {"reshard": "pass"},
}
# Hosts of the ranks, by the mesh.
MESHES = {
    2: {"(2,)": None, "(1, 2)": ("a", "a"), "(2, 1)": ("a", "b")},
    4: {"(4,)": None, "(2, 2)": ("a", "b", "a", "b")},
}
VIT = {"backbone": "test_vit", "weights": "random"}
ROUNDED = {"precision": "bf16", "evaluation": {"precision": "bf16"}}
LORA = VIT | {"adapter": {"rank": 4, "dropout": 0.3}, "projection": 6}
MESSAGES = ("all_gather", "reduce_scatter", "all_reduce")


def of_blocks(world, engine, dropout=0.2):
    """An engine over the network of the contract, with dropout, in float64."""
    torch.manual_seed(0)
    network = BlockNetwork(dropout).double().train().to(memory_format=torch.channels_last)
    optimizer = TimmOptimizer("adam")
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return engine.build(network, lambda: optimizer.build([{"params": trained}]), world)


def of_lora(world, engine):
    """An engine over a vision transformer whose adapters train, in float64."""
    read = recipe("run", ("none",), model=LORA)
    network = network_of(read, world).double().train()
    return learner_of(read.model_copy(update={"engine": engine}), network, world)


def images_of(network):
    images, labels = small_images(IMAGES)
    if not isinstance(network, BlockNetwork):
        # BatchNorm needs two pixels of a lone image.
        images = noise(IMAGES, 64 if network.batchnorm == "batch" else 32)
    if network.head.weight.dtype == torch.float64:
        images = images.double()
        images[LOST] = torch.nan
    return images, labels


def of_plain_blocks(world, engine):
    """The same without dropout."""
    return of_blocks(world, engine, dropout=0.0)


def gradients(world, build, engine, size, keep=0, describe=0):
    """The whole gradients of a step with a lost image, their norm, and its messages by kind."""
    learner = build(world, engine)
    replica = learner.replica
    stages = ThreeStages(
        replica,
        SmoothAP(tau=0.1),
        world,
        0,
        MicroBatchSizes(size, keep=keep, describe=describe),
        probed=True,
    )
    batch = TensorBatch(*images_of(learner.network), world)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        described = stages.describe(batch)
        gathered = stages.gather(described, batch)
        ranking = stages.rank(described.gathering, gathered, 0)
        drift, _, with_graph = stages.replay(batch, described, ranking.gradient)
    assert drift <= EXACT, (engine, size, keep, drift)
    assert (with_graph > 0) == (keep > 0)
    names = [event.name for event in recorded.events()]
    counts = {kind: names.count(f"gloo:{kind}") for kind in MESSAGES}
    actual = {
        name: parameter.grad
        for name, parameter in learner.network.named_parameters()
        if parameter.grad is not None
    }
    for name, gradient in actual.items():
        if isinstance(gradient, DTensor):
            actual[name] = gradient.full_tensor()
    actual["norm"] = torch.tensor(learner.update(0.0))
    return actual, counts


def apart(actual, expected):
    """The greatest difference of two sets of gradients, relative to the greatest of a parameter."""
    assert actual.keys() == expected.keys()
    return max(
        float((actual[name].flatten() - of_ddp.flatten()).abs().max() / of_ddp.abs().max())
        for name, of_ddp in expected.items()
        if ".lora_A." not in name  # 0 as long as the other matrix is
    )


# The network, images of a micro-batch, and micro-batches that keep their graph, by the number of
# ranks, whose shares of 7 and 6, or 4, 3, 3 and 3, make other numbers of micro-batches.
CASES = {
    2: {
        "dropout": (of_blocks, 2, 0),
        "kept graphs": (of_blocks, 2, 2),
        "lora": (of_lora, 3, 0),
    },
    4: {"dropout": (of_blocks, 3, 0)},
}


# No graphs are kept where blocks are freed, and tests of parts train adapters in one unit.
LEFT_OUT = [("kept graphs", "pass"), ("lora", "network")]


def each_sharding(world):
    """How far gradients of each sharding are from those of ddp, and the messages of both."""
    results = {}
    for case, (build, size, keep) in CASES[world.size].items():
        expected, of_ddp = gradients(world, build, DDPSettings(), size, keep)
        results[case, "ddp"] = (0.0, of_ddp)
        for mesh, hosts in MESHES[world.size].items():
            placed = replace(world, hosts=hosts or ("a",) * world.size)
            for sharding, settings in SHARDINGS.items():
                if (case, sharding) in LEFT_OUT:
                    continue
                engine = FSDPSettings(**settings, within="host" if hosts else "all")
                actual, messages = gradients(placed, build, engine, size, keep)
                results[case, f"{sharding} {mesh}"] = (apart(actual, expected), messages)
    return results


@pytest.fixture(scope="module")
def shardings():
    return {ranks: on_ranks(ranks, each_sharding) for ranks in MESHES}


@pytest.mark.parametrize("ranks", MESHES)
def test_gradients_are_those_of_ddp(shardings, ranks):
    for of_rank in shardings[ranks]:
        differences = {key: difference for key, (difference, _) in of_rank.items()}
        cases = {2: 7, 4: 3}[ranks]
        assert len(differences) == len(CASES[ranks]) + len(MESHES[ranks]) * cases
        assert max(differences.values()) <= EXACT, differences


@pytest.mark.parametrize("ranks", MESHES)
def test_a_step_gathers_and_reduces_each_unit_once(shardings, ranks):
    one_dimension, *_ = MESHES[ranks]
    for case in CASES[ranks].keys() - {"lora"}:
        for of_rank in shardings[ranks]:
            _, of_ddp = of_rank[case, "ddp"]
            for sharding, units in (("network", 1), ("blocks", 4)):
                _, messages = of_rank[case, f"{sharding} {one_dimension}"]
                assert gathers(messages) - gathers(of_ddp) == units
                assert reductions(messages) - reductions(of_ddp) == units - 1  # ddp has one too


@pytest.mark.parametrize(("ranks", "passes"), [(2, 4), (4, 2)])
def test_resharding_after_a_pass_costs_messages_of_each_pass(shardings, ranks, passes):
    one_dimension, two_dimensions = [*MESHES[ranks]][:2]
    for of_rank in shardings[ranks]:
        _, of_ddp = of_rank["dropout", "ddp"]
        _, messages = of_rank["dropout", f"pass {one_dimension}"]
        # Blocks when they are described, replayed and go back; the rest once for describe and the
        # first replay, and once for each further one.
        assert gathers(messages) - gathers(of_ddp) == passes * (3 * 3 + 1)
        # Where ddp reduces once, and does not ask for the greatest number of passes.
        assert reductions(messages) - reductions(of_ddp) == passes * 4 - 1 + 1
        # Hosts sum each unit once.
        _, over_hosts = of_rank["dropout", f"pass {two_dimensions}"]
        assert reductions(over_hosts) == reductions(messages) + 4


def gathers(messages):
    return messages["all_gather"]


def reductions(messages):
    return messages["reduce_scatter"] + messages["all_reduce"]  # as gloo scatters by all_reduce


def of_half(world, engine, **model):
    """An engine over a vision transformer in float32, which computes in bfloat16."""
    model = VIT | {"arguments": {"drop_path_rate": 0.2, "init_values": 0.1}} | model
    read = recipe("run", ("none",), model=model | {"projection": 6}, **ROUNDED)
    network = network_of(read, world).train()
    return learner_of(read.model_copy(update={"engine": engine}), network, world)


def of_half_base(world, engine):
    """The same with a frozen base in bfloat16."""
    return of_half(world, engine, adapter={"rank": 4, "dropout": 0.3, "base": "bf16"})


def halves(world):
    """How far gradients of sharded engines are from those of ddp in bfloat16, and their dtypes."""
    results = {}
    for build, reshard, gather in HALVES:
        of_ddp, _ = gradients(world, build, DDPSettings(), size=3)
        engine = FSDPSettings(unit="blocks", gather=gather, reshard=reshard)
        actual, _ = gradients(world, build, engine, size=3)
        del actual["norm"], of_ddp["norm"]
        dtypes = {gradient.dtype for gradient in actual.values()}
        results[build, reshard, gather] = (apart(actual, of_ddp), dtypes)
    return results


def refusals(world):
    """Codes of errors: no graphs are kept where blocks are freed, and no micro-batch is halved."""
    learner = of_blocks(world, FSDPSettings(reshard="pass"))
    codes = []
    with pytest.raises(DistapError) as error:
        ThreeStages(learner.replica, SmoothAP(tau=0.1), world, 0, MicroBatchSizes(2, keep=1))
    codes.append(error.value.code)

    def fails(images):
        raise torch.OutOfMemoryError("in describe")

    learner.replica.forward = fails
    stages = ThreeStages(
        learner.replica, SmoothAP(tau=0.1), world, 0, MicroBatchSizes(2), probed=True
    )
    with pytest.raises(DistapError) as error:
        stages.describe(TensorBatch(*images_of(learner.network), world))
    codes.append(error.value.code)
    return codes


def described_in_larger_micro_batches(world):
    """How far the gradients of passes are from those of ddp, and the messages of both sizes."""
    engine = FSDPSettings(reshard="pass")
    expected, _ = gradients(world, of_plain_blocks, DDPSettings(), 2)
    _, same = gradients(world, of_plain_blocks, engine, 2)
    actual, larger = gradients(world, of_plain_blocks, engine, 2, describe=5)
    return apart(actual, expected), gathers(same), gathers(larger)


def halves_and_refusals(world):
    return halves(world), refusals(world), described_in_larger_micro_batches(world)


@pytest.fixture(scope="module")
def halved():
    return on_ranks(2, halves_and_refusals)


def test_an_engine_that_frees_blocks_refuses_what_would_part_the_ranks(halved):
    for _, codes, _ in halved:
        assert codes == ["engine.keeps_no_graphs", "memory.too_small"]


# Sharded engines in bfloat16, and how far gradients may be apart: not a bit, but for the order in
# which sums are taken, and where peft computes in the dtype of an adapter's matrices.
HALVES = {
    (of_half, "step", "bf16"): 0,
    (of_half, "pass", "bf16"): 1e-5,
    (of_half_base, "step", "float32"): 0,
    (of_half_base, "pass", "bf16"): 0.02,
}


def test_an_engine_that_frees_blocks_gathers_less_often_for_larger_micro_batches(halved):
    for *_, (difference, same, larger) in halved:
        assert difference <= EXACT
        # 7 and 6 images of the ranks: 2 passes in place of 4, each of which gathers three blocks
        assert same - larger == 2 * 3


def test_bf16_gathers_and_a_bf16_base_have_the_gradients_of_ddp_in_bf16(halved):
    for of_rank, *_ in halved:
        for case, (difference, dtypes) in of_rank.items():
            assert difference <= HALVES[case], case
            assert dtypes == {torch.float32}


def test_a_base_in_bf16_rounds_matrices_of_frozen_blocks_alone():
    network = of_half_base(World(), DDPSettings()).network
    rounded = {
        name.replace(".base_layer", "").partition(".1.")[2]
        for name, parameter in network.named_parameters()
        if parameter.dtype == torch.bfloat16 and ".blocks.1." in name
    }
    assert rounded == {f"{name}.weight" for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}
    assert not any(
        parameter.dtype == torch.bfloat16 and (".blocks." not in name or parameter.requires_grad)
        for name, parameter in network.named_parameters()
    )


def test_an_old_torch_gathers_no_matrices_apart(monkeypatch):
    monkeypatch.delitem(MixedPrecisionPolicy.__dataclass_fields__, "param_dtype_override_fn")
    with raises("package.too_old", "engine.gather", torch.__version__):
        half_policy()


@pytest.mark.parametrize(
    ("network", "first", "last", "count"),
    [
        ("vit_small_patch16_224", "blocks.0", "blocks.11", 12),
        ("eva02_tiny_patch14_224", "blocks.0", "blocks.11", 12),
        ("naflexvit_base_patch16_gap", "blocks.0", "blocks.11", 12),
        ("vit_small_patch16_dinov3", "blocks.0", "blocks.11", 12),
        ("convnext_tiny", "stages.0", "stages.3.blocks.2", 14),
        ("swin_tiny_patch4_window7_224", "layers.0", "layers.3.blocks.1", 10),
        ("resnet50", "layer1.0", "layer4.2", 16),
        ("Dinov2", "encoder.layer.0", "encoder.layer.2", 3),
        ("SiglipVision", "encoder.layers.0", "encoder.layers.2", 3),
        ("DINOv3ViT", "model.layer.0", "model.layer.2", 3),
    ],
)
def test_blocks_are_those_that_a_network_lists(network, first, last, count):
    with torch.device("meta"):
        if network[0].islower():
            module = timm.create_model(network, num_classes=0)
        else:
            module = of_transformers(network)
    names = [name for name, _ in blocks_of(module)]
    assert (names[0], names[-1], len(names)) == (first, last, count)


@pytest.mark.parametrize(
    ("network", "settings", "count"),
    [
        ("vit_small_patch16_224", {}, 0),
        ("vit_small_patch16_224", {"gather": "bf16"}, 12),
        ("vit_small_patch16_224", {"reshard": "pass"}, 12),
        ("vit_giantopt_patch16_siglip_256", {}, 40),
        ("vit_giantopt_patch16_siglip_256", {"unit": "network"}, 0),
    ],
)
def test_auto_takes_blocks_where_a_billion_parameters_or_another_key_need_them(
    network, settings, count
):
    with torch.device("meta"):
        module = timm.create_model(network, num_classes=0)
    assert len(blocks_to_gather(module, **settings)) == count


def of_transformers(name):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=32,
        num_hidden_layers=3,
        image_size=32,
        patch_size=8,
    )
    return getattr(transformers, f"{name}Model")(config)


@pytest.mark.parametrize(
    ("network", "names"),
    [("vgg11", ["VGG", "engine.unit"]), ("coat_tiny", ["serial_blocks1.0", "share"])],
)
def test_a_network_without_blocks_is_refused(network, names):
    with torch.device("meta"):
        module = timm.create_model(network, num_classes=0)
    with raises("network.no_blocks", *names):
        FSDPSettings(unit="blocks").build(module, None, World())


def test_hosts_with_other_numbers_of_ranks_are_refused():
    world = World(rank=0, size=3, hosts=("a", "b", "b"))
    with raises("engine.uneven_hosts", "a has 1", "b has 2"):
        shard(nn.Linear(2, 2), world, unit="network", within="host")


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"engine": {"name": "fsdp", "unit": "network", "reshard": "pass"}}, ["reshard", "unit"]),
        (ROUNDED | {"engine": {"name": "fsdp", "unit": "network", "gather": "bf16"}}, ["unit"]),
        ({"engine": {"name": "fsdp", "gather": "bf16"}}, ["engine.gather", "precision"]),
        ({"engine": {"name": "fsdp", "gather": "bf16"}, "precision": "bf16"}, ["evaluation"]),
        ({"model": VIT | {"adapter": {"base": "bf16"}}}, ["model.adapter.base", "precision"]),
    ],
)
def test_keys_that_do_not_fit_are_refused(settings, names):
    with raises("recipe.value", *names):
        recipe("run", ("none",), **settings)


def statistics(world):
    """Running statistics after a step in which the ranks make other numbers of passes."""
    model = {"backbone": "test_resnet", "weights": "random", "batchnorm": "batch", "projection": 6}
    answers = []
    for engine in (DDPSettings(), FSDPSettings(reshard="pass")):
        read = recipe("run", ("none",), model=model).model_copy(update={"engine": engine})
        learner = learner_of(read, network_of(read, world).train(), world)
        gradients(world, lambda *_, built=learner: built, engine, size=2)
        answers.append({name: buffer.clone() for name, buffer in learner.network.named_buffers()})
    return answers


def test_passes_that_keep_ranks_in_step_leave_running_statistics_alone():
    for of_ddp, by_pass in on_ranks(2, statistics):
        assert any(name.endswith("running_mean") for name in of_ddp)
        for name, buffer in of_ddp.items():
            torch.testing.assert_close(by_pass[name], buffer, rtol=1e-5, atol=1e-6)

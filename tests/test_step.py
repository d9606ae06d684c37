from dataclasses import dataclass

import pytest
import torch
from batches import TensorBatch, small_images, small_network
from networks import noise, random_network
from raising import raises
from ranks import on_ranks
from reference import listwise_loss
from steps import learning, step_with

from distap.errors import DistapError
from distap.model.pooling import NamedPooling
from distap.randomness import seed_for
from distap.ranking.loss import Loss
from distap.ranking.losses.quantized import QuantizedAP
from distap.stages.micro_batches import MicroBatchSizes
from distap.stages.step import DROPOUT
from distap.world import World

# 21 images are uneven on 4 ranks, and fill no micro-batch of 4
SEED = 3
STEP = 7
IMAGES = 21
STOCHASTIC = {"dropout": 0.3, "drop_path": 0.2}
# What is tried on every number of ranks: network, images of a micro-batch, how many of a rank keep
# their graph, and images of a micro-batch of describe.
CASES = {
    "stochastic": (STOCHASTIC, 4),
    "one image": ({}, 1),
    "everything at once": ({}, 100),
    "two graphs kept": (STOCHASTIC, 4, 2),
    "all graphs kept": ({}, 2, 99),
    "one graph kept": ({}, 7, 1),
    "larger in describe": ({}, 2, 0, 5),
    "larger in describe, graphs kept": ({}, 2, 2, 5),
    "all described at once": ({}, 2, 1, 100),
    "smaller in describe": ({}, 4, 0, 3),
}


def step_on(world, network, size, keep=0, describe=0, **options):
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    learner = learning(network, optimizer, world)
    sizes = MicroBatchSizes(size, keep, describe)
    return step_with(learner, QuantizedAP(), world, SEED, sizes, probed=True, **options)


def moved_by(step, batch):
    """Each parameter's gradient after one step of SGD with rate 1, by how much it moved, and the
    step's result.
    """
    before = [p.detach().clone() for p in step.learner.network.parameters()]
    result = step(batch, 1.0)
    return [
        b - p.detach() for b, p in zip(before, step.learner.network.parameters(), strict=True)
    ], result


def assert_near(actual, expected):
    for item, other in zip(actual, expected, strict=True):
        assert (item - other).norm() <= 1e-9 * other.norm()


def all_cases(world):
    steps = {
        name: step_on(world, small_network(**settings), *sizes)
        for name, (settings, *sizes) in CASES.items()
    }
    return {
        name: moved_by(step, TensorBatch(*small_images(IMAGES), world, STEP))
        for name, step in steps.items()
    }


def full_batch_gradients(ranks, settings, micro_batch):
    """Autograd through the network and the materialised loss at once, dropout drawn as the ranks
    draw it.
    """
    network = small_network(**settings)
    images, labels = small_images(IMAGES)
    descriptors = torch.empty(IMAGES, 5, dtype=torch.float64)
    for rank in range(ranks):
        own_values = list(range(rank, IMAGES, ranks))
        for start in range(0, len(own_values), micro_batch):
            slots = own_values[start : start + micro_batch]
            torch.manual_seed(seed_for(DROPOUT, SEED, STEP, slots[0]))
            descriptors[slots] = network(images[slots])
    loss = listwise_loss("ap_q", descriptors, labels)
    loss.backward()
    return [p.grad for p in network.parameters()], loss.item()


@pytest.fixture(scope="module", params=[1, 4])
def stepped(request):
    """Every case on 1 and 4 ranks."""
    return request.param, on_ranks(request.param, all_cases)


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_those_of_one_full_batch_pass(stepped, case):
    ranks, answers = stepped
    settings, size, *_ = CASES[case]
    expected, loss = full_batch_gradients(ranks, settings, size)
    for answer in answers:
        moved, result = answer[case]
        assert result.loss == pytest.approx(loss, rel=1e-12) and result.replay_drift < 1e-12
        assert_near(moved, expected)


def vision_transformer():
    rates = {"drop_rate": 0.3, "drop_path_rate": 0.2, "proj_drop_rate": 0.2, "attn_drop_rate": 0.1}
    return random_network("test_vit", pooling=NamedPooling("cls"), arguments=rates).double().train()


def test_a_vision_transformer_with_class_token_dropout_and_stochastic_depth_trains_exactly():
    network = vision_transformer()
    images = noise(10, 64)
    labels = torch.arange(10) % 3
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    result = step_on(World(), network, 4)(TensorBatch(images, labels, World(), STEP), 1.0)
    whole = vision_transformer()
    descriptors = []
    for start in range(0, 10, 4):
        torch.manual_seed(seed_for(DROPOUT, SEED, STEP, start))
        descriptors.append(whole(images[start : start + 4]))
    loss = listwise_loss("ap_q", torch.cat(descriptors), labels)
    loss.backward()
    assert result.replay_drift < 1e-12 and result.loss == pytest.approx(loss.item(), rel=1e-12)
    again = vision_transformer()
    assert not torch.allclose(again(images), again(images), atol=1e-3)  # it does drop
    for name, p in whole.named_parameters():
        moved = before[name] - network.get_parameter(name).detach()
        assert (moved - p.grad).norm() <= 1e-9 * p.grad.norm() + 1e-15, name


def test_a_kept_graph_needs_no_second_forward():
    forwards = []
    step = step_on(World(), small_network(), 4, keep=2)
    step.learner.network.register_forward_hook(
        lambda module, images, descriptors: forwards.append(len(descriptors))
    )
    result = step(TensorBatch(*small_images(IMAGES), World()), 1.0)
    assert forwards == [4, 4, 4, 4, 4, 1, 4, 4, 4, 4]
    assert (result.replayed, result.kept) == (16, 5)


@dataclass(frozen=True)
class Indifferent(Loss):
    """A loss that some descriptors do not matter to."""

    chosen: list[int]
    factor: float = 0.0

    def value_and_gradient(self, gathered, budget):
        value = QuantizedAP().value_and_gradient(gathered, budget)
        scale = torch.where(
            torch.isin(gathered.own, torch.tensor(self.chosen)), 1.0, self.factor
        ).double()
        return value._replace(gradient=value.gradient * scale[:, None])


def replay_of_some(world, chosen, keep, settings, factor=0.0, skip_below=0.0):
    """How the parameters move, how many images were replayed, and the sizes of replay's forward
    passes.
    """
    network = small_network(**settings)
    learner = learning(network, torch.optim.SGD(network.parameters(), lr=1.0), world)
    loss = Indifferent(chosen, factor)
    step = step_with(
        learner, loss, world, SEED, MicroBatchSizes(4, keep), probed=True, skip_below=skip_below
    )
    sizes = []

    def note(module, images, descriptors):
        if torch.is_grad_enabled():
            sizes.append(len(descriptors))

    network.register_forward_hook(note)
    moved, result = moved_by(step, TensorBatch(*small_images(IMAGES), world, STEP))
    return moved, (result.replayed, result.kept), sizes


def all_replays_of_some(world):
    drifting = step_on(
        world, Restless(small_network()) if world.rank == world.size - 1 else small_network(), 4
    )
    with pytest.raises(DistapError, match="replay drift"):  # of one rank, on every rank
        drifting(TensorBatch(*small_images(IMAGES), world, STEP), 1.0)
    chosen = [1, 2, 5, 9, 14, 18]  # of one rank of two they are 2, 14, 18, of the other 1, 5, 9
    return {
        "plain": replay_of_some(world, chosen, 0, {}),
        "kept": replay_of_some(world, chosen, 2, {}),
        "whole": replay_of_some(world, chosen, 0, STOCHASTIC),
        "one rank only": replay_of_some(world, [1, 3], 0, {}),
        "small ones left out": replay_of_some(world, chosen, 0, {}, factor=1e-7, skip_below=1e-4),
    }


def test_images_without_gradient_are_not_replayed():
    alone = all_replays_of_some(World())
    together = on_ranks(2, all_replays_of_some)
    assert alone["plain"][1:] == ((6, 0), [4, 2])
    assert alone["whole"][2] == [4] * 5  # with dropout, micro-batches stay as they were
    for answer in (alone, *together):
        assert (
            answer["plain"][1] == answer["whole"][1] == answer["small ones left out"][1] == (6, 0)
        )
        assert sum(answer["kept"][1]) == 6
        assert answer["one rank only"][1] == (2, 0)
        for case in ("plain", "kept", "one rank only"):
            assert_near(answer[case][0], alone[case if case != "kept" else "plain"][0])
        assert_near(answer["small ones left out"][0], alone["plain"][0])
    assert together[0]["one rank only"][2] == [1]  # padding, so that it takes part in the reduction


class Greedy(torch.nn.Module):
    """Runs out of memory above some number of images, as torch says it on a GPU."""

    def __init__(self, network, with_graph, without=99, graphs=99, backward=99):
        super().__init__()
        self.network = network
        self.with_graph = with_graph
        self.without = without
        self.graphs = graphs
        self.backward = backward

    def forward(self, images):
        limit = self.with_graph if torch.is_grad_enabled() else self.without
        if len(images) > limit:
            raise torch.OutOfMemoryError("too many")
        descriptors = self.network(images)
        if torch.is_grad_enabled():
            self.graphs -= 1
            if self.graphs < 0:
                raise torch.OutOfMemoryError("too many graphs")
            descriptors.register_hook(self.check_backward)
        return descriptors

    def check_backward(self, gradient):
        if len(gradient) > self.backward:
            raise torch.OutOfMemoryError("too many in backward")


@pytest.mark.parametrize(
    ("limits", "size"),
    [
        ({"with_graph": 3}, 2),
        ({"with_graph": 99, "without": 5}, 4),
        ({"with_graph": 99, "backward": 5}, 4),
    ],
)
def test_micro_batches_are_halved_where_memory_runs_out(limits, size, caplog):
    step = step_on(World(), Greedy(small_network(), **limits), 8)
    moved, result = moved_by(step, TensorBatch(*small_images(IMAGES), World(), STEP))
    expected, loss = full_batch_gradients(1, {}, 8)
    assert result.loss == pytest.approx(loss, rel=1e-12)
    assert_near(moved, expected)
    assert step.stages.sizes == MicroBatchSizes(size)
    assert "out of memory in" in caplog.text


@pytest.mark.parametrize(
    ("limits", "sizes"),
    [
        ({"with_graph": 99, "without": 5}, (3, 4)),
        ({"with_graph": 99, "without": 2}, (2, 2)),
        ({"with_graph": 2, "without": 99}, (1, 16)),
    ],
)
def test_each_stage_halves_its_own_size(limits, sizes):
    step = step_on(World(), Greedy(small_network(), **limits), 3, describe=16)
    moved, _ = moved_by(step, TensorBatch(*small_images(IMAGES), World(), STEP))
    assert_near(moved, full_batch_gradients(1, {}, 8)[0])
    actual = step.stages.sizes
    assert (actual.images, actual.describe) == sizes


class Counting(torch.nn.Module):
    """Notes how many images it describes at once, and whether with a graph."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.passes = []

    def forward(self, images):
        self.passes.append((len(images), torch.is_grad_enabled()))
        return self.network(images)


def test_describe_takes_its_own_size_but_where_it_keeps_graphs():
    network = Counting(small_network())
    step = step_on(World(), network, 3, keep=1, describe=8)
    step(TensorBatch(*small_images(IMAGES), World(), STEP), 1.0)
    described = [(8, False), (8, False), (2, False), (3, True)]
    assert network.passes == described + [(3, True)] * 6


@pytest.mark.parametrize(
    ("settings", "layer"),
    [({"dropout": 0.1}, "dropout"), ({"drop_path": 0.1}, "drop_path"), ({"frozen": False}, "norm")],
)
def test_another_size_of_describe_is_refused_where_a_descriptor_depends_on_the_cut(settings, layer):
    network = small_network(**settings)
    with raises("network.cut_matters", "describe.size", 8, "replay.size", 4, layer):
        step_on(World(), network, 4, describe=8)
    step_on(World(), network, 4, describe=4)
    step_on(World(), network.eval(), 4, describe=8)


def test_fewer_graphs_are_kept_where_memory_runs_out(caplog):
    greedy = Greedy(small_network(), 99, graphs=3)
    step = step_on(World(), greedy, 4, keep=5)
    described = step.stages.describe(TensorBatch(*small_images(IMAGES), World(), STEP))
    assert (step.stages.sizes.keep, described.graphs) == (2, {})
    greedy.graphs = 99
    assert_near(
        moved_by(step, TensorBatch(*small_images(IMAGES), World(), STEP))[0],
        full_batch_gradients(1, {}, 4)[0],
    )


def test_memory_that_does_not_suffice_for_one_image_is_an_error_that_says_what_to_change():
    step = step_on(World(), Greedy(small_network(), 99, without=0), 2)
    with raises("memory.too_small"):
        step(TensorBatch(*small_images(IMAGES), World()), 1.0)
    step = step_on(World(), Greedy(small_network(dropout=0.1), 99, without=1), 2)
    with raises("memory.too_small"):
        step(TensorBatch(*small_images(IMAGES), World()), 1.0)


class Restless(torch.nn.Module):
    """Draws from a generator that no one restores."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, images):
        noise = torch.randn(len(images), 5, generator=self.generator, dtype=torch.float64)
        return torch.nn.functional.normalize(self.network(images) + noise)


def test_replay_drift_is_an_error_that_says_why_and_moves_nothing():
    network = Restless(small_network())
    before = [p.detach().clone() for p in network.parameters()]
    with raises("run.replay_drift", "8"):
        step_on(World(), network, 4)(TensorBatch(*small_images(IMAGES), World(), STEP), 1.0)
    assert all(torch.equal(b, p) for b, p in zip(before, network.parameters(), strict=True))


class Overflowing(torch.nn.Module):
    """Gives infinity for one image, as half precision can."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, images):
        descriptors = self.network(images)
        return torch.where(
            images.amax((1, 2, 3), keepdim=True)[:, :, 0, 0] > 100, torch.inf, descriptors
        )


@pytest.mark.parametrize("keep", [0, 3])
def test_an_image_that_is_not_finite_is_left_out_and_the_rest_trains_as_without_it(keep):
    images, labels = small_images(IMAGES)
    spoilt = images.clone()
    spoilt[18] = 1e6  # in a micro-batch that keeps its graph, which is described again
    step = step_on(World(), Overflowing(small_network()), 4, keep=keep)
    moved, result = moved_by(step, TensorBatch(spoilt, labels, World()))
    assert (result.not_finite, result.skipped, result.kept) == ([18], None, 5 if keep else 0)
    kept_rows = torch.arange(IMAGES) != 18
    reference = small_network()
    listwise_loss("ap_q", reference(images[kept_rows]), labels[kept_rows]).backward()
    assert_near(moved, [parameter.grad for parameter in reference.parameters()])


@pytest.mark.parametrize("spoilt", [range(IMAGES), range(IMAGES - 1)], ids=["all", "all but one"])
def test_a_batch_whose_descriptors_are_not_finite_is_a_step_that_moves_nothing(spoilt):
    images, labels = small_images(IMAGES)
    images[list(spoilt)] = 1e6
    step = step_on(World(), Overflowing(small_network()), 4)
    moved, result = moved_by(step, TensorBatch(images, labels, World()))
    assert result.skipped == "descriptor" and result.not_finite == list(spoilt)
    assert not any(tensor.any() for tensor in moved)


def test_a_gradient_that_is_not_finite_moves_nothing():
    network = small_network()
    step = step_on(World(), network, 4)
    network.head.weight.register_hook(lambda gradient: gradient * torch.nan)
    moved, result = moved_by(step, TensorBatch(*small_images(IMAGES), World()))
    assert result.skipped == "gradient" and not any(tensor.any() for tensor in moved)


def test_the_step_leaves_torchs_random_state_alone():
    step = step_on(World(), small_network(**STOCHASTIC), 4)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    step(TensorBatch(*small_images(IMAGES), World()), 1.0)
    assert torch.equal(torch.get_rng_state(), state)

"""DeepSpeed on 2 ranks, all that is looked at from one start of them."""

import gc
import json
import threading
import weakref

import pytest
import torch
from batches import SmallNetwork, TensorBatch, small_images
from ranks import on_ranks
from torch.profiler import ProfilerActivity, profile

from distap.engine import DDPEngine, Precision
from distap.engine.deepspeed.config import DeepSpeedSettings
from distap.engine.deepspeed.engine import DeepSpeedEngine
from distap.randomness import seed_for
from distap.ranking.losses.smooth import SmoothAP
from distap.ranking.rank import rank
from distap.stages.micro_batches import MicroBatchSizes
from distap.step import DROPOUT, ThreeStageStep
from distap.world import World

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow  # starting the ranks

RANKS, IMAGES, SIZE, STEPS = 2, 13, 2, 2  # shares of 7 and 6 images, so of 4 and 3 micro-batches
STAGES = (1, 2, 3)
PRECISIONS = ((2, "bf16"), (1, "fp16"), (2, "fp16"), (3, "fp16"))
OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "round_robin_gradients": True}}
CASES = {
    **{f"stage {stage}, Adam, clipped": (stage, torch.optim.Adam, 0.05, 0, None) for stage in STAGES},
    **{f"stage {stage}, SGD": (stage, torch.optim.SGD, None, 0, None) for stage in STAGES},
    **{f"stage {stage}, Adam, offloaded": (stage, torch.optim.Adam, 0.05, 0, OFFLOAD) for stage in (2, 3)},
    "stage 2, Adam, two graphs kept": (2, torch.optim.Adam, None, 2, None),
}


class Pixels(TensorBatch):
    """Whose images are copies, as those on a GPU are: what a kept graph remembers is not to be blanked."""

    def images(self, rows):
        return super().images(rows).clone()


class Network(SmallNetwork):
    """In float32, with what DeepSpeed does not know by itself: a parameter without dimensions, and channels last."""

    def __init__(self, dropout):
        torch.manual_seed(0)
        super().__init__(dropout=dropout)
        self.power = torch.nn.Parameter(torch.tensor(1.5))
        self.train().to(memory_format=torch.channels_last)

    def forward(self, images):
        return super().forward(images * self.power)


def images_and_labels():
    images, labels = small_images(IMAGES)
    return images.float(), labels


def network_and_optimizer(kind=torch.optim.Adam, dropout=0.3):
    network = Network(dropout)

    def build():
        parameters = list(network.parameters())
        return kind([{"params": parameters[::2], "factor": 0.5}, {"params": parameters[1::2]}], lr=0.0)

    return network, build


def deepspeed(world, stage, kind=torch.optim.Adam, clip_norm=None, path=None, precision=None, dropout=0.3):
    network, build = network_and_optimizer(kind, dropout)
    return DeepSpeedEngine(network, build, world, DeepSpeedSettings(stage=stage, config=path), clip_norm, precision)


def three_stages(world, engine, steps, keep=0, size=SIZE, first=0):
    step = ThreeStageStep(engine, SmoothAP(tau=0.1), world, 0, MicroBatchSizes(size, keep=keep))
    return [
        step(Pixels(*images_and_labels(), world, number), learning_rate=0.02)
        for number in range(first, first + steps)
    ]


def parameters_of(engine):
    return {name: t.clone() for name, t in engine.state_dict().items() if name.startswith("network.")}


def _all_cases(world, folder):
    """Every case's parameters after some steps and the norms of the gradients."""
    answers = {}
    for number, (name, (stage, kind, clip_norm, keep, config)) in enumerate(CASES.items()):
        path = None
        if config is not None:
            path = folder / f"{number}-{world.rank}.json"
            path.write_text(json.dumps(config))
        engine = deepspeed(world, stage, kind, clip_norm, path)
        results = three_stages(world, engine, STEPS, keep)
        answers[name] = parameters_of(engine), [result.gradient_norm for result in results]
        assert max(result.replay_drift for result in results) < 1e-6
    return answers


def _replay(world, engine, micro_batches, weight=1.0):
    """Replay the same images so many times, without any ranking."""
    images, _ = images_and_labels()
    for number in range(micro_batches):
        with engine.accumulating(is_last=number == micro_batches - 1):
            descriptors = engine.forward(images[world.rank :: world.size])
            engine.backward(descriptors, torch.full_like(descriptors, weight).cumsum(1))


def _reductions(world, stage):
    """Collectives over gradients in steps of 2 and of 6 micro-batches, and what the engine says of them."""
    engine = deepspeed(world, stage)
    answers = []
    for micro_batches in (1, 2, 6):  # the first is not looked at
        before = engine.reductions
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
            _replay(world, engine, micro_batches)
            engine.update(0.01)
        reducing = [event for event in recorded.events() if event.name in ("gloo:all_reduce", "gloo:reduce_scatter")]
        large = [event for event in reducing if any(shape and shape[0] > 100 for shape in event.input_shapes)]
        answers.append((len(large), engine.reductions - before))
    return answers[1:]


def _state_there_and_back(world, stage, state):
    """One more step from a state, and the state behind it; given to a second engine, which then has to agree."""
    engine = deepspeed(world, stage)
    engine.load_state_dict(state)
    three_stages(world, engine, 1, first=1)
    after = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    other = deepspeed(world, stage)
    other.load_state_dict(after)
    for one in (engine, other):
        three_stages(world, one, 1, first=2)
    again, same = parameters_of(engine), parameters_of(other)
    return after, all(torch.equal(again[name], same[name]) for name in again)


def _mixed_precision(world, stage, name):
    """Norms and scales of steps in which one gradient of one rank is too large for the scale."""
    engine = deepspeed(world, stage, clip_norm=1e-3, precision=Precision(name), dropout=0.0)
    images, _ = images_and_labels()
    norms, scales, moved = [], [], []
    for number in range(3):
        before = parameters_of(engine)
        for is_last in (False, True):
            with engine.accumulating(is_last):
                descriptors = engine.forward(images[world.rank :: world.size])
                gradient = 1e-4 * torch.ones_like(descriptors).cumsum(1)
                if number == 1 and world.rank == 1 and not is_last:
                    gradient[0, 0] = torch.inf
                engine.backward(descriptors, gradient)
        norms.append(engine.update(0.01))
        after = engine.state_dict()
        scales.append(float(after.get("scaler.scale", 1.0)))
        moved.append(any(not torch.equal(before[k], after[k]) for k in before))
    return norms, scales, moved


def _discarded(world, stage):
    """Norms of the same step: done once, after one that was given up in the middle, and after one at its end."""
    engine = deepspeed(world, stage, dropout=0.0)
    norms = []
    for given_up in ((), (False,), (False, True)):
        for is_last in given_up:
            with engine.accumulating(is_last):
                descriptors = engine.forward(images_and_labels()[0])
                engine.backward(descriptors, torch.ones_like(descriptors).cumsum(1))
        if given_up:
            engine.discard()
        _replay(world, engine, 2)
        norms.append(engine.update(0.0))
    return norms


def _interrupted(world):
    """Norms of the same step: done once, and after a backward pass that failed on one rank."""
    engine = deepspeed(world, 2, dropout=0.0)

    def fail(_):
        raise RuntimeError("no memory left")

    norms = []
    for fails in (False, True):
        if fails and world.rank == 0:
            handle = engine.network.block.weight.register_hook(fail)
            with pytest.raises(RuntimeError, match="no memory left"):
                _replay(world, engine, 2)
            handle.remove()
            engine.discard()
        _replay(world, engine, 2)
        norms.append(engine.update(0.0))
    return norms


def _described_apart(world, stage):
    """How far descriptors of the engine and of its network are apart; ranks describe different numbers of images.

    Returns the norm of the next step as well, and whether the network stays behind once the engine is gone.
    """
    engine = deepspeed(world, stage, dropout=0.0)
    images, _ = images_and_labels()
    three_stages(world, engine, 1)
    with engine.describing():
        parts = [engine.describe(images[i : i + 1]) for i in range(1 + 5 * world.rank)]
        with torch.no_grad():
            whole = engine.network(images[: len(parts)])
    norm = three_stages(world, engine, 1, first=1)[0].gradient_norm
    network = weakref.ref(engine.network)
    del engine
    gc.collect()
    return (torch.cat(parts) - whole).abs().max().item(), norm, network() is not None


def everything(world, folder, state):
    return {
        "cases": _all_cases(world, folder),
        "reductions": {stage: _reductions(world, stage) for stage in STAGES},
        "state": {stage: _state_there_and_back(world, stage, state) for stage in STAGES},
        "precision": {case: _mixed_precision(world, *case) for case in PRECISIONS},
        "discarded": {stage: _discarded(world, stage) for stage in STAGES},
        "interrupted": _interrupted(world),
        "described": {stage: _described_apart(world, stage) for stage in STAGES},
        "threads": [thread.name for thread in threading.enumerate() if not thread.name.startswith("distap")],
    }


@pytest.fixture(scope="module")
def replicated_state():
    """What one step of DDP by a lone process leads to."""
    network, build = network_and_optimizer()
    engine = DDPEngine(network, build, World())
    three_stages(World(), engine, 1)
    return {name: tensor.clone() for name, tensor in engine.state_dict().items()}


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory, replicated_state):
    return on_ranks(RANKS, everything, tmp_path_factory.mktemp("deepspeed"), replicated_state)


def full_batch(kind, clip_norm, steps):
    """Plain autograd over the whole batch in one process, its dropout drawn as the ranks draw it."""
    network, build = network_and_optimizer(kind)
    optimizer = build()
    images, labels = images_and_labels()
    norms = []
    for number in range(steps):
        descriptors = [None] * IMAGES
        for first in range(RANKS):
            slots = list(range(first, IMAGES, RANKS))
            for start in range(0, len(slots), SIZE):
                chosen = slots[start : start + SIZE]
                torch.manual_seed(seed_for(DROPOUT, 0, number, chosen[0]))
                for slot, descriptor in zip(chosen, network(images[chosen]), strict=True):
                    descriptors[slot] = descriptor
        batch = torch.stack(descriptors)
        optimizer.zero_grad()
        batch.backward(rank(batch.detach(), labels, "smooth_ap", tau=0.1).gradient)
        norms.append(float(torch.nn.utils.clip_grad_norm_(network.parameters(), clip_norm or float("inf"))))
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * group.get("factor", 1.0)
        optimizer.step()
    return {f"network.{name}": tensor for name, tensor in network.state_dict().items()}, norms


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_those_of_full_batch_training(on_two_ranks, case):
    _, kind, clip_norm, _, _ = CASES[case]
    expected, norms = full_batch(kind, clip_norm, STEPS)
    assert clip_norm is None or min(norms) > clip_norm
    for answers in on_two_ranks:
        parameters, same_norms = answers["cases"][case]
        assert same_norms == pytest.approx(norms, rel=1e-4)
        for name, tensor in expected.items():
            torch.testing.assert_close(parameters[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_reductions_do_not_grow_with_the_micro_batches(on_two_ranks, stage):
    for answers in on_two_ranks:
        assert answers["reductions"][stage] == [(1, 1), (1, 1)]


@pytest.mark.parametrize("stage", STAGES)
def test_a_state_goes_from_ddp_to_deepspeed_and_back_on_another_number_of_ranks(
    on_two_ranks, replicated_state, stage
):
    network, build = network_and_optimizer(dropout=0.0)
    engine = DDPEngine(network, build, World())
    for answers in on_two_ranks:
        after, is_exact = answers["state"][stage]
        assert is_exact
        assert {name: tensor.shape for name, tensor in after.items()} == {
            name: tensor.shape for name, tensor in replicated_state.items()
        }
        assert float(after["optimizer.state.head.weight.step"]) == 2
        engine.load_state_dict(after)
        again = engine.state_dict()
        assert all(torch.equal(again[name], tensor) for name, tensor in after.items())


@pytest.mark.parametrize(("stage", "name"), PRECISIONS)
def test_a_gradient_that_is_not_finite_on_one_rank_moves_nothing_on_any(on_two_ranks, stage, name):
    for answers in on_two_ranks:
        norms, scales, moved = answers["precision"][stage, name]
        assert moved == [True, False, True]
        assert norms[1] == float("inf")
        assert norms[0] > 1e-3 and norms[2] > 1e-3
        before, *after = scales
        assert after == ([before / 2] * 2 if name == "fp16" else [1.0] * 2)
        assert norms == on_two_ranks[0]["precision"][stage, name][0]


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_was_given_up_leaves_nothing_behind(on_two_ranks, stage):
    for answers in on_two_ranks:
        first, *others = answers["discarded"][stage]
        assert others == pytest.approx([first, first], rel=1e-6)


def test_a_backward_pass_that_failed_on_one_rank_can_be_done_again(on_two_ranks):
    for answers in on_two_ranks:
        first, second = answers["interrupted"]
        assert second == pytest.approx(first, rel=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_describe_different_numbers_of_images(on_two_ranks, stage):
    for answers in on_two_ranks:
        difference, norm, _ = answers["described"][stage]
        assert difference < 1e-6
        assert 0 < norm < float("inf")


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_can_be_collected_before_the_process_group_goes(on_two_ranks, stage):
    for answers in on_two_ranks:
        _, _, stays = answers["described"][stage]
        assert not stays
        assert answers["threads"] == ["MainThread"]


def test_a_lone_process_needs_no_process_group(caplog):
    engine = deepspeed(World(), 2, torch.optim.SGD, dropout=0.0)
    three_stages(World(), engine, 1)
    assert '"gradient_clipping": 0.0' in caplog.text and '"overlap_comm": false' in caplog.text
    del engine
    gc.collect()
    assert not torch.distributed.is_initialized()

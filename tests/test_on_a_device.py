"""What would run on a GPU, on a device that keeps a GPU's rules: `helpers/twin_device.py` says which."""

from collections import defaultdict

import pytest
import torch
from batches import TensorBatch, small_images, small_network
from problems import problem
from ranks import on_ranks
from steps import learning, step_with
from torch.nn.functional import normalize
from twin_device import twin_device, values, watching

from distap.data.converters.landmarks import OF_LANDMARKS
from distap.data.converters.revisited import DIFFICULTIES, OF_REVISITED
from distap.ranking.gather import gather
from distap.ranking.loss import build_loss
from distap.ranking.losses.quantized import QuantizedAP
from distap.ranking.rank import rank_descriptors
from distap.registry import REGISTRY
from distap.retrieval.evaluate import evaluate_descriptors
from distap.retrieval.figures import labelled_figures
from distap.retrieval.truth import Truth, class_truth
from distap.stages.micro_batches import MicroBatchSizes
from distap.stopwatch import Stopwatch
from distap.world import World

IMAGES = 200
BOUNDED = {"Event.synchronize in DeviceCopies.__call__"}  # the host may be two micro-batches ahead
OF_STAGE = {"synchronize in Stopwatch._now"}  # at the begin and the end of a stage
LOSSES = sorted(set(REGISTRY["loss"]) - {"matryoshka", "sum"})


def trained(device, keep=0):
    """The outcome of a step, the parameters after it, and the waits of each stage."""
    world, waits = World(device=device), defaultdict(set)
    network = small_network().to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    learner, sizes = learning(network, optimizer, world), MicroBatchSizes(8, 16, keep)
    step = step_with(learner, QuantizedAP(), world, 0, sizes, probed=True, stopwatch=Stopwatch(device))
    with watching() as found:
        for stage in ("describe", "_send_back"):
            watched(step.stages, stage, found, waits[stage])
        batch = TensorBatch(*small_images(IMAGES), world, 1)
        if device.type != "cpu":
            batch.pixels = batch.pixels.pin_memory()
        result = step(batch, learning_rate=1.0)
    return result, [values(one).detach() for one in network.parameters()], dict(waits)


def watched(step, name, found, waits):
    stage = getattr(step, name)

    def watch(*arguments):
        found.clear()
        result = stage(*arguments)
        waits.update(found)
        return result

    setattr(step, name, watch)


def trained_on_both(_, keep):
    """The same step on the CPU and on the device."""
    with twin_device() as device:  # first, since autograd looks for devices once
        on_device = trained(device, keep)
    return trained(torch.device("cpu"), keep), on_device


@pytest.mark.parametrize("keep", [0, 3])
def test_a_step_on_a_device_has_the_same_bits_and_waits_for_nothing(keep):
    [(on_cpu, on_device)] = on_ranks(1, trained_on_both, keep)
    result, parameters, waits = on_device
    assert result.loss == on_cpu[0].loss and result.gradient_norm == pytest.approx(on_cpu[0].gradient_norm)
    assert result.replay_drift == 0 and (result.replayed, result.kept) == (on_cpu[0].replayed, on_cpu[0].kept)
    for found, expected in zip(parameters, on_cpu[1], strict=True):
        assert torch.equal(found, expected)
    assert waits["describe"] <= BOUNDED | OF_STAGE
    assert waits["_send_back"] <= BOUNDED


def both(_, action):
    with twin_device() as device:
        on_device = action(device)
    return action(torch.device("cpu")), on_device


def all_losses(device):
    """Value and gradients of every loss, and its gradient by parameters of its own."""
    raw, labels = problem(4, 90, 7, dtype=torch.float32)
    facts = (one.to(device) for one in (normalize(raw), labels, torch.ones(90, dtype=torch.bool)))
    gathered, found = gather(*facts, World(device=device), 90), {}
    for name in LOSSES:
        loss = build_loss(name).sized(60, 8, 0)
        if loss.learned is not None:
            loss.learned.to(device)
        ranking = rank_descriptors(loss, gathered, memory_bytes=2**16)
        found[name] = [values(one).detach() for one in (ranking.loss, ranking.gradient, *ranking.by_parameters)]
    return found


def test_every_loss_ranks_on_a_device():
    [(on_cpu, on_device)] = on_ranks(1, both, all_losses)
    for name in LOSSES:
        for found, expected in zip(on_device[name], on_cpu[name], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7, msg=lambda text, name=name: name + text)


def all_figures(device):
    """The figures of every protocol, with the head of a ranking and without."""
    raw, labels = problem(5, 60, 7, dtype=torch.float32)
    descriptors, labels = normalize(raw).to(device), labels.to(device)
    generator = torch.Generator().manual_seed(0)
    head = torch.stack([(row + 1 + torch.randperm(59, generator=generator)[:4]) % 60 for row in range(60)]).to(device)
    of_classes, of_queries = class_truth(labels), class_truth(labels[:20], labels[20:])
    found, protocol = [], labelled_figures()
    for first in (None, head):
        found.append(evaluate_descriptors(descriptors, descriptors, of_classes, protocol, 10, head=first))
        own = None if first is None else first[:20, :2] % 20 + torch.tensor([0, 20], device=device)
        queried = descriptors[:20], descriptors[20:]
        found.append(evaluate_descriptors(*queried, of_queries, protocol, 10, head=own))
    positives, junk = [[row, row + 20, 40 + row] for row in range(15)], [[59 - row] for row in range(15, 0, -1)]
    graded = Truth(60, [own[:2] for own in positives], junk, [[1, 2]] * 15, DIFFICULTIES, device=device)
    parts = ["Public" if row % 2 else "Private" for row in range(15)]
    landmarks = Truth(60, positives, parts=parts, device=device)
    for truth, protocol in ((graded, OF_REVISITED), (landmarks, OF_LANDMARKS)):
        found.append(evaluate_descriptors(descriptors[:15], descriptors, truth, protocol))
    return [{name: plain(value) for name, value in vars(one).items() if name != "leading"} for one in found]


def plain(value):
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return values(value) if isinstance(value, torch.Tensor) else value


def test_every_protocol_evaluates_on_a_device():
    [(on_cpu, on_device)] = on_ranks(1, both, all_figures)
    torch.testing.assert_close(on_device, on_cpu, rtol=0, atol=0, equal_nan=True)

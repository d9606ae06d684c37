import copy

import pytest
import torch
from networks import noise, random_network
from steps import learning, step_with
from torch import nn
from torch._dynamo.utils import counters

from benchmarks.contenders import SeededBatch
from distap.errors import DistapError
from distap.model.compiling import CompiledBackbone, compile_backbone
from distap.model.network import RetrievalNetwork
from distap.model.pooling import GeM
from distap.ranking.losses.quantized import QuantizedAP
from distap.stages.micro_batches import MicroBatchSizes
from distap.world import World

# g++ takes about a second a kernel, so the network has few.


class Small(nn.Module):
    num_features = 4

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return self.drop(self.norm(self.convolution(x)).relu())


@pytest.fixture(scope="module")
def networks():
    """One as it is, and one with the same weights that is compiled for micro-batches of four."""
    torch.manual_seed(0)
    plain = RetrievalNetwork(Small(), GeM(), projection=4).train()
    compiled = copy.deepcopy(plain)
    compile_backbone(compiled, [4])
    return plain, compiled


def images(count, size=16):
    return noise(count, size)


def replayed(network, count, with_graph=True):
    torch.manual_seed(3)
    with torch.set_grad_enabled(with_graph):
        return network(images(count))


def gradients(network, count):
    network.zero_grad()
    descriptors = replayed(network, count)
    (descriptors * torch.arange(4.0)).sum().backward()
    return [parameter.grad for parameter in network.parameters()]


@pytest.mark.slow
def test_compiled_networks_describe_and_replay_alike_and_as_the_uncompiled_one(networks):
    plain, compiled = networks
    described, again = replayed(compiled, 4, with_graph=False), replayed(compiled, 4)
    # Dropout is on: the same parts were dropped each time.
    torch.testing.assert_close(described, again, rtol=0, atol=1e-6)
    torch.testing.assert_close(again, replayed(plain, 4))
    for given, expected in zip(gradients(compiled, 4), gradients(plain, 4), strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-6)
    assert list(compiled.state_dict()) == list(plain.state_dict())


@pytest.mark.slow
def test_tails_are_padded_and_images_of_other_sizes_are_not_compiled(networks):
    plain, compiled = networks
    replayed(compiled, 4, with_graph=False), replayed(compiled, 4)
    graphs = counters["stats"]["unique_graphs"]
    described, again = replayed(compiled, 3, with_graph=False), replayed(compiled, 3)
    assert described.shape == (3, 4)
    torch.testing.assert_close(described, again, rtol=0, atol=1e-6)
    gradients(compiled, 3)
    for network in networks:
        network.eval()
    torch.testing.assert_close(compiled(images(5, 20)), plain(images(5, 20)), rtol=0, atol=0)
    for network in networks:
        network.train()
    replayed(compiled, 4)
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.slow
def test_evaluation_on_images_of_the_size_of_training_is_compiled(networks):
    plain, compiled = networks
    replayed(compiled, 4, with_graph=False)
    graphs = counters["stats"]["unique_graphs"]
    for network in networks:
        network.eval()
    try:
        with torch.inference_mode():
            for count in (4, 4, 3):
                torch.testing.assert_close(compiled(images(count)), plain(images(count)))
    finally:
        for network in networks:
            network.train()
    assert counters["stats"]["unique_graphs"] == graphs + 1
    replayed(compiled, 4)  # training goes on with its own graphs


@pytest.mark.slow
def test_a_network_that_changes_after_its_warm_up_is_refused(networks):
    _, compiled = networks
    replayed(compiled, 4, with_graph=False)
    compiled.backbone.drop.p = 0.5
    try:
        with pytest.raises(
            DistapError, match=r"compiled again for micro-batches of \(4, 3, 16, 16\).* set step.compile"
        ):
            replayed(compiled, 4, with_graph=False)
    finally:
        compiled.backbone.drop.p = 0.3
    replayed(compiled, 4, with_graph=False)


@pytest.mark.slow
def test_steps_with_a_compiled_network_are_those_of_the_uncompiled_one(networks):
    # The last micro-batch has three images, so that it is padded.
    results = []
    for network in map(copy.deepcopy, networks):
        optimizer = torch.optim.Adam(network.parameters(), lr=0.0)
        learner = learning(network, optimizer, World())
        step = step_with(learner, QuantizedAP(), World(), 0, MicroBatchSizes(4), max_drift=1e-5, probed=[])
        for number in range(2):
            batch = SeededBatch(15, 16, 3, World())
            batch.step = number
            results.append(step(batch, 1e-3))
    plain, compiled = results[:2], results[2:]
    for one, other in zip(plain, compiled, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-4)
        assert other.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-2)


def test_micro_batches_are_padded_to_full_ones_and_their_halves():
    compiled = CompiledBackbone([24, 16])
    assert {n: compiled.padded_size(n) for n in (1, 2, 5, 7, 9, 13, 16, 17, 24, 30)} == {
        1: 1, 2: 2, 5: 6, 7: 8, 9: 12, 13: 16, 16: 16, 17: 24, 24: 24, 30: 30,
    }  # fmt: skip


def test_what_cannot_be_compiled_is_refused(monkeypatch):
    with pytest.raises(DistapError, match="needs frozen BatchNorm"):
        compile_backbone(random_network(batchnorm="batch"), [4])
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DistapError, match=r"needs a C\+\+ compiler, and g\+\+ was not found"):
        compile_backbone(RetrievalNetwork(Small(), GeM()), [4])

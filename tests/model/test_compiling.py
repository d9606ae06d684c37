import copy

import pytest
import torch
from networks import noise
from steps import learning, step_with
from torch import nn
from torch._dynamo.utils import counters

from benchmarks.contenders import SeededBatch
from distap.errors import DistapError
from distap.model.compiling import compile_backbone
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


@pytest.mark.slow
def test_steps_and_evaluations_with_a_compiled_network_are_those_of_the_uncompiled_one():
    torch.manual_seed(0)
    plain = RetrievalNetwork(Small(), GeM(), projection=4).train()
    compiled = copy.deepcopy(plain)
    compile_backbone(compiled)
    steps, described = [], []
    for network in (plain, compiled):
        optimizer = torch.optim.Adam(network.parameters(), lr=0.0)
        # Dropout is on: the same parts are dropped in both stages, or the drift would tell.
        step = step_with(
            learning(network, optimizer, World()), QuantizedAP(), World(), 0, MicroBatchSizes(4), max_drift=1e-5
        )
        for number in range(2):  # the last micro-batch has three images
            batch = SeededBatch(15, 16, 3, World())
            batch.step = number
            steps.append(step(batch, 1e-3))
        graphs = counters["stats"]["unique_graphs"]
        network.eval()
        with torch.inference_mode():
            described += [network(noise(count, size)) for count, size in ((4, 16), (3, 16), (5, 20))]
    for one, other in zip(steps[:2], steps[2:], strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-4)
        assert other.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-2)
    torch.testing.assert_close(described[3:], described[:3], rtol=1e-3, atol=1e-4)
    assert graphs > 0 and counters["stats"]["unique_graphs"] == graphs + 1  # of evaluation, for all its sizes
    assert list(compiled.state_dict()) == list(plain.state_dict())


def test_what_cannot_be_compiled_is_refused(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DistapError, match=r"needs a C\+\+ compiler, and g\+\+ was not found"):
        compile_backbone(RetrievalNetwork(Small(), GeM()))

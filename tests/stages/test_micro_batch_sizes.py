import pytest
import torch
from batches import small_network
from steps import learning
from torch import nn

from distap.errors import DistapError
from distap.stages.sizes import Fitting, SavedBytes, free_memory
from distap.world import World


class Limited(nn.Module):
    """Runs out of memory above some numbers of images."""

    def __init__(self, network, with_graph, without):
        super().__init__()
        self.network, self.with_graph, self.without = network, with_graph, without

    def forward(self, images):
        if len(images) > (self.with_graph if torch.is_grad_enabled() else self.without):
            raise torch.OutOfMemoryError("too many")
        return self.network(images.double())


def learner_with(**limits):
    network = Limited(small_network(), **limits)
    return learning(network, torch.optim.SGD(network.parameters(), lr=1.0), World())


def test_sizes_are_found_that_fit_and_nothing_is_left_of_the_trials():
    learner = learner_with(with_graph=5, without=12)
    before = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    fitting = Fitting(learner.replica, World(), image_size=16, share=64)
    assert 1 <= fitting.replay_size() <= 4
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.state_dict().items())
    assert all(parameter.grad is None for parameter in learner.network.parameters())


def test_a_micro_batch_leaves_memory_for_other_graphs(monkeypatch):
    fitting = Fitting(learner_with(with_graph=99, without=99).replica, World(), image_size=16, share=64)
    monkeypatch.setattr("distap.stages.sizes.free_memory", lambda device: 2**10)
    assert fitting.replay_size() == 1


def test_an_image_that_fits_nowhere_is_an_error():
    with pytest.raises(DistapError, match=r"replay: not even one image of 16 x 16 pixels fits .* data\.image_size"):
        Fitting(learner_with(with_graph=0, without=9).replica, World(), image_size=16, share=64).replay_size()


def test_the_graph_of_twice_as_many_images_takes_twice_the_memory():
    network = small_network()
    taken = []
    for images in (4, 8):
        saved = SavedBytes(network)
        with saved:
            network(torch.zeros(images, 3, 16, 16, dtype=torch.float64))
        taken.append(saved.bytes)
    assert taken[0] > 4 * 3 * 16 * 16 * 8  # the input alone
    assert taken[1] == pytest.approx(2 * taken[0], rel=0.05)


def test_all_graphs_are_kept_where_there_is_room_for_them(caplog):
    fitting = Fitting(learner_with(with_graph=99, without=99).replica, World(), image_size=16, share=10)
    assert fitting.kept_graphs(4) == 3
    assert "3 of 3 micro-batches keep their graph" in caplog.text
    few = Fitting(learner_with(with_graph=2, without=99).replica, World(), image_size=16, share=2)
    assert few.kept_graphs(64) == 1  # a micro-batch holds no more than the share
    none = Fitting(learner_with(with_graph=2, without=99).replica, World(), image_size=16, share=64)
    assert none.kept_graphs(4) == 0
    assert free_memory(torch.device("cpu")) > 2**20

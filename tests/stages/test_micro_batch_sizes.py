import pytest
import torch
from batches import small_network
from steps import learning
from torch import nn

from distap.stages.sizes import SavedBytes, free_memory, kept_graphs
from distap.world import World


class Limited(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, images):
        if len(images) > 4:
            raise torch.OutOfMemoryError("too many")
        return self.network(images.double())


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


def test_all_graphs_are_kept_where_there_is_room_for_them_and_nothing_is_left_of_the_trial(caplog):
    network = Limited(small_network())
    learner = learning(network, torch.optim.SGD(network.parameters(), lr=1.0), World())
    before = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    images = torch.zeros(8, 3, 16, 16)
    assert kept_graphs(learner.replica, World(), images[:4], share=10) == 3
    assert "3 of 3 micro-batches keep their graph" in caplog.text
    assert kept_graphs(learner.replica, World(), images, share=64) == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.state_dict().items())
    assert all(parameter.grad is None for parameter in learner.network.parameters())
    assert free_memory(torch.device("cpu")) > 2**20

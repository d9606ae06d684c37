import copy

import pytest
import torch
from networks import noise, random_network
from torch import nn

from distap.errors import DistapError
from distap.model.network import RetrievalNetwork
from distap.model.speed.folding import Describer


def folded(network):
    return Describer(network, fold_batchnorm=True)


def trained_a_little(network, seed=0):
    """Statistics, scales and weights as they are not by default."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                for tensor, centre, width in (
                    (module.running_mean, 0.0, 0.1),
                    (module.running_var, 1.0, 0.5),
                    (module.weight, 1.0, 0.5),
                    (module.bias, 0.0, 0.1),
                ):
                    tensor.copy_(centre + width * (2 * torch.rand(tensor.shape, generator=generator) - 1))
    return network


def largest_difference(network, other, seed=5):
    with torch.no_grad():
        torch.manual_seed(seed)
        expected = network(noise())
        torch.manual_seed(seed)
        return (other(noise()) - expected).abs().max()


# Convolution and BatchNorm, BatchNorm with its activation, `same` padding, groups.
@pytest.mark.parametrize(
    ("backbone", "folds"),
    [("resnet10t", 14), ("tf_efficientnet_lite0", 49), ("mobilenetv3_small_050", 34)],
)
def test_folded_descriptors_are_the_networks_to_rounding(backbone, folds):
    network = trained_a_little(random_network(backbone, projection=16)).train()
    twin = folded(network)
    assert len(twin.folds) == folds
    assert largest_difference(network, twin) < 1e-5
    trained_a_little(network, seed=1)
    assert largest_difference(network, twin) > 1e-3
    twin.refresh()
    assert largest_difference(network, twin) < 1e-5


def test_a_refresh_takes_over_every_weight_without_taking_memory():
    network = random_network("resnet10t", projection=16).train()
    twin = folded(network)
    places = [fold.folded.weight.data_ptr() for fold in twin.folds]
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    network.head.weight = nn.Parameter(torch.randn_like(network.head.weight))
    twin.refresh()
    assert largest_difference(network, twin) < 1e-5
    assert places == [fold.folded.weight.data_ptr() for fold in twin.folds]


def test_a_folded_network_drops_what_the_network_drops():
    network = trained_a_little(random_network("mobilenetv3_small_050", drop_rate=0.3, drop_path_rate=0.5)).train()
    twin = folded(network)
    assert largest_difference(network, twin) < 1e-5
    assert (twin(noise()) - twin(noise())).abs().max() > 1e-3
    network.eval()
    twin.refresh()
    assert largest_difference(network, twin, 1) == largest_difference(network, twin, 2) < 1e-5


def test_folding_leaves_the_network_as_it_was():
    network = random_network("resnet10t").train()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    twin = folded(network)
    assert not twin(noise()).requires_grad
    after = network.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    network(noise()).sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


class Branching(nn.Module):
    """The output of the convolution goes past BatchNorm as well."""

    num_features = 4

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        x = self.convolution(x)
        return x + self.norm(x)


class Rectified(Branching):
    """What BatchNorm is given has been changed in place."""

    def forward(self, x):
        return self.norm(self.convolution(x).relu_())


class Shared(Branching):
    """One BatchNorm behind two uses of a convolution."""

    def forward(self, x):
        return self.norm(self.convolution(x)) + self.norm(self.convolution(x.flip(-1)))


def test_a_convolution_whose_output_is_used_elsewhere_is_refused():
    with pytest.raises(DistapError, match="folding 1 BatchNorm layers of Branching changes its features"):
        folded(RetrievalNetwork(Branching(), nn.AdaptiveAvgPool2d(1)))


@pytest.mark.parametrize("backbone", [Rectified, Shared])
def test_what_is_no_pair_is_not_folded(backbone):
    with pytest.raises(DistapError, match=f"{backbone.__name__} has no BatchNorm right behind a convolution"):
        folded(RetrievalNetwork(backbone(), nn.AdaptiveAvgPool2d(1)))


def test_networks_that_cannot_be_folded_are_refused_with_the_reason():
    with pytest.raises(DistapError, match="ConvNeXt has no BatchNorm right behind a convolution"):
        folded(random_network("convnext_atto"))
    with pytest.raises(DistapError, match="needs frozen BatchNorm"):
        folded(random_network("resnet10t", batchnorm="batch"))


@pytest.mark.parametrize("fold", [False, True])
def test_describing_in_bfloat16_gives_float32_descriptors_close_to_the_networks(fold):
    network = trained_a_little(random_network("resnet10t")).train()
    describe = Describer(network, torch.bfloat16, fold_batchnorm=fold)
    described = describe(noise())
    assert described.dtype == torch.float32 and not described.requires_grad
    assert 0 < largest_difference(network, describe) < 0.02


def test_a_describer_follows_the_network_after_its_refresh():
    network = trained_a_little(random_network("resnet10t")).train()
    describers = Describer(network), Describer(network, torch.float32, fold_batchnorm=True)
    trained_a_little(network, seed=1)
    for describe in describers:
        describe.refresh()
        assert largest_difference(network, describe) < 1e-5


def test_a_folded_network_may_be_copied_with_the_network():
    network = trained_a_little(random_network("resnet10t")).train()
    other, twin = copy.deepcopy((network, folded(network)))
    trained_a_little(other, seed=1)
    twin.refresh()
    assert largest_difference(other, twin) < 1e-5

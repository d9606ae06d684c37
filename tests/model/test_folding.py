import copy

import pytest
import torch
from networks import noise, random_network
from raising import raises
from torch import nn

from distap.model.folding import convolve, depthwise_gradient, fold_batchnorm
from distap.model.network import RetrievalNetwork


def folded(network):
    """A copy of the network that is folded, and how many BatchNorm layers that folds."""
    other = copy.deepcopy(network)
    return other, fold_batchnorm(other)


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
                    if tensor is not None:
                        tensor.copy_(
                            centre + width * (2 * torch.rand(tensor.shape, generator=generator) - 1)
                        )
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
def test_a_folded_network_gives_the_descriptors_and_gradients_of_the_network(backbone, folds):
    network = trained_a_little(random_network(backbone, projection=16)).train()
    other, actual = folded(network)
    assert actual == folds
    assert largest_difference(network, other) < 1e-5
    trained_a_little(other, seed=1)
    assert largest_difference(network, other) > 1e-3
    trained_a_little(network, seed=1)
    assert largest_difference(network, other) < 1e-5
    assert largest_difference(network.eval(), other.eval()) < 1e-5
    network, gradients = network.double().train(), []
    for weight in (network, folded(network)[0]):
        weight(noise()).mul(torch.tensor([[1.0], [2.0]])).cumsum(1).sum().backward()
        gradients.append({name: parameter.grad for name, parameter in weight.named_parameters()})
    for name, expected in gradients[0].items():
        assert (gradients[1][name] - expected).norm() <= 1e-9 * expected.norm(), name


def test_parameters_keep_their_names_and_a_copy_computes_with_its_own():
    network = trained_a_little(random_network("resnet10t")).train()
    other, _ = folded(network)
    assert list(other.state_dict()) == list(network.state_dict())
    copied = trained_a_little(copy.deepcopy(other), seed=1)
    assert largest_difference(network, other) < 1e-5
    assert largest_difference(trained_a_little(network, seed=1), copied) < 1e-5


class Branching(nn.Module):
    """The output of the convolution goes past BatchNorm as well."""

    num_features = 4

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)

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
    with raises("network.folding_changes_features", "1", "BatchNorm"):
        folded(RetrievalNetwork(Branching(), nn.AdaptiveAvgPool2d(1)))


@pytest.mark.parametrize("backbone", [Rectified, Shared])
def test_what_is_no_pair_is_not_folded(backbone):
    with raises("network.nothing_to_fold", backbone.__name__, "BatchNorm"):
        folded(RetrievalNetwork(backbone(), nn.AdaptiveAvgPool2d(1)))


def test_networks_that_cannot_be_folded_are_refused_with_the_reason():
    with raises("network.nothing_to_fold", "ConvNeXt", "BatchNorm"):
        folded(random_network("convnext_atto"))
    with raises("network.batchnorm_not_frozen", "BatchNorm"):
        folded(random_network("resnet10t", batchnorm="batch"))


DEPTHWISE = [
    (kernel, stride, padding, dilation)
    for kernel in ((5, 5), (7, 3))
    for stride in ((1, 1), (2, 3))
    for padding in ((0, 0), (2, 1), (6, 6))
    for dilation in ((1, 1), (2, 1))
]


@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation"), DEPTHWISE)
def test_the_gradient_of_depthwise_weights_is_autograds(kernel, stride, padding, dilation):
    x = noise(2, 14).double()[:, :2, :, :13] / 255
    weight = torch.randn(2, 1, *kernel, dtype=torch.float64)
    weight.requires_grad_()
    y = nn.functional.conv2d(x, weight, None, stride, padding, dilation, 2)
    gradient = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (expected,) = torch.autograd.grad(y, weight, gradient)
    actual_gradient = depthwise_gradient(gradient, x, kernel, stride, padding, dilation)
    torch.testing.assert_close(actual_gradient, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_a_convolution_has_the_values_and_gradients_of_torchs(groups, kernel):
    torch.manual_seed(0)
    x = torch.randn(3, 4, 9, 8).to(memory_format=torch.channels_last).requires_grad_()
    weight = torch.randn(4, 4 // groups, kernel, kernel, requires_grad=True)
    bias = torch.randn(4, requires_grad=True)
    arguments = (x, weight, bias), ((2, 1), (kernel // 2, 1), (1, 1), groups)
    ours, torchs = (
        function(*arguments[0], *arguments[1]) for function in (convolve, nn.functional.conv2d)
    )
    assert torch.equal(ours, torchs) and "_Convolution" in type(ours.grad_fn).__name__
    gradient = torch.randn_like(torchs)
    gradients = [torch.autograd.grad(y, arguments[0], gradient) for y in (ours, torchs)]
    for actual_gradients, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual_gradients, expected, rtol=1e-4, atol=1e-4)
    weight.requires_grad_(False)
    (actual_gradients,) = torch.autograd.grad(convolve(*arguments[0], *arguments[1]), x, gradient)
    torch.testing.assert_close(actual_gradients, gradients[1][0])


def test_in_bf16_the_gradient_of_a_folded_network_is_near_the_one_in_float32():
    network = random_network("tf_efficientnet_lite0", projection=16).train()
    other = folded(network)[0]
    gradients = []
    for item, is_narrow in ((network, False), (other, True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_narrow):
            descriptors = item(noise())
        descriptors.cumsum(1).sum().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in item.parameters()]))
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.98

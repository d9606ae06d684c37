import copy

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from distap.errors import DistapError
from distap.model import activation_checkpointing, build_network

GEM, RANDOM = {"name": "gem"}, {"name": "random"}


def gradients_and_saved_bytes(network):
    images = torch.randint(0, 256, (4, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    sizes = {}

    def count(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(1)
    with saved_tensors_hooks(count, lambda tensor: tensor):
        descriptors = network(images)
    weights = torch.randn(descriptors.shape, generator=torch.Generator().manual_seed(2))
    (descriptors * weights).sum().backward()
    return {name: p.grad for name, p in network.named_parameters()}, sum(sizes.values())


@pytest.mark.parametrize("backbone", ["resnet10t", "mobilenetv3_small_050", "convnext_atto"])
def test_checkpointed_activations_give_the_same_gradients_and_take_less_memory(backbone):
    torch.manual_seed(0)
    network = build_network(backbone, RANDOM, GEM, drop_rate=0.2, drop_path_rate=0.2).train()
    thrifty = copy.deepcopy(network)
    activation_checkpointing(thrifty)
    expected, saved = gradients_and_saved_bytes(network)
    given, still_saved = gradients_and_saved_bytes(thrifty)
    weights = sum(p.nbytes for p in network.parameters())
    for name, gradient in expected.items():
        torch.testing.assert_close(given[name], gradient, rtol=1e-4, atol=1e-6)
    assert still_saved - weights < 0.6 * (saved - weights)


def test_a_backbone_without_it_is_refused():
    with pytest.raises(DistapError, match="timm has none for dla34"):
        activation_checkpointing(build_network("dla34", RANDOM, GEM))
    with pytest.raises(DistapError, match="needs frozen BatchNorm"):
        activation_checkpointing(build_network("resnet10t", RANDOM, GEM, batchnorm="batch"))

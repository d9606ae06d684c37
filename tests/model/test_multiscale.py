import copy

import pytest
import torch
from networks import noise, random_network
from raising import raises
from torch.nn.functional import interpolate, normalize

from distap.model.multiscale import MultiScaleNetwork
from distap.model.network import fingerprint
from distap.model.pooling import NamedPooling


def network(projection=None, **options):
    return random_network(projection=projection, **options).eval()


def images(count=2, height=64, width=80):
    return noise(count, height, width)


def plain(network, images, scales, power):
    """Scale by scale and image by image, as the papers say."""
    rows = []
    for image in images:
        described = []
        for scale in scales:
            size = (int(image.shape[1] * scale), int(image.shape[2] * scale))
            pixels = interpolate(image[None].float(), size, mode="bilinear", antialias=True)
            described.append(network(pixels)[0].double())
        mean = sum(d.sign() * d.abs() ** power for d in described) / len(scales)
        mean = mean.sign() * mean.abs() ** (1 / power)
        rows.append(mean / mean.norm())
    return torch.stack(rows)


@torch.inference_mode()
def test_one_scale_is_the_network_itself_bit_for_bit():
    inner = network(projection=16)
    assert torch.equal(MultiScaleNetwork(inner)(images()), inner(images()))


@pytest.mark.parametrize("projection", [None, 16])
@torch.inference_mode()
def test_scales_are_averaged_as_by_a_plain_loop(projection):
    inner = network(projection)
    several = MultiScaleNetwork(inner, (1.0, 0.7071, 0.5, 1.3))
    descriptors = several(images())
    assert several.power == (1.0 if projection else 3.0)
    torch.testing.assert_close(
        descriptors.double(),
        plain(inner, images(), several.scales, several.power),
        atol=2e-6,
        rtol=0,
    )
    torch.testing.assert_close(descriptors.norm(dim=1), torch.ones(2))


@torch.inference_mode()
def test_one_other_scale_is_the_scaled_image_alone():
    inner = network()
    expected = inner(interpolate(images().float(), (32, 40), mode="bilinear", antialias=True))
    assert torch.equal(MultiScaleNetwork(inner, (0.5,))(images()), expected)
    # At a length of 45.25 the authors' code keeps the scale between pixels, and 45 / 64 would be
    # another.
    expected = inner(interpolate(images().float(), scale_factor=0.7071, mode="bilinear"))
    assert torch.equal(MultiScaleNetwork(inner, (0.7071,), antialias=False)(images()), expected)


@pytest.mark.parametrize("scales", [(1.0,), (1.0, 0.5)])
@torch.inference_mode()
def test_whitening_is_a_linear_layer_behind_it(scales):
    inner = network(projection=16)
    generator = torch.Generator().manual_seed(1)
    mean = 0.1 * torch.randn(16, generator=generator, dtype=torch.float64)
    projection = torch.randn(5, 16, generator=generator, dtype=torch.float64)
    whitened = MultiScaleNetwork(inner, scales, whitening=(mean, projection))
    expected = (MultiScaleNetwork(inner, scales)(images()).double() - mean) @ projection.t()
    assert whitened.dimensions == 5
    torch.testing.assert_close(whitened(images()).double(), normalize(expected), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("settings", "code", "names"),
    [
        ({"scales": ()}, "evaluation.scales", ["0"]),
        ({"scales": (1.0, 0.0)}, "evaluation.scales", ["0"]),
        ({"scales": (100.0,)}, "evaluation.scales", ["8"]),
        ({"scales": (1.0, 1.0)}, "evaluation.scales", []),
        ({"whitening": (torch.zeros(3), torch.eye(3))}, "descriptors.other_whitening", ["16"]),
    ],
)
def test_settings_that_are_no_use_are_refused(settings, code, names):
    with raises(code, *names):
        MultiScaleNetwork(network(projection=16), **settings)


def test_the_mean_over_scales_has_the_power_of_gem_where_nothing_is_negative():
    inner = network()
    with torch.no_grad():
        inner.pooling.power.fill_(2.5)
    assert MultiScaleNetwork(inner).power == 2.5
    remaining = network(projection=8), network(pooling=NamedPooling("mean"))
    assert [MultiScaleNetwork(other).power for other in remaining] == [1, 1]


# Fingerprints


def test_the_same_network_has_the_same_fingerprint_however_it_lies_in_memory():
    inner = network(projection=8)
    expected = fingerprint(inner)
    assert fingerprint(network(projection=8)) == expected
    assert fingerprint(inner.to(memory_format=torch.contiguous_format).train()) == expected


def test_whatever_changes_descriptors_changes_the_fingerprint():
    first = network(projection=8)
    changed = [first, network(projection=8, seed=1), network(projection=9), network()]
    for name in ("mean", "std"):
        other = copy.deepcopy(first)
        getattr(other, name)[0, 0] += 1
        changed.append(other)
    for change in (
        lambda n: n.pooling.power.data.add_(1e-6),
        lambda n: setattr(n.pooling, "smallest", 1e-5),
        lambda n: n.backbone.bn1.running_mean.add_(1e-6),
        lambda n: n.double(),
    ):
        other = copy.deepcopy(first)
        change(other)
        changed.append(other)
    prints = [fingerprint(item) for item in changed]
    assert len(set(prints)) == len(prints)
    assert all(len(text) == 64 for text in prints)

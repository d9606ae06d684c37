from itertools import product

import numpy as np
import pytest
import torch
from networks import noise, random_network
from torch.nn.functional import layer_norm, normalize

from distap.errors import DistapError
from distap.model.network import fingerprint
from distap.model.pooling import GeM, NamedPooling
from distap.registry import REGISTRY, build_part, name_of

VIT = "test_vit"


def features(height=5, width=5):
    return torch.rand(2, 7, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_gem_is_the_generalised_mean_spoc_the_mean_and_max_takes_one_place_a_channel():
    expected = (features() ** 3).mean((2, 3)) ** (1 / 3)
    torch.testing.assert_close(GeM().double()(features()), expected)
    assert (GeM(1.0).double()(features()) - features().mean((2, 3))).abs().max() < 1e-9
    for name in ("mean", "spoc"):
        assert torch.equal(NamedPooling(name).build()(features()), features().mean((2, 3)))
    assert torch.equal(NamedPooling("max").build()(features()), features().flatten(2).max(2).values)


@pytest.mark.parametrize(
    ("size", "regions"),
    [  # side, tops and lefts of each scale, as the paper draws them; a side 1.5 times as long has one region more
        ((6, 6), [(6, [0], [0]), (4, [0, 2], [0, 2]), (3, [0, 2, 3], [0, 2, 3])]),
        ((2, 3), [(2, [0], [0, 1]), (1, [0, 1], [0, 1, 2]), (1, [0, 1], [0, 1, 2])]),
    ],
)
def test_rmac_sums_the_maxima_of_square_regions(size, regions):
    given, expected = features(*size), torch.zeros(2, 7, dtype=torch.float64)
    for side, tops, lefts in regions:
        for top, left in product(tops, lefts):
            region = given[:, :, top : top + side, left : left + side]
            expected += normalize(region.flatten(2).max(2).values)
    torch.testing.assert_close(NamedPooling("rmac").build()(given), expected)


def test_the_class_token_is_timms_and_may_stand_before_the_mean():
    cls, both = (random_network(VIT, pooling=NamedPooling(name)).eval() for name in ("cls", "cls_mean"))
    tokens = cls.backbone((noise().float() - cls.mean) / cls.std)
    torch.testing.assert_close(cls(noise()), normalize(tokens[:, 0]))
    assert both.dimensions == 2 * cls.dimensions
    own = tokens[:, both.backbone.num_prefix_tokens :]
    torch.testing.assert_close(both(noise()), normalize(torch.cat([tokens[:, 0], own.mean(1)], 1)))
    assert random_network(VIT, 16, pooling=NamedPooling("cls_mean"))(noise()).shape == (2, 16)


def test_layer_norm_standardises_what_pooling_gives_and_makes_another_network():
    network = random_network(projection=16, layer_norm=True).eval()
    plain = random_network(projection=16).eval()
    assert network.state_dict().keys() == plain.state_dict().keys()
    expected = plain.head(layer_norm(plain.pooled(noise()), (plain.features,)))
    torch.testing.assert_close(network(noise()), normalize(expected))
    assert fingerprint(network) != fingerprint(plain)


@pytest.mark.parametrize(
    ("backbone", "pooling", "message"),
    [
        ("resnet10t", "cls", "class token, which resnet10t does not have"),
        ("vit_pwee_patch16_reg1_gap_256", "cls_mean", "class token, which vit_pwee_patch16_reg1_gap_256 does not"),
        (VIT, "rmac", "regions of a map, but test_vit gives tokens"),
        ("pit_ti_224", "cls_mean", "pit_ti_224 gives no tokens but that of the class; choose cls"),
    ],
)
def test_a_pooling_that_does_not_fit_is_refused(backbone, pooling, message):
    with pytest.raises(DistapError, match=message):
        random_network(backbone, pooling=NamedPooling(pooling))(noise(1, 224))


def test_every_pooling_is_recorded_under_its_own_name():
    for name in REGISTRY["pooling"]:
        assert name_of("pooling", build_part("pooling", name)) == name


def test_crow_weighs_places_and_channels_as_the_authors_do():
    features = torch.rand(2, 5, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    features[:, 1] *= features[:, 1] > 0.6
    features[:, 2] = 0
    expected = []
    for image in features.numpy():
        active = image.sum(0)
        weights = (active / (active**2).sum() ** 0.5) ** 0.5
        share = [np.count_nonzero(channel) / 12 for channel in image]
        rarity = np.array([np.log(sum(share) / own) if own > 0 else 0 for own in share])
        expected.append((image * weights).sum((1, 2)) * rarity)
    features.requires_grad_(True)
    pooled = build_part("pooling", "crow").build()(features)
    np.testing.assert_allclose(pooled.detach(), np.stack(expected), rtol=1e-12)
    pooled.sum().backward()
    assert features.grad.isfinite().all()

import pytest
import torch
from networks import noise, random_network
from raising import raises
from torch.nn.functional import layer_norm, normalize

from distap.model.network import fingerprint
from distap.model.pooling import GeM, NamedPooling
from distap.registry import REGISTRY, build_part, name_of

VIT = "test_vit"


def features(height=5, width=5):
    return torch.rand(
        2, 7, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )


def test_gem_is_the_generalised_mean_spoc_the_mean_and_max_takes_one_place_a_channel():
    expected = (features() ** 3).mean((2, 3)) ** (1 / 3)
    torch.testing.assert_close(GeM().double()(features()), expected)
    assert (GeM(1.0).double()(features()) - features().mean((2, 3))).abs().max() < 1e-9
    for name in ("mean", "spoc"):
        assert torch.equal(NamedPooling(name).build()(features()), features().mean((2, 3)))
    assert torch.equal(NamedPooling("max").build()(features()), features().flatten(2).max(2).values)


def test_the_class_token_is_timms_and_may_stand_before_the_mean():
    cls, both = (
        random_network(VIT, pooling=NamedPooling(name)).eval() for name in ("cls", "cls_mean")
    )
    tokens = cls.backbone((noise().float() - cls.mean) / cls.std)
    torch.testing.assert_close(cls(noise()), normalize(tokens[:, 0]))
    assert both.dimensions == 2 * cls.dimensions
    patches = tokens[:, both.backbone.num_prefix_tokens :]
    torch.testing.assert_close(
        both(noise()), normalize(torch.cat([tokens[:, 0], patches.mean(1)], 1))
    )
    assert random_network(VIT, 16, pooling=NamedPooling("cls_mean"))(noise()).shape == (2, 16)


def test_layer_norm_standardises_what_pooling_gives_and_makes_another_network():
    network = random_network(projection=16, layer_norm=True).eval()
    plain = random_network(projection=16).eval()
    assert network.state_dict().keys() == plain.state_dict().keys()
    expected = plain.head(layer_norm(plain.pooled(noise()), (plain.features,)))
    torch.testing.assert_close(network(noise()), normalize(expected))
    assert fingerprint(network) != fingerprint(plain)


@pytest.mark.parametrize(
    ("backbone", "pooling", "code", "names"),
    [
        ("resnet10t", "cls", "network.no_class_token", []),
        (
            "vit_pwee_patch16_reg1_gap_256",
            "cls_mean",
            "network.no_class_token",
            ["vit_pwee_patch16_reg1_gap_256"],
        ),
        ("pit_ti_224", "cls_mean", "network.no_tokens", ["pit_ti_224"]),
    ],
)
def test_a_pooling_that_does_not_fit_is_refused(backbone, pooling, code, names):
    with raises(code, *names):
        random_network(backbone, pooling=NamedPooling(pooling))(noise(1, 224))


def test_every_pooling_is_recorded_under_its_own_name():
    for name in REGISTRY["pooling"]:
        assert name_of("pooling", build_part("pooling", name)) == name

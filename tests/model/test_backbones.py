"""Networks of timm of many families, with arguments, sizes and weights of their own."""

import shutil
from functools import partial

import pytest
import timm
import torch
from huggingface_hub import constants
from networks import noise, random_network
from raising import raises
from safetensors.torch import load_file, save_file
from small_trainings import recipe, train
from timm.layers import resample_abs_pos_embed
from torch.nn.functional import normalize

import distap as library
from distap.apps.export.exporting import export_to_folder
from distap.config.reading import load_recipe
from distap.errors import DistapError
from distap.model.backbone import TimmBackbone
from distap.model.network import build_network, fingerprint
from distap.model.pooling import AutoPooling, GeM, GeMPooling, NamedPooling, Native
from distap.model.weights import FileWeights, TimmWeights
from distap.training.build import trained_network
from distap.training.start_checks import checked_network
from distap.world import World

WEIGHTS = "model.safetensors"
# One of each kind: how it takes sizes, what its head insists on, which tokens it has, where its
# channels stand.
FAMILIES = {
    # two tokens before those of the image, and a head that reads them
    "deit_tiny_distilled_patch16_224": 64,
    "vit_small_patch16_dinov3": 64,  # registers, rotary positions
    "cait_xxs24_224": 64,
    "swin_tiny_patch4_window7_224": 96,  # built for one size; channels last
    "test_coatnet": 64,
    "test_vit_relpos": 64,
    "efficientvit_b0": 64,  # a head that always pools
    "mixer_s32_224": 64,
    "mobilenetv3_small_050": 64,  # a head that widens
    "test_nfnet": 64,
    "test_mambaout": 64,
}


@pytest.mark.parametrize(("backbone", "size"), FAMILIES.items())
def test_networks_of_all_kinds_are_built_describe_and_learn(backbone, size):
    network = random_network(backbone, image_size=size).train()
    descriptors = network(noise(height=size))
    assert descriptors.shape == (2, network.dimensions)
    torch.testing.assert_close(descriptors.norm(dim=1), torch.ones(2))
    (descriptors * torch.randn(descriptors.shape)).sum().backward()
    unused = [
        name for name, p in network.named_parameters() if p.grad is None and ".head" not in name
    ]
    assert unused in ([], ["backbone.mask_token"])


def described_by(tmp_path, shards, size, **model):
    return checked_network(
        recipe(tmp_path, shards, data__image_size=size, model={"weights": "random", **model}),
        World(),
    )


def test_arguments_reach_timm_and_unknown_ones_are_named(tmp_path, training_shards):
    model = {"backbone": "test_vit", "arguments": {"img_size": 96, "dynamic_img_size": False}}
    network = described_by(tmp_path, training_shards, 96, **model)
    assert (
        network.backbone.patch_embed.img_size == (96, 96) and not network.backbone.dynamic_img_size
    )
    for model, size, message in (
        (
            {"backbone": "test_resnet", "arguments": {"img_size": 96}},
            96,
            r"^model\.arguments\.img_size: test_resnet does not",
        ),
        (
            {"backbone": "mixer_s32_224", "arguments": {"tokens": 3}},
            224,
            r"^model\.arguments\.tokens: ",
        ),
        (
            {"backbone": "test_vit", "arguments": {"img_size": 96, "dynamic_img_size": False}},
            64,
            r"^data\.image_size: test_vit ",
        ),
        (
            {"backbone": "efficientformer_l1"},
            64,
            r"^data\.image_size: .* images of 64 px; it was made for 224",
        ),
        ({"backbone": "test_resnet", "pooling": "cls"}, 64, r"^model\.pooling takes a class token"),
        (
            {"backbone": "coat_tiny", "pooling": "gem"},
            64,
            r"^model\.backbone: coat_tiny gives no single map",
        ),
    ):
        with pytest.raises(DistapError, match=message):
            described_by(tmp_path, training_shards, size, **model)
    with raises("recipe.value", "model.arguments"):
        load_recipe(
            {"model": {"backbone": "plug_ins:Tiny", "arguments": {"depth": 3}}}, where="test"
        )


def saved_by_timm(folder, name="test_vit", **arguments):
    """A folder as `timm.models.push_to_hf_hub` writes it."""
    torch.manual_seed(1)
    network = timm.create_model(
        name, num_classes=5, pretrained_cfg_overlay={"mean": (0.1, 0.2, 0.3)}, **arguments
    )
    # of scales that are 1 and shifts that are 0, a lost one would not show
    for parameter in network.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.02)
    timm.models.save_for_hf(network, folder, model_args=arguments, safe_serialization=True)
    return network.eval()


def test_a_folder_of_timm_gives_its_weights_pixels_and_arguments(tmp_path):
    saved = saved_by_timm(tmp_path, embed_dim=48)
    network = build_network(
        TimmBackbone(f"local-dir:{tmp_path}"), TimmWeights(), NamedPooling("cls")
    ).eval()
    assert network.features == 48
    pixels = (
        (noise(height=160) / 255 - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) / network.std * 255
    )
    pixels = pixels.float()
    tokens = saved.forward_features(pixels)
    torch.testing.assert_close(network(noise(height=160)), normalize(tokens[:, 0]))
    with raises("network.unreadable", "model.backbone"):
        TimmBackbone(f"local-dir:{tmp_path}/none").build()


SMALL = {"depth": 1, "embed_dim": 48, "num_heads": 4}
POOLED = [  # a network of each family with a pooling of its own, made small, and its size of images
    ("vit_small_patch14_dinov2", SMALL, 70),
    ("vit_small_patch14_reg4_dinov2", SMALL, 70),
    ("vit_small_patch16_dinov3", SMALL, 64),
    ("convnext_tiny.dinov3_lvd1689m", {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)}, 64),
    ("vit_base_patch32_clip_224", SMALL, 64),
    ("resnet50_clip", {"img_size": 64}, 64),
    ("vit_base_patch16_siglip_224.v2_webli", SMALL, 64),
    ("vit_base_patch16_siglip_gap_224.v2_webli", SMALL, 64),
    ("vit_pe_core_tiny_patch16_384", SMALL, 64),
    ("eva02_tiny_patch14_224", SMALL, 70),
    (
        "swinv2_tiny_window8_256",
        {"img_size": 64, "depths": (1, 1, 1, 1), "embed_dim": 24, "num_heads": (1, 2, 3, 6)},
        64,
    ),
    ("convnextv2_atto", {"depths": (1, 1, 1, 1)}, 64),
    ("tf_efficientnet_lite0", {}, 64),
    ("mobilenetv3_small_050", {}, 64),
    ("crossvit_9_240", {}, 240),
]


@pytest.mark.filterwarnings("ignore::UserWarning")  # of timm's resampling
@pytest.mark.parametrize(("name", "arguments", "size"), POOLED)
def test_the_native_descriptor_is_that_of_timms_own_head(tmp_path, name, arguments, size):
    saved = saved_by_timm(tmp_path, name, **arguments)
    backbone = TimmBackbone(f"local-dir:{tmp_path}")
    network = build_network(backbone, TimmWeights(), NamedPooling("native"), image_size=size).eval()
    if hasattr(saved, "set_input_size"):
        saved.set_input_size((size, size))
    images = (noise(height=size).float() - network.mean) / network.std
    with torch.no_grad():
        expected = saved.forward_head(saved.forward_features(images), pre_logits=True)
        torch.testing.assert_close(network(noise(height=size)), normalize(expected))
    assert network.dimensions == expected.shape[1]
    chosen = build_network(backbone, TimmWeights(), AutoPooling(), image_size=size).pooling
    assert isinstance(chosen, GeM if name == "tf_efficientnet_lite0" else Native)


def test_weights_that_would_be_lost_or_stay_random_are_named(tmp_path):
    saved_by_timm(tmp_path, "vit_base_patch16_siglip_224", **SMALL)
    backbone = TimmBackbone(f"local-dir:{tmp_path}")
    pooling = NamedPooling("mean")
    file = tmp_path / WEIGHTS
    for weights in (TimmWeights, partial(FileWeights, file)):
        with raises("weights.other_network", "pooling", "13", "attn_pool.kv.bias"):
            build_network(backbone, weights(), pooling)
        assert build_network(backbone, weights(allow=("attn_pool.*",)), pooling).dimensions == 48
    other = TimmBackbone("vit_base_patch16_siglip_gap_224")
    arguments = {"arguments": SMALL, "pooling": NamedPooling("native")}
    save_file(
        {k: v for k, v in load_file(file).items() if not k.startswith(("attn", "norm"))}, file
    )
    with raises("weights.other_network", "2", "norm.bias", "norm.weight"):
        build_network(other, FileWeights(file), **arguments)
    assert (
        build_network(other, FileWeights(file, ("norm.*",)), **arguments)
        .backbone.norm.weight.eq(1)
        .all()
    )


def test_gem_on_signed_features_warns(tmp_path, training_shards, caplog):
    for backbone, warns in (("test_vit", True), ("test_resnet", False)):
        described_by(tmp_path, training_shards, 64, backbone=backbone, pooling="gem")
        assert ("model.pooling: gem takes features below 1e-06" in caplog.text) == warns
        caplog.clear()


def test_weights_of_another_size_are_resampled(tmp_path):
    """From a folder of timm and from a file alike."""
    saved = saved_by_timm(tmp_path)
    expected = resample_abs_pos_embed(saved.pos_embed, [6, 6], num_prefix_tokens=1)
    for name, weights in (
        (f"local-dir:{tmp_path}", TimmWeights()),
        ("test_vit", FileWeights(tmp_path / WEIGHTS)),
    ):
        network = build_network(
            TimmBackbone(name),
            weights,
            GeMPooling(),
            arguments={"dynamic_img_size": False},
            image_size=96,
        )
        torch.testing.assert_close(network.backbone.pos_embed, expected)
        assert torch.equal(
            network.backbone.blocks[0].attn.qkv.weight, saved.blocks[0].attn.qkv.weight
        )


def test_a_name_of_the_hub_is_read_as_it_was_downloaded(tmp_path, monkeypatch):
    """From the cache of huggingface_hub, as a download would have left it, without a connection."""
    place = tmp_path / "models--us--ours"
    commit = "0" * 40
    saved = saved_by_timm(place / "snapshots" / commit, embed_dim=48)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    network = build_network(TimmBackbone("hf-hub:us/ours"), TimmWeights(), GeMPooling())
    assert torch.equal(network.backbone.blocks[0].attn.qkv.weight, saved.blocks[0].attn.qkv.weight)
    with raises("network.unreadable", "model.backbone", "hf-hub:us/theirs"):
        TimmBackbone("hf-hub:us/theirs").build()


@pytest.mark.filterwarnings("ignore::UserWarning")  # of timm's resampling
@pytest.mark.parametrize("name", ["eva02_tiny_patch14_224", "swin_tiny_patch4_window7_224"])
def test_weights_of_timms_own_pooling_and_size_are_loaded(tmp_path, name):
    saved = saved_by_timm(tmp_path, name).state_dict()
    for weights in (TimmWeights(), FileWeights(tmp_path / WEIGHTS)):
        network = build_network(
            TimmBackbone(f"local-dir:{tmp_path}"), weights, GeMPooling(), image_size=56
        ).eval()
        norms = [saved.get(f"{norm}.weight") for norm in ("norm", "fc_norm")]
        assert any(
            norm is not None and torch.equal(norm, network.backbone.norm.weight) for norm in norms
        )
        assert network(noise(height=56)).isfinite().all()


def test_a_run_is_evaluated_and_exported_without_the_folder_that_its_backbone_came_from(
    tmp_path, training_shards
):
    folder = tmp_path / "folder"
    run = tmp_path / "run"
    saved_by_timm(folder, embed_dim=48)
    model = {"backbone": f"local-dir:{folder}", "pooling": "cls_mean", "layer_norm": True}
    model["arguments"] = {"drop_path_rate": 0.1}
    train(
        World(),
        run,
        training_shards,
        steps=1,
        model=model,
        data__validation=str(training_shards[1]),
    )
    shutil.rmtree(folder)
    _, network = trained_network(run, World())
    assert network.dimensions == 96 and (network.mean / 255).flatten().tolist() == pytest.approx(
        [0.1, 0.2, 0.3]
    )
    export_to_folder(run, tmp_path / "export", ("pt2", "safetensors"))
    library.load(run, device="cpu").save_pretrained(tmp_path / "saved")
    for source in (run, tmp_path / "export", tmp_path / "saved"):
        assert fingerprint(library.load(source, device="cpu").network.network) == fingerprint(
            network
        )
    saved = timm.create_model(f"local-dir:{tmp_path / 'saved'}", pretrained=True)
    assert torch.equal(saved.norm.weight, network.backbone.norm.weight)

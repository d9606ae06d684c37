import io

import pytest
import torch
from raising import raises
from torchvision.transforms import v2

from benchmarks.photos import jpeg, photo
from distap.data.images.augmentation import CropFlipColour, TorchvisionSteps, seeded
from distap.data.images.decoding import EncodedImage
from distap.data.sizing import Sizing
from distap.errors import DistapError
from distap.registry import build_part

PHOTO = photo(320, 240, seed=0)
EVERYTHING = CropFlipColour(crop=0.3, flip=0.5, colour=0.4, grey=0.3)


def as_png(image) -> EncodedImage:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return EncodedImage(buffer.getvalue())


class Boxes:
    """An image that says what is cropped of it."""

    def __init__(self, *size):
        self.size = size
        self.asked = []

    def crop(self, box, shape):
        self.asked.append((box, shape))
        return torch.zeros(3, *shape, dtype=torch.uint8)


def test_the_same_seed_gives_the_same_pixels_and_leaves_the_global_state_alone():
    transform = EVERYTHING.transform(40)
    image = EncodedImage(jpeg(PHOTO, 90))
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = seeded(transform, image, 7)
    torch.rand(5)
    assert torch.equal(first, seeded(transform, image, 7))
    assert not torch.equal(first, seeded(transform, image, 8))
    torch.set_rng_state(state)
    seeded(transform, image, 9)
    assert torch.equal(torch.get_rng_state(), state)


def test_without_variation_training_sees_what_evaluation_sees():
    plain = CropFlipColour(crop=1, flip=0).transform(40)
    image = EncodedImage(jpeg(PHOTO, 90))
    assert torch.equal(seeded(plain, image, 1), Sizing("crop", 40)(image))


def test_a_flip_mirrors_the_crop():
    image = as_png(PHOTO)
    kept_rows, flipped = (CropFlipColour(crop=1, flip=flip).transform(40)(image) for flip in (0, 1))
    assert torch.equal(kept_rows.flip(2), flipped)
    assert CropFlipColour(grey=1).transform(40)(image).float().std(0).max() == 0


@pytest.mark.parametrize(
    "settings", [{"crop": 0}, {"crop": 1.5}, {"flip": -0.1}, {"colour": 2}, {"grey": 7}]
)
def test_settings_out_of_range_are_refused(settings):
    with raises("recipe.value", next(iter(settings))):
        build_part("augmentation", "crop_flip_colour", **settings)


# Steps of torchvision

RECIPES = {
    "random resized crop": (
        [
            {"RandomResizedCrop": {"scale": [0.2, 0.9], "ratio": [0.5, 1.5]}},
            {"RandomHorizontalFlip": 0.5},
        ],
        lambda: [v2.RandomResizedCrop(48, (0.2, 0.9), (0.5, 1.5)), v2.RandomHorizontalFlip(0.5)],
    ),
    "resize, then crop": (
        [{"Resize": 64}, "RandomCrop", {"RandomErasing": {"p": 1, "value": [124, 116, 104]}}],
        lambda: [v2.Resize(64), v2.RandomCrop(48), v2.RandomErasing(1, value=[124, 116, 104])],
    ),
    "the longer side, then a padded crop": (
        [
            {"Resize": {"size": None, "max_size": 60}},
            {"RandomCrop": {"pad_if_needed": True, "fill": 127}},
        ],
        lambda: [v2.Resize(None, max_size=60), v2.RandomCrop(48, pad_if_needed=True, fill=127)],
    ),
    "everything else": (
        [
            {"RandomRotation": {"degrees": 10, "interpolation": "bilinear"}},
            {
                "RandomApply": {
                    "transforms": [{"ColorJitter": {"brightness": 0.4, "hue": [-0.1, 0.2]}}],
                    "p": 0.8,
                }
            },
            {"RandAugment": {"num_ops": 2, "magnitude": 7}},
            "RandomResizedCrop",
        ],
        lambda: [
            v2.RandomRotation(10, v2.InterpolationMode.BILINEAR),
            v2.RandomApply([v2.ColorJitter(brightness=0.4, hue=(-0.1, 0.2))], 0.8),
            v2.RandAugment(2, 7),
            v2.RandomResizedCrop(48),
        ],
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_steps_give_torchvisions_pixels_bit_for_bit(name):
    steps, theirs = RECIPES[name]
    part, exact = (
        build_part("augmentation", "torchvision", steps=all)
        for all in (steps, ["Identity", *steps])
    )
    image = EncodedImage(jpeg(PHOTO, 90))
    whole = v2.functional.pil_to_tensor(image.whole())
    ours, theirs = exact.transform(48), v2.Compose(theirs())
    for seed in range(5):
        torch.manual_seed(seed)
        expected = theirs(whole)
        assert torch.equal(seeded(ours, image, seed), expected)
        # the same boxes, of an image that is decoded at reduced scale
        near = seeded(part.transform(48), image, seed)
        assert torch.equal(near, seeded(part.transform(48), image, seed))
        assert (near.int() - expected.int()).abs().float().mean() < (8 if len(steps) < 4 else 0.1)


@pytest.mark.parametrize("first", ["Resize", "RandomResizedCrop"])
def test_a_first_step_decodes_at_reduced_scale_and_draws_the_same_box(first):
    image = Boxes(320, 240)
    for steps in ((first, "CenterCrop"), ("Identity", first, "CenterCrop")):
        seeded(TorchvisionSteps(steps).transform(40), image, 3)
    (box, shape), whole = image.asked
    assert shape == ((40, 53) if first == "Resize" else (40, 40))
    assert whole == ((0, 0, 320, 240), (240, 320))
    if first == "Resize":
        assert box == (0, 0, 320, 240)
    other = TorchvisionSteps(({first: {"interpolation": "bicubic"}}, "CenterCrop"))
    assert seeded(other.transform(40), image, 3).shape == (3, 40, 40)
    assert image.asked[-1] == whole


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (["Rezise"], "'Rezise' is no transform of torchvision.transforms.v2; did you mean Resize"),
        ([{"ColorJitter": {"brihtness": 1}}], "ColorJitter: .*brihtness"),
        ([{"RandomErasing": {"value": "random"}}], "give a number or three"),
        ([{"AutoAugment": {"policy": "imagenot"}}], "AutoAugment: 'imagenot'"),
        ([], "at least 1 item"),
    ],
)
def test_wrong_steps_are_refused_when_the_recipe_is_read(steps, message):
    with pytest.raises(DistapError, match=message):
        build_part("augmentation", "torchvision", steps=steps)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (
            ["Resize"],
            (
                r"it gives \(3, 40, 60\) torch.uint8; expected \(3, 40, 40\) uint8, as"
                r" data.image_size"
            ),
        ),
        (
            ["RandomResizedCrop", {"Normalize": {"mean": [0], "std": [1]}}],
            "Normalize: Input tensor should be a float",
        ),
        (["FiveCrop"], "it gives tuple"),
        (["MixUp"], "MixUp: "),
    ],
)
def test_steps_that_do_not_end_in_pixels_of_the_size_are_refused_before_training(steps, message):
    with pytest.raises(DistapError, match=f"data.augmentation: .*{message}"):
        TorchvisionSteps(tuple(steps)).transform(40)

"""Colours that vary in one pass, beside torchvision's, one change after the other."""

import numpy as np
import pytest
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from benchmarks.photos import photo
from distap.data.images.augmentation import CropFlipColour
from distap.data.images.colour import GREY, VaryColours

PIXELS = F.pil_to_tensor(photo(90, 70, seed=0))
STRONG = (0.8, 0.9, 1.0)
VARY = VaryColours(v2.ColorJitter(*STRONG), 0.3)
THEIRS = v2.Compose([v2.ColorJitter(*STRONG), v2.RandomGrayscale(0.3)])


def without_rounding(pixels, jitter, grey):
    """Draw changes as torchvision does, and make them in float64, clamped at the end only."""
    weights = torch.tensor(GREY, dtype=torch.float64)[:, None, None]
    drawn = jitter.make_params([])
    colours = pixels.double()
    for number in drawn["fn_idx"].tolist():
        greys = (weights * colours).sum(0)
        if number == 0:
            colours = colours * drawn["brightness_factor"]
        elif number == 1:
            factor = drawn["contrast_factor"]
            colours = factor * colours + (1 - factor) * greys.mean()
        elif number == 2:
            factor = drawn["saturation_factor"]
            colours = factor * colours + (1 - factor) * greys
    if torch.rand(1) < grey:
        colours = (weights * colours).sum(0).expand_as(colours)
    return colours.clamp(0, 255)


@pytest.mark.parametrize("size", [(70, 90), (1, 1), (33, 5), (300, 400)])
def test_one_pass_gives_all_changes_without_rounding_in_between(size):
    pixels = F.resize(PIXELS, size)
    for seed in range(20):
        torch.manual_seed(seed)
        expected = without_rounding(pixels, VARY.jitter, VARY.grey)
        torch.manual_seed(seed)
        actual = VARY(pixels)
        assert actual.shape == pixels.shape and actual.dtype == torch.uint8
        # Half a level is the rounding, and float32 adds a little.
        assert (actual - expected).abs().max() < 0.501


def test_the_result_is_torchvisions_in_float64_where_it_clamps_nothing():
    pixels = (90 + PIXELS // 4).to(torch.uint8)
    gentle = (0.3, 0.3, 0.3)
    vary = VaryColours(v2.ColorJitter(*gentle), 0.3)
    theirs = v2.Compose([v2.ColorJitter(*gentle), v2.RandomGrayscale(0.3)])
    for seed in range(20):
        torch.manual_seed(seed)
        expected = 255 * theirs(pixels.double() / 255)
        torch.manual_seed(seed)
        assert (vary(pixels) - expected).abs().max() < 0.501


def test_factors_order_and_greys_are_drawn_as_torchvision_draws_them():
    for seed in range(50):
        torch.manual_seed(seed)
        theirs = THEIRS(PIXELS)
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        ours = VARY(PIXELS)
        assert torch.equal(torch.get_rng_state(), state)
        is_grey = bool((ours == ours[:1]).all())
        assert is_grey == bool((theirs == theirs[:1]).all())


def test_the_pixels_of_usual_strengths_are_near_torchvisions():
    vary = VaryColours(v2.ColorJitter(0.4, 0.4, 0.4), 0.1)
    theirs = v2.Compose([v2.ColorJitter(0.4, 0.4, 0.4), v2.RandomGrayscale(0.1)])
    differences = []
    for seed in range(50):
        torch.manual_seed(seed)
        expected = theirs(PIXELS)
        torch.manual_seed(seed)
        differences.append((vary(PIXELS).double() - expected.double()).abs().mean())
    assert np.mean(differences) < 3


def test_factors_of_one_change_no_pixel():
    jitter = v2.ColorJitter((1, 1), (1, 1), (1, 1))
    jitter.brightness = jitter.contrast = jitter.saturation = (1.0, 1.0)
    assert torch.equal(VaryColours(jitter, 0)(PIXELS), PIXELS)
    assert torch.equal(VaryColours(None, 0)(PIXELS), PIXELS)


def test_an_image_turned_grey_has_one_value_a_pixel_which_is_torchvisions():
    grey = VaryColours(None, 1.0)(PIXELS)
    assert torch.equal(grey, grey[:1].expand_as(grey))
    # which rounds down
    assert (grey.int() - F.rgb_to_grayscale(PIXELS, 3).int()).abs().max() <= 1


def test_pixels_that_are_given_stay_as_they_are():
    before = PIXELS.clone()
    for seed in range(5):
        torch.manual_seed(seed)
        VARY(PIXELS)
    assert torch.equal(PIXELS, before)


def test_a_training_without_colours_draws_none():
    transform = CropFlipColour(crop=1, flip=0, colour=0, grey=0).transform(40)
    assert transform.steps == ()

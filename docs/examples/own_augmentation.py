"""Quarter turns, an augmentation of one's own: for images without an up, such as those of
satellites and microscopes.

In a recipe: `data: {augmentation: {name: "own_augmentation:QuarterTurns", crop: 0.7}}`, with this
folder on PYTHONPATH. `distap train RECIPE --dry-run` tries it on images of the recipe.
"""

from dataclasses import dataclass

import torch

from distap.data.images.augmentation import CropFlipColour


@dataclass(frozen=True)
class QuarterTurns:
    """Crop and flip as usual, and turn by 0, 1, 2 or 3 quarters."""

    crop: float = 0.5
    """Smallest share of the area that a crop keeps."""
    flip: float = 0.5
    """Probability of a horizontal flip."""

    def transform(self, image_size):
        """Return a function from an `EncodedImage` to (3, image_size, image_size) uint8 pixels.

        distap seeds torch's generator by seed, step and slot before each call. So draw from it
        alone: then describing and replaying see the same pixels, on any number of workers.
        """
        crop = CropFlipColour(crop=self.crop, flip=self.flip).transform(image_size)

        def vary(image):
            quarters = int(torch.randint(4, ()))
            return torch.rot90(crop(image), quarters, (1, 2)).contiguous()

        return vary

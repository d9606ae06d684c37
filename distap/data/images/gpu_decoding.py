"""Decode JPEG on a GPU, for `data.decode: gpu`: workers read the files, and the rank decodes and augments them."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from distap.data.images.augmentation import Croppable
from distap.data.images.cropping import DecodedImage, Turns
from distap.data.images.decoding import MAX_PIXELS, DamagedImageError, EncodedImage

AT_ONCE = 32  # images; one of a megapixel takes 3 MB of the GPU's memory


class StoredJPEG(NamedTuple):
    """A JPEG file with a sound header, how its pixels are turned upright, and the slot of a step that wants it."""

    data: bytes
    turns: Turns
    step: int
    slot: int


class GPUDecoder:
    """Decodes and augments JPEG files on a device, beside the work that is queued there.

    Args:
        augment: gives an image as a slot of a step gets it, (3, size, size) uint8.
        device: where torchvision decodes.
        max_pixels: of an image that the device's decoder refuses, and Pillow decodes instead.
    """

    def __init__(
        self, augment: Callable[[Croppable, int, int], Tensor], device: torch.device, max_pixels: int = MAX_PIXELS
    ) -> None:
        self._augment, self._max_pixels = augment, max_pixels
        # Here, since torchvision 0.29 says that it will leave decoding to TorchCodec some day, which is no reason to
        # keep those from training who do not decode on GPUs.
        from torchvision.io import ImageReadMode, decode_jpeg

        self._decode = partial(decode_jpeg, mode=ImageReadMode.RGB, device=device)
        self._module = torch.get_device_module(device)
        self._stream = None if device.type == "cpu" else self._module.Stream(device)

    def __call__(self, files: Sequence[StoredJPEG]) -> list[Tensor | DamagedImageError]:
        """(3, size, size) uint8 of each file on the CPU, or why it cannot be decoded."""
        parts = (files[start : start + AT_ONCE] for start in range(0, len(files), AT_ONCE))
        return [result for part in parts for result in self._at_once(part)]

    def _at_once(self, files: Sequence[StoredJPEG]) -> list[Tensor | DamagedImageError]:
        encoded = [torch.frombuffer(bytearray(file.data), dtype=torch.uint8) for file in files]
        try:
            # Waiting for this stream does not wait for the network, which works on another one.
            with nullcontext() if self._stream is None else self._module.stream(self._stream):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)
                    stored = self._decode(encoded)
                varied = [self._varied(one, file) for one, file in zip(stored, files, strict=True)]
                return list(torch.stack(varied).cpu())
        except RuntimeError:  # it does not say which file the decoder refuses
            return [self._at_once([file])[0] if len(files) > 1 else self._by_pillow(file) for file in files]

    def _varied(self, pixels: Tensor, file: StoredJPEG) -> Tensor:
        _, height, width = pixels.shape
        return self._augment(DecodedImage((width, height), file.turns, pixels), file.step, file.slot)

    def _by_pillow(self, file: StoredJPEG) -> Tensor | DamagedImageError:
        """Pillow decodes more kinds of JPEG, and says what is wrong with the others."""
        try:
            return self._augment(EncodedImage(file.data, self._max_pixels), file.step, file.slot)
        except DamagedImageError as error:
            return error

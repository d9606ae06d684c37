import numpy as np
import pytest
import torch
from images import AUGMENTATION, damage, indexed_images

from distap.data.loading.share import NO_SAMPLE
from distap.data.sizing import PixelSettings


def read(images, steps, count=6):
    """Pixels and sample numbers of each step's share."""
    shares = images.shares(steps)
    return [
        (share.images(slice(0, count)).clone(), share.samples.tolist(), share) for share in shares
    ]


def test_reading_on_from_a_step_gives_what_reading_from_the_start_gives(shards):
    images = indexed_images(shards)
    from_start = read(images, range(4))[2:]
    resumed = read(images, range(2, 4))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(from_start, resumed, strict=True))


def test_an_image_is_augmented_anew_each_step(shards):
    (first, samples, _), (second, again, _) = read(
        indexed_images(shards, batch_size=9), range(2), 9
    )
    assert first.dtype == torch.uint8
    assert first.shape == (9, 3, 16, 16)
    assert sorted(samples) == sorted(again)
    assert not torch.equal(first[np.argsort(samples)], second[np.argsort(again)])


@pytest.mark.parametrize("memory_bytes", [2**30, 0])
def test_smaller_images_come_first_and_resuming_changes_nothing(shards, memory_bytes):
    sizes = tuple(
        (share, size, AUGMENTATION.transform(size))
        for share, size in ((0, 8), (0.5, 12), (0.75, 16))
    )
    images = indexed_images(shards, sizes=sizes, pixels=PixelSettings(memory_bytes))
    whole = read(images, range(8))
    plain = read(indexed_images(shards), range(8))
    assert [pixels.shape[-1] for pixels, _, _ in whole] == [8, 8, 8, 8, 12, 12, 16, 16]
    assert all(
        torch.equal(pixels, other)
        for (pixels, _, _), (other, _, _) in zip(whole[6:], plain[6:], strict=True)
    )
    for (pixels, samples, _), (again, same, _) in zip(
        whole[3:], read(images, range(3, 8)), strict=True
    ):
        assert torch.equal(pixels, again) and samples == same


def test_a_damaged_image_is_replaced_by_one_of_its_class_and_reported(shards):
    images = indexed_images(shards, batch_size=4)
    batch = images.plan.batch(0)
    index = images.index
    slot = next(s for s in range(4) if len(images.plan.stand_ins(0, s)))
    damage(shards, [batch[slot]])
    ((_, samples, share),) = read(images, range(1), 4)
    assert samples[slot] == images.plan.stand_ins(0, slot)[0]
    assert share.present.all()
    (failure,) = share.failures
    assert (
        failure.name == f"{index.shard_name[index.shard[batch[slot]]]}:{index.names[batch[slot]]}"
    )
    assert failure.reason.startswith("crc_mismatch: ")


def test_a_slot_without_stand_in_stays_empty(shards):
    damage(shards, [0])
    images = indexed_images(shards, batch_size=9)  # every image is in the batch
    ((pixels, samples, share),) = read(images, range(1), 9)
    empty = images.plan.batch(0).tolist().index(0)
    assert samples[empty] == NO_SAMPLE
    assert (~share.present).nonzero().flatten().tolist() == [empty]
    assert share.labels[empty] == -1
    assert not pixels[empty].any()

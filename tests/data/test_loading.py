import numpy as np
import pytest
import torch
from images import damage, slot_images

from distap.data.images.decoding import DamagedImageError, decode
from distap.data.images.transforms import evaluation_transform
from distap.data.loading.indexed import NO_SAMPLE, OrderedImages, evaluation_chunks, training_shares
from distap.data.loading.reading import Reader
from distap.data.shards.index import load_index
from distap.stopwatch import Stopwatch


def read(images, slots, steps, chunk=2, workers=0):
    """Pixels and sample numbers of each step's share."""
    shares = training_shares(images, slots, steps, chunk, workers, 2, Stopwatch())
    return [(share.images(slice(0, len(slots))).clone(), list(share.samples), share) for share in shares]


@pytest.mark.parametrize(("chunk", "workers"), [(1, 0), (4, 1), (2, 2)])
def test_pixels_do_not_depend_on_ranks_chunks_or_workers(shards, chunk, workers):
    images = slot_images(shards)
    for (whole, samples, _), (even, some, _), (odd, others, _) in zip(
        read(images, range(6), range(3)),
        read(images, range(0, 6, 2), range(3), chunk, workers),
        read(images, range(1, 6, 2), range(3), chunk, workers),
        strict=True,
    ):
        assert samples[::2] == some
        assert samples[1::2] == others
        assert torch.equal(whole[::2], even)
        assert torch.equal(whole[1::2], odd)


def test_reading_on_from_a_step_gives_what_reading_from_the_start_gives(shards):
    images = slot_images(shards)
    from_start, resumed = read(images, range(6), range(4))[2:], read(images, range(6), range(2, 4))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(from_start, resumed, strict=True))


def test_an_image_is_augmented_anew_each_step(shards):
    images = slot_images(shards, batch_size=9)
    (first, samples, _), (second, again, _) = read(images, range(9), range(2))
    assert sorted(samples) == sorted(again)
    assert not torch.equal(first[np.argsort(samples)], second[np.argsort(again)])


def test_a_damaged_image_is_replaced_by_one_of_its_class_and_reported(shards):
    images = slot_images(shards, batch_size=4)
    batch = images.plan.batch(0)
    slot = next(s for s in range(4) if len(images.plan.stand_ins(0, s)))
    damage(shards, [batch[slot]])
    _, samples, share = read(images, range(4), range(1))[0]
    assert samples[slot] == images.plan.stand_ins(0, slot)[0]
    assert share.present.all()
    index = images.reader.index
    assert [tuple(failure) for failure in share.failures] == [
        (f"{index.shard_name[index.shard[batch[slot]]]}:{index.key[batch[slot]]}", "crc_mismatch")
    ]


def test_a_slot_without_stand_in_stays_empty(shards):
    damage(shards, [0])
    images = slot_images(shards, batch_size=9)  # every image is in the batch
    _, samples, share = read(images, range(9), range(1))[0]
    empty = images.plan.batch(0).tolist().index(0)
    assert samples[empty] == NO_SAMPLE
    assert (~share.present).nonzero().flatten().tolist() == [empty]
    assert share.labels[empty] == -1


def test_evaluation_reads_in_order_and_leaves_out_what_is_damaged(shards):
    damage(shards, [4])
    index = load_index(shards)
    images = OrderedImages(Reader(shards, index), evaluation_transform(16), 16)
    chunks = list(evaluation_chunks(images, range(1, 9, 2), 3, 0))
    assert [sample for chunk in chunks for sample in chunk.samples] == [1, 3, 5, 7]
    chunks = list(evaluation_chunks(images, range(0, 9, 2), 3, 0))
    assert [sample for chunk in chunks for sample in chunk.samples] == [0, 2, NO_SAMPLE, 6, 8]
    assert [failure.reason for chunk in chunks for failure in chunk.failures] == ["crc_mismatch"]


def test_the_network_gets_bytes(shards):
    pixels, _, _ = read(slot_images(shards), range(6), range(1))[0]
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (6, 3, 16, 16)


def test_an_image_of_too_many_pixels_is_refused_before_decoding(image_folder):
    data = (image_folder / "apple" / "0.png").read_bytes()
    with pytest.raises(DamagedImageError, match="too_large: 24 x 24") as error:
        decode(data, max_pixels=500)
    assert error.value.reason == "too_large"


def test_a_truncated_image_is_told_from_one_that_is_none(image_folder):
    data = (image_folder / "apple" / "0.png").read_bytes()
    with pytest.raises(DamagedImageError) as error:
        decode(data[:-300])
    assert error.value.reason == "truncated"
    with pytest.raises(DamagedImageError) as error:
        decode(b"not an image at all")
    assert error.value.reason == "decode_error"

import hashlib
import os

import pytest
import torch
from batches import small_network
from images import damage, indexed_images, write_images
from raising import raises
from ranks import on_ranks
from steps import learning, step_with

from benchmarks.photos import pack
from distap.data.loading.share import NO_SAMPLE, HeldPixels
from distap.data.shards.index import load_index
from distap.data.sizing import PixelSettings
from distap.ranking.losses.quantized import QuantizedAP
from distap.stages.micro_batches import MicroBatchSizes
from distap.world import World

WAYS = {"memory": PixelSettings(), "spool": PixelSettings(memory_bytes=0)}
# 11 images are uneven on 2, 4 and 8 ranks
BATCH = 11
DESCRIBE = 3
REPLAY = 2
STEPS = 12


def shares_of(folder, world, way, workers=0, pixels=None, batch=BATCH):
    pixels = pixels or WAYS[way]
    images = indexed_images(
        folder, batch, world=world, chunk=DESCRIBE, workers=workers, pixels=pixels
    )
    return images.shares(range(STEPS))


def rows_of(count, size):
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def digest(image):
    return hashlib.sha256(image.numpy().tobytes()).hexdigest()


def seen(share, count):
    """Samples of a share's rows, and their pixels by hash in describe and in replay."""
    passes = []
    for size in (DESCRIBE, REPLAY):
        passes.append(
            [digest(image) for rows in rows_of(count, size) for image in share.images(rows)]
        )
    return list(zip(share.samples.tolist(), *passes, strict=True))


def global_batches(folder, ranks, way, workers):
    """What all ranks see of each step, in the order of slots."""
    batches = [[None] * BATCH for _ in range(STEPS)]
    for rank in range(ranks):
        for share in shares_of(folder, World(rank, ranks), way, workers):
            slots = range(BATCH) if share.order is None else share.order[rank::ranks].tolist()
            for slot, item in zip(slots, seen(share, len(slots)), strict=True):
                batches[share.step][slot] = item
    return batches


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory):
    """16 images: 8, 4, 2 and 2 of a class; three of the first class damaged, and one of the
    last."""
    folder = tmp_path_factory.mktemp("spoilt")
    write_images(folder / "images", {"apple": 8, "bear": 4, "car": 2, "dog": 2})
    pack(folder / "images", folder / "shards", images_per_shard=4)
    labels = load_index(folder / "shards").label.tolist()
    damage(folder / "shards", [labels.index(0) + n for n in range(3)] + [labels.index(3)])
    return folder / "shards"


@pytest.fixture(scope="module")
def expected(spoilt):
    return global_batches(spoilt, 1, "memory", 0)


def test_the_batches_have_stand_ins_and_images_that_nothing_stands_in_for(spoilt, expected):
    plan = indexed_images(spoilt, BATCH).plan
    replaced = []
    missing = []
    for step, batch in enumerate(expected):
        labels = plan.classes.labels[plan.batch(step)].tolist()
        for label, planned, (read, first, again) in zip(
            labels, plan.batch(step).tolist(), batch, strict=True
        ):
            assert first == again
            if read == NO_SAMPLE:
                missing.append(planned)
            elif read != planned:
                replaced.append((step, label))
    assert missing
    # Several of one class in one step, whose slots lie on different ranks.
    assert any(replaced.count(item) > 1 for item in replaced)
    for batch in expected:
        used = [sample for sample, _, _ in batch if sample != NO_SAMPLE]
        assert len(set(used)) == len(used)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 0), (8, 0), (4, 2)])
def test_samples_and_pixels_are_the_same_on_any_number_of_ranks(
    spoilt, expected, ranks, way, workers
):
    assert global_batches(spoilt, ranks, way, workers) == expected


@pytest.mark.parametrize("way", WAYS)
def test_rows_may_be_asked_for_in_other_numbers_than_they_were_read(spoilt, expected, way):
    described = [(0, 2), (2, 3), (3, 8), (3, 5), (5, 7), (7, 11)]  # five were too many once
    replayed = [slice(0, 4), slice(4, 5), torch.tensor([6, 7, 9])]
    for share, batch in zip(shares_of(spoilt, World(), way), expected, strict=True):
        for start, stop in described:
            actual = [digest(image) for image in share.images(slice(start, stop))]
            assert actual == [first for _, first, _ in batch[start:stop]]
        for rows in replayed:
            numbers = range(BATCH)[rows] if isinstance(rows, slice) else rows.tolist()
            assert [digest(image) for image in share.images(rows)] == [
                batch[number][2] for number in numbers
            ]


def gradients(world, folder, way):
    """By how much each parameter moves in one step of SGD, and the loss."""
    network = small_network()
    before = [p.detach().clone() for p in network.parameters()]
    scaled = torch.nn.Sequential(Scaling(), network)
    learner = learning(scaled, torch.optim.SGD(scaled.parameters(), lr=1.0), world)
    step = step_with(learner, QuantizedAP(), world, 0, MicroBatchSizes(REPLAY))
    losses = [step(share, 1.0).loss for share in shares_of(folder, world, way)]
    return losses, [b - p.detach() for b, p in zip(before, network.parameters(), strict=True)]


class Scaling(torch.nn.Module):
    """Bytes to what the small network takes."""

    def forward(self, images):
        return images.double() / 255


def all_gradients(world, folder):
    return [gradients(world, folder, way) for way in WAYS]


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are_the_same_bit_for_bit_wherever_pixels_wait(spoilt, ranks):
    answers = (
        on_ranks(ranks, all_gradients, spoilt) if ranks > 1 else [all_gradients(World(), spoilt)]
    )
    for in_memory, (actual, moved) in answers:
        assert actual == in_memory[0]
        assert all(torch.equal(a, b) for a, b in zip(moved, in_memory[1], strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_blanked_rows_are_black_in_replay_and_the_others_are_not(shards, way):
    shares = shares_of(shards, World(), way, batch=9)
    share = next(shares)
    described = torch.cat([share.images(rows).clone() for rows in rows_of(9, DESCRIBE)])
    share.blank(torch.tensor([0, 4]))
    again = torch.cat([share.images(rows).clone() for rows in rows_of(9, REPLAY)])
    described[[0, 4]] = 0
    assert torch.equal(again, described)
    assert torch.equal(share.images(slice(0, 1)), described[:1])  # as padding of a shorter share


def test_auto_takes_memory_up_to_the_limit_and_the_spool_beyond(shards, tmp_path):
    bytes_of_share = 9 * 3 * 16 * 16
    for limit, spooled in ((bytes_of_share, 0), (bytes_of_share - 1, bytes_of_share)):
        settings = PixelSettings(memory_bytes=limit, spool_folder=tmp_path)
        share = next(shares_of(shards, World(), "auto", pixels=settings, batch=9))
        assert share.held.spool_size_bytes == spooled
    assert not list(tmp_path.glob("distap-spool-*"))  # the file has no name


def test_a_full_disk_is_an_error_before_anything_is_read(shards, small_disk):
    disk = small_disk("1m")
    images = indexed_images(shards, 9, size=256, pixels=PixelSettings(0, disk))
    with raises("storage.no_room", disk):
        images.shares(range(1))


def test_space_that_others_take_meanwhile_does_not_stop_the_spool(small_disk):
    disk = small_disk("1m")
    # 768,000 bytes
    held = HeldPixels(PixelSettings(0, disk), (10, 3, 160, 160), torch.uint8, pinned=False)
    (disk / "other").write_bytes(bytes(os.statvfs(disk).f_bavail * 4096))
    pixels = torch.randint(0, 256, (10, 3, 160, 160), dtype=torch.uint8)
    held.keep(0, pixels)
    assert torch.equal(held.rows(slice(0, 10)), pixels)


@pytest.mark.parametrize("folder", ["missing", "file"])
def test_a_spool_folder_that_cannot_be_used_is_named(tmp_path, folder):
    (tmp_path / "file").write_text("")
    settings = PixelSettings(0, tmp_path / folder)
    with raises("storage.no_room", folder, "data.pixels.spool_folder"):
        HeldPixels(settings, (1, 3, 8, 8), torch.uint8, pinned=False)

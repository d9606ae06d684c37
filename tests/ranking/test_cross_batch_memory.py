import pytest
import torch
from problems import problem
from torch.nn.functional import normalize

from distap.ranking.gather import gather
from distap.ranking.memory import CrossBatchMemory
from distap.world import World


def batch(seed, images):
    """A gathered batch of the images with these numbers."""
    raw, labels = problem(seed, len(images), 4)
    present = torch.ones(len(labels), dtype=torch.bool)
    return gather(normalize(raw), labels, present, World(), len(labels), torch.tensor(images))


def test_it_forgets_the_oldest():
    memory = CrossBatchMemory(7)
    first, second = batch(0, range(5)), batch(1, range(5, 10))
    memory.remember(first)
    memory.remember(second)
    extended = memory.extend(batch(2, range(10, 14)))
    assert torch.equal(extended.gallery[4:], torch.cat([first.descriptors[3:], second.descriptors]))
    assert torch.equal(extended.gallery_labels[4:], torch.cat([first.labels[3:], second.labels]))


def test_an_image_of_the_batch_is_not_met_again_in_the_memory():
    memory = CrossBatchMemory(100)
    memory.remember(batch(0, [0, 1, 2, 3]))
    assert memory.images.tolist() == [0, 1, 2, 3]
    extended = memory.extend(batch(1, [2, 3, 4, 5]))
    assert len(extended.gallery) == 6
    memory.remember(batch(1, [2, 3, 4, 5]))
    assert memory.images.tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.equal(memory.descriptors[2:], batch(1, [2, 3, 4, 5]).descriptors)


def test_images_without_a_number_are_all_kept():
    memory = CrossBatchMemory(100)
    memory.remember(batch(0, [-1] * 4))
    memory.remember(batch(1, [-1] * 4))
    assert len(memory) == 8


def test_it_is_saved_and_restored():
    memory, again, smaller = CrossBatchMemory(10), CrossBatchMemory(10), CrossBatchMemory(3)
    memory.remember(batch(0, range(8)))
    again.load_state_dict(memory.state_dict())
    smaller.load_state_dict(memory.state_dict())
    other = batch(1, range(20, 24))
    assert torch.equal(again.extend(other).gallery, memory.extend(other).gallery)
    assert smaller.images.tolist() == [5, 6, 7]


def test_an_empty_one_is_saved_and_restored():
    again = CrossBatchMemory(10)
    again.load_state_dict(CrossBatchMemory(10).state_dict())
    assert len(again.extend(batch(0, range(4))).gallery) == 4


def test_a_size_below_zero_is_refused():
    with pytest.raises(ValueError, match="size is -1"):
        CrossBatchMemory(-1)

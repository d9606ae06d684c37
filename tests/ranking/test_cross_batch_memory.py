import pytest
import torch
from problems import problem
from reference import listwise_gradient
from torch.nn.functional import normalize

from distap.ranking.gather import gather
from distap.ranking.listwise import ListwiseLoss
from distap.ranking.memory import CrossBatchMemory
from distap.world import World


def batch(seed, images):
    """A gathered batch of the images with these numbers."""
    raw, labels = problem(seed, len(images), 4)
    present = torch.ones(len(labels), dtype=torch.bool)
    return gather(normalize(raw), labels, present, World(), len(labels), torch.tensor(images))


def test_it_is_saved_and_restored():
    memory, again, smaller = CrossBatchMemory(10), CrossBatchMemory(10), CrossBatchMemory(3)
    memory.remember(batch(0, range(8)))
    again.load_state_dict(memory.state_dict())
    smaller.load_state_dict(memory.state_dict())
    other = batch(1, range(20, 24))
    assert torch.equal(again.extend(other).gallery, memory.extend(other).gallery)
    assert smaller.images.tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("contrastive", {}),
        ("contrastive", {"negatives": 5}),
        ("triplet", {"mining": "semi_hard", "squared": True}),
        ("triplet", {}),
        ("multi_similarity", {}),
        ("calibration", {"alpha": 1.0, "beta": 0.5, "form": "sum"}),
    ],
)
def test_over_some_steps_each_batch_meets_what_a_list_of_earlier_ones_holds(name, options):
    loss, remembered = ListwiseLoss(name, memory=20, **options), []
    for step in range(5):
        raw, labels = problem(step, 12, 4)
        images = torch.randperm(30, generator=torch.Generator().manual_seed(step))[:12]
        rows = raw.clone().requires_grad_()
        value = loss(rows, labels, images)
        value.backward()
        remembered = [one for one in remembered if one[0] not in images.tolist()]
        gallery = [torch.stack(column) for column in list(zip(*remembered, strict=True))[1:]]
        expected, gradient = listwise_gradient(name, raw, labels, *gallery, **options)
        assert value.item() == pytest.approx(expected, rel=1e-9)
        torch.testing.assert_close(rows.grad, gradient, rtol=1e-9, atol=1e-13)
        remembered = [*remembered, *zip(images.tolist(), normalize(raw), labels, strict=True)][-20:]
    assert len(gallery[0]) > 10


def test_a_size_below_zero_is_refused():
    with pytest.raises(ValueError, match="size is -1"):
        CrossBatchMemory(-1)

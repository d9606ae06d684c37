import pytest
import torch

from distap.errors import memory_ran_out
from distap.stages.micro_batches import backward_passes, cut

NAN = float("nan")


def passes(lengths, size, kept=(), **options):
    """(rows, whether kept) of each pass, for gradients of these lengths."""
    gradient = torch.tensor(lengths)[:, None] * torch.tensor([[0.6, 0.8]])
    graphs = {first: torch.zeros(min(size, len(lengths) - first), 2) for first in kept}
    cuts = backward_passes(gradient, graphs, size, **options)
    numbers = torch.arange(len(lengths))
    for item in cuts:
        assert torch.equal(item.gradient, gradient[item.rows]) or item.gradient.isnan().any()
    return [(numbers[item.rows].tolist(), item.descriptors is not None) for item in cuts]


def test_a_share_is_cut_in_order_and_the_last_micro_batch_is_shorter():
    assert cut(0, 7, 3) == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert cut(3, 3, 2) == []


@pytest.mark.parametrize(
    ("lengths", "size", "options", "expected"),
    [
        ([1.0] * 5, 2, {}, [([0, 1], False), ([2, 3], False), ([4], False)]),
        (
            [1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0],
            2,
            {},
            [([0, 2], False), ([3, 5], False), ([6], False)],
        ),
        # Micro-batches that must stay are left out as a whole.
        (
            [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0],
            2,
            {"regroup": False},
            [([2, 3], False), ([4, 5], False)],
        ),
        # Kept graphs come first.
        ([1.0] * 6, 2, {"kept": (2, 4)}, [([2, 3], True), ([4, 5], True), ([0, 1], False)]),
        ([1.0, 1.0, 1.0, 1.0, 0.0, 0.0], 2, {"kept": (2, 4)}, [([2, 3], True), ([0, 1], False)]),
        # Gradients below the limit are left out, but not those that are no number.
        ([0.5, 0.1, NAN, 2.0], 4, {"limit": 0.2}, [([0, 2, 3], False)]),
    ],
)
def test_rows_with_a_gradient_are_replayed_in_full_micro_batches(lengths, size, options, expected):
    assert passes(lengths, size, **options) == expected


def test_a_share_without_any_gradient_is_padded_by_one_image_without_gradient():
    (item,) = backward_passes(torch.zeros(3, 2), {}, 4)
    assert item.is_padding
    assert item.rows == slice(0, 1)
    assert torch.equal(item.gradient, torch.zeros(1, 2))


def test_only_a_lack_of_memory_is_one():
    assert memory_ran_out(torch.OutOfMemoryError("CUDA out of memory"))
    assert memory_ran_out(RuntimeError("could not create a primitive"))  # of oneDNN
    with pytest.raises(RuntimeError) as of_cpu:
        torch.empty(2**60, dtype=torch.uint8)
    assert memory_ran_out(of_cpu.value)
    assert not memory_ran_out(RuntimeError("size mismatch"))

"""What cannot be ranked is refused, and the rows at fault are named."""

import pytest
import torch
from problems import problem
from torch.nn.functional import normalize

from distap.errors import DistapError
from distap.ranking.losses.smooth import SmoothAP
from distap.ranking.memory import CrossBatchMemory
from distap.ranking.rank import rank


def batch():
    raw, labels = problem(0, 12, 3)
    return normalize(raw), labels


def refusal(descriptors, labels, loss="ap_q", **options):
    with pytest.raises(DistapError) as error:
        rank(descriptors, labels, loss, **options)
    return str(error.value)


def test_rows_at_fault_are_named():
    descriptors, labels = batch()
    for value in (torch.nan, torch.inf, -torch.inf):
        broken = descriptors.clone()
        broken[3, 1] = broken[7, 0] = value
        assert "rows 3, 7: descriptors hold values that are not finite" in refusal(broken, labels)
    assert "rows 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more" in refusal(
        descriptors * torch.nan, labels
    )
    descriptors[5] *= 3
    assert "row 5: descriptors have other lengths than 1, such as 3" in refusal(descriptors, labels)


def test_a_batch_of_one_class_or_of_singletons():
    descriptors, labels = batch()
    of_one = refusal(descriptors, torch.full_like(labels, 7))
    assert "all 12 images of this batch (rows 0 to 11) are of one class, 7" in of_one
    assert "none of the 12 images of this batch (rows 0 to 11) has another" in refusal(
        descriptors, torch.arange(12)
    )


def test_labels_beyond_the_range():
    descriptors, labels = batch()
    overflowed = labels.clone()
    signed = labels.clone()
    overflowed[2] = torch.iinfo(torch.int64).max
    overflowed[2] += 1
    assert "row 2: labels -9223372036854775808 are no class numbers" in refusal(
        descriptors, overflowed
    )
    signed[4] = -5
    unsigned = signed.view(torch.uint64)
    assert "row 4: labels 18446744073709551611 are no class numbers" in refusal(
        descriptors, unsigned
    )


def test_labels_as_large_as_they_may_be_are_ranked():
    descriptors, labels = batch()
    renamed = torch.iinfo(torch.int64).max - labels
    assert rank(descriptors, renamed).loss == rank(descriptors, labels).loss
    assert rank(descriptors, labels.to(torch.int32)).loss == rank(descriptors, labels).loss


def test_wrong_types_shapes_and_options():
    descriptors, labels = batch()
    assert "labels are torch.float64" in refusal(descriptors, labels.double())
    assert "labels are (11,) for 12 images" in refusal(descriptors, labels[:11])
    assert "labels are () for 12 images" in refusal(descriptors, labels[0])
    assert "descriptors are (12, 8) of torch.int64" in refusal(descriptors.long(), labels)
    assert "samples are (12,) of torch.float64" in refusal(descriptors, labels, samples=[0.1] * 12)
    assert "mode is 'shraded'; did you mean sharded" in refusal(descriptors, labels, mode="shraded")
    assert "SmoothAP: tau: -1.0" in refusal(descriptors, labels, SmoothAP, tau=-1.0)
    for options in ({"tau": 0.1}, {"weights": "class"}):
        assert "is a loss already" in refusal(descriptors, labels, SmoothAP(), **options)


def test_the_old_name_of_samples_is_taken_with_a_warning():
    descriptors, labels = batch()
    memories = [CrossBatchMemory(12), CrossBatchMemory(12)]
    rank(descriptors, labels, memory=memories[0], samples=torch.arange(12))
    with pytest.warns(FutureWarning, match="`images` of `rank` is called `samples` now"):
        rank(descriptors, labels, memory=memories[1], images=torch.arange(12))
    named, old = (memory.state_dict() for memory in memories)
    assert named.keys() == old.keys()
    assert all(torch.equal(rows, old[name]) for name, rows in named.items())


def test_a_precision_that_was_chosen_in_torch_is_left_alone():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    rank(*batch())
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    torch.backends.cuda.matmul.fp32_precision = "none"

import pytest
import torch
from definitions import built, levels_of
from problems import problem, remembering
from reference import listwise_gradient
from teachers import extra_of
from torch.nn.functional import normalize

from distap.ranking.listwise import ListwiseLoss
from distap.ranking.memory import CrossBatchMemory
from distap.registry import REGISTRY


# which draws again
@pytest.mark.parametrize("name", [name for name in REGISTRY["loss"] if name != "simix"])
def test_without_gradients_it_is_a_figure_to_watch(name):
    raw, labels = problem(7, 20, 4)
    levels = levels_of(labels)
    loss = ListwiseLoss(built(name, 10, 8))
    extra = extra_of(loss.loss, raw)
    expected = loss(raw, levels, extra=extra).item()
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            assert loss(raw, levels, extra=extra).item() == expected


def test_it_says_that_it_differentiates_once():
    raw, labels = problem(8, 20, 4)
    loss = ListwiseLoss("smooth_ap")(raw.requires_grad_(), labels)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(loss, raw, create_graph=True)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("smooth_ap", {}),
        ("contrastive", {}),
        ("contrastive", {"negatives": 5}),
        ("triplet", {"mining": "semi_hard", "squared": True}),
        ("triplet", {}),
        ("multi_similarity", {}),
        ("calibration", {"alpha": 1.0, "beta": 0.5, "form": "sum"}),
    ],
)
def test_over_some_steps_each_batch_meets_what_a_list_of_earlier_ones_holds(name, options):
    loss = ListwiseLoss(name, memory=20, **options)
    remembered = []
    for step in range(5):
        last, loss = loss, ListwiseLoss(name, memory=20, **options)
        loss.load_state_dict(last.state_dict())
        raw, labels = problem(step, 12, 4)
        images = torch.randperm(30, generator=torch.Generator().manual_seed(step))[:12]
        rows = raw.clone().requires_grad_()
        value = loss(rows, labels, images)
        value.backward()
        remembered = [item for item in remembered if item[0] not in images.tolist()]
        gallery = [torch.stack(column) for column in list(zip(*remembered, strict=True))[1:]]
        expected, gradient = listwise_gradient(name, raw, labels, *gallery, **options)
        assert value.item() == pytest.approx(expected, rel=1e-9)
        torch.testing.assert_close(rows.grad, gradient, rtol=1e-9, atol=1e-13)
        remembered = [*remembered, *zip(images.tolist(), normalize(raw), labels, strict=True)][-20:]
    assert len(gallery[0]) > 10
    assert loss.eval()(raw, labels).item() == pytest.approx(
        listwise_gradient(name, raw, labels, **options)[0]
    )


def test_a_smaller_memory_takes_the_last_of_a_larger_one_and_none_is_below_zero():
    memory = remembering(0, 8, first=0)
    smaller = CrossBatchMemory(3)
    smaller.load_state_dict(memory.state_dict())
    assert smaller.state_dict()["images"].tolist() == [5, 6, 7]
    with pytest.raises(ValueError, match="size is -1"):
        CrossBatchMemory(-1)

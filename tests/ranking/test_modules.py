import pytest
import torch
from definitions import built
from problems import problem
from reference import listwise_gradient
from torch import nn

from distap.errors import DistapError
from distap.ranking.listwise import ListwiseLoss
from distap.registry import REGISTRY


def backward(loss, raw, labels):
    raw = raw.detach().clone().requires_grad_()
    value = loss(raw, labels)
    (3 * value).backward()
    return value.item(), raw.grad / 3


def test_it_normalises_differentiates_and_takes_options_weights_and_presets():
    raw, labels = problem(1, 30, 5)
    value, gradient = backward(ListwiseLoss("ap_q", weights="class", preset="dirtorch"), raw, labels)
    loss, expected = listwise_gradient("ap_q", raw, labels, weights="class", bins=25, low=0.0)
    assert value == pytest.approx(loss, rel=1e-9)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-13)
    with pytest.raises(DistapError, match="did you mean tau"):
        ListwiseLoss("smooth_ap", taw=1)


def test_a_memory_is_ranked_against_in_training_and_is_part_of_the_state():
    (raw, labels), (other, other_labels) = problem(3, 20, 4), problem(4, 16, 4)
    loss = ListwiseLoss("smooth_ap", memory=100)
    first, _ = backward(loss, other, other_labels)
    assert first == pytest.approx(listwise_gradient("smooth_ap", other, other_labels)[0])
    again = ListwiseLoss("smooth_ap", memory=100)
    again.load_state_dict(loss.state_dict())
    remembered = nn.functional.normalize(other), other_labels
    expected = listwise_gradient("smooth_ap", raw, labels, *remembered)
    for module in (loss, again):
        value, gradient = backward(module, raw, labels)
        assert value == pytest.approx(expected[0], rel=1e-9)
        torch.testing.assert_close(gradient, expected[1], rtol=1e-9, atol=1e-13)
    assert backward(loss.eval(), raw, labels)[0] == pytest.approx(listwise_gradient("smooth_ap", raw, labels)[0])


@pytest.mark.parametrize("name", [name for name in REGISTRY["loss"] if name != "simix"])  # which draws again
def test_without_gradients_it_is_a_figure_to_watch(name):
    raw, labels = problem(7, 20, 4)
    loss = ListwiseLoss(built(name, 10, 8))
    expected = loss(raw, labels).item()
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            assert loss(raw, labels).item() == expected


def test_it_says_that_it_differentiates_once():
    raw, labels = problem(8, 20, 4)
    loss = ListwiseLoss("smooth_ap")(raw.requires_grad_(), labels)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(loss, raw, create_graph=True)

"""Losses with parameters of their own, against their definition and over ranks."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from definitions import SOFTMAX, defined, levels_of
from problems import problem
from pytorch_metric_learning.losses import ProxyAnchorLoss
from raising import raises
from ranks import on_ranks
from torch.distributed.tensor import DTensor
from torch.nn.functional import normalize

from distap.ranking.listwise import ListwiseLoss
from distap.ranking.losses.building import build_loss
from distap.ranking.losses.function import FunctionLoss
from distap.ranking.losses.sums import Matryoshka
from distap.ranking.rank import rank

# the labels of a problem of 5 classes go up to 17
CLASSES = 18
DIMENSIONS = 8


def module_of(name, **options):
    return ListwiseLoss(name, classes=CLASSES, dimensions=DIMENSIONS, **options).double()


def backward(module, raw, labels):
    """The loss, and its gradients by the descriptors before normalisation and by the proxies."""
    raw = raw.clone().requires_grad_()
    value = module(raw, labels)
    (3 * value).backward()
    return value.item(), raw.grad / 3, next(module.parameters()).grad / 3


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize("weights", ["uniform", "class"])
@pytest.mark.parametrize("name", [*SOFTMAX, "arc_face", "cos_face", "proxy_anchor"])
def test_loss_and_both_gradients_equal_the_definition(name, weights, dtype, tolerance, monkeypatch):
    monkeypatch.setattr("distap.ranking.loss.CPU_TILE_PAIRS", 100)
    raw, labels = problem(0, 30, 5)
    # duplicates, some of two classes, and a class of one image
    raw[10:20] = raw[:10]
    labels[3] = 11
    is_by_class = weights == "class" and name != "proxy_anchor"
    module = module_of(name, weights=weights if is_by_class else "uniform").to(dtype)
    value, gradient, by_proxies = backward(module, raw.to(dtype), labels)
    leaf = raw.clone().requires_grad_()
    proxies = next(module.parameters()).detach().double().requires_grad_()
    groups = [labels == label for label in labels.unique()] if is_by_class else [slice(None)]
    expected = torch.stack(
        [
            defined(name, normalize(leaf)[rows], levels_of(labels[rows]), [proxies])
            for rows in groups
        ]
    ).mean()
    expected.backward()
    assert value == pytest.approx(expected.item(), rel=tolerance)
    for got, wanted in ((gradient, leaf.grad), (by_proxies, proxies.grad)):
        assert (got - wanted).norm() <= tolerance * wanted.norm()


def test_a_batch_without_any_two_images_of_a_class_can_be_learned_from():
    module = module_of("proxy_nca")
    value, _, by_proxies = backward(module, problem(1, 10, 5)[0], torch.arange(10))
    assert value > 0 and by_proxies.abs().max() > 0


def test_a_module_with_parameters_is_trained_as_it_would_be_alone():
    raw, labels = problem(2, 30, 5)
    function = ProxyAnchorLoss(CLASSES, DIMENSIONS).double()
    value, gradient, by_proxies = backward(ListwiseLoss(deepcopy(function)), raw, labels)
    leaf = raw.clone().requires_grad_()
    expected = function(normalize(leaf), labels)
    expected.backward()
    assert value == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-9, atol=1e-13)
    torch.testing.assert_close(by_proxies, function.proxies.grad, rtol=1e-9, atol=1e-13)


def test_one_module_of_parameters_is_refused_for_several_dimensions():
    module = FunctionLoss(ProxyAnchorLoss(CLASSES, DIMENSIONS).double())
    with raises("loss.shared_parameters"):
        ListwiseLoss(Matryoshka(dimensions=(4, DIMENSIONS), inner=module))
    raw, labels = problem(2, 30, 5)
    assert ListwiseLoss(Matryoshka(dimensions=(DIMENSIONS,), inner=module))(raw, labels).isfinite()


MODES = [{"mode": "sharded"}, {"mode": "central"}, {"shard_classes": True}]


def share_of_module(world):
    raw, labels = problem(3, 21, 5)
    own_rows = slice(7 * world.rank, 7 * world.rank + 7)
    answers = []
    for name in SOFTMAX:
        for options in MODES:
            module = module_of(name, group=dist.group.WORLD, **options)
            value, gradient, by_proxies = backward(module, raw[own_rows], labels[own_rows])
            if isinstance(by_proxies, DTensor):  # whose rows are on one rank each
                by_proxies = by_proxies.full_tensor() / world.size
            answers.append((value, gradient, by_proxies))
    return answers


def test_over_ranks_the_gradients_of_descriptors_and_of_proxies_are_summed():
    raw, labels = problem(3, 21, 5)
    wholes = [backward(module_of(name), raw, labels) for name in SOFTMAX for _ in MODES]
    for whole, answers in zip(wholes, zip(*on_ranks(3, share_of_module), strict=True), strict=True):
        values, gradients, by_proxies = zip(*answers, strict=True)
        assert values == pytest.approx([whole[0]] * 3, rel=1e-12)
        torch.testing.assert_close(torch.cat(gradients), whole[1], rtol=1e-9, atol=1e-13)
        torch.testing.assert_close(sum(by_proxies), whole[2], rtol=1e-9, atol=1e-13)


def test_first_proxies_depend_on_the_seed_alone_and_are_saved_with_the_module():
    first, again = (build_loss("proxy_nca").sized(9, 4, seed=5) for _ in range(2))
    torch.manual_seed(1)
    other = build_loss("proxy_nca", classes=9, seed=6).sized(9, 4, seed=5)
    drawn = [loss.parameters[0] for loss in (first, again, other)]
    assert drawn[0].shape == (9, 4) and torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    module = module_of("proxy_nca", seed=1)
    again = module_of("proxy_nca")
    again.load_state_dict(module.state_dict())
    assert torch.equal(again.learned["proxies"], module.learned["proxies"])


@pytest.mark.parametrize(
    ("change", "code", "names"),
    [
        (
            lambda: build_loss("proxy_nca").learned,
            "loss.unknown_classes",
            [],
        ),
        (
            lambda: build_loss("proxy_nca", classes=3).sized(4, 8, 0),
            "loss.wrong_setting",
            ["3", "4"],
        ),
        (
            lambda: rank(
                normalize(problem(5, 30, 9)[0]),
                problem(5, 30, 9)[1],
                build_loss("proxy_nca", classes=5, dimensions=9),
            ),
            "loss.wrong_proxies",
            ["5", "9", "8"],
        ),
        (
            lambda: build_loss("normalized_softmax", temperature=0),
            "recipe.value",
            ["temperature", "0"],
        ),
    ],
)
def test_numbers_that_do_not_fit_are_named(change, code, names):
    with raises(code, *names):
        change()

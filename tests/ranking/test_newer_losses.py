"""Losses since 2021 against their definitions, written slowly in `newer_losses`."""

import math

import newer_losses
import pytest
import torch
from definitions import levels_of, virtual_images
from hypothesis import example, given, settings
from hypothesis import strategies as st
from problems import problem, rank_raw, remembering
from raising import raises
from reference import listwise_loss
from torch.nn.functional import normalize

from distap.ranking.listwise import ListwiseLoss
from distap.ranking.losses import steps
from distap.ranking.losses.building import build_loss
from distap.ranking.memory import CrossBatchMemory
from distap.ranking.rank import rank

BOUNDING = {"rho": 100.0, "delta": 0.05, "offset": -3.56, "start": 0.5}
GRADED = {
    "h_ap": [{}, {"relevance": "map"}, {"alpha": 3.0, **BOUNDING}],
    "smooth_ndcg": [{}, {"tau": 0.1}],
    "sup_ndcg": [{}, BOUNDING],
}
WEIGHTS = ("uniform", "class")


def assert_is(raw, labels, name, options, definition, memory=None, tolerance=1e-9):
    leaf = raw.double().requires_grad_()
    expected = definition(normalize(leaf))
    expected.backward()
    ranking, gradient = rank_raw(raw, labels, name, memory=memory, **options)
    assert ranking.loss.item() == pytest.approx(expected.item(), rel=tolerance, abs=1e-12)
    assert (gradient - leaf.grad).norm() <= tolerance * leaf.grad.norm() + 1e-12


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from([*GRADED]),
    st.data(),
    st.integers(0, 10_000),
    st.sampled_from(WEIGHTS),
    st.integers(1, 4),
)
def test_graded_losses_equal_the_definition_at_any_number_of_levels(
    name, data, seed, weights, depth
):
    options = data.draw(st.sampled_from(GRADED[name]))
    raw, labels = problem(seed, data.draw(st.integers(4, 16)), data.draw(st.integers(1, 6)))
    levels = levels_of(labels, depth)
    other = problem(78, 6, 4)
    memory = CrossBatchMemory(100)
    rank(normalize(other[0]), levels_of(other[1], depth), name, memory=memory)
    assert_is(
        raw,
        levels,
        name,
        {**options, "weights": weights},
        lambda d: newer_losses.graded(
            name, d, levels, normalize(other[0]), levels_of(other[1], depth), weights, **options
        ),
        memory,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    "loss",
    [{"smooth_ap": {"tau": 0.5}}, {"smooth_ndcg": {"tau": 0.5}}, {"triplet": {"margin": None}}],
    ids=lambda loss: next(iter(loss)),
)
def test_interpolated_sums_of_large_classes_equal_those_of_all_pairs(
    loss, dtype, tolerance, monkeypatch
):
    raw, labels = problem(0, 300, 2, dtype=dtype)
    interpolated = []

    class Spied(steps.InterpolatedSums):
        def counts(self):
            interpolated.append(self)
            return super().counts()

    monkeypatch.setattr(steps, "InterpolatedSums", Spied)
    ranking, gradient = rank_raw(raw, levels_of(labels), loss)
    assert interpolated
    monkeypatch.setattr(steps, "SMOOTH", ())
    plain, expected = rank_raw(raw, levels_of(labels), loss)
    assert ranking.loss.item() == pytest.approx(plain.loss.item(), rel=tolerance)
    assert (gradient - expected).norm() <= tolerance * expected.norm()


def test_the_conventions_of_published_code_are_pinned_by_numbers():
    # yash0307/RecallatK_surrogate ed05202, run on these inputs.
    duplicates = torch.eye(16, dtype=torch.float64).repeat_interleave(4, dim=0)
    labels = torch.arange(16).repeat_interleave(4)
    assert rank(duplicates, labels, "recall_at_k", preset="released").loss.item() == pytest.approx(
        0.214582, abs=1e-6
    )
    # Three positives at ranks 1, 2, 3, all well apart: images of one class along a spiral.
    far = spiral([0, 0.4, 0.9, 1.6] + [2 + 0.05 * k for k in range(16)])
    labels = torch.arange(20).clamp(max=4) // 4
    for preset, expected in (("released", 0.285092), ("paper", 0.270500)):
        ranking = rank(far, labels, "recall_at_k", preset=preset, tau=1e-4)
        assert ranking.per_query[0].item() == pytest.approx(expected, abs=1e-6)
    raw, labels = problem(3, 60, 12)
    once, twice = (
        rank_raw(raw, inputs, "h_ap", preset="released")
        for inputs in (labels, labels[:, None].repeat(1, 2))
    )
    sup_ap = rank_raw(raw, labels, "sup_ap", preset="released")
    for ranking, gradient in (once, twice):
        assert ranking.loss.item() == pytest.approx(sup_ap[0].loss.item(), rel=1e-12)
        torch.testing.assert_close(gradient, sup_ap[1], rtol=1e-9, atol=1e-13)


def spiral(angles):
    return torch.tensor(
        [[math.cos(index), math.sin(index)] for index in angles], dtype=torch.float64
    )


def test_simix_ranks_virtual_images_of_every_pair_of_a_class():
    raw, labels = problem(2, 17, 5)
    leaf = raw.clone().requires_grad_()
    loss = build_loss("simix", inner={"recall_at_k": {"form": "paper"}})
    ranking, gradient = rank_raw(raw, labels, loss, step=3)
    d = normalize(leaf)
    mixed = virtual_images(labels, loss, lambda spying: rank_raw(raw, labels, spying, step=3))
    assert all(0 <= item <= 1 for _, _, item in mixed)
    virtual = torch.stack([alpha * d[a] + (1 - alpha) * d[b] for a, b, alpha in mixed])
    everything = torch.cat([d, virtual])
    known_labels = torch.cat([labels, torch.stack([labels[a] for a, _, _ in mixed])])
    expected = listwise_loss("recall_at_k", everything, known_labels)
    expected.backward()
    assert ranking.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-9, atol=1e-13)
    assert rank_raw(raw, labels, loss, step=4)[0].loss != ranking.loss
    assert rank_raw(raw, labels, loss, step=3)[0].loss == ranking.loss


@pytest.mark.parametrize(
    "inner", ["ap_q", {"smooth_ap": {"tau": 0.05}}, {"name": "normalized_softmax", "classes": 30}]
)
def test_matryoshka_is_the_sum_over_cut_descriptors(inner):
    raw, labels = problem(4, 30, 5)
    module = ListwiseLoss(
        {"matryoshka": {"dimensions": [2, 5, 8], "weights": [1, 0.5, 2], "inner": inner}}
    ).double()
    leaf = raw.clone().requires_grad_()
    module(leaf, labels).backward()
    same = raw.clone().requires_grad_()
    losses = [build_loss(inner).sized(None, d, 0) for d in (2, 5, 8)]
    for loss_of_part in filter(lambda item: item.learned is not None, losses):
        loss_of_part.learned.double()
    values = [
        ListwiseLoss(loss_of_part)(normalize(same)[:, :d], labels)
        for loss_of_part, d in zip(losses, (2, 5, 8), strict=True)
    ]
    (values[0] + 0.5 * values[1] + 2 * values[2]).backward()
    torch.testing.assert_close(leaf.grad, same.grad, rtol=1e-9, atol=1e-13)
    with raises("loss.wrong_dimensions", "8", "6"):
        ListwiseLoss({"matryoshka": {"dimensions": [8], "inner": "ap_q"}})(raw[:, :6], labels)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.integers(4, 20), st.integers(1, 4), st.sampled_from(WEIGHTS))
@example(255, 6, 1, "uniform")  # a difference of 20, from which on torch's softplus is a line
def test_csl_equals_the_definition_at_any_number_of_levels(seed, images, depth, weights):
    raw, labels = problem(seed, images, 5)
    raw[3::3] = raw[0]  # duplicates, of several classes
    tree = levels_of(torch.arange(18), depth)
    margins = newer_losses.MARGINS
    module = ListwiseLoss(
        "csl",
        tree=tree[:, 1:].tolist(),
        classes=18,
        dimensions=8,
        margins=margins,
        weights=weights,
        seed=seed,
    ).double()
    leaf = raw.clone().requires_grad_()
    proxies = module.learned["proxies"].detach().clone().requires_grad_()
    same = raw.clone().requires_grad_()
    value = module(same, tree[labels] if seed % 2 else labels)
    value.backward()
    expected = newer_losses.csl(normalize(leaf), labels, proxies, tree, weights)
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-9)
    for got, by in ((same, leaf), (module.learned["proxies"], proxies)):
        assert (got.grad - by.grad).norm() <= 1e-9 * by.grad.norm() + 1e-12


@pytest.mark.parametrize(
    ("tree", "code", "names"),
    [
        ([[0, 0, 0, 0]] * 3, "loss.wrong_tree", ["4", "3"]),
        ([[0, 0], [0, 1], [1, 1]], "data.crossing_levels", ["0", "1", "2"]),
        (None, "loss.wrong_tree", ["2", "1"]),
    ],
)
def test_a_tree_that_does_not_fit_is_named(tree, code, names):
    with raises(code, *names):
        ListwiseLoss("csl", classes=3, dimensions=8, tree=tree)(
            torch.randn(2, 8), torch.tensor([[0, 0], [1, 0]])
        )


def test_wrappers_ask_of_a_batch_what_their_inner_loss_asks():
    raw = normalize(problem(4, 6, 5)[0])
    levels = torch.stack([torch.arange(6), torch.arange(6) // 3], 1)
    assert rank(raw, levels, {"matryoshka": {"dimensions": [4], "inner": "h_ap"}}).queries == 6
    lone = build_loss(
        {"matryoshka": {"dimensions": [4], "inner": {"name": "arc_face", "classes": 6}}}
    )
    assert ListwiseLoss(lone)(raw, levels[:, 0]).item() > 0


def test_arc_face_falls_with_similarity_everywhere():
    similarities = torch.linspace(-1, 1, 201, dtype=torch.float64)[:, None]
    moved = build_loss("arc_face", classes=2, dimensions=2).with_margin(similarities)
    assert bool((moved.diff(dim=0) > 0).all())


@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_sigmoid_loss_trains_its_scale_and_bias(weights):
    raw, labels = problem(6, 12, 5)
    # duplicates, and an image alone in its class
    raw[6:9] = raw[:3]
    labels[4] = 999
    other, other_labels = problem(7, 5, 5)
    module = ListwiseLoss("sigmoid", memory=100, weights=weights).double()
    leaf = raw.clone().requires_grad_()
    module(other, other_labels)
    value = module(leaf, labels)
    same = raw.clone().requires_grad_()
    value.backward()
    learned = {
        name: parameter.detach().clone().requires_grad_()
        for name, parameter in module.learned.items()
    }
    assert [parameter.item() for parameter in learned.values()] == [
        -10,
        pytest.approx(math.log(10)),
    ]
    expected = listwise_loss(
        "sigmoid", normalize(same), labels, normalize(other), other_labels, weights, **learned
    )
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-9)
    gradients = [leaf.grad, *(parameter.grad for parameter in module.learned.values())]
    torch.testing.assert_close(
        gradients,
        [same.grad, *(parameter.grad for parameter in learned.values())],
        rtol=1e-9,
        atol=1e-13,
    )


@pytest.mark.parametrize("name", ["triplet", "contrastive"])
def test_gradients_of_near_duplicates_are_those_of_float64(name):
    raw, labels = problem(8, 12, 4, dtype=torch.float32)
    raw = normalize(raw.double()).float()
    raw[1::2] = raw[::2] + 1e-6 * torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    labels[1::2] = labels[::2]
    exact, coarse = (
        rank_raw(normalize(raw.double()).to(dtype), labels, name)[1].double()
        for dtype in (torch.float64, torch.float32)
    )
    assert (exact - coarse).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize(
    ("labels", "code", "names"),
    [
        (
            [[0, 0], [0, 1], [1, 0], [1, 0]],
            "data.crossing_levels",
            ["0", "1"],
        ),
        ([[0, 0], [0, 0], [1, -1], [1, 0]], "data.wrong_labels", ["row 2", "-1"]),
        (
            [[[0]], [[0]], [[1]], [[1]]],
            "data.wrong_labels",
            ["4", "1"],
        ),
    ],
)
def test_labels_that_are_no_levels_are_refused(labels, code, names):
    with raises(code, *names):
        rank(normalize(problem(0, 4, 2)[0]), torch.tensor(labels), "h_ap")


def test_a_memory_of_other_levels_and_large_labels():
    raw, labels = problem(9, 12, 4)
    memory = remembering(9, 8)
    with raises("data.wrong_labels", "2", "1"):
        rank(normalize(raw), levels_of(labels, 2), "h_ap", memory=memory)
    assert rank(normalize(raw), labels + 2**62, "simix").is_finite

"""Losses with a teacher, and KoLeo, against their definitions, written slowly in `teachers`."""

from functools import cache

import pytest
import torch
from batches import small_network
from problems import problem, slots_of_ranks
from raising import raises
from ranks import on_ranks
from steps import learning, step_with
from teachers import OF_IMAGES, of_teacher, teacher_of
from torch.nn.functional import normalize

import distap
from distap.errors import DistapError
from distap.ranking.gather import gather
from distap.ranking.listwise import ListwiseLoss
from distap.ranking.losses.building import build_loss
from distap.ranking.memory import CrossBatchMemory
from distap.ranking.rank import rank, rank_descriptors
from distap.registry import REGISTRY
from distap.stages.micro_batches import MicroBatchSizes
from distap.world import World

SLOTS = 23  # uneven on 2 and 3 ranks
DIMENSIONS = 6
LISTWISE = [
    name
    for name in REGISTRY["loss"]
    if name not in ("sum", "matryoshka", "within", "by_set", "sigmoid")
    and build_loss(name, **({"margins": (0.1,)} if name == "csl" else {})).asymmetric
]
# Name of the loss, and its settings.
LOSSES = [
    ("distil_features", {}),
    ("distil_features", {"distance": "squared"}),
    ("distil_features", {"weights": "class"}),
    ("distil_relations", {}),
    ("distil_relations", {"temperature": 0.05, "teacher_temperature": 0.2}),
    ("distil_relations", {"form": "squared"}),
    ("distil_relations", {"weights": "class"}),
    ("koleo", {}),
    ("koleo", {"epsilon": 0.1, "weights": "class"}),
    # The gradient of blackbox_ap is not linear in the loss: that of a mean of two is another.
    *(("compatible", {"inner": inner}) for inner in LISTWISE if inner != "blackbox_ap"),
    *(
        ("compatible", {"inner": inner, "queries": queries})
        for inner in (
            "smooth_ap",
            "ap_q",
            "contrastive",
            "recall_at_k",
            "blackbox_ap",
        )
        for queries in ("student", "teacher")
    ),
    ("compatible", {"inner": "smooth_ap", "self_pair": False}),
    (
        "compatible",
        {"inner": "ap_q", "self_pair": False, "weights": "class"},
    ),
]


def loss_of(name, settings):
    """The loss; `compatible` has the settings of its inner one."""
    if name != "compatible":
        return build_loss(name, **settings)
    outer = {key: value for key, value in settings.items() if key in ("queries",)}
    inner = {key: value for key, value in settings.items() if key not in ("queries", "inner")}
    return build_loss(name, inner={"name": settings["inner"], **inner}, **outer)


def levels_of_slots(labels):
    return torch.stack([labels, labels // 3], dim=1)


def batch(ties=False):
    """Descriptors of unequal classes, the teacher's, labels, and which rows take part: not all."""
    descriptors, labels, taking_part = slots_of_ranks(SLOTS)
    teacher = teacher_of(descriptors)
    if ties:
        # Entries of one half, of which 4 are not 0, make similarities exact: ties are ties in every
        # order of summation.
        generator = torch.Generator().manual_seed(3)
        descriptors = torch.randint(0, 2, (SLOTS, 4), generator=generator).double() - 0.5
        teacher = descriptors.roll(1, dims=0)
    taking_part[[0, 5]] = False
    taking_part[3::4] = False
    return descriptors, teacher, labels, taking_part


@cache
def expected(number):
    """Value and gradient of the definition, by autograd; rows that take no part have none."""
    name, settings = LOSSES[number]
    descriptors, teacher, labels, taking_part = batch()
    leaf = descriptors[taking_part].clone().requires_grad_()
    levels = levels_of_slots(labels[taking_part])
    value = of_teacher(name, normalize(leaf), teacher[taking_part], levels, **settings)
    value.backward()
    gradient = torch.zeros_like(descriptors)
    gradient[taking_part] = leaf.grad
    return value.item(), gradient


def tangential(gradient, descriptors):
    """A gradient without its part along the descriptor, which normalisation removes."""
    return gradient - (gradient * descriptors).sum(1, keepdim=True) * descriptors


def rank_share(world, number, memory_bytes, mode):
    descriptors, teacher, labels, taking_part = batch()
    rows = slice(world.rank, None, world.size)
    levels = levels_of_slots(labels)
    gathered = gather(descriptors[rows], levels[rows], taking_part[rows], world, SLOTS)
    gathered = gathered.with_extra({"teacher": 3 * teacher[rows]})
    ranking = rank_descriptors(loss_of(*LOSSES[number]), gathered, mode, memory_bytes)
    per_query = world.gather_rows(ranking.per_query, SLOTS)
    return (
        ranking.loss,
        per_query,
        world.gather_rows(ranking.gradient, SLOTS),
    )


def rank_all(world):
    """All losses, a row at a time; some also all rows of a rank at once, and on rank 0 alone."""
    cases = {(number, (1, "sharded")): None for number in range(len(LOSSES))}
    for number, (_, settings) in enumerate(LOSSES):
        if settings in ({}, {"inner": "smooth_ap"}, {"inner": "ap_q"}):
            cases |= {(number, (None, mode)): None for mode in ("sharded", "central")}
    return {(number, way): rank_share(world, number, *way) for number, way in cases}


@pytest.fixture(scope="module", params=[1, 2, 3])
def ranked(request):
    if request.param == 1:
        return [rank_all(World())]
    return on_ranks(request.param, rank_all)


@pytest.mark.parametrize("number", range(len(LOSSES)), ids=lambda number: str(LOSSES[number]))
def test_value_and_gradient_are_those_of_the_definition_on_some_ranks(ranked, number):
    value, gradient = expected(number)
    descriptors, _, _, taking_part = batch()
    for answer in ranked:
        for (other, _), (got, per_query, got_gradient) in answer.items():
            if other != number:
                continue
            assert got.item() == pytest.approx(value, rel=1e-9)
            difference = tangential(got_gradient, descriptors) - gradient
            assert difference.norm() <= 1e-9 * gradient.norm() + 1e-13
            assert got_gradient[~taking_part].abs().max() == 0
            settings = LOSSES[number][1]
            if "weights" not in settings and settings.get("form") != "violating":
                assert per_query.nanmean().item() == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("distil_features", {}),
        ("distil_relations", {}),
        ("distil_relations", {"form": "squared"}),
        ("koleo", {}),
        ("compatible", {"inner": "smooth_ap"}),
        ("compatible", {"inner": "ap_q"}),
        ("compatible", {"inner": "sup_ap"}),
        ("compatible", {"inner": "triplet"}),
    ],
    ids=str,
)
def test_equal_similarities_are_ties(name, settings):
    descriptors, teacher, labels, _ = batch(ties=True)
    leaf = descriptors.clone().requires_grad_()
    value = of_teacher(name, normalize(leaf), teacher, labels[:, None], **settings)
    value.backward()
    loss = loss_of(name, settings)
    extra = {"teacher": teacher} if loss.extras else None
    ranking = rank(descriptors, labels, loss, extra=extra)
    assert ranking.loss.item() == pytest.approx(value.item(), rel=1e-9)
    difference = tangential(ranking.gradient, descriptors) - leaf.grad
    assert difference.norm() <= 1e-9 * leaf.grad.norm() + 1e-13


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "loss",
    [
        {"name": "distil_features"},
        {"name": "distil_features", "distance": "squared"},
        {"name": "distil_relations"},
        {"name": "distil_relations", "form": "squared"},
    ],
    ids=str,
)
def test_a_teacher_equal_to_the_own_descriptors_gives_nothing(loss, dtype):
    raw, labels = problem(1, 40, 6, dtype=dtype)
    leaf = raw.requires_grad_()
    value = ListwiseLoss(loss)(leaf, labels, extra={"teacher": normalize(raw.detach())})
    value.backward()
    tolerance = 200 * torch.finfo(dtype).eps
    assert abs(value.item()) <= tolerance
    assert leaf.grad.abs().max() <= tolerance


def test_a_teacher_of_other_dimensions_has_relations_to_compare():
    raw, labels = problem(1, 20, 6)
    teacher = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))
    leaf = raw.clone().requires_grad_()
    of_teacher("distil_relations", normalize(leaf), teacher, labels[:, None]).backward()
    other = raw.clone().requires_grad_()
    ListwiseLoss("distil_relations")(other, labels, extra={"teacher": teacher}).backward()
    torch.testing.assert_close(other.grad, leaf.grad, rtol=1e-6, atol=1e-9)


def test_a_sum_is_that_of_its_terms_whose_teacher_is_one():
    raw, labels = problem(2, 30, 6)
    descriptors = normalize(raw)
    extra = {"teacher": teacher_of(raw)}
    terms = {
        "smooth_ap": 1.0,
        "distil_features": 0.5,
        "distil_relations": 2.0,
        "compatible": 0.3,
    }
    whole = rank(descriptors, labels, {**terms, "koleo": 0.1}, extra=extra)
    parts = {name: rank(descriptors, labels, name, extra=extra) for name in list(terms)[1:]}
    parts |= {name: rank(descriptors, labels, name) for name in ("smooth_ap", "koleo")}
    weights = {**terms, "koleo": 0.1}
    value = sum(weight * parts[name].loss for name, weight in weights.items())
    gradient = sum(weight * parts[name].gradient for name, weight in weights.items())
    torch.testing.assert_close(whole.loss, value, rtol=1e-12, atol=0)
    torch.testing.assert_close(whole.gradient, gradient, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("name", OF_IMAGES)
def test_images_that_are_alone_in_their_class_count(name):
    raw, labels = problem(3, 12, 6)
    loss = build_loss(name)
    extra = {"teacher": teacher_of(raw)} if loss.extras else None
    lone = rank(normalize(raw), torch.arange(12), loss, extra=extra)
    one_class = rank(normalize(raw), torch.zeros(12, dtype=torch.long), loss, extra=extra)
    with_labels = rank(normalize(raw), labels, loss, extra=extra)
    assert lone.queries == 12 and lone.skipped_queries == 0
    assert torch.equal(lone.loss, one_class.loss) and lone.loss != 0
    torch.testing.assert_close(lone.gradient, with_labels.gradient, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("name", ["distil_relations", "koleo"])
def test_a_lone_image_has_no_other_one_to_compare(name):
    loss = build_loss(name)
    for descriptors in (
        normalize(torch.ones(1, 4)),
        normalize(torch.eye(3, 4)),
    ):
        extra = {"teacher": descriptors} if loss.extras else None
        labels = torch.stack(
            [
                torch.arange(len(descriptors)),
                torch.arange(len(descriptors)),
            ],
            1,
        )
        with raises("sampling.no_positives"):
            # Each image is a data set of its own.
            rank(
                descriptors,
                labels,
                {"within": {"inner": name}},
                extra=extra,
            )


def test_weights_of_images_are_those_given():
    raw, labels = problem(2, 30, 6)
    weights = torch.rand(30, generator=torch.Generator().manual_seed(1))
    extra = {"teacher": teacher_of(raw), "weights": weights}
    for name in ("distil_features", "distil_relations", "koleo"):
        loss = build_loss(name, weights="given")
        tensors = {key: extra[key] for key in loss.extras}
        value = of_teacher(
            name,
            normalize(raw),
            teacher_of(raw),
            labels[:, None],
            weights=weights,
        )
        assert rank(normalize(raw), labels, loss, extra=tensors).loss.item() == pytest.approx(
            value.item(), rel=1e-9
        )


def test_queries_and_gallery_of_a_sum_of_prefixes_are_both_cut():
    raw, labels = problem(2, 30, 6)
    teacher = teacher_of(raw)
    inner = {
        "matryoshka": {
            "dimensions": [3, 8],
            "inner": {"ap_q": 1.0, "smooth_ap": 0.5},
        }
    }
    leaf = raw.clone().requires_grad_()
    ListwiseLoss("compatible", inner=inner)(leaf, labels, extra={"teacher": teacher}).backward()
    expected = raw.clone().requires_grad_()
    total = 0
    for d in (3, 8):
        cut = (
            normalize(normalize(expected)[:, :d]),
            teacher[:, :d],
            labels[:, None],
        )
        total = total + of_teacher("compatible", *cut, inner="ap_q")
        total = total + 0.5 * of_teacher("compatible", *cut, inner="smooth_ap")
    total.backward()
    torch.testing.assert_close(leaf.grad, expected.grad, rtol=1e-9, atol=1e-13)


def test_relations_of_prefixes_are_compared_with_the_whole_teacher():
    raw, labels = problem(2, 30, 6)
    teacher = teacher_of(raw)
    loss = {"matryoshka": {"dimensions": [3, 8], "inner": "distil_relations"}}
    whole = rank(normalize(raw), labels, loss, extra={"teacher": teacher})
    values = [
        of_teacher(
            "distil_relations",
            normalize(raw[:, :d]),
            teacher,
            labels[:, None],
        )
        for d in (3, 8)
    ]
    assert whole.loss.item() == pytest.approx(sum(values).item(), rel=1e-9)


def test_scale_and_bias_of_a_sigmoid_across_networks_are_trained():
    raw, labels = problem(2, 30, 6)
    module = ListwiseLoss(build_loss("compatible", inner="sigmoid").sized(None, None, 0)).double()
    module(raw, labels, extra={"teacher": teacher_of(raw)}).backward()
    slopes = [parameter.grad for parameter in module.learned.parameters()]
    learned = [parameter.detach().requires_grad_() for parameter in module.learned.parameters()]
    settings = dict(zip(("bias", "log_scale"), learned, strict=True))
    of_teacher(
        "compatible",
        normalize(raw),
        teacher_of(raw),
        labels[:, None],
        inner="sigmoid",
        **settings,
    ).backward()
    torch.testing.assert_close(slopes, [item.grad for item in learned], rtol=1e-9, atol=1e-13)


@distap.loss
def hinge(similarities, same_class, margin=0.1):
    hardest = similarities.masked_fill(same_class, -1).amax(1, keepdim=True)
    return ((hardest - similarities + margin).clamp(min=0) * same_class).sum(1)


def test_a_loss_of_ones_own_ranks_the_teacher():
    raw, labels = problem(2, 30, 6)
    labels = labels.clone()
    labels[2] = 999  # alone in its class: no query
    descriptors, teacher = normalize(raw), teacher_of(raw)
    loss = build_loss("compatible", inner=hinge(), queries="student")
    same = labels[:, None] == labels
    other_rows = ~torch.eye(30, dtype=torch.bool)
    cut = [table[other_rows].view(30, 29) for table in (descriptors @ teacher.t(), same)]
    values = hinge.function(*cut)[cut[1].any(1)]
    ranking = rank(descriptors, labels, loss, extra={"teacher": teacher})
    assert ranking.loss.item() == pytest.approx(values.mean().item(), rel=1e-9)


def test_what_a_teacher_cannot_be_is_named():
    raw, labels = problem(1, 20, 6)
    descriptors = normalize(raw)
    for name in ("distil_features", "compatible"):
        with raises("loss.wrong_dimensions", "8", "5"):
            rank(
                descriptors,
                labels,
                name,
                extra={"teacher": torch.ones(20, 5)},
            )
        matryoshka = {"matryoshka": {"dimensions": [4, 8], "inner": name}}
        with raises("loss.wrong_dimensions", "4", "8", "matryoshka"):
            rank(
                descriptors,
                labels,
                matryoshka,
                extra={"teacher": descriptors},
            )
    for teacher in (torch.ones(20), torch.ones(20, 8, dtype=torch.long)):
        with raises("data.wrong_extra", "teacher", "20"):
            rank(
                descriptors,
                labels,
                "distil_relations",
                extra={"teacher": teacher},
            )
    for wrong in (0.0, torch.nan):
        teacher = torch.ones(20, 8)
        teacher[7] = wrong
        with raises("data.wrong_extra", "teacher", "row 7"):
            rank(
                descriptors,
                labels,
                "distil_relations",
                extra={"teacher": teacher},
            )
    with raises("data.wrong_extra", "teacher"):
        rank(descriptors, labels, "compatible")


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_a_teachers_rows_are_of_any_length_that_float32_holds(scale):
    raw, labels = problem(1, 20, 6, dtype=torch.float32)
    descriptors = normalize(raw)
    teacher = teacher_of(raw)
    for name in ("distil_features", "distil_relations"):
        expected = rank(descriptors, labels, name, extra={"teacher": teacher})
        scaled = rank(descriptors, labels, name, extra={"teacher": teacher * scale})
        torch.testing.assert_close(scaled.loss, expected.loss, rtol=1e-5, atol=0)


def test_the_nearest_of_close_rows_of_float32_is_the_nearest_by_distance():
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(8, 128, generator=generator, dtype=torch.float64)
    noise = torch.randn(64, 128, generator=generator, dtype=torch.float64)
    rows = normalize(centres).repeat_interleave(8, 0) + 1e-4 * normalize(noise)
    descriptors = normalize(normalize(rows).float())  # whose lengths are 1 within 6e-8
    exact = descriptors.double()
    distances = (exact[:, None] - exact).norm(dim=2).fill_diagonal_(torch.inf)
    ranking = rank(descriptors, torch.arange(64) // 8, "koleo")
    expected = -(distances.amin(1) + 1e-8).log()
    torch.testing.assert_close(ranking.per_query, expected, rtol=1e-6, atol=0)


def test_a_loss_that_would_ignore_a_memory_is_refused_for_a_training():
    ListwiseLoss("koleo", memory=9)
    with raises("loss.takes_no_memory", "KoLeo"):
        training_with_memory("koleo")


def training_with_memory(loss):
    network = small_network()
    learner = learning(network, torch.optim.SGD(network.parameters()), World())
    return step_with(
        learner,
        build_loss(loss),
        World(),
        0,
        MicroBatchSizes(4),
        memory=CrossBatchMemory(9),
    )


@pytest.mark.parametrize(
    "loss",
    [
        "distil_relations",
        "compatible",
        {"smooth_ap": 1.0, "compatible": 0.5},
        {"matryoshka": {"dimensions": [4], "inner": {"ap_q": 1.0, "distil_relations": 1.0}}},
        {"smooth_ap": 1.0, "test_distillation:OfAll": 1.0},
    ],
    ids=str,
)
def test_a_memory_is_refused_at_once_where_a_term_cannot_rank_against_it(loss):
    raw, labels = problem(1, 20, 6)
    with raises("loss.takes_no_memory", "memory"):
        ListwiseLoss(loss, memory=9)
    with raises("loss.takes_no_memory"):
        rank(normalize(raw), labels, loss, memory=CrossBatchMemory(9))
    with raises("loss.takes_no_memory"):
        training_with_memory(loss)


class OfAll(distap.DescriptorLoss):
    def loss(self, descriptors, labels):
        return descriptors.sum()


def test_features_and_koleo_need_no_memory_in_a_sum_with_a_loss_that_does():
    raw, labels = problem(1, 20, 6)
    descriptors = normalize(raw)
    for name in ("distil_features", "koleo"):
        extra = {"teacher": teacher_of(raw)} if name == "distil_features" else None
        gradients = list[torch.Tensor]()
        for loss in ("smooth_ap", {"smooth_ap": 1.0, name: 1.0}):
            memory = CrossBatchMemory(30)
            rank(descriptors.roll(1, 1), labels, memory=memory)
            tensors = None if loss == "smooth_ap" else extra
            gradients.append(rank(descriptors, labels, loss, memory=memory, extra=tensors).gradient)
        alone = rank(descriptors, labels, name, extra=extra).gradient
        torch.testing.assert_close(gradients[1], gradients[0] + alone, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize(
    "inner",
    [
        "arc_face",
        "distil_relations",
        "distil_features",
        "koleo",
        "compatible",
        "simix",
        {"smooth_ap": 1.0, "koleo": 0.1},
    ],
    ids=str,
)
def test_losses_without_queries_against_a_gallery_cannot_be_inside(inner):
    with pytest.raises(DistapError, match="queries cannot be of another network"):
        build_loss("compatible", inner=inner)

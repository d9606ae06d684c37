"""Losses within each data set equal those of each set alone, weighted by queries."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from definitions import OF_SETS
from problems import problem
from pytorch_metric_learning.losses import ProxyAnchorLoss
from raising import raises
from ranks import on_ranks
from teachers import teacher_of
from torch.nn.functional import normalize

import distap
from distap.config.reading import load_recipe
from distap.errors import DistapError
from distap.ranking.gather import gather
from distap.ranking.listwise import ListwiseLoss
from distap.ranking.losses.building import build_loss
from distap.ranking.losses.function import FunctionLoss
from distap.ranking.memory import CrossBatchMemory
from distap.ranking.rank import NothingToRankError, rank, rank_descriptors, start_gathering
from distap.registry import REGISTRY
from distap.world import World

SLOTS = 26  # uneven on 3 ranks
DIMENSIONS = 6
# The classes of data set 0, then those of the others: 4, 5, 2 and 2. No batch has set 4.
SETS = torch.tensor([0] * 4 + [1] * 5 + [2] * 2 + [3] * 2 + [4] * 2)
# class, coarser class, data set
CLASSES = torch.stack([torch.arange(15), torch.arange(15) // 2 + 4 * SETS, SETS], dim=1)
METRIC = {"name": "benchmarks.metric_learning:MetricLearning"}


@distap.loss
def hinge(similarities, same_class, shift, margin=0.1):
    hardest = similarities.masked_fill(same_class, -1).amax(1, keepdim=True)
    losses = (hardest - similarities + margin + shift[:, None]).clamp(min=0) * same_class
    return losses.sum(1) / same_class.sum(1)


INNER = {name: name for name in REGISTRY["loss"] if name not in ("sum", *OF_SETS)} | {
    "matryoshka": {"matryoshka": {"dimensions": [2, 5], "inner": {"ap_q": 1, "arc_face": 0.5}}},
    "sum": {"sup_ap": 0.3, "arc_face": 0.7},
    "simix": {"simix": {"inner": "smooth_ap"}},
    "by class": {"name": "smooth_ap", "weights": "class"},
    "given weights": {"name": "ap_q", "weights": "given"},
    "of another package": METRIC | {"function": "ContrastiveLoss"},
    "proxies of another package": METRIC | {"function": "ProxyAnchorLoss"},
    "with a tensor": hinge(),
}
# The loss of each of the five data sets.
LOSSES = {name: [inner] * 5 for name, inner in INNER.items()} | {
    "by set": ["ap_q", "arc_face", "contrastive", "normalized_softmax", "csl"],
    "by set without losses by query": ["smooth_ap", METRIC | {"function": "ContrastiveLoss"}] * 2
    + ["h_ap"],
}
# One loss of each class that says how ranks share their work; the others inherit it.
CHOSEN = ("ap_q", "smooth_ap", "csl", "sigmoid", "matryoshka", "simix", "sum", "by set")
CHOSEN += ("proxies of another package",)
CENTRAL = ("smooth_ap", "by set", "proxies of another package")


def batch():
    """Classes of set 2 on one rank only, of 2 or of 3; one image of set 3, alone in its class."""
    raw = problem(0, SLOTS, 5, dimensions=DIMENSIONS)[0]
    drawn = torch.randint(0, 9, (SLOTS,), generator=torch.Generator().manual_seed(1))
    drawn[[0, 6, 12, 18, 24]] = torch.tensor([9, 10, 9, 10, 10])
    drawn[5] = 11
    return normalize(raw), drawn, torch.ones(SLOTS, dtype=torch.bool)


def left_out():
    """The same without some images, one of which is not a number: three of set 2, and set 3."""
    descriptors, labels, taking_part = batch()
    descriptors[7] = torch.nan
    taking_part[[1, 2, 5, 6, 12, 18]] = False
    return descriptors, labels, taking_part


CASES = {"batch": batch, "left out": left_out, "remembered": batch, "dealt": left_out}
RANKED = [("batch", name, "sharded") for name in LOSSES]
RANKED += [(case, name, "sharded") for case in CASES if case != "batch" for name in CHOSEN]
RANKED += [(case, name, "central") for case in CASES for name in CENTRAL]
# A memory is refused where rank 0 takes the whole batch's descriptors.
RANKED = [item for item in RANKED if item[0] != "remembered" or "package" not in item[1]]


def double(loss):
    if loss.learned is not None:
        loss.learned.double()
    return loss


def of_sets(name):
    """The loss of all sets, as a training has it."""
    inner = LOSSES[name]
    if "by set" in name:
        names = "vwxyz"
        loss = build_loss({"by_set": dict(zip(names, inner, strict=True))})
    else:
        loss = build_loss({"within": {"inner": inner[0]}})
    return double(loss.sized(CLASSES, DIMENSIONS, 0))


def memory_of(case, chosen=None):
    """A memory with images of sets 0, 2 and 4, or those of one set with labels of their own."""
    if case != "remembered":
        return None
    raw = problem(8, 12, 5, dimensions=DIMENSIONS)[0]
    levels = CLASSES[torch.tensor([0, 1, 2, 2, 3, 0, 9, 10, 13, 14, 0, 9])]
    if chosen is not None:
        rows = levels[:, -1] == chosen
        raw, levels = raw[rows], of_set(levels[rows], chosen)
    memory = CrossBatchMemory(100)
    present = torch.ones(len(raw), dtype=torch.bool)
    memory.remember(gather(normalize(raw), levels, present, World(), len(raw)))
    return memory


def of_set(levels, number):
    """The levels of images of a data set, whose classes are numbered from 0."""
    first = int((number > SETS).sum())
    return torch.cat([levels[:, :1] - first, levels[:, 1:-1]], dim=1)


def extra_of(loss, rows):
    drawn = torch.rand(SLOTS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    extra = dict.fromkeys(loss.extras, drawn)
    if "teacher" in extra:
        extra["teacher"] = teacher_of(torch.empty(SLOTS, DIMENSIONS, dtype=torch.float64))
    return {name: tensor[rows] for name, tensor in extra.items()}


@cache
def each_set_alone(case, name):
    """The sum of the losses of each set alone by its queries: value, loss of each query, gradient
    and those of the parameters.
    """
    descriptors, labels, taking_part = CASES[case]()
    taking_part &= ~descriptors.isnan().any(1)
    levels = CLASSES[labels]
    total = torch.zeros((), dtype=torch.float64)
    per_query = torch.full((SLOTS,), torch.nan, dtype=torch.float64)
    gradient = torch.zeros_like(descriptors)
    by_parameters = []
    queries = 0
    for number, inner in enumerate(LOSSES[name]):
        numbers = of_set(CLASSES[number == SETS], number)
        loss = double(build_loss(inner).sized(numbers, DIMENSIONS, 0))
        rows = (taking_part & (levels[:, -1] == number)).nonzero().flatten()
        try:
            ranking = rank(
                descriptors[rows],
                of_set(levels[rows], number),
                loss,
                memory=memory_of(case, number),
                extra=extra_of(loss, rows),
            )
        except NothingToRankError:
            by_parameters += map(torch.zeros_like, loss.parameters)
            continue
        queries += ranking.queries
        total += ranking.queries * ranking.loss
        gradient[rows] = ranking.queries * ranking.gradient
        by_parameters += [ranking.queries * slope for slope in ranking.by_parameters]
        if ranking.per_query is None:
            per_query = None
        if per_query is not None:
            per_query[rows] = ranking.per_query
    return (
        total / queries,
        per_query,
        gradient / queries,
        [slope / queries for slope in by_parameters],
        queries,
    )


def rank_share(world, case, name, mode):
    descriptors, labels, taking_part = CASES[case]()
    order = torch.arange(SLOTS)
    if case == "dealt":  # each rank has a random set of the slots
        order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(2))
        for rank_number in range(world.size):
            order[rank_number :: world.size] = order[rank_number :: world.size].sort().values
    rows = order[world.rank :: world.size]
    loss = of_sets(name)
    gathering = start_gathering(loss, world, SLOTS, mode, order=order if case == "dealt" else None)
    unknown = torch.full_like(rows, -1)
    gathering.add(descriptors[rows], CLASSES[labels[rows]], taking_part[rows], unknown)
    gathered = gathering.finish().with_extra(extra_of(loss, rows))
    memory = memory_of(case)
    if memory is not None:
        gathered = memory.extend(gathered)
    ranking = rank_descriptors(loss, gathered, mode, counter=gathering.counter)
    gradient = torch.zeros_like(descriptors)
    gradient[rows] = ranking.gradient
    per_query = ranking.per_query
    if per_query is not None:
        per_query = torch.zeros(SLOTS, dtype=torch.float64).index_copy(0, rows, per_query)
        per_query = world.sum(per_query)
    return ranking.loss, per_query, world.sum(gradient), ranking.by_parameters, ranking.queries


def rank_all_cases(world):
    return {element: rank_share(world, *element) for element in RANKED}


@pytest.fixture(scope="module", params=[1, 2, 3])
def ranked(request):
    """Every case on some ranks; one start of the ranks for all."""
    if request.param == 1:
        return [rank_all_cases(World())]
    return on_ranks(request.param, rank_all_cases)


@pytest.mark.parametrize(("case", "name", "mode"), RANKED)
def test_it_is_the_sum_by_queries_of_each_set_alone(ranked, case, name, mode):
    value, per_query, gradient, by_parameters, queries = each_set_alone(case, name)
    for answer in ranked:
        got, got_per_query, got_gradient, got_by_parameters, got_queries = answer[case, name, mode]
        assert got_queries == queries
        assert got.item() == pytest.approx(value.item(), rel=1e-9)
        assert gradient.norm() > 0
        assert (got_gradient - gradient).norm() <= 1e-9 * gradient.norm()
        assert len(got_by_parameters) == len(by_parameters)
        for slope, expected in zip(got_by_parameters, by_parameters, strict=True):
            assert (slope - expected).norm() <= 1e-9 * expected.norm()
        if per_query is None:
            assert got_per_query is None
        else:
            torch.testing.assert_close(
                got_per_query, per_query, rtol=1e-9, atol=1e-15, equal_nan=True
            )


def two_sets(images=24):
    """Descriptors before normalisation and labels of two data sets: of classes 0 to 4, and 5 to
    7."""
    raw, _ = problem(4, images, 5)
    labels = torch.randint(0, 8, (images,), generator=torch.Generator().manual_seed(5))
    return raw, torch.stack([labels, (labels > 4).long()], dim=1)


WITHIN = {"within": {"inner": "smooth_ap"}}
BY_SET = {"faces": {"name": "arc_face", "margin": 0.3}, "products": "smooth_ap"}


def test_a_lone_data_set_has_the_loss_of_its_own_bit_for_bit():
    raw, levels = two_sets()
    levels[:, 1] = 7
    descriptors = normalize(raw)
    for inner in ("ap_q", "smooth_ap", "triplet"):
        whole = rank(descriptors, levels, {"within": {"inner": inner}})
        alone = rank(descriptors, levels[:, 0], inner)
        assert torch.equal(whole.loss, alone.loss)
        assert torch.equal(whole.gradient, alone.gradient)
        assert torch.equal(whole.per_query, alone.per_query)


def test_other_data_sets_are_neither_positives_nor_negatives():
    raw, levels = two_sets()
    descriptors = normalize(raw)
    first = levels[:, 1] == 0
    # Images of the other set on top of these change nothing for them.
    moved = descriptors.clone()
    moved[~first] = descriptors[first][0]
    before = rank(descriptors, levels, WITHIN)
    after = rank(moved, levels, WITHIN)
    assert torch.equal(before.per_query[first], after.per_query[first])
    assert not torch.equal(before.per_query[~first], after.per_query[~first])


def test_it_may_stand_in_a_sum_and_inside_matryoshka():
    raw, levels = two_sets()
    descriptors = normalize(raw)
    both = rank(descriptors, levels, WITHIN | {"calibration": 0.5})
    ours = rank(descriptors, levels, WITHIN)
    other = rank(descriptors, levels, "calibration")
    torch.testing.assert_close(both.loss, ours.loss + 0.5 * other.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(both.gradient, ours.gradient + 0.5 * other.gradient)
    torch.testing.assert_close(
        both.per_query, ours.per_query + 0.5 * other.per_query, equal_nan=True
    )
    for loss in ({"within": {"inner": "arc_face"}}, {"by_set": BY_SET}):
        around = build_loss({"matryoshka": {"dimensions": [3, 8], "inner": loss}})
        inside = build_loss(loss)
        classes = torch.stack([torch.arange(8), (torch.arange(8) > 4).long()], dim=1)
        cut = [double(inside.sized(classes, d, 0)) for d in (3, 8)]
        whole = rank(descriptors, levels, double(around.sized(classes, 8, 0)))
        parts = [
            rank(normalize(descriptors[:, :d]), levels, part)
            for d, part in zip((3, 8), cut, strict=True)
        ]
        expected = parts[0].loss + parts[1].loss
        torch.testing.assert_close(whole.loss, expected, rtol=1e-12, atol=0)
        slopes = [*parts[0].by_parameters, *parts[1].by_parameters]
        torch.testing.assert_close(list(whole.by_parameters), slopes, rtol=1e-10, atol=1e-15)


def test_all_forms_of_a_recipe_are_one_loss():
    full = {"name": "by_set", "losses": BY_SET}
    forms = [full, {"by_set": BY_SET}, {"by_set": {"losses": BY_SET}}]
    assert len({repr(build_loss(form)) for form in forms}) == 1
    summed = build_loss({"by_set": BY_SET | {"weight": 2.0}, "calibration": 0.5})
    assert [weight for weight, _ in summed.terms] == [2.0, 0.5]
    assert repr(summed.terms[0][1]) == repr(build_loss(full))
    for form in (
        *forms,
        WITHIN,
        {"name": "within", "inner": "smooth_ap"},
        {"by_set": BY_SET, "pnp": 1},
    ):
        recipe = load_recipe(
            {"run": "runs/1", "steps": 1, "data": {"train": "photos"}, "loss": form}, where="test"
        )
        again = load_recipe(recipe.model_dump(mode="json"), where="test")
        assert again.loss == recipe.loss == build_loss(form)


def test_it_is_an_average_precision_if_its_losses_are():
    losses = ({"within": {"inner": "ap_q"}}, {"by_set": {"a": "ap_q", "b": "fast_ap"}})
    assert all(build_loss(loss).is_ap for loss in losses)
    assert not build_loss({"by_set": {"a": "ap_q", "b": "contrastive"}}).is_ap
    assert not build_loss({"within": {"inner": "contrastive"}}).is_ap


def test_without_known_classes_those_of_the_losses_follow_one_another():
    raw, levels = two_sets()
    arc_face = {"name": "arc_face", "dimensions": 8}
    levels = torch.cat([levels, torch.tensor([[90, 2], [90, 2], [8, 2], [8, 2]])])
    raw = torch.cat([raw, problem(6, 4, 2)[0]])
    module = ListwiseLoss(
        {
            "by_set": {
                "a": arc_face | {"classes": 5},
                "b": {"matryoshka": {"dimensions": [8], "inner": arc_face | {"classes": 3}}},
                "c": "contrastive",
            }
        }
    ).double()
    leaf = raw.clone().requires_grad_()
    value = module(leaf, levels)
    value.backward()
    expected = torch.zeros((), dtype=torch.float64)
    same = raw.clone().requires_grad_()
    learned = list(module.learned.parameters())
    for number, (first, count) in enumerate([(0, 5), (5, 3), (0, None)]):
        rows = levels[:, 1] == number
        alone = ListwiseLoss("contrastive")
        if count is not None:
            alone = ListwiseLoss(arc_face | {"classes": count}).double()
            alone.load_state_dict(alone.state_dict() | {"learned.proxies": learned[number]})
        share = int(rows.sum()) / len(rows)
        expected = expected + share * alone(same[rows], levels[rows, 0] - first)
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-9)
    torch.testing.assert_close(leaf.grad, same.grad, rtol=1e-9, atol=1e-13)


def test_parameters_of_a_data_set_that_is_absent_do_not_move():
    raw, levels = two_sets()
    classes = torch.stack([torch.arange(8), (torch.arange(8) > 4).long()], dim=1)
    loss = double(build_loss({"within": {"inner": "arc_face"}}).sized(classes, 8, 0))
    rows = levels[:, 1] == 1
    absent, present = rank(normalize(raw[rows]), levels[rows], loss).by_parameters
    assert absent.shape == (5, 8) and not absent.any()
    assert present.shape == (3, 8) and present.any()


def test_batches_from_which_nothing_is_learned_are_refused():
    descriptors = normalize(problem(0, 6, 2)[0])
    lone = torch.stack([torch.arange(6), torch.arange(6) // 3], dim=1)
    with raises("sampling.no_positives", "6"):
        rank(descriptors, lone, WITHIN)
    of_one_each = torch.stack([torch.arange(6) // 3, torch.arange(6) // 3], dim=1)
    with raises("sampling.one_class", "6", "0"):
        rank(descriptors, of_one_each, WITHIN)
    # A data set with one class takes part where another has two.
    mixed = torch.tensor([[0, 0], [0, 0], [1, 0], [1, 0], [2, 1], [2, 1]])
    ranking = rank(descriptors, mixed, WITHIN)
    assert ranking.queries == 6 and ranking.per_query[4:].tolist() == [0, 0]


@pytest.mark.parametrize("loss", [WITHIN, {"by_set": {"a": "ap_q"}}], ids=str)
def test_labels_without_a_data_set_are_refused(loss):
    descriptors = normalize(problem(0, 6, 2)[0])
    with raises("loss.no_sets", "data.train"):
        rank(descriptors, torch.arange(6) // 2, loss)
    with raises("loss.no_sets", "data.train"):
        build_loss(loss).sized(torch.arange(6), 8, 0)


def test_data_sets_and_classes_that_are_unknown_are_named():
    raw, levels = two_sets()
    descriptors = normalize(raw)
    with raises("loss.unknown_set", "1", "faces"):
        rank(descriptors, levels, {"by_set": {"faces": "ap_q"}})
    classes = torch.stack([torch.arange(8), (torch.arange(8) > 4).long()], dim=1)
    with raises("loss.unknown_set", "1", "faces"):
        build_loss({"by_set": {"faces": "ap_q"}}).sized(classes, 8, 0)
    sized = build_loss(WITHIN).sized(classes, 8, 0)
    with raises("loss.unknown_set", "2"):
        rank(descriptors, torch.cat([levels[:, :1], 2 * levels[:, 1:]], dim=1), sized)
    for shift, label in ((1, 5), (-1, 4)):
        moved = levels.clone()
        moved[:, 0] = (levels[:, 0] + shift).clamp(min=0)
        moved[:, 1] = (moved[:, 0] > 4 + shift).long()
        with raises("data.wrong_labels", label):
            rank(descriptors, moved, sized)
    with pytest.raises(DistapError, match="by_set needs a loss"):
        build_loss("by_set", losses={})


@pytest.mark.parametrize("inner", ["arc_face", "sigmoid", {"name": "csl", "classes": 4}], ids=str)
def test_parameters_for_data_sets_that_are_unknown_are_refused(inner):
    raw, levels = two_sets()
    loss = {"within": {"inner": inner}}
    for call in (lambda: ListwiseLoss(loss), lambda: rank(normalize(raw), levels, loss)):
        with raises("loss.unknown_sets", "by_set", "classes"):
            call()
    assert build_loss(WITHIN).sized(8, 8, 0) == build_loss(WITHIN)


def test_one_module_of_parameters_is_refused_for_several_data_sets():
    module = FunctionLoss(ProxyAnchorLoss(8, 8))
    classes = torch.stack([torch.arange(8), (torch.arange(8) > 4).long()], dim=1)
    with raises("loss.shared_parameters"):
        ListwiseLoss(build_loss("within", inner=module).sized(classes, 8, 0))


def test_only_some_images_are_what_they_are_where_the_others_take_no_part():
    descriptors, labels, taking_part = left_out()
    levels = CLASSES[labels]
    order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(2))
    weights = torch.rand(SLOTS)
    for number in range(4):
        batches = []
        for present in (taking_part, taking_part & (levels[:, -1] == number)):
            gathering = start_gathering(build_loss("ap_q"), World(), SLOTS, order=order)
            gathering.add(descriptors[order], levels[order], present[order], order)
            batches.append(gathering.finish())
        whole, expected = batches
        whole = replace(whole, extra={"weights": weights[whole.samples]})
        got = whole.only(whole.gallery_levels[:, -1] == number)
        for name in ("gallery", "gallery_levels", "samples", "own", "taking_part", "arrival"):
            assert torch.equal(getattr(got, name), getattr(expected, name)), name
        assert torch.equal(got.local, expected.local)
        assert torch.equal(got.extra["weights"], weights[got.samples])

"""Every loss against its definition, written slowly in `reference`."""

import math

import pytest
import torch
from definitions import built, levels_of
from hypothesis import given, settings
from hypothesis import strategies as st
from newer_losses import OF_QUERY
from problems import problem, rank_raw, remembering
from reference import listwise_gradient
from teachers import extra_of
from torch.nn.functional import normalize

from distap.errors import DistapError
from distap.ranking.loss import Budget
from distap.ranking.losses.building import build_loss
from distap.ranking.rank import rank
from distap.registry import REGISTRY


def hundredths(low, high):
    """Numbers with two decimals: hypothesis refuses to draw others where subnormal ones are
    flushed.
    """
    return st.integers(round(100 * low), round(100 * high)).map(lambda number: number / 100)


# Not 1: rounding decides on which side of 1 the similarity of an image to itself lies.
ALPHA = hundredths(0, 0.99)
BINS = {"bins": st.integers(2, 100), "low": st.sampled_from([-1.0, 0.0])}
OPTIONS = {
    "ap_q": BINS,
    "ap_t": BINS | {"form": st.sampled_from(["simplified", "full"])},
    "fast_ap": BINS,
    "smooth_ap": {"tau": st.sampled_from([0.01, 0.1])},
    "sup_ap": {
        "tau": st.sampled_from([0.01, 0.1]),
        "rho": st.sampled_from([0.0, 10.0, 100.0]),
        "delta": st.sampled_from([None, 0.05]),
        "offset": st.sampled_from([None, 1.44]),
        "start": st.sampled_from([0.0, 0.5]),
    },
    "calibration": {
        "alpha": ALPHA,
        "beta": hundredths(-0.5, 0.9),
        "form": st.sampled_from(["all", "violating", "sum"]),
    },
    "roadmap": {
        "lam": hundredths(0, 1),
        "tau": st.sampled_from([0.01, 0.1]),
        "rho": st.sampled_from([0.0, 100.0]),
        "offset": st.sampled_from([None, 1.44]),
        "alpha": ALPHA,
        "form": st.sampled_from(["all", "violating"]),
    },
    "blackbox_ap": {"lam": hundredths(0.5, 20), "margin": st.sampled_from([0.0, 0.02, 0.2])},
    "multi_similarity": {
        "alpha": hundredths(0.5, 5),
        "beta": hundredths(5, 50),
        "base": hundredths(0, 1),
        "epsilon": st.sampled_from([None, 0.0, 0.1]),
    },
    "contrastive": {"margin": hundredths(0.1, 2), "negatives": st.sampled_from([None, 1, 5])},
    "triplet": {
        "margin": st.sampled_from([None, 0.1, 1.0]),
        "mining": st.sampled_from(["all", "hardest", "hard_negative", "semi_hard"]),
        "squared": st.booleans(),
    },
    "recall_at_k": {
        "form": st.sampled_from(["paper", "released", "suprank", "oml"]),
        "ks": st.sampled_from([(1, 2, 4, 8, 16), (1, 3), (2,)]),
    },
    "sup_recall_at_k": {
        "form": st.sampled_from(["paper", "suprank"]),
        "ks": st.sampled_from([(1, 2, 4, 8, 16), (2, 5)]),
        "offset": st.sampled_from([None, -3.56]),
    },
    "pnp": {
        "form": st.sampled_from(["O", "I_u", "I_b", "D_s", "D_q"]),
        "alpha": st.sampled_from([1.0, 2.0]),
    },
    "sup_con": {"temperature": st.sampled_from([0.07, 0.5])},
    "info_nce": {},
}
OF_PAIRS = ("multi_similarity", "contrastive", "triplet")  # a query makes no pair with itself
COMMON = {"weights": st.sampled_from(["uniform", "class"])}


@st.composite
def problems(draw, names=tuple(OPTIONS)):
    name = draw(st.sampled_from(names))
    options = {key: draw(values) for key, values in (OPTIONS[name] | COMMON).items()}
    if name not in OF_QUERY:
        options["self_pair"] = name not in OF_PAIRS and draw(st.booleans())
    images = draw(st.integers(4, 20 if name in OF_QUERY else 40))
    raw, labels = problem(draw(st.integers(0, 10_000)), images, draw(st.integers(1, 12)))
    return name, options, raw, labels


def assert_same(ranking, gradient, loss, expected, tolerance=1e-9, residue=1e-13):
    assert ranking.is_finite
    assert ranking.loss.item() == pytest.approx(loss, rel=tolerance, abs=residue)
    # Where the true gradient is zero, the reference itself has a rounding residue.
    assert (gradient - expected).norm() <= tolerance * expected.norm() + residue


@settings(deadline=None, max_examples=120)
@given(problems(), st.none() | st.integers(4, 34))
def test_value_and_gradient_equal_the_definition_also_with_remembered_images(case, remembered):
    name, options, raw, labels = case
    memory = None
    gallery = ()
    if remembered is not None:
        other, other_labels = problem(10_001, remembered, 12)
        memory = remembering(10_001, remembered, classes=12)
        gallery = (normalize(other), other_labels)
    ranked = rank_raw(raw, labels, name, memory=memory, **options)
    residue = 1e-12 if name in OF_QUERY else 1e-13
    assert_same(
        *ranked, *listwise_gradient(name, raw, labels, *gallery, **options), residue=residue
    )


@pytest.mark.parametrize("name", REGISTRY["loss"])
def test_in_float32_value_and_gradients_are_those_of_float64(name):
    # Of larger batches, some pairs are so near a jump of SupAP's steps that rounding takes them
    # beyond it.
    raw, labels = problem(1, 120, 20, dtype=torch.float32)
    of_type = (torch.float64, torch.float32)
    exact, ranked = (
        rank_raw(raw.to(item), levels_of(labels), loss, extra=extra_of(loss, raw.to(item)))
        for item, loss in ((item, built(name, 400, 8, item)) for item in of_type)
    )
    assert_same(*ranked, exact[0].loss.item(), exact[1], tolerance=1e-5)
    for actual, expected in zip(ranked[0].by_parameters, exact[0].by_parameters, strict=True):
        assert (actual - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("name", ["ap_q", "ap_t", "fast_ap"])
def test_bins_recomputed_are_the_bins_kept(name, monkeypatch):
    monkeypatch.setattr("distap.ranking.loss.CPU_TILE_PAIRS", 300)
    raw, labels = problem(3, 150, 15, dtype=torch.float32)
    budget = 20_000
    assert Budget(raw.device).half >= 150 * 150
    assert Budget(raw.device, budget).half < 150 * 151 // 2
    kept_names, gradient = rank_raw(raw, labels, name)
    recomputed, again = rank_raw(raw, labels, name, memory_bytes=budget)
    assert torch.equal(kept_names.loss, recomputed.loss)
    assert torch.equal(gradient, again)


@pytest.mark.parametrize("name", OPTIONS)
def test_exact_duplicates_are_ranked(name):
    # Entries of one half make similarities exact, so that ties are ties in every order of
    # summation.
    generator = torch.Generator().manual_seed(3)
    raw = torch.randint(0, 2, (28, 4), generator=generator, dtype=torch.float64) - 0.5
    labels = torch.randint(0, 6, (28,), generator=generator)
    if name == "blackbox_ap":
        pytest.skip("its gradient depends on how ties are broken")
    # So many bins have no similarity of 0 or 0.5 at a centre, where the gradient jumps.
    options = {"bins": 7} if name == "fast_ap" else {}
    assert_same(
        *rank_raw(raw, labels, name, **options), *listwise_gradient(name, raw, labels, **options)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", REGISTRY["loss"])
def test_small_tiles_give_what_one_large_tile_gives_and_duplicates_are_ties(
    name, dtype, monkeypatch
):
    third = 15 if name == "simix" else 61  # simix makes many images of a few
    raw, labels = problem(7, 3 * third, 40, dimensions=100, dtype=dtype)
    loss = built(name, int(labels.max()) + 1, 100, dtype)
    raw[third : 2 * third] = raw[:third]
    extra = extra_of(loss, raw)
    whole, gradient = rank_raw(raw, levels_of(labels), loss, extra=extra)
    for pairs in (500, 4_000):
        monkeypatch.setattr("distap.ranking.loss.CPU_TILE_PAIRS", pairs)
        tolerance = 100 * torch.finfo(dtype).eps
        ranked = rank_raw(raw, levels_of(labels), loss, extra=extra)
        assert_same(*ranked, whole.loss.item(), gradient, tolerance)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("triplet", {"mining": "semi_hard", "squared": True}),
        ("triplet", {"mining": "semi_hard"}),
        ("triplet", {"mining": "hardest"}),
        ("triplet", {"mining": "hard_negative"}),
        ("multi_similarity", {"epsilon": 0.0}),
        ("contrastive", {"negatives": 3, "margin": 1.5}),
        ("blackbox_ap", {"margin": 0.0}),
        ("sup_ap", {}),
    ],
)
def test_an_image_under_two_classes_has_one_loss_and_gradient_in_each_type_and_tile(name, options):
    # Few images, so that none of the others tie in float32.
    raw, labels = problem(0, 40, 8, dimensions=100)
    # Of another length, so that rounding parts it from its duplicate once both are normalised.
    raw, labels = torch.cat([raw, 3.1 * raw[:20]]), torch.cat([labels, labels[:20] + 1])
    whole, gradient = rank_raw(raw, labels, name, **options)
    for dtype in (torch.float64, torch.float32):
        for memory_bytes in (None, 1):
            ranked, actual = rank_raw(
                raw.to(dtype), labels, name, memory_bytes=memory_bytes, **options
            )
            assert_same(
                ranked, actual.double(), whole.loss.item(), gradient, 100 * torch.finfo(dtype).eps
            )


def test_semi_hard_takes_the_nearest_negative_that_is_farther_by_more_than_a_tie():
    raw, labels = problem(0, 60, 8, dimensions=100)
    raw, labels = torch.cat([raw, 3.1 * raw[:30]]), torch.cat([labels, labels[:30] + 1])
    similarities = normalize(raw) @ normalize(raw).t()
    # Rounded, the similarities of duplicates are equal bits.
    similarities = (similarities * 2**40).round() / 2**40
    losses = []
    for query, label in enumerate(labels):
        positives = similarities[query, (labels == label) & (torch.arange(len(labels)) != query)]
        negatives = similarities[query, labels != label]
        farther = [negatives[negatives < positive] for positive in positives]
        pairs = [
            (positive, group.max())
            for positive, group in zip(positives, farther, strict=True)
            if len(group)
        ]
        violations = [
            (2 * (negative - positive) + 0.1).clamp(min=0) for positive, negative in pairs
        ]
        losses.append(sum(violations) / len(positives) if len(positives) else torch.nan)
    actual = rank_raw(raw, labels, "triplet", mining="semi_hard", squared=True)[0].loss
    assert actual.item() == pytest.approx(torch.tensor(losses).nanmean().item(), abs=1e-6)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_query_without_positive_is_left_out_and_counted(name):
    raw, labels = problem(4, 30, 5)
    labels[3] = 1000
    labels[7] = 2000
    ranked = rank_raw(raw, labels, name)
    alone = torch.tensor([labels.tolist().count(label) == 1 for label in labels.tolist()])
    assert ranked[0].skipped_queries == alone.sum()
    assert ranked[0].queries == (~alone).sum()
    assert torch.equal(ranked[0].per_query.isnan(), alone)
    assert ranked[0].per_query.nanmean().item() == pytest.approx(ranked[0].loss.item(), rel=1e-12)
    assert_same(*ranked, *listwise_gradient(name, raw, labels))


def separated(seed=0):
    """Four classes, each image orthogonal to those of other classes and within 0.01 of its own, in
    float32.
    """
    generator = torch.Generator().manual_seed(seed)
    raw = torch.eye(4, 16).repeat_interleave(6, dim=0) + 0.01 * torch.randn(
        24, 16, generator=generator
    )
    return raw, torch.arange(4).repeat_interleave(6)


@pytest.mark.parametrize(
    "name", ["ap_q", "ap_t", "fast_ap", "smooth_ap", "sup_ap", "calibration", "roadmap"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_separated_classes_have_no_loss_and_a_gradient_below_any_noise(name, dtype):
    raw, labels = separated()
    ranking, gradient = rank_raw(raw.to(dtype), labels, name)
    assert ranking.loss.item() == pytest.approx(0, abs=1e-6)
    assert gradient.abs().max() < 1e-12


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.integers(4, 40), st.integers(1, 12))
def test_sup_ap_bounds_the_ap_loss_from_above(seed, images, classes):
    raw, labels = problem(seed, images, classes)
    bound = rank_raw(raw, labels, "sup_ap")[0].per_query
    assert (bound + 1e-12 >= exact_ap_loss(normalize(raw), labels)).logical_or(bound.isnan()).all()


def exact_ap_loss(descriptors, labels):
    """1 - AP of each query, itself among the positives; a negative that ties with a positive comes
    before it.
    """
    similarities = descriptors @ descriptors.t()
    losses = []
    for query, label in enumerate(labels):
        positives = similarities[query, labels == label]
        negatives = similarities[query, labels != label]
        among = torch.stack([(positives >= s).sum() for s in positives])
        before = torch.stack([(negatives >= s).sum() for s in positives])
        losses.append(1 - (among / (among + before)).mean())
    return torch.stack(losses)


@pytest.mark.parametrize("name", OPTIONS)
def test_in_bfloat16_autocast_the_gradient_is_that_of_float32(name):
    raw, labels = problem(6, 200, 25, dimensions=32, dtype=torch.float32)
    descriptors = normalize(raw)
    plain = rank(descriptors, labels, name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = rank(descriptors, labels, name)
    assert torch.equal(inside.gradient, plain.gradient)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ap_q", {"bins": 1}, "bins is 1"),
        ("fast_ap", {"bins": 0}, "bins is 0; 1 to 127"),
        ("ap_q", {"bins": "many"}, "bins: 'many': must be a whole number"),
        ("calibration", {"alpha": math.nan}, "alpha: nan: must be a finite number"),
        ("ap_q", {"low": 1.0, "high": 0.0}, "low must be below high"),
        ("ap_t", {"form": "complete"}, "form: 'complete': must be 'simplified' or 'full'"),
        ("smooth_ap", {"tau": 0.0}, "tau: 0"),
        ("roadmap", {"lam": 1.5}, "lam: 1.5"),
        ("triplet", {"self_pair": True}, "self_pair: True: must be False"),
        ("recall_at_k", {"ks": []}, "ks"),
        ("simix", {"inner": "triplet"}, "inner is Triplet"),
        ("h_ap", {"self_pair": False}, "self_pair: False: must be True"),
        (
            "triplet",
            {"mining": "easy"},
            "mining: 'easy': must be 'all', 'hardest', 'hard_negative' or 'semi_hard'",
        ),
    ],
)
def test_settings_that_make_no_sense_are_named(name, options, message):
    with pytest.raises(DistapError, match=message):
        build_loss(name, **options)

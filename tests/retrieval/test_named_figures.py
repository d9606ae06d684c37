"""Figures by name against slow references, and against libraries where these define them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from retrieval_reference import figure_of, mean
from sklearn.metrics import average_precision_score, ndcg_score
from torch.nn.functional import normalize

import distap
from distap.errors import DistapError
from distap.retrieval.evaluate import evaluate_descriptors
from distap.retrieval.figures import GRADED
from distap.retrieval.truth import Truth

NAMES = [
    "mAP",
    "mAP@R",
    "mAP@3",
    "mAP@1000",
    "R@1",
    "R@20",
    "CMC@2",
    "mP@5",
    "mP@5/min",
    "mP@5/last",
]
NAMES += ["mAP/trapezoids", *GRADED]


def problem(seed: int, tied: bool):
    """Similarities, descriptors, and a graded truth with lone queries, and with junk alone."""
    generator = torch.Generator().manual_seed(seed)
    gallery = int(torch.randint(1, 40, (), generator=generator))
    described = torch.randn(6 + gallery, 5, generator=generator, dtype=torch.float64)
    described = (
        torch.randint(-1, 2, described.shape, generator=generator).double()
        if tied
        else normalize(described)
    )
    levels = torch.randint(0, 4, (6, gallery), generator=generator)  # 0 for a negative
    levels[0] = 0
    is_junk = torch.rand(6, gallery, generator=generator) < 0.2
    is_junk[1] = True
    rows = [
        (own_row & ~junk).nonzero().flatten().tolist()
        for own_row, junk in zip(levels > 0, is_junk, strict=True)
    ]
    grades = [levels[query, own_row].tolist() for query, own_row in enumerate(rows)]
    junk = [own_row.nonzero().flatten().tolist() for own_row in is_junk]
    truth = Truth(gallery, rows, junk, grades, {"": (1, 2, 3), "good": (2, 3), "fair": (1,)})
    return described[:6], described[6:], truth, levels


def relevance_of(
    query: int, queries, gallery, truth, levels, worst: bool, head: list[int]
) -> list[int]:
    similarities = (gallery @ queries[query]).tolist()
    own_row = levels[query].tolist()
    sign = 1 if worst else -1
    order = sorted(
        range(len(own_row)), key=lambda row: (-round(similarities[row], 9), sign * own_row[row])
    )
    order = [*head, *(row for row in order if row not in head)]
    return [own_row[row] for row in order if row not in truth.junk[query]]


@settings(deadline=None, max_examples=80)
@given(
    st.integers(0, 10_000), st.booleans(), st.sampled_from(["against", "for"]), st.integers(0, 20)
)
@example(3842, True, "against", 3)  # a query that is zero, so that its ties have no width
def test_every_figure_is_that_of_its_definition(seed, tied, ties, kept):
    queries, gallery, truth, levels = problem(seed, tied)
    generator = torch.Generator().manual_seed(seed)
    head = torch.stack([torch.randperm(len(gallery), generator=generator)[:kept] for _ in range(6)])
    evaluation = evaluate_descriptors(
        queries, gallery, truth, NAMES, ties=ties, head=head if kept else None
    )
    for query in range(6):
        relevance = relevance_of(
            query, queries, gallery, truth, levels, ties == "against", head[query].tolist()
        )
        for name in evaluation.values:
            group, _, figure = name.rpartition(" ")
            # others are junk
            own_row = [level for level in relevance if level in (0, *truth.groups[group])]
            expected = figure_of(figure, own_row) if any(own_row) else math.nan
            if figure == "mP@5":
                expected = (
                    expected * min(5, len(own_row)) / min(5, len(gallery)) if own_row else math.nan
                )
            assert evaluation.values[name][query].item() == pytest.approx(
                expected, abs=1e-12, nan_ok=True
            ), name


@pytest.mark.parametrize("pairs", [60, 1])
def test_a_gallery_read_in_blocks_gives_the_same_figures(tmp_path, monkeypatch, pairs):
    queries, gallery, truth, _ = problem(1, tied=True)
    whole = evaluate_descriptors(queries, gallery, truth, NAMES)
    np.save(tmp_path / "gallery.npy", gallery.half().numpy())
    mapped = np.load(tmp_path / "gallery.npy", mmap_mode="r")
    monkeypatch.setattr("distap.retrieval.evaluate.BLOCK_PAIRS", pairs)
    monkeypatch.setattr("distap.retrieval.evaluate.RESIDENT_BYTES", 0)
    monkeypatch.setattr("distap.retrieval.ranks.CONVERTED_NUMBERS", 9)
    evaluation = evaluate_descriptors(queries.float(), mapped, truth, NAMES)
    torch.testing.assert_close(
        evaluation.values, whole.values, rtol=1e-12, atol=1e-12, equal_nan=True
    )


def test_figures_agree_with_those_of_libraries():
    """They do where nothing ties: scikit-learn merges ties, the others break them by the order.

    torchmetrics takes no positive of a score of 0 or less for one, so it is given one more.
    """
    # takes a second, which workers without this test save
    from torchmetrics.functional import retrieval

    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(0, 8, (60,), generator=generator)
        described = normalize(torch.randn(60, 16, generator=generator, dtype=torch.float64))
        evaluation = distap.evaluate(
            described, labels, figures=["mAP", "mAP@R", "R@1", "mAP@1000", "NDCG"]
        )
        scores = described @ described.T
        precisions = []
        gains = []
        by_torchmetrics = []
        for query in range(60):
            other_rows = torch.arange(60) != query
            right = labels[other_rows] == labels[query]
            if right.any():
                own_row = scores[query, other_rows]
                precisions.append(average_precision_score(right.numpy(), own_row.numpy()))
                gains.append(ndcg_score(right[None].double().numpy(), own_row[None].numpy()))
                torch_gain = retrieval.retrieval_normalized_dcg(own_row, right.long())
                by_torchmetrics.append(
                    [
                        float(retrieval.retrieval_average_precision(own_row + 1, right)),
                        float(torch_gain),
                    ]
                )
        assert evaluation["mAP"] == evaluation["mAP@1000"] == pytest.approx(mean(precisions))
        assert evaluation["NDCG"] == pytest.approx(mean(gains))
        assert [evaluation["mAP"], evaluation["NDCG"]] == pytest.approx(
            np.mean(by_torchmetrics, axis=0).tolist(), abs=1e-6
        )
        names = {"R@1": "precision_at_1", "mAP@R": "mean_average_precision_at_r"}
        calculator = AccuracyCalculator(include=tuple(names.values()), k=59)
        theirs = calculator.get_accuracy(described, labels)
        assert [evaluation[name] for name in names] == pytest.approx(
            [theirs[name] for name in names.values()]
        )


def test_cameras_domains_and_levels_by_hand():
    """Images on a circle: the nearest of 0 is 1, then 2, 3 and so on."""
    angles = torch.tensor([0.0, 0.1, 0.21, 0.33, 0.46, 0.6])
    described = torch.stack([angles.cos(), angles.sin()], 1)
    asks = np.arange(6) == 0
    figures = distap.evaluate(
        described, [7, 7, 1, 7, 2, 3], asks, cameras=["a", "a", "b", "b", "a", "c"]
    )
    # 1 is junk, then 2 is wrong and 3 is right
    assert figures["mAP"] == 1 / 2 and figures["R@1"] == 0
    with pytest.raises(DistapError, match="none of the 1 queries has an image of its class"):
        distap.evaluate(described, [7, 7, 1, 2, 2, 3], asks, cameras=["a"] * 6)
    figures = distap.evaluate(
        described,
        [1, 1, 2, 1, 2, 1],
        domains=["x", "x", "x", "y", "y", "y"],
        figures=["R@1", "mP@5/min"],
    )
    # In x the query 0 finds 1, and 1 finds 0; in y, 3 finds 2 or 4 first, and 5 finds 4; 2 and 4
    # have no other.
    assert (figures["x R@1"], figures["y R@1"], figures["R@1"], figures["mean R@1"]) == (
        1,
        0,
        0.5,
        0.5,
    )
    assert (figures["queries"], figures["left_out"]) == (4, 2)
    # 1 is of the group of 0, 3 also of its class
    levels = [[0, 0], [1, 0], [5, 2], [0, 0], [4, 2], [3, 1]]
    figures = distap.evaluate(
        described, levels, asks, figures=["mAP", "H-AP", "NDCG", "ASI", "ASI/level"]
    )
    assert figures["ASI/level"] == 0 and figures["level 1 ASI/level"] == (1 + 1 / 2) / 2
    assert figures["mAP"] == 1 / 3 and figures["level 1 mAP"] == (1 + 2 / 3) / 2
    assert figures["H-AP"] == pytest.approx((1 / 1 + (1 + 2) / 3) / (1 + 2))
    assert figures["NDCG"] == pytest.approx((1 + 3 / 2) / (3 + 1 / math.log2(3)))
    assert figures["ASI"] == pytest.approx((0 + 1 / 2) / 2)


def test_graded_figures_take_queries_without_positives_and_a_domain_has_not_the_name_of_the_mean():
    small_set = normalize(torch.randn(700, 8))
    labels = [0, 0, *range(1, 699)]
    assert distap.evaluate(small_set, labels, figures=["H-AP", "ASI"])["left_out"] == 698
    with pytest.raises(DistapError, match="no part or domain of queries may be called mean"):
        distap.evaluate(small_set[:4], [0, 0, 1, 1], domains=["a", "a", "mean", "mean"])


def test_a_figure_without_its_k_or_with_another_name_is_an_error():
    for name in ("R", "R@0", "R@k", "mAP@", "mp@5", "mAP@5@6", "recall"):
        with pytest.raises(DistapError, match=f"no figure '{name}'; expected mAP, mAP@R"):
            distap.evaluate(torch.eye(3), [0, 0, 1], figures=[name])

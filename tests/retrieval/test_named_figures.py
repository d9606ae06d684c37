"""Figures by name against slow references, and against libraries where these define them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from retrieval_reference import mean
from sklearn.metrics import average_precision_score
from torch.nn.functional import normalize
from torchmetrics.functional.retrieval import retrieval_average_precision

import distap
from distap.errors import DistapError
from distap.retrieval.evaluate import evaluate_descriptors
from distap.retrieval.truth import ListedTruth

NAMES = ["mAP", "mAP@R", "mAP@3", "mAP@1000", "R@1", "R@20", "CMC@2", "mP@5", "mP@5/min", "mP@5/last"]


def slow(name: str, relevance: list[int]) -> float:
    """A figure of one query from its definition, by the relevance of each place of its ranking."""
    right = [bool(one) for one in relevance]
    count, k = sum(right), int("".join(filter(str.isdigit, name)) or 0)
    at_hits = [sum(right[:place]) / place for place, hit in enumerate(right, 1) if hit]
    until = {"mAP": len(right), "mAP@R": count}.get(name, k)
    precisions = [sum(right[:place]) / place for place, hit in enumerate(right[:until], 1) if hit]
    last = max(place for place, hit in enumerate(right, 1) if hit)
    return {
        "mAP@R": lambda: sum(precisions) / count,
        "R": lambda: float(any(right[:k])),
        "CMC": lambda: float(any(right[:k])),
        "mP": lambda: sum(right[:k]) / min(k, len(right)),
        "min": lambda: sum(right[: min(k, count)]) / min(k, count),
        "last": lambda: sum(right[: min(k, last)]) / min(k, last),
        "mAP": lambda: sum(precisions) / (min(count, k) if k else len(at_hits)),
    }[name if name == "mAP@R" else name.rsplit("/", 1)[-1].split("@")[0]]()


def problem(seed: int, tied: bool):
    """Similarities, descriptors, and a graded truth with lone queries, and with junk alone."""
    generator = torch.Generator().manual_seed(seed)
    gallery = int(torch.randint(1, 40, (), generator=generator))
    described = torch.randn(6 + gallery, 5, generator=generator, dtype=torch.float64)
    described = torch.randint(-1, 2, described.shape, generator=generator).double() if tied else normalize(described)
    levels = torch.randint(0, 4, (6, gallery), generator=generator)  # 0 for a negative
    levels[0] = 0
    is_junk = torch.rand(6, gallery, generator=generator) < 0.2
    is_junk[1] = True
    rows = [(own & ~junk).nonzero().flatten().tolist() for own, junk in zip(levels > 0, is_junk, strict=True)]
    grades = [levels[query, own].tolist() for query, own in enumerate(rows)]
    junk = [own.nonzero().flatten().tolist() for own in is_junk]
    truth = ListedTruth(gallery, rows, junk, grades, {"": (1, 2, 3), "good": (2, 3)})
    return described[:6], described[6:], truth, levels


def relevance_of(query: int, queries, gallery, truth, levels, worst: bool) -> list[int]:
    similarities, own = (gallery @ queries[query]).tolist(), levels[query].tolist()
    sign = 1 if worst else -1
    order = sorted(range(len(own)), key=lambda row: (-round(similarities[row], 9), sign * own[row]))
    return [own[row] for row in order if row not in truth.junk[query]]


@settings(deadline=None, max_examples=80)
@given(seed=st.integers(0, 10_000), tied=st.booleans(), ties=st.sampled_from(["against", "for"]))
def test_every_figure_is_that_of_its_definition(seed, tied, ties):
    queries, gallery, truth, levels = problem(seed, tied)
    found = evaluate_descriptors(queries, gallery, truth, NAMES, ties=ties)
    for query in range(6):
        relevance = relevance_of(query, queries, gallery, truth, levels, ties == "against")
        for name in found.values:
            group, _, figure = name.rpartition(" ")
            own = [level for level in relevance if level != 1] if group else relevance  # the others are junk
            expected = slow(figure, own) if any(own) else math.nan
            if figure == "mP@5":
                expected = expected * min(5, len(own)) / min(5, len(gallery)) if own else math.nan
            assert found.values[name][query].item() == pytest.approx(expected, abs=1e-12, nan_ok=True), name


def test_figures_agree_with_those_of_libraries():
    """They do where nothing ties: scikit-learn merges ties, the others break them by the order.

    torchmetrics takes no positive of a score of 0 or less for one, so it is given one more.
    """
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(0, 8, (60,), generator=generator)
        described = normalize(torch.randn(60, 16, generator=generator, dtype=torch.float64))
        found = distap.evaluate(described, labels, figures=["mAP", "mAP@R", "R@1", "mAP@1000"])
        scores = described @ described.T
        precisions, by_torchmetrics = [], []
        for query in range(60):
            others = torch.arange(60) != query
            right = labels[others] == labels[query]
            if right.any():
                own = scores[query, others]
                precisions.append(average_precision_score(right.numpy(), own.numpy()))
                by_torchmetrics.append(float(retrieval_average_precision(own + 1, right)))
        assert found["mAP"] == found["mAP@1000"] == pytest.approx(mean(precisions))
        assert found["mAP"] == pytest.approx(mean(by_torchmetrics), abs=1e-6)
        names = {"R@1": "precision_at_1", "mAP@R": "mean_average_precision_at_r"}
        calculator = AccuracyCalculator(include=tuple(names.values()), k=59)
        theirs = calculator.get_accuracy(described, labels)
        assert [found[name] for name in names] == pytest.approx([theirs[name] for name in names.values()])


def test_a_figure_without_its_k_or_with_another_name_is_an_error():
    for name in ("R", "R@0", "R@k", "mAP@", "mp@5", "mAP@5@6", "recall"):
        with pytest.raises(DistapError, match=f"no figure '{name}'; expected mAP, mAP@R"):
            distap.evaluate(torch.eye(3), [0, 0, 1], figures=[name])

"""Figures of sets whose ground truth is listed: Revisited Oxford and Paris, Google Landmarks v2."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from retrieval_reference import mean, order_of, precision_at, trapezoid_average_precision
from torch.nn.functional import normalize

from distap.errors import DistapError
from distap.evaluation.ground_truth import DIFFICULTIES, FORMS, listed_truth
from distap.retrieval.evaluate import evaluate_descriptors
from distap.retrieval.figures import AT, LANDMARKS, REVISITED
from distap.retrieval.truth import ListedTruth

CPU = torch.device("cpu")


def graded(gallery, *queries):
    """The truth of queries that are given as their easy, hard and junk rows."""
    grades = [[0] * len(easy) + [1] * len(hard) for easy, hard, _ in queries]
    positives, junk = [[*easy, *hard] for easy, hard, _ in queries], [junk for *_, junk in queries]
    return ListedTruth(gallery, positives, junk, grades, DIFFICULTIES)


def problem(seed, queries, gallery, tied):
    """Descriptors, and lists of which some lack easy or hard images; tied ones are small integers."""
    generator = torch.Generator().manual_seed(seed)
    if tied:
        described = torch.randint(-1, 2, (queries + gallery, 3), generator=generator).double()
    else:
        described = normalize(torch.randn(queries + gallery, 5, generator=generator, dtype=torch.float64))
    lists = []
    for _ in range(queries):
        order = torch.randperm(gallery, generator=generator).tolist()
        cuts = sorted(torch.randint(0, gallery + 1, (3,), generator=generator).tolist())
        lists.append([order[a:b] for a, b in zip([0, *cuts[:2]], cuts, strict=True)])
    return described[:queries], described[queries:], lists


def rights(queries, gallery, lists, head=None):
    """By group and query, which places of the ranking without junk hold a positive."""
    result = {"Easy": [], "Medium": [], "Hard": []}
    for number, (row, own) in enumerate(zip((queries @ gallery.t()).tolist(), lists, strict=True)):
        easy, hard, junk = map(set, own)
        groups = {"Easy": (easy, junk | hard), "Medium": (easy | hard, junk), "Hard": (hard, junk | easy)}
        for name, (positives, ignored) in groups.items():
            order = order_of(row, positives, ignored, head[number].tolist() if head is not None else ())
            result[name].append([found in positives for found in order])
    return result


def require_equal(result, expected):
    left_out = {}
    for name, of_queries in expected.items():
        counted = [right for right in of_queries if any(right)]
        left_out[name] = len(of_queries) - len(counted)
        areas = [trapezoid_average_precision(right) if any(right) else np.nan for right in of_queries]
        assert result.values[f"{name} mAP/trapezoids"].tolist() == pytest.approx(areas, abs=1e-12, nan_ok=True)
        figures = {f"{name} mAP/trapezoids": [trapezoid_average_precision(right) for right in counted]}
        figures |= {f"{name} mP@{k}/last": [precision_at(right, k) for right in counted] for k in AT}
        for figure, values in figures.items():
            value = mean(values) if values else np.nan
            assert result.summary()[figure] == pytest.approx(value, abs=1e-12, nan_ok=True)
    assert result.left_out == left_out


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), gallery=st.integers(2, 40), tied=st.booleans(), kept=st.integers(0, 20))
def test_three_groups_equal_those_of_sorting_without_junk(seed, gallery, tied, kept):
    queries, described, lists = problem(seed, 4, gallery, tied)
    generator = torch.Generator().manual_seed(seed)
    head = torch.stack([torch.randperm(gallery, generator=generator)[:kept] for _ in range(4)]) if kept else None
    result = evaluate_descriptors(queries, described, graded(gallery, *lists), REVISITED, head=head)
    require_equal(result, rights(queries, described, lists, head))


@pytest.mark.parametrize("pairs", [60, 1])
def test_a_gallery_read_in_blocks_gives_the_same_three_groups(tmp_path, monkeypatch, pairs):
    queries, described, lists = problem(1, 6, 50, tied=True)
    np.save(tmp_path / "gallery.npy", described.half().numpy())
    mapped = np.load(tmp_path / "gallery.npy", mmap_mode="r")
    monkeypatch.setattr("distap.retrieval.evaluate.BLOCK_PAIRS", pairs)
    monkeypatch.setattr("distap.retrieval.evaluate.RESIDENT_BYTES", 0)
    monkeypatch.setattr("distap.retrieval.ranks.CONVERTED_NUMBERS", 9)
    result = evaluate_descriptors(queries.float(), mapped, graded(50, *lists), REVISITED)
    require_equal(result, rights(queries, described, lists))


def test_one_perfect_query_and_one_known_by_hand():
    gallery = normalize(torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, 0.2], [1.0, 0.3], [1.0, 0.4]]))
    # The ranking is 0 1 2 3 4; without the junk 1 the hard image 2 comes second and the easy one 4 comes fourth.
    truth = graded(5, ([4], [2], [1]), ([0], [], []))
    result = evaluate_descriptors(gallery[:1].repeat(2, 1), gallery, truth, REVISITED)
    assert result.values["Easy mAP/trapezoids"].tolist() == pytest.approx([(0 / 2 + 1 / 3) / 2, 1])
    assert result.values["Medium mAP/trapezoids"].tolist() == pytest.approx(
        [((0 + 1 / 2) / 2 + (1 / 3 + 2 / 4) / 2) / 2, 1]
    )
    assert result.values["Hard mAP/trapezoids"].tolist() == pytest.approx(
        [(0 + 1 / 2) / 2, float("nan")], nan_ok=True
    )
    assert result.left_out == {"Easy": 0, "Medium": 0, "Hard": 1}
    assert result.summary()["Hard mAP/trapezoids"] == pytest.approx(1 / 4)


def test_queries_without_any_positive_have_no_figure():
    result = evaluate_descriptors(torch.eye(4)[:2], torch.eye(4), graded(4, ([], [], []), ([], [], [1])), REVISITED)
    assert result.left_out == {"Easy": 2, "Medium": 2, "Hard": 2} and np.isnan(result.summary()["Hard mP@1/last"])


def test_a_truth_that_does_not_fit_is_an_error():
    for lists, message in ((([0], [1], [0]), "names an image twice"), (([0], [4], []), "row 4 of a gallery of 4")):
        with pytest.raises(DistapError, match=message):
            graded(4, lists)
    with pytest.raises(DistapError, match="a truth for 0 queries and a gallery of 4, and descriptors of 1 and 4"):
        evaluate_descriptors(torch.eye(4)[:1], torch.eye(4), ListedTruth(4, []), LANDMARKS)


@pytest.mark.parametrize("resident", [2**30, 0])
def test_a_gallery_of_another_network_or_with_a_hole_is_an_error(monkeypatch, resident):
    monkeypatch.setattr("distap.retrieval.evaluate.RESIDENT_BYTES", resident)
    truth = ListedTruth(4, [[0]])
    with pytest.raises(DistapError, match="5 dimensions and the gallery 4"):
        evaluate_descriptors(torch.eye(5)[:1], torch.eye(4), truth, LANDMARKS)
    gallery = np.eye(4, dtype=np.float16)
    gallery[2, 1] = np.inf
    for values in (gallery, torch.from_numpy(gallery)):
        with pytest.raises(DistapError, match="gallery descriptor 2 is not finite"):
            evaluate_descriptors(torch.eye(4)[:1], values, truth, LANDMARKS)


def test_the_ground_truth_of_a_data_set_names_gallery_rows():
    record = {"name": "q", "box": [0, 0, 1, 1], "easy": ["b"], "hard": ["d", "a", "d"], "junk": ["c"]}
    truth = listed_truth(FORMS["roxford5k"], [record], ["a", "b", "c", "d", "a"], CPU)  # of two, the first is meant
    assert (truth.positives, truth.grades, truth.junk, truth.gallery) == ([[1, 3, 0]], [[0, 1, 1]], [[2]], 5)
    with pytest.raises(DistapError, match="query q: 1 of its 2 hard images are not in the gallery"):
        listed_truth(FORMS["roxford5k"], [record], ["a", "b", "c"], CPU)
    record = {"name": "q", "usage": "Private", "positives": ["b", "a", "b"]}
    truth = listed_truth(FORMS["gldv2"], [record], ["a", "b", "c"], CPU)
    assert (truth.positives, truth.parts) == ([[1, 0]], ["Private"])

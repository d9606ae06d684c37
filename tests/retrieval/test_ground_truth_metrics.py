import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from retrieval_reference import (
    average_precision_at_100,
    mean,
    order_of,
    precision_at,
    trapezoid_average_precision,
)
from torch.nn.functional import normalize

from distap.errors import DistapError
from distap.retrieval.ground_truth_metrics import (
    AT,
    GradedQuery,
    LandmarkQuery,
    evaluate_graded,
    evaluate_landmarks,
    graded_queries,
    landmark_queries,
)


def problem(seed, queries, gallery, tied):
    """Descriptors, and a truth in which some queries lack easy or hard images; tied ones are small integers."""
    generator = torch.Generator().manual_seed(seed)
    if tied:
        described = torch.randint(-1, 2, (queries + gallery, 3), generator=generator).double()
    else:
        described = normalize(torch.randn(queries + gallery, 5, generator=generator, dtype=torch.float64))
    truth = []
    for _ in range(queries):
        order = torch.randperm(gallery, generator=generator).tolist()
        cuts = sorted(torch.randint(0, gallery + 1, (3,), generator=generator).tolist())
        truth.append(GradedQuery(*(tuple(order[a:b]) for a, b in zip([0, *cuts[:2]], cuts, strict=True))))
    return described[:queries], described[queries:], truth


def rights(queries, gallery, truth, head=None):
    """By protocol and query, which places of the ranking without junk hold a positive."""
    result = {"Easy": [], "Medium": [], "Hard": []}
    for number, (row, own) in enumerate(zip((queries @ gallery.t()).tolist(), truth, strict=True)):
        easy, hard, junk = set(own.easy), set(own.hard), set(own.junk)
        protocols = {"Easy": (easy, junk | hard), "Medium": (easy | hard, junk), "Hard": (hard, junk | easy)}
        for name, (positives, ignored) in protocols.items():
            order = order_of(row, positives, ignored, head[number].tolist() if head is not None else ())
            result[name].append([found in positives for found in order])
    return result


def require_equal(result, expected):
    left_out = {}
    for name, of_queries in expected.items():
        counted = [right for right in of_queries if any(right)]
        left_out[name] = len(of_queries) - len(counted)
        areas = [trapezoid_average_precision(right) if any(right) else np.nan for right in of_queries]
        assert result.average_precision[name].tolist() == pytest.approx(areas, abs=1e-12, nan_ok=True)
        figures = {f"{name} mAP": [trapezoid_average_precision(right) for right in counted]}
        figures |= {f"{name} mP@{k}": [precision_at(right, k) for right in counted] for k in AT}
        for figure, values in figures.items():
            value = mean(values) if values else np.nan
            assert result.summary[figure] == pytest.approx(value, abs=1e-12, nan_ok=True)
    assert result.left_out == left_out


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    gallery=st.integers(2, 40),
    tied=st.booleans(),
)
def test_three_protocols_equal_those_of_sorting_without_junk(seed, gallery, tied):
    queries, described, truth = problem(seed, 4, gallery, tied)
    result = evaluate_graded(queries, described, truth)
    require_equal(result, rights(queries, described, truth))


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), kept=st.integers(1, 20))
def test_a_head_comes_first_and_its_junk_is_taken_out(seed, kept):
    queries, described, truth = problem(seed, 3, 20, tied=True)
    generator = torch.Generator().manual_seed(seed)
    head = torch.stack([torch.randperm(20, generator=generator)[:kept] for _ in range(3)])
    result = evaluate_graded(queries, described, truth, head=head)
    require_equal(result, rights(queries, described, truth, head))


@pytest.mark.parametrize("pairs", [60, 1])
def test_a_gallery_read_in_blocks_gives_the_same_three_protocols(tmp_path, monkeypatch, pairs):
    queries, described, truth = problem(1, 6, 50, tied=True)
    expected = rights(queries, described, truth)
    np.save(tmp_path / "gallery.npy", described.half().numpy())
    mapped = np.load(tmp_path / "gallery.npy", mmap_mode="r")
    monkeypatch.setattr("distap.retrieval.ground_truth_metrics.BLOCK_PAIRS", pairs)
    monkeypatch.setattr("distap.retrieval.ranks.CONVERTED_NUMBERS", 9)
    require_equal(evaluate_graded(queries.float(), mapped, truth), expected)


def test_one_perfect_query_and_one_known_by_hand():
    gallery = normalize(torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, 0.2], [1.0, 0.3], [1.0, 0.4]]))
    # The ranking is 0 1 2 3 4; without the junk 1 the hard image 2 comes second and the easy one 4 comes fourth.
    truth = [GradedQuery(easy=(4,), hard=(2,), junk=(1,)), GradedQuery(easy=(0,), hard=(), junk=())]
    result = evaluate_graded(gallery[:1].repeat(2, 1), gallery, truth)
    assert result.average_precision["Easy"].tolist() == pytest.approx([(0 / 2 + 1 / 3) / 2, 1])
    assert result.average_precision["Medium"].tolist() == pytest.approx(
        [((0 + 1 / 2) / 2 + (1 / 3 + 2 / 4) / 2) / 2, 1]
    )
    assert result.average_precision["Hard"].tolist() == pytest.approx([(0 + 1 / 2) / 2, float("nan")], nan_ok=True)
    assert result.left_out == {"Easy": 0, "Medium": 0, "Hard": 1}
    assert result.summary["Hard mAP"] == pytest.approx(1 / 4)


def test_a_collapsed_network_scores_no_more_than_chance():
    queries, gallery = normalize(torch.ones(5, 16)), normalize(torch.ones(1000, 16))
    truth = [GradedQuery((10 * own, 3), (10 * own + 1, 7), (10 * own + 2,)) for own in range(1, 6)]
    assert max(evaluate_graded(queries, gallery, truth).summary.values()) < 0.01


@pytest.mark.parametrize(
    ("evaluate", "truth", "message"),
    [
        (evaluate_graded, [GradedQuery((0,), (1,), (0,))], "names an image twice"),
        (evaluate_graded, [GradedQuery((0,), (4,), ())], "row 4 of a gallery of 4"),
        (evaluate_graded, [], "truth for 0 queries"),
        (evaluate_landmarks, [LandmarkQuery((4,), "Public")], "row 4 of a gallery of 4"),
        (evaluate_landmarks, [], "truth for 0 queries"),
    ],
)
def test_a_truth_that_does_not_fit_is_an_error(evaluate, truth, message):
    with pytest.raises(DistapError, match=message):
        evaluate(torch.eye(4)[:1], torch.eye(4), truth)


def test_a_gallery_of_another_network_or_with_a_hole_is_an_error():
    truth = [GradedQuery((0,), (), ())]
    with pytest.raises(DistapError, match="4 dimensions and the gallery 3"):
        evaluate_graded(torch.eye(4)[:1], torch.eye(3), truth)
    gallery = np.eye(4, dtype=np.float16)
    gallery[2, 1] = np.inf
    with pytest.raises(DistapError, match="rows 0 to 3 of the gallery: 1 of 4"):
        evaluate_graded(torch.eye(4)[:1], gallery, truth)
    with pytest.raises(DistapError, match="the gallery: 1 of 4"):
        evaluate_graded(torch.eye(4)[:1], torch.from_numpy(gallery), truth)


def test_the_ground_truth_of_a_data_set_names_gallery_rows():
    rows = {"a": 0, "b": 1, "c": 2}
    record = {"name": "q", "box": [0, 0, 1, 1], "easy": ["b"], "hard": [], "junk": ["c", "a"]}
    assert graded_queries([record], rows) == [GradedQuery((1,), (), (2, 0))]
    with pytest.raises(DistapError, match="query q: 1 of its 2 junk images are not in the gallery"):
        graded_queries([record], {"b": 1, "c": 2})
    record = {"name": "q", "usage": "Private", "positives": ["b", "a", "b"]}
    assert landmark_queries([record], rows) == [LandmarkQuery((1, 0), "Private")]
    with pytest.raises(DistapError, match="usage Ignored; expected Public or Private"):
        landmark_queries([record | {"usage": "Ignored"}], rows)


def landmark_problem(seed, tied, gallery=260):
    generator = torch.Generator().manual_seed(seed)
    if tied:
        described = torch.randint(-1, 2, (5 + gallery, 3), generator=generator).double()
    else:
        described = normalize(torch.randn(5 + gallery, 4, generator=generator, dtype=torch.float64))
    counts = [0, 1, 130, 20, 99]  # one with more positives than the hundred places that count
    positives = [tuple(torch.randperm(gallery, generator=generator)[:count].tolist()) for count in counts]
    usages = ["Public", "Private", "Private", "Public", "Private"]
    truth = [LandmarkQuery(*own) for own in zip(positives, usages, strict=True)]
    return described[:5], described[5:], truth


def expected_figures(queries, gallery, truth, head=None):
    rights = []
    for number, (row, own) in enumerate(zip((queries @ gallery.t()).tolist(), truth, strict=True)):
        order = order_of(row, set(own.positives), set(), head[number].tolist() if head is not None else ())
        rights.append([found in own.positives for found in order])
    result = {}
    for name, usages in (("", ("Public", "Private")), ("Public ", ("Public",)), ("Private ", ("Private",))):
        counted = [right for right, own in zip(rights, truth, strict=True) if any(right) and own.usage in usages]
        result[f"{name}mAP@100"] = mean([average_precision_at_100(right) for right in counted])
        result[f"{name}mP@10"] = mean([sum(right[:10]) / 10 for right in counted])
    return result


@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 10_000),
    tied=st.booleans(),
    headed=st.booleans(),
)
def test_figures_of_landmarks_equal_those_of_sorting_the_gallery(seed, tied, headed):
    queries, gallery, truth = landmark_problem(seed, tied)
    generator = torch.Generator().manual_seed(seed)
    head = torch.stack([torch.randperm(260, generator=generator)[:30] for _ in range(5)]) if headed else None
    result = evaluate_landmarks(queries, gallery, truth, head=head)
    assert result.summary == pytest.approx(expected_figures(queries, gallery, truth, head), abs=1e-12)
    assert result.left_out == {"AP@100": 1}


@pytest.mark.parametrize("pairs", [600, 100])
def test_a_gallery_read_in_blocks_gives_the_same_figures_of_landmarks(tmp_path, monkeypatch, pairs):
    queries, gallery, truth = landmark_problem(3, tied=True)
    np.save(tmp_path / "gallery.npy", gallery.half().numpy())
    mapped = np.load(tmp_path / "gallery.npy", mmap_mode="r")
    monkeypatch.setattr("distap.retrieval.ground_truth_metrics.BLOCK_PAIRS", pairs)
    result = evaluate_landmarks(queries.float(), mapped, truth)
    assert result.summary == pytest.approx(expected_figures(queries, gallery, truth), abs=1e-12)

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from retrieval_reference import average_precision_at_100, mean, order_of
from torch.nn.functional import normalize

from distap.errors import DistapError
from distap.retrieval.landmarks import LandmarkQuery, evaluate_landmarks, landmark_queries


def problem(seed, tied, gallery=260):
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


def expected_figures(queries, gallery, truth, ties, head=None):
    rights = []
    for number, (row, own) in enumerate(zip((queries @ gallery.t()).tolist(), truth, strict=True)):
        order = order_of(row, set(own.positives), set(), ties, head[number].tolist() if head is not None else ())
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
    ties=st.sampled_from(["pessimistic", "index"]),
    headed=st.booleans(),
)
def test_figures_equal_those_of_sorting_the_gallery(seed, tied, ties, headed):
    queries, gallery, truth = problem(seed, tied)
    generator = torch.Generator().manual_seed(seed)
    head = torch.stack([torch.randperm(260, generator=generator)[:30] for _ in range(5)]) if headed else None
    result = evaluate_landmarks(queries, gallery, truth, ties=ties, head=head)
    assert result.summary() == pytest.approx(expected_figures(queries, gallery, truth, ties, head), abs=1e-12)
    assert result.left_out == 1


@pytest.mark.parametrize("pairs", [600, 100])
def test_a_memory_map_read_in_blocks_gives_the_same(tmp_path, monkeypatch, pairs):
    queries, gallery, truth = problem(3, tied=True)
    np.save(tmp_path / "gallery.npy", gallery.half().numpy())
    mapped = np.load(tmp_path / "gallery.npy", mmap_mode="r")
    monkeypatch.setattr("distap.retrieval.landmarks.BLOCK_PAIRS", pairs)
    result = evaluate_landmarks(queries.float(), mapped, truth)
    assert result.summary() == pytest.approx(expected_figures(queries, gallery, truth, "pessimistic"), abs=1e-12)


def test_the_ground_truth_of_a_data_set_names_gallery_rows():
    record = {"name": "q", "usage": "Private", "positives": ["b", "a"]}
    assert landmark_queries([record], {"a": 0, "b": 1}) == [LandmarkQuery((1, 0), "Private")]
    with pytest.raises(DistapError, match="usage Ignored; expected Public or Private"):
        landmark_queries([record | {"usage": "Ignored"}], {"a": 0, "b": 1})


def test_a_truth_that_does_not_fit_is_an_error():
    with pytest.raises(DistapError, match="truth for 0 queries"):
        evaluate_landmarks(torch.eye(3)[:1], torch.eye(3), [])
    with pytest.raises(DistapError, match="row 3 of a gallery of 3"):
        evaluate_landmarks(torch.eye(3)[:1], torch.eye(3), [LandmarkQuery((3,), "Public")])

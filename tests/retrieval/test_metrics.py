import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import labelled_set_figures
from retrieval_reference import interpolated_precision, labelled_orders
from torch.nn.functional import normalize

from distap.errors import DistapError
from distap.retrieval.metrics import evaluate_labelled_set


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), images=st.integers(3, 40), classes=st.integers(1, 8), ties=st.booleans())
def test_figures_equal_those_of_sorting_each_gallery(seed, images, classes, ties):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (images,), generator=generator)
    labels[0] = labels[1]
    if ties:  # small integers have exact products, so equal similarities are equal bit by bit
        descriptors = torch.randint(-1, 2, (images, 3), generator=generator).double()
    else:
        descriptors = normalize(torch.randn(images, 6, generator=generator, dtype=torch.float64))
    result = evaluate_labelled_set(descriptors, labels)
    expected = labelled_set_figures((descriptors @ descriptors.t()).tolist(), labels.tolist())
    assert result.summary() == pytest.approx(expected, abs=1e-12)
    assert result.without_positive == sum(labels.tolist().count(c) == 1 for c in labels.tolist())


def test_precision_at_recall_and_the_figures_of_classes_are_means_over_queries():
    generator = torch.Generator().manual_seed(3)
    labels = torch.tensor([4] * 130 + [1] * 9 + [7] + [2] * 2)[torch.randperm(142, generator=generator)]
    descriptors = normalize(torch.randn(142, 4, generator=generator, dtype=torch.float64))
    result = evaluate_labelled_set(descriptors, labels)
    orders = labelled_orders((descriptors @ descriptors.t()).tolist(), labels.tolist())
    curves = torch.tensor([interpolated_precision(right) for right in orders.values()], dtype=torch.float64)
    assert result.precision_at_recall.tolist() == pytest.approx(curves.mean(0).tolist(), abs=1e-12)

    figures = result.of_classes(labels)
    assert figures.classes.tolist() == [1, 2, 4]
    assert figures.queries.tolist() == [9, 2, 130]
    for row, label in enumerate(figures.classes):
        own = [right for query, right in orders.items() if labels[query] == label]
        precisions = [[sum(right[:place]) / place for place, hit in enumerate(right, 1) if hit] for right in own]
        expected = sum(sum(found) / len(found) for found in precisions) / len(own)
        assert figures.mean_average_precision[row].item() == pytest.approx(expected, abs=1e-12)
        recall = [sum(any(right[:k]) for right in own) / len(own) for k in (1, 5, 10)]
        assert figures.recall[row].tolist() == pytest.approx(recall, abs=1e-12)


def test_blocks_of_queries_do_not_matter(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    descriptors, labels = normalize(torch.randn(50, 8, generator=generator)), torch.arange(50) % 9
    whole = evaluate_labelled_set(descriptors, labels)
    monkeypatch.setattr("distap.retrieval.metrics.BLOCK_PAIRS", 150)
    in_blocks = evaluate_labelled_set(descriptors, labels)
    assert in_blocks.summary() == pytest.approx(whole.summary(), abs=1e-12)
    assert torch.equal(in_blocks.neighbours, whole.neighbours)


def test_a_collapsed_network_scores_low():
    descriptors = normalize(torch.ones(400, 16))
    figures = evaluate_labelled_set(descriptors, torch.arange(400) // 4).summary()
    assert figures["mAP"] < 0.02
    assert figures["R@1"] < 0.02


def test_the_query_is_removed_by_its_index_also_where_duplicates_exist():
    descriptors = torch.eye(3).repeat_interleave(2, dim=0)  # each image twice, in two classes
    result = evaluate_labelled_set(descriptors, torch.tensor([0, 1, 0, 1, 2, 2]))
    assert result.neighbours[:, 0].tolist() == [1, 0, 3, 2, 5, 4]
    assert result.first_positive[4:].tolist() == [1, 1]


def test_a_perfect_ranking_scores_one():
    descriptors = torch.eye(4).repeat_interleave(3, dim=0)
    figures = evaluate_labelled_set(descriptors, torch.arange(4).repeat_interleave(3)).summary()
    assert set(figures.values()) == {1.0}


def test_descriptors_that_are_not_finite_are_an_error():
    descriptors = torch.eye(4)
    descriptors[2, 1] = torch.nan
    with pytest.raises(DistapError, match="1 of 4 descriptors are not finite"):
        evaluate_labelled_set(descriptors, torch.tensor([0, 0, 1, 1]))


def test_a_set_without_any_positive_is_an_error():
    with pytest.raises(DistapError, match="nothing to retrieve"):
        evaluate_labelled_set(torch.eye(4), torch.arange(4))

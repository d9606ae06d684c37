import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from retrieval_reference import (
    average_precision,
    average_precision_at_r,
    interpolated_precision,
    labelled_figures,
    labelled_orders,
    mean,
    order_of,
)
from torch.nn.functional import normalize

from distap.errors import DistapError
from distap.retrieval.metrics import AT, evaluate_labelled_set, evaluate_queries
from distap.retrieval.ranks import count_above, count_above_in_columns


def labelled_set(seed, images, classes, tied):
    """Descriptors and labels, some of no class; tied ones are small integers, whose products are exact."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(-1, classes, (images,), generator=generator)
    labels[0] = labels[1] = 0
    if tied:
        return torch.randint(-1, 2, (images, 3), generator=generator).double(), labels
    return normalize(torch.randn(images, 6, generator=generator, dtype=torch.float64)), labels


def similarities(descriptors):
    return (descriptors @ descriptors.t()).tolist()


sets = given(
    seed=st.integers(0, 10_000),
    images=st.integers(3, 40),
    classes=st.integers(1, 8),
    tied=st.booleans(),
)


@settings(deadline=None, max_examples=60)
@sets
def test_figures_equal_those_of_sorting_each_gallery(seed, images, classes, tied):
    descriptors, labels = labelled_set(seed, images, classes, tied)
    result = evaluate_labelled_set(descriptors, labels)
    orders = labelled_orders(similarities(descriptors), labels.tolist())
    assert result.summary() == pytest.approx(labelled_figures(orders, AT), abs=1e-12)
    assert result.is_query.nonzero().flatten().tolist() == sorted(orders)
    for query, right in orders.items():
        assert result.average_precision[query].item() == pytest.approx(average_precision(right), abs=1e-12)
        at_r = average_precision_at_r(right)
        assert result.average_precision_at_r[query].item() == pytest.approx(at_r, abs=1e-12)
        assert result.first_positive[query].item() == right.index(True) + 1


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), kept=st.integers(1, 12))
def test_a_head_comes_first_whatever_its_similarity(seed, kept):
    descriptors, labels = labelled_set(seed, 20, 4, tied=True)
    generator = torch.Generator().manual_seed(seed)
    others = [[row for row in torch.randperm(20, generator=generator).tolist() if row != own] for own in range(20)]
    head = torch.tensor(others)[:, :kept]
    result = evaluate_labelled_set(descriptors, labels, 5, head=head)
    orders = labelled_orders(similarities(descriptors), labels.tolist(), head.tolist())
    assert result.summary() == pytest.approx(labelled_figures(orders, AT), abs=1e-12)
    shown = min(kept, 5)
    assert torch.equal(result.neighbours[:, :shown], head[:, :shown])
    assert all(len(set(row)) == 5 for row in result.neighbours.tolist())


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ([[1, 1], [0, 2], [0, 1]], "twice"),
        ([[1, 3], [0, 2], [0, 1]], "numbers below 3"),
        ([[1, 2], [0, 2], [0, 2]], "the query itself"),
    ],
)
def test_a_head_that_is_no_head_is_an_error(head, message):
    with pytest.raises(DistapError, match=message):
        evaluate_labelled_set(torch.eye(3), torch.tensor([0, 0, 1]), head=torch.tensor(head))


def test_precision_at_recall_and_the_figures_of_classes_are_means_over_queries():
    generator = torch.Generator().manual_seed(3)
    labels = torch.tensor([4] * 130 + [1] * 9 + [7] + [2] * 2)[torch.randperm(142, generator=generator)]
    descriptors = normalize(torch.randn(142, 4, generator=generator, dtype=torch.float64))
    result = evaluate_labelled_set(descriptors, labels)
    orders = labelled_orders(similarities(descriptors), labels.tolist())
    curves = torch.tensor([interpolated_precision(right) for right in orders.values()], dtype=torch.float64)
    assert result.precision_at_recall.tolist() == pytest.approx(curves.mean(0).tolist(), abs=1e-12)

    figures = result.class_figures(labels)
    assert {label: own["queries"] for label, own in figures.items()} == {1: 9, 2: 2, 4: 130}
    for label, found in figures.items():
        own = [right for query, right in orders.items() if labels[query] == label]
        expected = {
            "queries": len(own),
            "mAP": mean([*map(average_precision, own)]),
            "mAP@R": mean([*map(average_precision_at_r, own)]),
            **{f"R@{k}": mean([any(right[:k]) for right in own]) for k in (1, 5, 10)},
        }
        assert found == pytest.approx(expected, abs=1e-12)


def test_figures_are_given_at_the_ranks_that_are_asked_for():
    descriptors, labels = torch.randn(30, 4, dtype=torch.float64), torch.arange(30) % 9
    found = evaluate_labelled_set(descriptors, labels, at=(2, 100))
    orders = labelled_orders((descriptors @ descriptors.t()).tolist(), labels.tolist())
    assert found.summary() == pytest.approx(labelled_figures(orders, (2, 100)), abs=1e-12)
    assert list(found.class_figures(labels)[0]) == ["queries", "mAP", "mAP@R", "R@2", "R@100"]


@pytest.mark.parametrize("pairs", [75, 20, 1])
def test_blocks_of_queries_and_columns_do_not_matter(monkeypatch, pairs):
    generator = torch.Generator().manual_seed(0)
    descriptors = torch.randint(-2, 3, (25, 4), generator=generator).float()
    labels = torch.arange(25) % 9
    whole = evaluate_labelled_set(descriptors, labels)
    monkeypatch.setattr("distap.retrieval.metrics.BLOCK_PAIRS", pairs)
    monkeypatch.setattr("distap.retrieval.ranks.CONVERTED_NUMBERS", 28)
    in_blocks = evaluate_labelled_set(descriptors, labels)
    assert torch.equal(in_blocks.average_precision, whole.average_precision)
    assert torch.equal(in_blocks.hits, whole.hits)
    assert in_blocks.summary() == pytest.approx(whole.summary(), abs=1e-12)
    own = torch.arange(25)[:, None]
    products = descriptors @ descriptors.t()
    assert torch.equal(products[own, in_blocks.neighbours], products[own, whole.neighbours])


def test_a_memory_map_of_float16_is_read_as_it_is(tmp_path, monkeypatch):
    generator = torch.Generator().manual_seed(2)
    descriptors = normalize(torch.randn(300, 8, generator=generator)).half()
    np.save(tmp_path / "descriptors.npy", descriptors.numpy())
    mapped = np.load(tmp_path / "descriptors.npy", mmap_mode="r")
    labels = torch.arange(300) // 4
    expected = evaluate_labelled_set(descriptors.float(), labels)
    for resident in (2**30, 0):  # converted once, or by blocks
        monkeypatch.setattr("distap.retrieval.metrics.RESIDENT_BYTES", resident)
        result = evaluate_labelled_set(mapped, labels)
        assert torch.equal(result.first_positive, expected.first_positive)
        assert result.summary() == pytest.approx(expected.summary(), abs=1e-12)


def test_a_class_of_most_images_is_ranked_like_the_small_ones(monkeypatch):
    generator = torch.Generator().manual_seed(4)
    labels = torch.tensor([0] * 90 + [1] * 3 + [-1] * 5 + [2, 2])[torch.randperm(100, generator=generator)]
    descriptors = torch.randint(-1, 2, (100, 4), generator=generator).double()
    monkeypatch.setattr("distap.retrieval.metrics.BLOCK_PAIRS", 9000)
    result = evaluate_labelled_set(descriptors, labels)
    orders = labelled_orders(similarities(descriptors), labels.tolist())
    assert result.summary() == pytest.approx(labelled_figures(orders, AT), abs=1e-12)


@pytest.mark.parametrize("bounds", [3, 40])
def test_counting_by_rows_and_for_all_rows_together_agree(bounds):
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(-3, 4, (7, 500), generator=generator).float()
    wanted = torch.randint(-3, 4, (7, bounds), generator=generator).float()
    wanted[2, 1:] = torch.inf
    rows[3, :9] = -torch.inf
    expected = [
        [sum(x >= bound for x in row) for bound in own]
        for row, own in zip(rows.tolist(), wanted.tolist(), strict=True)
    ]
    assert count_above(rows, wanted).tolist() == expected
    assert count_above_in_columns(rows, wanted).tolist() == expected


def test_the_most_similar_images_of_a_wide_gallery_are_the_neighbours():
    descriptors = normalize(torch.randn(1500, 4, generator=torch.Generator().manual_seed(6), dtype=torch.float64))
    result = evaluate_labelled_set(descriptors, torch.arange(1500) // 2, neighbours=3)
    products = (descriptors @ descriptors.t()).fill_diagonal_(-2)
    assert torch.equal(result.neighbours, products.topk(3, dim=1).indices)


def test_a_collapsed_network_scores_no_more_than_chance():
    descriptors, labels = normalize(torch.ones(400, 16)), torch.arange(400) // 4
    figures = evaluate_labelled_set(descriptors, labels).summary()
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
    expected = {"mAP": 1, "mAP@R": 1, "R@1": 1, "R@5": 1, "R@10": 1, "mP@1": 1, "mP@5": 0.4, "mP@10": 0.2}
    assert figures == pytest.approx(expected, abs=1e-12)


def test_descriptors_that_are_not_finite_are_an_error():
    descriptors = torch.eye(4)
    descriptors[2, 1] = torch.nan
    for values in (descriptors, descriptors.numpy()):
        with pytest.raises(DistapError, match="1 of 4 descriptors are not finite"):
            evaluate_labelled_set(values, torch.tensor([0, 0, 1, 1]))


@pytest.mark.parametrize("labels", [torch.arange(4), torch.tensor([-1, -1, -1, 0])])
def test_a_set_without_any_positive_is_an_error(labels):
    with pytest.raises(DistapError, match="nothing to retrieve"):
        evaluate_labelled_set(torch.eye(4), labels)


@pytest.mark.parametrize("pairs", [2**26, 30, 1])
@pytest.mark.parametrize("is_headed", [False, True])
def test_queries_against_a_gallery_have_the_figures_of_sorting_it(monkeypatch, pairs, is_headed):
    generator = torch.Generator().manual_seed(1)
    queries, gallery = (torch.randint(-2, 3, (rows, 4), generator=generator).double() for rows in (20, 30))
    query_labels, gallery_labels = (torch.randint(0, 9, (rows,), generator=generator) for rows in (20, 30))
    query_labels[3], gallery_labels[gallery_labels == 5] = 11, 6  # queries without a positive
    head = torch.stack([torch.randperm(30, generator=generator)[:4] for _ in range(20)]) if is_headed else None
    orders = {}
    for row, (own, label) in enumerate(zip((queries @ gallery.t()).tolist(), query_labels.tolist(), strict=True)):
        positives = set((gallery_labels == label).nonzero().flatten().tolist())
        if positives:
            order = order_of(own, positives, set(), head[row].tolist() if is_headed else ())
            orders[row] = [place in positives for place in order]
    monkeypatch.setattr("distap.retrieval.metrics.BLOCK_PAIRS", pairs)
    for values in (gallery, gallery.numpy()):
        found = evaluate_queries(queries, values, query_labels, gallery_labels, head=head, at=(1, 7))
        assert found.summary() == pytest.approx(labelled_figures(orders, (1, 7)), abs=1e-12)
        assert found.is_query.nonzero().flatten().tolist() == list(orders) and len(orders) < 20
        similarities = queries @ gallery.t()
        if is_headed:
            assert torch.equal(found.neighbours[:, :4], head)
        else:
            nearest = similarities.gather(1, found.neighbours)
            assert torch.equal(nearest, similarities.sort(descending=True).values[:, :10])
    with pytest.raises(DistapError, match="no query has an image of its class in the gallery"):
        evaluate_queries(queries, gallery, query_labels + 20, gallery_labels)

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from retrieval_reference import figure_of, labelled_figures, labelled_orders, mean, order_of
from torch.nn.functional import normalize

from distap.errors import DistapError
from distap.retrieval.evaluate import evaluate_descriptors
from distap.retrieval.figures import LABELLED_FIGURES
from distap.retrieval.ranks import FEW_BOUNDS, MANY_BOUNDS, count_above
from distap.retrieval.truth import class_truth


def evaluated(descriptors, labels, neighbours=0, **settings):
    truth = class_truth(labels)
    return evaluate_descriptors(
        descriptors, descriptors, truth, LABELLED_FIGURES, neighbours, **settings
    )


def labelled_set(seed, images, classes, tied):
    """Descriptors and labels, some of no class; tied ones are small integers, whose products are
    exact.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(-1, classes, (images,), generator=generator)
    labels[0] = labels[1] = 0
    if tied:
        return torch.randint(-1, 2, (images, 3), generator=generator).double(), labels
    return normalize(torch.randn(images, 6, generator=generator, dtype=torch.float64)), labels


@settings(deadline=None, max_examples=80)
@given(
    st.integers(0, 10_000), st.integers(3, 40), st.integers(1, 8), st.booleans(), st.integers(0, 12)
)
def test_figures_equal_those_of_sorting_each_gallery_behind_its_head(
    seed, images, classes, tied, kept
):
    descriptors, labels = labelled_set(seed, images, classes, tied)
    generator = torch.Generator().manual_seed(seed)
    heads = [torch.randperm(images - 1, generator=generator)[:kept] for _ in range(images)]
    # not itself
    head = (
        torch.stack([rows + (rows >= own_row) for own_row, rows in enumerate(heads)])
        if kept
        else None
    )
    result = evaluated(descriptors, labels, 5, head=head)
    similarities = (descriptors @ descriptors.t()).tolist()
    orders = labelled_orders(similarities, labels.tolist(), head.tolist() if kept else None)
    for own_row, row in enumerate(result.neighbours.tolist()):
        assert own_row not in row and len(set(row)) == min(5, images - 1)
    assert head is None or torch.equal(
        result.neighbours[:, :kept], head[:, : result.neighbours.shape[1]]
    )
    assert result.summary() == pytest.approx(labelled_figures(orders, (1, 5, 10)), abs=1e-12)
    assert result.first_positive.nonzero().flatten().tolist() == sorted(orders)
    assert result.left_out == images - len(orders)
    for query, right in orders.items():
        for name in ("mAP", "mAP@R"):
            assert result.values[name][query].item() == pytest.approx(
                figure_of(name, right), abs=1e-12
            )
        assert result.first_positive[query].item() == right.index(True) + 1


@pytest.mark.parametrize("lowest", [-3, 4])
@pytest.mark.parametrize(
    ("bounds", "transposed"),
    [(3, False), (3, True), (FEW_BOUNDS + 1, True), (MANY_BOUNDS + 1, False)],
)
def test_negatives_are_counted_by_comparing_or_by_sorting_or_one_by_one(bounds, transposed, lowest):
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(-3, 4, (7, 500), generator=generator).float()
    rows[torch.rand(7, 500, generator=generator) < 0.02] = 9.0
    wanted = (
        torch.randint(lowest, lowest + 7, (7, bounds), generator=generator)
        .float()
        .sort(dim=1)
        .values
    )
    wanted[2, 1:] = torch.inf
    rows[3, :9] = -torch.inf
    expected = [
        [sum(x >= bound for x in row) for bound in own_row]
        for row, own_row in zip(rows.tolist(), wanted.tolist(), strict=True)
    ]
    inputs = rows.t().contiguous().t() if transposed else rows
    assert count_above(inputs, wanted, torch.empty(7 * 500)).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("images", [5, 37, 600])
def test_a_collapsed_network_ranks_positives_last_however_its_products_are_rounded(dtype, images):
    item = normalize(
        torch.randn(100, generator=torch.Generator().manual_seed(images), dtype=dtype), dim=0
    )
    descriptors = item.repeat(images, 1)
    labels = torch.arange(images) % (images // 2)
    # with a head, half of the tiles do not suffice
    for head in (None, torch.empty(images, 0, dtype=torch.int64)):
        evaluation = evaluated(descriptors, labels, head=head)
        of_class = labels.bincount()[labels].tolist()
        expected = [
            mean([k / (images - own_row + k) for k in range(1, own_row)]) for own_row in of_class
        ]
        assert evaluation.values["mAP"].tolist() == pytest.approx(expected, abs=1e-12)
    assert evaluated(descriptors, labels, ties="for").summary()["mAP"] == 1


@pytest.mark.parametrize("labels", [torch.arange(4), torch.tensor([-1, -1, -1, 0])])
def test_a_set_without_any_positive_is_an_error(labels):
    with pytest.raises(DistapError, match="none of the 4 images has another of its class"):
        class_truth(labels)
    with pytest.raises(
        DistapError, match="none of the 4 queries has an image of its class in the gallery"
    ):
        class_truth(labels, labels + 10)


@pytest.mark.parametrize("pairs", [2**26, 30, 1])
@pytest.mark.parametrize("is_headed", [False, True])
def test_queries_against_a_gallery_have_the_figures_of_sorting_it(monkeypatch, pairs, is_headed):
    generator = torch.Generator().manual_seed(1)
    queries, gallery = (
        torch.randint(-2, 3, (rows, 4), generator=generator).double() for rows in (20, 30)
    )
    query_labels, gallery_labels = (
        torch.randint(0, 9, (rows,), generator=generator) for rows in (20, 30)
    )
    # queries without a positive
    query_labels[3] = 11
    gallery_labels[gallery_labels == 5] = 6
    head = (
        torch.stack([torch.randperm(30, generator=generator)[:4] for _ in range(20)])
        if is_headed
        else None
    )
    orders = {}
    for row, (own_row, label) in enumerate(
        zip((queries @ gallery.t()).tolist(), query_labels.tolist(), strict=True)
    ):
        positives = set((gallery_labels == label).nonzero().flatten().tolist())
        if positives:
            order = order_of(own_row, positives, set(), head[row].tolist() if is_headed else ())
            orders[row] = [place in positives for place in order]
    monkeypatch.setattr("distap.retrieval.evaluate.BLOCK_PAIRS", pairs)
    truth = class_truth(query_labels, gallery_labels)
    protocol = ("mAP", "mAP@R", "R@1", "R@7", "mP@1", "mP@7")
    for values in (gallery, gallery.numpy()):
        evaluation = evaluate_descriptors(queries, values, truth, protocol, 10, head=head)
        assert evaluation.summary() == pytest.approx(labelled_figures(orders, (1, 7)), abs=1e-12)
        assert (
            evaluation.first_positive.nonzero().flatten().tolist() == list(orders)
            and len(orders) < 20
        )
        similarities = queries @ gallery.t()
        if is_headed:
            assert torch.equal(evaluation.neighbours[:, :4], head)
        else:
            nearest = similarities.gather(1, evaluation.neighbours)
            assert torch.equal(nearest, similarities.sort(descending=True).values[:, :10])

"""Tensors of images that reach a loss, and pairs of descriptors, against one pass over the whole
batch.
"""

import sys
from pathlib import Path

import pytest
import torch
from batches import small_images, small_network
from raising import raises
from ranks import on_ranks
from reference import listwise_loss
from small_trainings import recipe
from torch import nn
from torch.nn.functional import normalize, softplus

from distap import ListwiseLoss, MicroBatchSizes, Multistage, rank
from distap.errors import DistapError
from distap.ranking.losses.building import build_loss
from distap.trainer import Trainer
from distap.training.prepared import prepare
from distap.world import World

sys.path.append(str(Path(__file__).parents[2] / "docs/examples"))
from distillation import hinge, of_features, of_relations
from pairs import BetweenTowers

IMAGES = 21
drawn = torch.rand(2, IMAGES, 5, generator=torch.Generator().manual_seed(2))
EXTRA = {
    "teacher": normalize(drawn[0] - 0.5).double(),
    "trust": drawn[1, :, 0].double(),
    "weights": drawn[1, :, 1],
}


def by_trust(descriptors, labels):
    other_rows = ~torch.eye(IMAGES, dtype=torch.bool)
    pairs = [descriptors @ descriptors.t(), labels[:, None] == labels]
    return hinge.function(
        *(element[other_rows].view(IMAGES, -1) for element in pairs), EXTRA["trust"]
    ).mean()


def siglip(rows, labels):
    images, texts = (normalize(item) for item in rows.chunk(2, dim=1))
    signs = 2.0 * (labels[:, None] == labels) - 1
    scale = torch.tensor(10.0).log().double().exp()
    return softplus(-signs * (scale * images @ texts.t() - 10)).mean()


def weighted(descriptors, labels):
    weights = EXTRA["weights"].double()
    return sum(
        listwise_loss(name, descriptors, labels, weights=weights) for name in ("ap_q", "smooth_ap")
    )


WEIGHTED = build_loss({"ap_q": {"weights": "given"}, "smooth_ap": {"weights": "given"}})
CASES = {
    "features": (of_features, ["teacher"], lambda d, y: of_features(d, y, EXTRA["teacher"])),
    "relations": (
        of_relations(),
        ["teacher"],
        lambda d, y: of_relations.function(d, y, EXTRA["teacher"]),
    ),
    "rows of queries": (hinge(), ["trust"], by_trust),
    "weights": (WEIGHTED, ["weights"], weighted),
    "pairs": (BetweenTowers(), [], siglip),
}


CASES["pairs"][0].learned.double()


def network_of(name):
    network = small_network()
    if name == "pairs":  # two descriptors of 3 dimensions in a row
        network.head = nn.Linear(8, 6).double()
    return network


def of_share(world, name, mode="sharded"):
    """Loss and summed gradients of a rank's share; the first rank has the most images."""
    loss, names, _ = CASES[name]
    share = (
        (slice(0, 14) if world.rank == 0 else slice(14, None)) if world.size > 1 else slice(None)
    )
    network = network_of(name)
    multistage = Multistage(network, loss, MicroBatchSizes(3, keep=1), reduce=True, mode=mode)
    images, labels = (element[share] for element in small_images(IMAGES))
    value = multistage(images, labels, extra={key: EXTRA[key][share] for key in names})
    value.backward()
    return value.item(), [parameter.grad for parameter in network.parameters()]


def on_two(world):
    actual = {
        name: [of_share(world, name, mode) for mode in ("sharded", "central")] for name in CASES
    }
    with pytest.raises(
        DistapError, match=r"rank 0 has labels \(b\), teacher \(b, 5\) of torch.float32; rank 1 has"
    ):
        extra = {"teacher": torch.ones(IMAGES, 5 + world.rank)}
        Multistage(small_network(), of_features)(*small_images(IMAGES), extra=extra)
    return actual


@pytest.fixture(scope="module")
def two_ranks():
    return on_ranks(2, on_two)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_tensors_of_images_and_pairs_give_the_gradient_of_the_whole_batch(request, name, ranks):
    network = network_of(name)
    (images, labels) = small_images(IMAGES)
    expected = CASES[name][2](normalize(network(images)), labels)
    expected.backward()
    of_ranks = (
        request.getfixturevalue("two_ranks") if ranks == 2 else [{name: [of_share(World(), name)]}]
    )
    for value, gradients in (item for element in of_ranks for item in element[name]):
        assert value == pytest.approx(expected.item(), rel=1e-9)
        for item, parameter in zip(gradients, network.parameters(), strict=True):
            torch.testing.assert_close(item, parameter.grad, rtol=1e-9, atol=1e-12)


def test_weights_of_queries_hold_with_a_memory_and_a_loss_of_descriptors_takes_none():
    labels = small_images(IMAGES)[1]
    first = normalize(torch.randn(9, 5, dtype=torch.float64))
    leaf, again = (
        small_network()(small_images(IMAGES)[0]).detach().requires_grad_() for _ in range(2)
    )
    module = ListwiseLoss("smooth_ap", memory=30, weights="given")
    rank(first, labels[:9], memory=module.memory)
    module(leaf, labels, extra={"weights": EXTRA["weights"]}).backward()
    listwise_loss(
        "smooth_ap", normalize(again), labels, first, labels[:9], EXTRA["weights"].double()
    ).backward()
    torch.testing.assert_close(leaf.grad, again.grad, rtol=1e-9, atol=1e-12)
    lone = torch.cat([torch.tensor([99]), labels[1:]])
    with raises("data.wrong_weights"):
        rank(leaf.detach(), lone, "ap_q", weights="given", extra={"weights": (lone == 99).float()})
    with raises("loss.takes_no_memory"):
        Multistage(small_network(), of_features, memory=9)
    with raises("loss.takes_no_memory"):
        rank(
            leaf.detach(),
            labels,
            of_features,
            memory=module.memory,
            extra={"teacher": EXTRA["teacher"]},
        )


@pytest.mark.parametrize(
    ("loss", "extra", "message"),
    [
        (of_features, {}, "the loss takes teacher of each image; extra has nothing"),
        (
            "ap_q",
            {"teacher": torch.ones(IMAGES)},
            r"teacher is \(21,\), but the loss takes no tensors of images",
        ),
        (
            of_features,
            {"teacher": torch.ones(3, 5)},
            r"teacher is \(3, 5\) for 21 images; a row for each",
        ),
        (
            of_features,
            {"teacher": torch.ones(IMAGES, 5, requires_grad=True)},
            "a gradient, which it would not get",
        ),
        (
            build_loss("ap_q", weights="given"),
            {"weights": -torch.ones(IMAGES)},
            "weights have to be finite",
        ),
    ],
)
def test_tensors_that_a_loss_cannot_take_are_named(loss, extra, message):
    images, labels = small_images(IMAGES)
    with pytest.raises(DistapError, match=message):
        Multistage(small_network(), loss)(images, labels, extra=extra)
    with pytest.raises(DistapError, match=message):
        rank(small_network()(images).detach(), labels, loss, extra=extra)


def test_losses_and_recipes_without_such_tensors_are_refused(tmp_path, training_shards):
    with pytest.raises(
        DistapError, match="inner takes trust of images, which virtual ones do not have"
    ):
        build_loss({"simix": {"inner": hinge(self_pair=False)}})
    with raises("loss.needs_extra", "loss"):
        Trainer(
            prepare(
                recipe(tmp_path, training_shards, loss={"name": "ap_q", "weights": "given"}),
                World(),
            ),
            World(),
        )

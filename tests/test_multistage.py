"""Multistage against one pass of autograd over the whole batch, in float64."""

from copy import deepcopy
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from batches import small_images, small_network
from definitions import built, defined, levels_of, virtual_images
from pytorch_metric_learning.losses import ContrastiveLoss
from raising import raises
from ranks import on_ranks
from reference import listwise_loss
from teachers import extra_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import distap
from benchmarks.measuring import collectives_of
from distap import MicroBatchSizes, Multistage
from distap.errors import DistapError
from distap.randomness import seed_for
from distap.ranking.loss import Loss
from distap.registry import REGISTRY
from distap.stages.step import DROPOUT

IMAGES = 21
NEAR = 1e-9
OTHER = "pytorch-metric-learning"
SEED = 5
EVERY = [*REGISTRY["loss"], OTHER]
CHOSEN = ["ap_q", "smooth_ap", "recall_at_k", "sup_con", "h_ap", "proxy_nca", OTHER]
CHOSEN += ["distil_features", "distil_relations", "compatible", "koleo"]


def loss_of(name):
    return ContrastiveLoss() if name == OTHER else built(name, 5, 5)


@cache
def full_batch(name="ap_q", make=small_network):
    """The loss and each parameter's gradient, the loss's own last, from one graph over all
    images."""
    network = make()
    images, labels = small_images(IMAGES)
    parameters = []
    virtual = ()
    if name != OTHER:
        parameters = [parameter.detach().requires_grad_() for parameter in loss_of(name).parameters]
    if name == "simix":
        virtual = virtual_images(labels, loss_of(name), lambda loss: one_process(network, loss, 4))
    descriptors = normalize(network(images))
    value = ContrastiveLoss()(descriptors, labels)
    if name != OTHER:
        value = defined(name, descriptors, levels_of(labels), parameters, virtual)
    value.backward()
    return value.item(), [parameter.grad for parameter in (*network.parameters(), *parameters)]


def one_process(network, loss, size, **options):
    """The loss and Multistage, of one process."""
    images, labels = small_images(IMAGES)
    torch.manual_seed(SEED)  # of simix
    multistage = Multistage(network, loss, size, **options)
    return multistage(images, levels_of(labels), extra=extra_of_images(loss)), multistage


def extra_of_images(loss, share=slice(None)):
    """What the loss takes of a share of the images next to their labels."""
    if not isinstance(loss, Loss):
        return None
    extra = extra_of(loss, torch.empty(IMAGES, 5, dtype=torch.float64))
    return {name: rows[share] for name, rows in extra.items()}


def gradients_of(network):
    gradients = [parameter.grad for parameter in network.parameters()]
    return [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in gradients]


def assert_near(actual, expected):
    for item, other in zip(actual, expected, strict=True):
        assert (item - other).abs().max() <= NEAR * other.abs().max() + 1e-15


def share_of(rank, size):
    """Uneven shares, each of consecutive images: the first rank has the most."""
    stops = [IMAGES - (size - 1 - index) * (IMAGES // size - 1) for index in range(size)]
    return slice(stops[rank - 1] if rank else 0, stops[rank])


def wrapped(wrapper, loss, sizes, **options):
    """A network, Multistage around it, and what to call."""
    network = small_network()
    if wrapper == "fsdp2":
        fully_shard(network.block)
        fully_shard(network)
    inner = DistributedDataParallel(network) if wrapper == "ddp inside" else network
    multistage = Multistage(inner, loss, sizes, reduce=wrapper == "summed here", **options)
    return (
        network,
        multistage,
        DistributedDataParallel(multistage) if wrapper == "ddp around" else multistage,
    )


def one_case(world, wrapper, name, mode):
    """Loss, gradients and, of losses in CHOSEN, large collectives of a batch on this rank's
    share."""
    passes = 2 if mode == "accumulated" else 1
    network, multistage, outer = wrapped(
        wrapper, loss_of(name), 4, mode="sharded" if passes == 2 else mode
    )
    # simix draws numbers for pairs in the order of the batch, which such shares leave as it is.
    share = (
        slice(world.rank, None, world.size) if name == "simix" else share_of(world.rank, world.size)
    )
    images, labels = (tensor[share] for tensor in small_images(IMAGES))
    values = []
    torch.manual_seed(SEED)

    def backward():
        extra = extra_of_images(multistage.loss, share)
        values.append(outer(images, levels_of(labels), extra=extra))
        (3 * values[-1]).backward()

    if passes == 2:
        with multistage.no_sync():
            backward()
    collectives = collectives_of(backward) if name in CHOSEN else backward()
    gradients = gradients_of(network) + [parameter.grad for parameter in multistage.loss.parameters]
    if wrapper == "not wrapped":
        gradients = [world.sum(gradient) / world.size for gradient in gradients]
    return values[0].item(), [gradient.detach() / 3 / passes for gradient in gradients], collectives


WRAPPERS = ["ddp inside", "ddp around", "fsdp2", "summed here", "not wrapped"]
CASES = [(wrapper, loss, "sharded") for wrapper in WRAPPERS for loss in CHOSEN]
CASES += [(wrapper, "proxy_nca", "central") for wrapper in WRAPPERS]
CASES += [
    (wrapper, loss, "accumulated")
    for wrapper in WRAPPERS
    if wrapper != "ddp around"
    for loss in CHOSEN[::5]
]
CASES += [("ddp inside", loss, "sharded") for loss in EVERY if loss not in CHOSEN]


def all_cases(world):
    return {case: one_case(world, *case) for case in CASES}


@pytest.fixture(scope="module")
def on_some_ranks():
    return on_ranks(3, all_cases)


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_ranks_get_the_gradient_of_all_their_images(on_some_ranks, case):
    expected, gradients = full_batch(case[1])
    for rank in on_some_ranks:
        value, actual, _ = rank[case]
        assert value == pytest.approx(expected, rel=NEAR)
        assert_near(actual, gradients)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(
    "size", [1, 4, 100, MicroBatchSizes(3, keep=2), MicroBatchSizes(3, describe=8)], ids=str
)
def test_the_gradient_is_that_of_one_pass_over_the_batch(name, size):
    network = small_network()
    value, multistage = one_process(network, loss_of(name), size)
    (3 * value).backward()
    expected, gradients = full_batch(name)
    assert value.item() == pytest.approx(expected, rel=NEAR)
    actual_gradients = gradients_of(network) + [
        parameter.grad for parameter in multistage.loss.parameters
    ]
    assert_near(actual_gradients, [3 * gradient for gradient in gradients])


@pytest.mark.parametrize("case", [case for case in CASES if case[1] in CHOSEN], ids=str)
def test_a_backward_pass_reduces_the_gradients_once(on_some_ranks, case):
    network = 8 * sum(parameter.numel() for parameter in small_network().parameters())
    for _, _, collectives in (rank[case] for rank in on_some_ranks):
        # gloo reduces and scatters by an all_reduce; gradients of descriptors, counts and drift
        # take some bytes too.
        (reduced,) = (call.bytes for call in collectives if call.name == "gloo:all_reduce")
        assert reduced - (0 if case[0] == "not wrapped" else network) in range(network // 2)


def test_dropout_draws_the_same_in_both_passes():
    network = small_network(dropout=0.3, drop_path=0.2)
    images, labels = small_images(IMAGES)
    torch.manual_seed(5)
    value = Multistage(network, "ap_q", 4)(images, labels)
    value.backward()
    torch.manual_seed(5)
    seed = int(torch.randint(2**62, ()))
    again = small_network(dropout=0.3, drop_path=0.2)
    passes = []
    for start in range(0, IMAGES, 4):
        torch.manual_seed(seed_for(DROPOUT, seed, 0, start))
        passes.append(again(images[start : start + 4]))
    expected = listwise_loss("ap_q", torch.cat(passes), labels)
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), rel=NEAR)
    assert_near(gradients_of(network), gradients_of(again))


class OfNesting(nn.Module):
    """Takes a dict of tensors."""

    def __init__(self):
        super().__init__()
        self.network = small_network()

    def forward(self, inputs):
        return self.network(inputs["image"][0] * inputs["mask"][:, None, None, None])


def micro_batches(images, labels):
    for start in range(0, len(images), 5):
        yield images[start : start + 5], labels[start : start + 5]


def test_a_batch_may_be_any_nesting_of_tensors_or_come_as_micro_batches():
    images, labels = small_images(IMAGES)
    _, gradients = full_batch()
    whole = {"image": (images,), "mask": torch.ones(IMAGES, dtype=images.dtype)}
    inputs = {
        "dict": (OfNesting(), (whole, labels)),
        "iterator": (small_network(), (micro_batches(images, labels),)),
        "iterator of images": (small_network(), (iter(images.split(6)), labels)),
        "loader": (
            small_network(),
            (DataLoader(list(zip(images, labels, strict=True)), batch_size=8),),
        ),
        "list": (small_network(), (list(images), labels)),
    }
    for network, arguments in inputs.values():
        Multistage(network, "ap_q", 4)(*arguments).backward()
        assert_near(gradients_of(network), gradients)


def test_images_of_different_sizes_are_described_one_by_one():
    images, labels = small_images(IMAGES)
    cut = [image[:, : 7 + number % 3, : 9 - number % 2] for number, image in enumerate(images)]
    network = small_network()
    again = small_network()
    Multistage(network, "ap_q", 4)(cut, labels).backward()
    listwise_loss("ap_q", torch.cat([again(image[None]) for image in cut]), labels).backward()
    assert_near(gradients_of(network), gradients_of(again))


class Hidden(nn.Module):
    """Returns the maps of a small network in some container."""

    def __init__(self, contain):
        super().__init__()
        self.network = small_network()
        self.contain = contain

    def forward(self, images):
        return self.contain(torch.relu(self.network.norm(self.network.stem(images))))


def tokens(maps):
    return {"hidden": maps.flatten(2).transpose(1, 2)}


@pytest.mark.parametrize(
    ("contain", "output", "pooling", "expected"),
    [
        (tokens, "hidden", "cls", lambda maps: maps[..., 0, 0]),
        (lambda maps: (None, maps), 1, "mean", lambda maps: maps.mean((2, 3))),
        (
            lambda maps: SimpleNamespace(last=maps.mean(2)),
            "last",
            "mean",
            lambda maps: maps.mean((1, 2)),
        ),
        (lambda maps: maps, None, "max", lambda maps: maps.amax((2, 3))),
    ],
)
def test_a_field_and_a_pooling_make_descriptors_of_what_a_network_returns(
    contain, output, pooling, expected
):
    images, labels = small_images(IMAGES)
    network = Hidden(contain)
    again = Hidden(expected)
    value = Multistage(network, "ap_q", 4, output=output, pooling=pooling)(images, labels)
    value.backward()
    listwise_loss("ap_q", normalize(again(images)), labels).backward()
    assert_near(
        *(
            [item for item in gradients_of(element) if item is not None]
            for element in (network, again)
        )
    )


@pytest.mark.parametrize(
    ("output", "pooling", "code", "names"),
    [
        (
            None,
            None,
            "network.no_descriptors",
            ["3"],
        ),
        ("pooler_output", "cls", "network.no_descriptors", ["3", "pooler_output"]),
        ("hidden", "token", "recipe.value", ["pooling", "token", "cls", "cls_mean"]),
    ],
)
def test_a_field_or_pooling_that_a_network_does_not_have_is_named(output, pooling, code, names):
    with raises(code, *names):
        Multistage(Hidden(tokens), output=output, pooling=pooling)(*small_images(IMAGES))


class Shifted(nn.Module):
    """Two parameters for which autograd returns one gradient tensor, and one that repeats a
    number."""

    def __init__(self):
        super().__init__()
        self.network = small_network()
        self.first, self.second = (
            nn.Parameter(torch.full((5,), 0.1, dtype=torch.float64)) for _ in range(2)
        )
        self.third = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, images):
        return self.network(images) * self.third.sum() + (self.first + self.second)


def test_gradients_that_share_memory_are_summed_apart():
    _, gradients = full_batch(make=Shifted)
    network = Shifted()
    Multistage(network, "ap_q", 4)(*small_images(IMAGES)).backward()
    assert_near(gradients_of(network), gradients)


def odd_ranks(world):
    """Ranks that differ: one mixes images, in image sizes, in BatchNorm statistics, and one without
    images.
    """
    images, labels = (tensor[share_of(world.rank, world.size)] for tensor in small_images(IMAGES))
    mixing = nn.Sequential(small_network(), nn.Softmax(dim=0))
    with pytest.raises(DistapError, match="it mixes the images"):
        Multistage(mixing if world.rank == 1 else small_network(), "ap_q", 4)(images, labels)
    network = small_network()
    fully_shard(network)
    listed = [image[:, : 9 - 2 * world.rank * (number % 2)] for number, image in enumerate(images)]
    Multistage(network, "ap_q", 4)(listed, labels).backward()
    network = small_network()
    replicas = DistributedDataParallel(network)
    network.norm.running_mean += world.rank
    Multistage(replicas, "ap_q", 4)(images, labels).backward()
    try:
        Multistage(replicas, "ap_q", 4)(images[: 9 * world.rank], labels[: 9 * world.rank])
    except DistapError as error:
        return gradients_of(network), str(error)


def test_ranks_that_differ_neither_hang_nor_drift():
    _, gradients = full_batch()
    for answer, output in on_ranks(2, odd_ranks):
        assert_near(answer, gradients)
        assert output == "rank 0: no images were given"


def test_autocast_and_a_scaled_loss_reach_the_replay():
    images, labels = (
        tensor.float() if tensor.is_floating_point() else tensor for tensor in small_images(IMAGES)
    )
    gradients = []
    for keep in (0, 99):  # with every graph kept, nothing is replayed
        network = small_network().float()
        with torch.autocast("cpu", torch.bfloat16):
            value = Multistage(network, "ap_q", MicroBatchSizes(4, keep=keep))(images, labels)
        assert value.dtype == torch.float32
        (value * 1024).backward()
        gradients.append(gradients_of(network))
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    in_float = small_network().float()
    whole = small_network().float()
    with torch.autocast("cpu", torch.bfloat16):
        descriptors = torch.cat([whole(chunk) for chunk in images.split(4)])
    (1024 * listwise_loss("ap_q", normalize(descriptors.float()), labels)).backward()
    for actual, expected, other in zip(
        gradients[0], gradients_of(whole), gradients_of(in_float), strict=True
    ):
        assert other is None and (actual - expected).norm() < 1e-2 * expected.norm()


def test_what_would_spoil_the_gradient_is_refused():
    images, labels = small_images(IMAGES)
    with pytest.raises(
        DistapError, match=r"norm is a BatchNorm layer in training mode.*freeze_batchnorm=True"
    ):
        Multistage(small_network(frozen=False))(images, labels)
    with pytest.raises(DistapError, match="other lengths than 1"):
        Multistage(nn.Sequential(small_network(), Double()), normalise=False)(images, labels)
    with pytest.raises(DistapError, match="labels are missing"):
        Multistage(small_network())(images)
    for wrong, shape in ((labels[1:], r"\(20,\)"), (labels[0], r"\(\)")):
        with pytest.raises(DistapError, match=f"labels are {shape} for 21 images"):
            Multistage(small_network())(images, wrong)
    with pytest.raises(
        DistapError, match=r"microbatch: unknown key; .*; Multistage itself has micro_batch"
    ):
        Multistage(small_network(), microbatch=4)
    with pytest.raises(DistapError, match="images have 20, 21 rows"):
        Multistage(small_network())((images, labels[1:]), labels)
    with pytest.raises(DistapError, match="needs `classes`, the number of classes"):
        Multistage(small_network(), "proxy_nca")
    with pytest.raises(DistapError, match="no images were given"):
        Multistage(small_network())(images[:0], labels[:0])
    with pytest.raises(
        DistapError, match=r"samples are \(1,\) of torch.int64; a whole number for each of 21"
    ):
        Multistage(small_network())(images, labels, samples=[1])
    with pytest.raises(DistapError, match="ContrastiveLoss is a class; give an object"):
        Multistage(small_network(), ContrastiveLoss)
    with pytest.raises(DistapError, match="mixes images"):
        Multistage(nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False)).eval().double())(
            images, labels
        )
    with pytest.raises(DistapError, match="cannot be called weights"):
        distap.loss(lambda descriptors, labels, weights=1: descriptors)
    value = Multistage(small_network())(images, labels)
    value.backward()
    with pytest.raises(RuntimeError, match="sent back already"):
        value.backward()


class Double(nn.Module):
    def forward(self, descriptors):
        return 2 * descriptors


def test_batchnorm_can_be_frozen_and_keeps_its_statistics_and_mode():
    network = small_network(frozen=False)
    before = deepcopy(network.norm.state_dict())
    Multistage(network, "ap_q", 4, freeze_batchnorm=True)(*small_images(IMAGES)).backward()
    _, gradients = full_batch()
    assert_near(gradients_of(network), gradients)
    assert network.norm.training
    assert all(
        torch.equal(before[name], value) for name, value in network.norm.state_dict().items()
    )

"""What `Multistage` cannot do exactly is refused by name, and layers with a state of their own are exact."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from batches import TensorBatch, small_images, small_network
from safetensors.torch import save
from steps import learning, step_with
from timm.layers.norm_act import BatchNormAct2d
from torch import nn
from torch.nn.functional import batch_norm, cross_entropy, normalize
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import distap
from distap import Multistage
from distap.errors import DistapError
from distap.ranking.losses.quantized import QuantizedAP
from distap.stages.exactness import mixes_images, normalises_by_batch
from distap.world import World

IMAGES = 22
PROXIES = nn.Parameter(torch.randn(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64))


def closes_over_proxies(descriptors, labels, proxies=PROXIES):
    return cross_entropy(8 * descriptors @ normalize(proxies[:, : descriptors.shape[1]]).t(), labels % 5)


class ProxyLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.proxies = nn.Parameter(PROXIES.detach().clone())

    def of_batch(self, descriptors, labels):
        return closes_over_proxies(descriptors, labels, self.proxies)

    forward = of_batch


class Network(nn.Module):
    """Flattened images through a layer, and what is done with its output."""

    def __init__(self, finish=lambda descriptors: descriptors, layer=None):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.finish = layer or nn.Linear(3 * 8 * 8, 6).double(), finish

    def forward(self, images):
        return self.finish(self.layer(images[..., :8, :8].flatten(1)))


class Centred(nn.Module):
    def forward(self, rows):
        return rows - rows.mean(0)


def images_and_labels():
    images, labels = small_images(IMAGES)
    return torch.nn.functional.interpolate(images.double() / 255, 8), labels


HIDDEN = [nn.Linear(6, 6).double()]
SMALL = nn.Linear(6, 6).double()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    ("network", "message"),
    [
        (Network(lambda d: d - d.mean(0)), "it mixes the images"),
        (Network(lambda d: batch_norm(d, None, None, training=True)), "it mixes the images"),
        (Network(lambda d: torch.softmax(d @ d.t(), 1) @ d), "it mixes the images"),
        (Network(layer=nn.Sequential(nn.Linear(192, 6).double(), Centred(), nn.Dropout(0.1))), "it mixes the images"),
        (Network(lambda d: HIDDEN[0](d)), r"a parameter \(6,?6?.*\) would get no gradient"),
        (Network(lambda d: checkpoint(SMALL, d, use_reentrant=True)), "pass use_reentrant=False"),
        (Network(lambda d: {"pooler_output": d}), "a dict with pooler_output for 3 images; descriptors"),
        (Network(lambda d: d[:, 0]), r"a tensor \(3,\) for 3 images"),
        (Network(lambda d: (d, d)), r"a tuple of a tensor \(3, 6\), a tensor \(3, 6\) for 3 images"),
        (Network(lambda d: None), "a NoneType for 3 images"),
    ],
)
def test_a_network_whose_gradient_would_be_wrong_is_refused_at_the_call(network, message):
    with pytest.raises(DistapError, match=message):
        Multistage(network, "ap_q", 4)(*images_and_labels())


@pytest.mark.parametrize(
    "given",
    [lambda i: i, lambda i: {"pixels": i}, lambda i: list(i), lambda i: iter([i[:4], i[4:]])],
    ids=["tensor", "dict", "list", "iterator"],
)
def test_images_that_require_a_gradient_are_refused(given):
    images, labels = images_and_labels()
    prompted = images + nn.Parameter(torch.zeros(1, 3, 1, 1, dtype=torch.float64))
    network = Network()
    network.forward = lambda one: Network.forward(network, one["pixels"] if isinstance(one, dict) else one)
    with pytest.raises(DistapError, match="require a gradient"):
        Multistage(network, "ap_q", 4)(given(prompted), labels)
    with torch.no_grad():
        Multistage(network, "ap_q", 4)(given(prompted), labels)


@pytest.mark.parametrize(
    "loss",
    [lambda d, y: closes_over_proxies(d, y), partial(closes_over_proxies, proxies=PROXIES), ProxyLoss().of_batch],
    ids=["lambda", "partial", "bound method"],
)
def test_a_loss_that_closes_over_a_parameter_is_refused(loss):
    with pytest.raises(DistapError, match=r"a parameter \(5, 6\) would get no gradient: the loss closes over it"):
        Multistage(Network(), loss, 4)(*images_and_labels())


def test_a_loss_without_a_graph_is_refused():
    with pytest.raises(DistapError, match="has no graph: is it detached"):
        Multistage(Network(), lambda descriptors, labels: descriptors.detach().norm(), 4)(*images_and_labels())


def test_proxies_train_with_a_frozen_network():
    images, labels = images_and_labels()
    network, again = Network().requires_grad_(False), ProxyLoss()
    multistage = Multistage(network, ProxyLoss(), 4)
    multistage(images, labels).backward()
    again(normalize(network(images)), labels).backward()
    (proxies,) = multistage.learned.parameters()
    torch.testing.assert_close(proxies.grad, again.proxies.grad, rtol=1e-9, atol=1e-12)


class Scaling(nn.Linear):
    """A layer that changes its buffer in each pass and computes with it."""

    def __init__(self):
        super().__init__(3 * 8 * 8, 6)
        self.register_buffer("scale", torch.full((6,), 1.0, dtype=torch.float64))

    def forward(self, rows):
        with torch.no_grad():
            self.scale = self.scale + torch.arange(6) / 6
        return super().forward(rows) * self.scale


@pytest.mark.filterwarnings("ignore:.torch.nn.utils.spectral_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("keep", [0, 1, 9])
@pytest.mark.parametrize(
    "layer",
    [
        Scaling,
        lambda: spectral_norm(nn.Linear(3 * 8 * 8, 6)),
        lambda: nn.utils.spectral_norm(nn.Linear(3 * 8 * 8, 6)),
    ],
    ids=["scaling", "spectral norm", "spectral norm by hooks"],
)
def test_a_layer_whose_state_moves_in_each_pass_has_the_gradient_of_one_pass_over_the_batch(layer, keep):
    """All images meet the weights of the first pass, in describe, in replay and in a graph that is kept."""
    images, labels = images_and_labels()
    network = Network(layer=layer().double()).train()
    again = deepcopy(network)
    multistage = Multistage(network, "smooth_ap", distap.MicroBatchSizes(4, keep))
    multistage(images, labels).backward()
    distap.ListwiseLoss("smooth_ap")(again(images), labels).backward()
    assert multistage.replay_drift == 0
    for (name, one), other in zip(network.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12, msg=name)
    for one, other in zip(network.buffers(), again.buffers(), strict=True):
        assert torch.equal(one, other)


def test_what_people_have_is_taken():
    images, labels = images_and_labels()
    expected = Multistage(Network(), {"ap_q": 1.0, "contrastive": 0.5}, 4)(images, labels)
    terms = [
        Multistage(Network(), name, 4)(images, labels.numpy()[::-1].copy()[::-1]) for name in ("ap_q", "contrastive")
    ]
    torch.testing.assert_close(expected, terms[0] + 0.5 * terms[1])
    torch.testing.assert_close(Multistage(Network(), "ap_q", 4)(images, labels.tolist()), terms[0])
    unit = normalize(Network()(images)).detach()
    torch.testing.assert_close(distap.rank(unit.numpy(), labels.numpy()).loss, distap.rank(unit, labels).loss)
    with pytest.raises(DistapError, match="labels: a list of 22 str makes no tensor of numbers; number them first"):
        Multistage(Network(), "ap_q", 4)(images, [f"class {label}" for label in labels.tolist()])


@pytest.mark.parametrize("size", [0, -1, 2.5, "auto", None, True])
def test_a_micro_batch_of_no_images_is_refused(size):
    with pytest.raises(DistapError, match=f"micro_batch: {size!r}.* a whole number"):
        Multistage(small_network(), micro_batch=size)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_multistage_gives_the_same_gradient():
    networks = Network(), Network()
    plain = Multistage(networks[0], "ap_q", 4)
    compiled = torch.compile(Multistage(networks[1], "ap_q", 4), backend="eager")
    for one in (plain, compiled):
        one(*images_and_labels()).backward()
    assert torch.equal(networks[0].layer.weight.grad, networks[1].layer.weight.grad)


def test_safetensors_saves_a_module_with_a_multistage_inside():
    for memory in (0, 30):
        module = nn.ModuleDict({"loss": Multistage(Network(), "ap_q", 4, memory=memory)})
        module["loss"](*images_and_labels()).backward()
        state = {name: value.clone() for name, value in module.state_dict().items()}
        assert save(state)
        again = nn.ModuleDict({"loss": Multistage(Network(), "ap_q", 4, memory=memory)})
        again.load_state_dict(state)
        assert len(again["loss"].memory) == min(memory, IMAGES)
        with torch.no_grad():
            assert not again["loss"](*images_and_labels()).requires_grad


class Merging(nn.Module):
    """An adapter that merges itself into its base in evaluation mode, as loralib's layers do."""

    def __init__(self):
        super().__init__()
        self.base, self.merged = nn.Linear(6, 6).double(), False

    def train(self, mode=True):
        self.merged |= not mode
        return super().train(mode)

    def forward(self, rows):
        return nn.functional.dropout(self.base(rows), 0.1, self.training)


def test_trying_a_network_out_leaves_its_layers_as_they_are():
    network = nn.Sequential(Network(), Merging()).train()
    Multistage(network, "ap_q", 4)(*images_and_labels()).backward()
    assert network[1].training and not network[1].merged


def test_sound_networks_are_not_refused():
    def with_a_leaf_of_its_own(descriptors):
        return descriptors + torch.zeros(1, dtype=torch.float64).requires_grad_()

    for finish in (with_a_leaf_of_its_own, lambda d: d + 0.01 * torch.randn_like(d), nn.Dropout(0.5)):
        Multistage(Network(finish).train(), "ap_q", 4)(*images_and_labels()).backward()


def test_an_image_that_is_not_finite_spoils_no_statistics():
    images, labels = images_and_labels()
    images[5] = torch.inf
    norm = nn.BatchNorm1d(6).double()
    network = Network(layer=nn.Sequential(nn.Linear(3 * 8 * 8, 6).double(), norm)).train()
    learner = learning(network, torch.optim.SGD(network.parameters(), lr=0.1), World())
    step = step_with(learner, QuantizedAP(), World(), 0, distap.MicroBatchSizes(4))
    assert step(TensorBatch(images, labels, World()), 0.1).not_finite == [4, 5, 6, 7]
    assert norm.running_mean.isfinite().all()


def test_timm_s_batchnorm_with_an_activation_inside_counts_as_one():
    network = nn.Sequential(nn.Conv2d(3, 4, 3), BatchNormAct2d(4), nn.Flatten())
    assert mixes_images(network.train()) == "1 normalises by the statistics of its micro-batch"
    assert normalises_by_batch(network) and mixes_images(network.eval()) is None

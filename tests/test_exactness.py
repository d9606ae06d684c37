"""What `Multistage` cannot do exactly is refused by name, and layers with a state of their own are
exact.
"""

from copy import deepcopy
from functools import partial

import pytest
import torch
from batches import TensorBatch, small_images, small_network
from definitions import built
from raising import raises
from safetensors.torch import save
from steps import learning, step_with
from timm.layers.norm_act import BatchNormAct2d
from torch import nn
from torch.func import functional_call
from torch.nn.functional import batch_norm, cross_entropy, normalize
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import distap
from distap import Multistage
from distap.errors import DistapError
from distap.ranking.losses.quantized import QuantizedAP
from distap.stages.exactness import normalises_by_batch, refuse_mixing, why_cut_matters
from distap.world import World

IMAGES = 22
PROXIES = nn.Parameter(
    torch.randn(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
)


def closes_over_proxies(descriptors, labels, proxies=PROXIES):
    return cross_entropy(
        8 * descriptors @ normalize(proxies[:, : descriptors.shape[1]]).t(), labels % 5
    )


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
        self.layer = layer or nn.Linear(3 * 8 * 8, 6).double()
        self.finish = finish

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
    ("network", "code", "names"),
    [
        (Network(lambda d: d - d.mean(0)), "network.mixes_images", []),
        (Network(lambda d: batch_norm(d, None, None, training=True)), "network.mixes_images", []),
        (Network(lambda d: torch.softmax(d @ d.t(), 1) @ d), "network.mixes_images", []),
        (
            Network(layer=nn.Sequential(nn.Linear(192, 6).double(), Centred(), nn.Dropout(0.1))),
            "network.mixes_images",
            [],
        ),
        (Network(lambda d: HIDDEN[0](d)), "network.unknown_parameter", ["6"]),
        (
            Network(lambda d: checkpoint(SMALL, d, use_reentrant=True)),
            "network.reentrant_checkpoints",
            ["use_reentrant"],
        ),
        (
            Network(lambda d: {"pooler_output": d}),
            "network.no_descriptors",
            ["pooler_output", "3"],
        ),
        (Network(lambda d: d[:, 0]), "network.no_descriptors", ["3"]),
        (
            Network(lambda d: (d, d)),
            "network.no_descriptors",
            ["3", "6"],
        ),
        (Network(lambda d: None), "network.no_descriptors", ["NoneType", "3"]),
    ],
)
def test_a_network_whose_gradient_would_be_wrong_is_refused_at_the_call(network, code, names):
    with raises(code, *names):
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
    network.forward = lambda tensor: Network.forward(
        network, tensor["pixels"] if isinstance(tensor, dict) else tensor
    )
    with raises("data.images_with_graph"):
        Multistage(network, "ap_q", 4)(given(prompted), labels)
    with torch.no_grad():
        Multistage(network, "ap_q", 4)(given(prompted), labels)


@pytest.mark.parametrize(
    "loss",
    [
        lambda d, y: closes_over_proxies(d, y),
        partial(closes_over_proxies, proxies=PROXIES),
        ProxyLoss().of_batch,
    ],
    ids=["lambda", "partial", "bound method"],
)
def test_a_loss_that_closes_over_a_parameter_is_refused(loss):
    with raises("network.unknown_parameter", "5", "6"):
        Multistage(Network(), loss, 4)(*images_and_labels())


def test_a_loss_without_a_graph_is_refused():
    with raises("loss.no_graph"):
        Multistage(Network(), lambda descriptors, labels: descriptors.detach().norm(), 4)(
            *images_and_labels()
        )


def test_proxies_train_with_a_frozen_network():
    images, labels = images_and_labels()
    network = Network().requires_grad_(False)
    again = ProxyLoss()
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
def test_a_layer_whose_state_moves_in_each_pass_has_the_gradient_of_one_pass_over_the_batch(
    layer, keep
):
    """All images meet the weights of the first pass, in describe, in replay and in a graph that is
    kept.
    """
    images, labels = images_and_labels()
    network = Network(layer=layer().double()).train()
    again = deepcopy(network)
    multistage = Multistage(network, "smooth_ap", distap.MicroBatchSizes(4, keep))
    multistage(images, labels).backward()
    distap.ListwiseLoss("smooth_ap")(again(images), labels).backward()
    assert multistage.replay_drift == 0
    for (name, parameter), other in zip(
        network.named_parameters(), again.parameters(), strict=True
    ):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-9, atol=1e-12, msg=name)
    for parameter, other in zip(network.buffers(), again.buffers(), strict=True):
        assert torch.equal(parameter, other)


def test_what_people_have_is_taken():
    images, labels = images_and_labels()
    expected = Multistage(Network(), {"ap_q": 1.0, "contrastive": 0.5}, 4)(images, labels)
    terms = [
        Multistage(Network(), name, 4)(images, labels.numpy()[::-1].copy()[::-1])
        for name in ("ap_q", "contrastive")
    ]
    torch.testing.assert_close(expected, terms[0] + 0.5 * terms[1])
    torch.testing.assert_close(Multistage(Network(), "ap_q", 4)(images, labels.tolist()), terms[0])
    unit = normalize(Network()(images)).detach()
    torch.testing.assert_close(
        distap.rank(unit.numpy(), labels.numpy()).loss, distap.rank(unit, labels).loss
    )
    with raises("data.not_numbers", "labels", "22"):
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
    for item in (plain, compiled):
        item(*images_and_labels()).backward()
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
        self.base = nn.Linear(6, 6).double()
        self.merged = False

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

    for finish in (
        with_a_leaf_of_its_own,
        lambda d: d + 0.01 * torch.randn_like(d),
        nn.Dropout(0.5),
    ):
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
    assert why_cut_matters(network.train()) == "1 normalises by the statistics of its micro-batch"
    assert normalises_by_batch(network) and why_cut_matters(network.eval()) is None


def gradients_of(network, loss):
    network.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in network.parameters()]


@pytest.mark.parametrize(
    "hook",
    [
        lambda gradient: 0.1 * gradient,
        lambda gradient: gradient.clamp(-1e-3, 1e-3),
        lambda gradient: gradient + 1,
    ],
    ids=["scale", "clamp", "add"],
)
def test_a_hook_on_a_parameter_acts_once_on_the_whole_gradient(hook):
    images, labels = images_and_labels()
    network = Network()
    calls = []
    network.layer.weight.register_hook(lambda gradient: calls.append(1))
    handle = network.layer.weight.register_hook(hook)
    multistage = Multistage(network, "ap_q", distap.MicroBatchSizes(5, keep=2))
    expected = gradients_of(network, distap.ListwiseLoss("ap_q")(network(images), labels))
    gradients = gradients_of(network, multistage(images, labels))
    assert calls == [1, 1]
    torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-15)
    handle.remove()
    assert not torch.equal(gradients_of(network, multistage(images, labels))[0], gradients[0])


def test_a_hook_after_accumulation_acts_once_on_the_whole_gradient():
    images, labels = images_and_labels()
    network = Network()
    calls = []
    network.layer.weight.register_post_accumulate_grad_hook(
        lambda parameter: calls.append(parameter.grad.clone())
    )
    gradients = gradients_of(network, Multistage(network, "ap_q", 5)(images, labels))
    (gradient,) = calls
    assert torch.equal(gradient, gradients[0])


def exchange_a_parameter(network):
    network.layer.weight = nn.Parameter(network.layer.weight.detach().clone())


def exchange_a_layer(network):
    network.layer = deepcopy(network.layer)


def freeze_a_parameter(network):
    network.layer.weight.requires_grad_(False)


@pytest.mark.parametrize("change", [exchange_a_parameter, exchange_a_layer, freeze_a_parameter])
def test_a_parameter_that_changes_its_place_before_backward_is_named(change):
    network = Network()
    loss = Multistage(network, "ap_q", 5)(*images_and_labels())
    change(network)
    with raises("network.exchanged_parameter", "layer.weight"):
        loss.backward()


def test_parameters_lent_by_functional_call_are_refused():
    multistage = Multistage(Network(), "ap_q", 5)
    lent = {
        name: parameter.detach().clone().requires_grad_()
        for name, parameter in multistage.named_parameters()
    }
    loss = functional_call(multistage, lent, images_and_labels())
    with raises("network.exchanged_parameter", "layer.weight", "functional_call"):
        loss.backward()


def test_weights_that_torch_caches_have_the_gradient_of_one_pass():
    images, labels = images_and_labels()
    network = Network(layer=weight_norm(nn.Linear(3 * 8 * 8, 6).double()))
    expected = gradients_of(network, distap.ListwiseLoss("ap_q")(network(images), labels))
    multistage = Multistage(network, "ap_q", 5)
    for _ in range(2):
        with parametrize.cached():
            gradients = gradients_of(network, multistage(images, labels))
        torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-15)


def test_a_graph_that_all_passes_share_is_refused():
    layer = nn.Linear(6, 6).double()
    shift = layer(torch.ones(6, dtype=torch.float64)).tanh()
    network = Network(lambda descriptors: descriptors + shift)
    network.outside = layer
    with raises("network.shared_graph"):
        Multistage(network, "ap_q", 5)(*images_and_labels())


def test_complex_descriptors_are_refused():
    with raises("network.no_descriptors", "torch.complex128"):
        Multistage(Network(lambda d: torch.complex(d, d)), "ap_q", 5)(*images_and_labels())


def test_another_default_device_is_refused():
    images, labels = images_and_labels()
    network = Network()
    with torch.device("meta"):
        for call in (
            lambda: Multistage(network, "ap_q", 5)(images, labels),
            lambda: distap.ListwiseLoss("ap_q")(network(images), labels),
            lambda: distap.rank(normalize(images.flatten(1)), labels),
            lambda: distap.train("emoji"),
            lambda: distap.load("run"),
        ):
            with raises("ranks.default_device"):
                call()


@pytest.mark.parametrize("ending", ["multistage", "listwise"])
def test_descriptors_of_length_zero_are_named(ending):
    images, labels = images_and_labels()
    images[3] = images[7] = 0
    network = Network(layer=nn.Linear(3 * 8 * 8, 6, bias=False).double())
    with raises("descriptors.not_normalised", "rows 3, 7", "0"):
        if ending == "multistage":
            Multistage(network, "ap_q", 5)(images, labels)
        else:
            distap.ListwiseLoss("ap_q")(network(images), labels)


def test_a_network_that_gives_one_descriptor_is_told_of_once(caplog):
    images, labels = images_and_labels()
    network = Network(lambda descriptors: 0 * descriptors + 1)
    for module, inputs in (
        (Multistage(network, "ap_q", 5), images),
        (distap.ListwiseLoss("ap_q"), network(images)),
    ):
        caplog.clear()
        for _ in range(2):
            module(inputs, labels)
        (record,) = caplog.records
        assert "given all images of this batch the same descriptor" in record.getMessage()


def test_an_expanded_buffer_of_a_layer_in_training_mode_is_taken():
    images, labels = images_and_labels()
    network = Network().train()
    expected = gradients_of(network, Multistage(network, "ap_q", 5)(images, labels))
    network.register_buffer("mean", torch.zeros(1).expand(8))
    assert torch.equal(
        gradients_of(network, Multistage(network, "ap_q", 5)(images, labels))[0], expected[0]
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("loss", ["ap_q", "smooth_ap", "proxy_nca"])
def test_a_compiled_function_around_a_listwise_loss_gives_the_same_gradient(loss):
    images, labels = images_and_labels()
    network = Network()
    listwise = distap.ListwiseLoss(built(loss, 5, 6))

    def function(images, labels):
        return listwise(network(images), labels)

    expected = gradients_of(network, function(images, labels))
    gradients = gradients_of(network, torch.compile(function, backend="eager")(images, labels))
    torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-15)


def test_a_descriptor_that_is_not_a_number_does_not_hide_that_a_network_draws():
    network = nn.Dropout(0.5)
    images = torch.ones(3, 8)
    images[2, 0] = torch.nan

    def describe(count, seed):
        torch.manual_seed(seed)
        return network(images[:count])

    refuse_mixing(describe, network, 3)
    with raises("network.mixes_images"):
        refuse_mixing(lambda count, seed: describe(count, 0) * count, network, 3)

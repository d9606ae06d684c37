"""Networks of which only rank 0 holds the whole, until each rank has its share."""

import pytest
import torch
from networks import noise
from ranks import on_ranks
from small_trainings import recipe
from torch import nn
from torch.distributed.tensor import DTensor

from distap.model.hollow import hollow_parameters
from distap.training.build import learner_of, network_of
from distap.training.filling import built_once, fill
from distap.world import World

MODELS = {
    "rotary": {"backbone": "vit_tiny_patch16_dinov3_qkvb"},  # frequencies in no file
    "resized": {"backbone": "test_vit_relpos", "projection": 5},  # tries two sizes
    # masks on the device of its parameters, in no file
    "windows": {
        "backbone": "swin_tiny_patch4_window7_224",
        "arguments": {"embed_dim": 16, "depths": [2, 2], "num_heads": [1, 2]},
    },
    "convolutions": {"backbone": "test_resnet"},  # channels last, statistics
    "lora": {"backbone": "test_vit", "adapter": {"rank": 2}, "projection": 4},
}
SIZE = 64


def asked(model, **changes):
    data = {"train": "none", "image_size": SIZE}
    return recipe("run", ("none",), model=model | {"weights": "random"}, data=data, **changes)


def state(network):
    """Parameters and buffers in full."""
    tensors = [*network.named_parameters(), *network.named_buffers()]
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in tensors
    }


def started(world):
    """For each model: whether a rank held values before its engine did, and all tensors after."""
    answers = {}
    for name, model in MODELS.items():
        for engine in ("fsdp", "ddp"):
            chosen = asked(model, engine=engine)
            network = network_of(chosen, world, whole=engine == "ddp")
            held = not next(network.parameters()).is_meta
            learner = learner_of(chosen, network, world)
            answers[name, engine] = held, state(learner.network)
            with torch.no_grad(), learner.replica.describing():
                answers[name, engine] += (network.eval()(noise(2, SIZE)),)
    return answers


def test_only_rank_0_builds_a_network_and_all_ranks_train_the_same():
    alone = started(World())
    for rank, answers in enumerate(on_ranks(3, started)):
        for case, (held, tensors, descriptors) in answers.items():
            assert held is (rank == 0 or case[1] == "ddp")
            _, expected, described = alone[case[0], "ddp"]
            assert tensors.keys() == expected.keys()
            for name, tensor in tensors.items():
                assert torch.equal(tensor.flatten(), expected[name].flatten()), (case, name)
            torch.testing.assert_close(descriptors, described)


class Computing(nn.Module):
    """A network that looks at a parameter while it is built."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.scale = self.weight.abs().max().item()


class Sharing(nn.Module):
    """A network of which two modules have one parameter."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)
        self.second.weight = self.first.weight


class Varying(nn.Module):
    """A network that has another shape without values."""

    def __init__(self):
        super().__init__()
        probe = nn.Linear(1, 1)
        self.weight = nn.Parameter(torch.zeros(2 if probe.weight.is_meta else 3))


def filled(world):
    networks = []
    for kind in (Computing, Sharing, Varying):
        torch.manual_seed(world.rank)
        network = built_once(kind, world)
        is_hollow = any(parameter.is_meta for parameter in network.parameters())
        fill(network, world)
        networks.append((is_hollow, state(network), len(list(network.parameters()))))
    return networks


def test_a_network_that_needs_values_or_shares_them_is_built_by_every_rank():
    first, *further = on_ranks(2, filled)
    for another in further:
        for (_, expected, count), (is_hollow, tensors, same_count) in zip(
            first, another, strict=True
        ):
            assert not is_hollow and count == same_count
            assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("fails", [False, True])
def test_modules_that_are_built_later_have_values(fails):
    class BrokenError(Exception):
        pass

    try:
        with hollow_parameters():
            assert nn.Linear(2, 2).weight.is_meta
            if fails:
                raise BrokenError
    except BrokenError:
        pass
    assert not nn.Linear(2, 2).weight.is_meta

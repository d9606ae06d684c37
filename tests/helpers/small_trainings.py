"""A training of ten steps on a small network, and what it left in its run folder."""

import torch
from stores import found_checkpoint

from distap.config.reading import load_recipe
from distap.config.recipe import Recipe
from distap.telemetry.runlog import read_run_log
from distap.trainer import Trainer
from distap.training.prepared import prepare


def recipe(run, shards, **changes) -> Recipe:
    """A small training: 10 steps of 25 images on a network of 370,000 parameters."""
    settings = {
        "run": str(run),
        "steps": 10,
        "data": {"train": str(shards[0]), "image_size": 32, "workers": 0},
        "sampling": {"name": "random", "batch_size": 25},
        "model": {"backbone": "test_resnet", "weights": {"name": "random"}},
        "replay": {"size": 4},
        "optimizer": {"learning_rate": 1e-3},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            settings.setdefault(section, {})[name] = value
        else:
            settings[section] = value
    return load_recipe(settings, where="test")


# Plain gradient descent, for comparisons of loss curves: Adam divides by the size of the gradient,
# so that a gradient near zero moves its parameter as rounding has it, and rounding depends on the
# CPU.
DESCENT = {"name": "momentum", "momentum": 0.0, "learning_rate": 3e-3}


def train(world, *arguments, **changes):
    Trainer(prepare(recipe(*arguments, **changes), world), world).train()


def losses(run):
    return [entry["loss"] for entry in read_run_log(run) if "loss" in entry]


def parameters(run):
    return found_checkpoint(run).tensors("network.")


def are_same(item, other):
    """Whether two runs have the same parameters, bit for bit. Each is read once: it takes as long
    as a step.
    """
    ours = parameters(item)
    theirs = parameters(other)
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )

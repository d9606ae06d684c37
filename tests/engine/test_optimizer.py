from itertools import pairwise

import pytest
import torch
from torch import nn

from distap.engine.optimizer import TimmOptimizer, parameter_groups
from distap.engine.schedule import TimmSchedule
from distap.engine.settings import GroupSettings
from distap.errors import DistapError
from distap.registry import build_part


def rates(schedule, steps):
    return [schedule.factor(step, steps) for step in range(steps + 1)]


def test_by_default_the_rate_rises_over_the_warm_up_and_falls_to_zero():
    found = rates(TimmSchedule(warmup=4), 12)
    assert found[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert found[12] == 0
    assert [a - b for a, b in pairwise(found[4:])] == pytest.approx([1 / 8] * 8)
    assert rates(TimmSchedule(), 5) == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0])
    assert rates(TimmSchedule(), 1)[0] == rates(TimmSchedule(warmup=3), 3)[2] == 1


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (TimmSchedule("constant"), [1, 1, 1, 1, 1, 1]),
        (TimmSchedule("constant", warmup=2), [0.5, 1, 1, 1, 1, 1]),
        (TimmSchedule("cosine"), [1, 0.904508, 0.654508, 0.345492, 0.095492, 0]),
        (TimmSchedule("step", every=2), [1, 1, 0.1, 0.1, 0.01, 0.01]),
        (TimmSchedule("step", warmup=1, every=2, decay=0.5), [1, 1, 1, 0.5, 0.5, 0.25]),
        (TimmSchedule("multistep", milestones=(2, 5)), [1, 0.1, 0.1, 0.1, 0.01, 0.01]),
    ],
)
def test_schedules_are_pure_functions_of_the_step(schedule, expected):
    assert rates(schedule, 5) == pytest.approx(expected, abs=1e-6)
    assert rates(schedule, 5)[::-1] == [schedule.factor(step, 5) for step in (5, 4, 3, 2, 1, 0)]


@pytest.mark.parametrize(
    ("kind", "name", "options", "message"),
    [
        ("schedule", "linear", {"every": 3}, "every is set, but the schedule linear does not use it"),
        ("schedule", "step", {}, "the schedule step needs every"),
        ("schedule", "multistep", {"milestones": [5, 2]}, "expected them in ascending order"),
        ("schedule", "cosine", {"warmup": -1}, "warmup: -1"),
        ("optimizer", "adam", {"momentum": 0.9}, "momentum is set, but the optimiser adam has no momentum"),
        ("optimizer", "adan", {}, "unknown; did you mean adam?"),
    ],
)
def test_options_that_make_no_sense_are_refused(kind, name, options, message):
    with pytest.raises(DistapError, match=message.replace("?", r"\?")):
        build_part(kind, name, **options)


def test_parts_learn_at_their_own_rates_and_vectors_do_not_decay():
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    parts = {"all": (network, GroupSettings(factor=0.5, weight_decay=0.1)), "none": (nn.Identity(), GroupSettings())}
    optimizer = TimmOptimizer("adamw").build(parameter_groups(parts))
    groups = {group["name"]: group for group in optimizer.param_groups}
    assert set(groups) == {"all", "all.vectors"}
    assert (groups["all"]["factor"], groups["all"]["weight_decay"], len(groups["all"]["params"])) == (0.5, 0.1, 1)
    assert (groups["all.vectors"]["weight_decay"], len(groups["all.vectors"]["params"])) == (0.0, 3)
    assert isinstance(optimizer, torch.optim.AdamW)


def test_adam_is_torchs_and_lamb_clips_nothing_itself():
    parameters = [{"params": [nn.Parameter(torch.ones(2))]}]
    ours, theirs = TimmOptimizer(betas=(0.8, 0.9)).build(parameters), torch.optim.Adam(parameters, betas=(0.8, 0.9))
    assert type(ours) is torch.optim.Adam
    assert ours.defaults | {"lr": 0} == theirs.defaults | {"lr": 0}
    assert TimmOptimizer("lamb").build(parameters).defaults["max_grad_norm"] is None


def test_sgd_without_momentum_is_without_nesterovs():
    parameters = [{"params": [nn.Parameter(torch.ones(2))]}]
    assert TimmOptimizer("sgd", momentum=0).build(parameters).defaults["nesterov"] is False

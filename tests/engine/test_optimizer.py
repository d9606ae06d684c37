from itertools import pairwise

import pytest
import torch
from torch import nn

from distap.engine.optimizer import GroupSettings, LinearDecay, build_optimizer


def test_the_rate_rises_over_the_warm_up_and_falls_to_zero():
    schedule = LinearDecay(1.0, warmup=4, steps=12)
    rates = [schedule.at(step) for step in range(13)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[12] == 0
    falls = [a - b for a, b in pairwise(rates[4:])]
    assert falls == pytest.approx([1 / 8] * 8)


def test_parts_learn_at_their_own_rates_and_vectors_do_not_decay():
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    parts = {"all": (network, GroupSettings(factor=0.5, weight_decay=0.1)), "none": (nn.Identity(), GroupSettings())}
    optimizer = build_optimizer("adamw", parts)
    groups = {group["name"]: group for group in optimizer.param_groups}
    assert set(groups) == {"all", "all.vectors"}
    assert (groups["all"]["factor"], groups["all"]["weight_decay"], len(groups["all"]["params"])) == (0.5, 0.1, 1)
    assert (groups["all.vectors"]["weight_decay"], len(groups["all.vectors"]["params"])) == (0.0, 3)
    assert isinstance(optimizer, torch.optim.AdamW)

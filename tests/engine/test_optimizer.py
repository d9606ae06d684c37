from fractions import Fraction

import pytest
import timm
import torch
from raising import raises
from ranks import on_ranks
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn
from torch.optim import lr_scheduler

from distap.config.sections import GroupSettings
from distap.errors import DistapError
from distap.ranking.row_shards import part_of_rank, sharded
from distap.registry import REGISTRY, build_part
from distap.training.optimizer import TimmOptimizer, parameter_groups
from distap.training.schedule import RateSchedule
from distap.world import World


def rates(schedule, steps, *epoch):
    return [schedule.factor(step, steps, *epoch) for step in range(steps)]


def of_torch(steps, warmup, build):
    """Rates of a whole run by torch: a linear warm-up, then the scheduler that `build` returns."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
    whole = build(optimizer)
    results = []
    if warmup:
        rising = lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / warmup)
        whole = lr_scheduler.SequentialLR(optimizer, [rising, whole], [warmup])
    for _ in range(steps):
        results += whole.get_last_lr()
        optimizer.step()
        whole.step()
    return results


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (
            RateSchedule("multistep", warmup=5, milestones=(10, 25), decay=0.3),
            of_torch(40, 5, lambda o: lr_scheduler.MultiStepLR(o, [10, 25], 0.3)),
        ),
        (
            RateSchedule("constant", warmup=4),
            of_torch(40, 4, lambda o: lr_scheduler.ConstantLR(o, 1.0)),
        ),
        (
            RateSchedule("linear", warmup=4),
            of_torch(40, 4, lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, 36)),
        ),
        (RateSchedule("cosine"), of_torch(40, 0, lambda o: lr_scheduler.CosineAnnealingLR(o, 40))),
    ],
)
def test_schedules_are_those_of_timm_and_torch_over_a_whole_run(schedule, expected):
    assert rates(schedule, 40) == pytest.approx(expected, abs=1e-9)


def test_a_schedule_takes_numbers_as_they_are_written():
    # As floats, 0.1 is above a tenth and 0.3 is below three tenths.
    falls = RateSchedule("multistep", unit="epochs", milestones=(0.1, 0.3), decay=0.5)
    assert rates(falls, 5, Fraction(10)) == [1.0, 0.5, 0.5, 0.25, 0.25]


def test_a_schedule_in_epochs_changes_the_rate_where_an_epoch_ends():
    # ROADMAP's: times 0.3 after 30 and 70 epochs, here of 7 images in batches of 2, so of 3.5
    # steps.
    roadmap = RateSchedule("multistep", unit="epochs", milestones=(30, 70), decay=0.3)
    assert rates(roadmap, 350, Fraction(7, 2)) == pytest.approx(
        [1.0] * 105 + [0.3] * 140 + [0.09] * 105
    )
    whole = RateSchedule("cosine", unit="epochs", warmup=1)
    in_steps = RateSchedule("cosine", warmup=3.5)
    assert rates(whole, 50, Fraction(7, 2)) == pytest.approx(rates(in_steps, 50))


@pytest.mark.parametrize(
    ("kind", "name", "options", "message"),
    [
        (
            "schedule",
            "linear",
            {"decay": 3},
            "decay is set, but the schedule linear does not use it",
        ),
        ("schedule", "multistep", {"milestones": [5, 2]}, "expected them in ascending order"),
        ("schedule", "cosine", {"warmup": -1}, "warmup: -1"),
        ("schedule", "cosine", {"unit": "epoch"}, "unit: 'epoch': must be 'steps' or 'epochs'"),
        (
            "optimizer",
            "adam",
            {"momentum": 0.9},
            "momentum is set, but the optimiser adam has no momentum",
        ),
        ("optimizer", "adm", {}, "unknown; did you mean adam?"),
    ],
)
def test_options_that_make_no_sense_are_refused(kind, name, options, message):
    with pytest.raises(DistapError, match=message.replace("?", r"\?")):
        build_part(kind, name, **options)


def by_parameter(groups, network, factor="lr_scale"):
    """Rate and weight decay of each parameter by its name."""
    names = {parameter: name for name, parameter in network.named_parameters()}
    return {
        names[parameter]: (pytest.approx(group.get(factor, 1.0)), group["weight_decay"])
        for group in groups
        for parameter in group["params"]
    }


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_convnext"])
def test_layers_learn_at_rates_that_decay_and_biases_norms_and_tokens_keep_their_weight(name):
    network = timm.create_model(name, num_classes=0)
    modules = {"backbone": (network, GroupSettings(weight_decay=0.1))}
    keeps = getattr(network, "no_weight_decay", set)()
    same = {"no_weight_decay_list": keeps}
    ours = parameter_groups(modules)
    theirs = param_groups_weight_decay(network, 0.1, **same)
    assert by_parameter(ours, network, "factor") == by_parameter(theirs, network)
    ours = parameter_groups(modules, 0.6)
    theirs = param_groups_layer_decay(network, 0.1, layer_decay=0.6, **same)
    assert by_parameter(ours, network, "factor") == by_parameter(theirs, network)
    factors = by_parameter(ours, network, "factor")
    assert len({str(factor) for factor, _ in factors.values()}) > 4
    for parameter, tensor in network.named_parameters():
        assert factors[parameter][1] == (0.1 if tensor.ndim > 1 and parameter not in keeps else 0.0)


def test_parts_learn_at_their_own_rates_and_the_power_of_the_pooling_by_itself():
    power = nn.Module()
    power.register_parameter("power", nn.Parameter(torch.tensor(3.0)))
    modules = {
        "backbone": (
            nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
            GroupSettings(factor=0.5, weight_decay=0.1),
        ),
        # ten times the rate and no decay, as in Radenović's code
        "pooling": (power, GroupSettings(factor=10.0, weight_decay=0.1)),
        "head": (nn.Identity(), GroupSettings()),
    }
    optimizer = TimmOptimizer("adamw").build(parameter_groups(modules))
    actual = {
        (g["part"], g["factor"], g["weight_decay"], len(g["params"]))
        for g in optimizer.param_groups
    }
    assert actual == {
        ("backbone", 0.5, 0.1, 1),
        ("backbone", 0.5, 0.0, 3),
        ("pooling", 10.0, 0.0, 1),
    }
    assert isinstance(optimizer, torch.optim.AdamW)
    with raises("network.no_layers", "optimizer.layer_decay"):
        parameter_groups(modules, 0.5)


def test_adam_is_torchs_lamb_clips_nothing_itself_and_sgd_without_momentum_is_without_nesterovs():
    parameters = [{"params": [nn.Parameter(torch.ones(2))]}]
    ours = TimmOptimizer(betas=(0.8, 0.9)).build(parameters)
    theirs = torch.optim.Adam(parameters, betas=(0.8, 0.9))
    assert type(ours) is torch.optim.Adam
    assert ours.defaults | {"lr": 0} == theirs.defaults | {"lr": 0}
    assert TimmOptimizer("lamb").build(parameters).defaults["max_grad_norm"] is None
    assert TimmOptimizer("sgd", momentum=0).build(parameters).defaults["nesterov"] is False


def moved_by(name, world):
    """Return seven rows and three numbers after four steps, the rows shared out over ranks."""
    generator = torch.Generator().manual_seed(0)
    rows = part_of_rank(7, world)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def held(tensor):
        if world.size == 1:
            return tensor
        return sharded(tensor[rows.start : rows.stop].clone(), len(tensor), world)

    table = nn.Parameter(held(drawn(7, 4)))
    numbers = nn.Parameter(drawn(3))
    group = {"params": [table, numbers], "weight_decay": 0.1, "lr": 0.0}
    optimizer = TimmOptimizer(name).build([group])
    for group in optimizer.param_groups:
        group["lr"] = 0.05
    for _ in range(4):
        table.grad = held(drawn(7, 4))
        numbers.grad = drawn(3)
        optimizer.step()
    values = table.detach()
    return values if world.size == 1 else values.full_tensor(), numbers.detach()


def moved_by_all(world):
    return {name: moved_by(name, world) for name in REGISTRY["optimizer"]}


@pytest.fixture(scope="module")
def moved_on_three_ranks():
    return on_ranks(3, moved_by_all)


@pytest.mark.parametrize("name", REGISTRY["optimizer"])
def test_each_optimiser_moves_rows_that_ranks_share_out_as_whole_ones(moved_on_three_ranks, name):
    expected = moved_by(name, World())
    for of_rank in moved_on_three_ranks:
        for tensor, reference in zip(of_rank[name], expected, strict=True):
            torch.testing.assert_close(tensor, reference, rtol=1e-12, atol=1e-14)

"""The cost model: its counts against PyTorch's own, its formulas by hand, its bytes against real steps."""

import json
import re

import pytest
import torch
from networks import random_network
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measuring import graph_bytes
from benchmarks.plan.cards import machine_of
from benchmarks.plan.command import parse_gpus, parse_rate, plan_command
from benchmarks.plan.network_cost import Line, NetworkCost, changed, network_cost
from benchmarks.plan.planning import cost_plan
from benchmarks.plan.step_cost import Machine, NetworkLink, StepCost
from distap.config.reading import load_recipe
from distap.config.recipe import Recipe
from distap.errors import DistapError
from distap.stages.replica import autocast

SIZE = 64
NOTHING = Line(0, 0)
# 10 dimensions, a million parameters; 1 MB of graph an image.
NETWORK = NetworkCost(10, 10**6, 10**6, *[NOTHING] * 5, working=Line(0, 1e5), graph=Line(0, 1e6))
MACHINE = Machine(
    Line(1, 0.1), Line(1, 0.2), Line(2, 0.3), NOTHING, 0, 1e9, NetworkLink(1e6, 0.5), NetworkLink(1e5, 1), 4
)


def recipe(**changes) -> Recipe:
    settings = {
        "run": "nowhere",
        "steps": 100,
        "data": {"train": "nowhere", "image_size": SIZE},
        "sampling": {"name": "random", "batch_size": 32},
        "model": {"backbone": "resnet10t", "weights": {"name": "random"}},
        "replay": {"size": 4},
    }
    return load_recipe({**settings, **changes}, where="test")


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_arithmetic_and_activations_are_counted_as_pytorch_does_without_computing(precision):
    cost = network_cost(recipe(precision=precision))
    trained = random_network("resnet10t").train()
    images = torch.zeros(3, 3, SIZE, SIZE, dtype=torch.uint8)
    with autocast(precision), FlopCounterMode(display=False) as forward:
        assert cost.graph(3) == pytest.approx(3 * graph_bytes(trained, images))
    assert cost.convolutions(3) + cost.products(3) == pytest.approx(forward.get_total_flops())
    assert cost.parameters == sum(p.numel() for p in trained.parameters())


def test_seconds_are_the_sum_of_passes_and_waits():
    settings = recipe(replay={"size": 2, "keep": 1}, loss={"name": "smooth_ap"})
    seconds = StepCost(settings, 8, NETWORK, MACHINE, 2).seconds
    # 4 images a rank: two of them described, two described with a graph; the first two described again.
    assert seconds["describe"] == pytest.approx(1.2 + 1.4)
    assert seconds["replay"] == pytest.approx(1.4 + 2 * 2.6)
    # All-reduce of a million parameters over two ranks; two rounds of messages.
    assert seconds["reduce"] == pytest.approx(4 + 2 * 0.5)


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.parametrize("ranks", [1, 7])
def test_the_greatest_sizes_fit_and_greater_ones_do_not(engine, ranks):
    machine = MACHINE._replace(memory=60e6)
    settings = recipe(replay={"size": 2}, engine={"name": engine})

    def cost(**replay) -> StepCost:
        return StepCost(changed(settings, replay=replay), 20_000, NETWORK, machine, ranks)

    size, keep = cost().greatest_replay_size, cost().greatest_keep
    assert size > 2 and keep > 1
    for greater, fits in ((0, True), (1, False)):
        for changes in ({"size": size + greater}, {"keep": keep + greater}):
            assert (sum(cost(**changes).memory.values()) <= machine.memory) is fits


def test_more_gpus_are_faster_and_never_beyond_linear():
    plan = cost_plan(recipe(replay={"keep": "auto"}), 4096, [1, 8, 64], 50e9, 8, "h100")
    rates = [step["images_per_second"] for step in plan["steps"]]
    assert rates == sorted(rates)
    assert all(step["efficiency"] <= 1 and step["fits"] for step in plan["steps"])
    most = plan["steps"][1]["greatest_keep"]
    assert re.search(
        rf"on 8 GPUs set replay.size=\d+ replay.keep={most} data.workers=\d+; a host needs", plan["advice"]
    )


def test_a_plan_of_a_data_sheet_is_printed_and_says_what_it_rests_on(tmp_path, capfd):
    asked = recipe(steps=None, epochs=7, data={"train": str(tmp_path / "later"), "image_size": SIZE})
    config = tmp_path / "recipe.yaml"
    config.write_text(json.dumps(asked.model_dump(mode="json")))
    plan_command(config, gpus="8,1", batch=32, card="l4")
    said = capfd.readouterr().out
    assert "l4 by its data sheet, of which nothing was measured" in said and "resnet10t at 64 px" in said
    assert "on 8 GPUs set replay.size=4" in said and "hours are unknown" in said


def test_mistakes_are_named():
    with pytest.raises(DistapError, match="did you mean h100"):
        machine_of("h10", NETWORK, recipe(), 1e9, 8)
    with pytest.raises(DistapError, match="400Gb for bits"):
        parse_rate("fast")
    with pytest.raises(DistapError, match="such as 1,8,64"):
        parse_gpus("1;8", 32)
    with pytest.raises(DistapError, match="give fewer GPUs"):
        parse_gpus("64", 32)
    assert parse_gpus("64,8,1", 32) == [1, 8]  # 64 GPUs are more than there are images
    assert parse_rate("400Gb") == parse_rate("50 GB/s") == 50e9

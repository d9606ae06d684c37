"""The cost model: its counts against PyTorch's own, its formulas by hand, its bytes against real
steps.
"""

import json
import re
import sys
from dataclasses import replace

import pytest
import torch
from networks import random_network
from ranks import skip_if_fast
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measuring import graph_bytes
from benchmarks.plan.cards import machine_of
from benchmarks.plan.command import parse_gpus, parse_rate, plan_command
from benchmarks.plan.network_cost import Line, NetworkCost, changed, network_cost
from benchmarks.plan.planning import _advice, cost_plan, engine_memory
from benchmarks.plan.step_cost import Machine, NetworkLink, StepCost
from benchmarks.towers.fake_rank import BLOCKS, peak_of_a_rank
from distap.config.reading import load_recipe
from distap.config.recipe import Recipe
from distap.errors import DistapError
from distap.stages.replica import autocast
from distap.training.rank_memory import NetworkSize, RankMemory, described_peaks

SIZE = 64
NOTHING = Line(0, 0)
# 10 dimensions, a million parameters; 1 MB of graph an image.
NETWORK = NetworkCost(10, 10**6, 10**6, *[NOTHING] * 5, working=Line(0, 1e5), graph=Line(0, 1e6))
MACHINE = Machine(
    Line(1, 0.1),
    Line(1, 0.2),
    Line(2, 0.3),
    NOTHING,
    0,
    1e9,
    NetworkLink(1e6, 0.5),
    NetworkLink(1e5, 1),
    4,
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
    # 4 images a rank: two of them described, two described with a graph; the first two described
    # again.
    assert seconds["describe"] == pytest.approx(1.2 + 1.4)
    assert seconds["replay"] == pytest.approx(1.4 + 2 * 2.6)
    # All-reduce of a million parameters over two ranks; two rounds of messages.
    assert seconds["reduce"] == pytest.approx(4 + 2 * 0.5)


def test_larger_micro_batches_of_describe_need_working_memory_alone():
    def cost(**changes) -> StepCost:
        settings = recipe(replay={"size": 1}, loss={"name": "smooth_ap"}, **changes)
        network = NETWORK._replace(working=Line(0, 1e6))
        return StepCost(settings, 32, network, MACHINE, 2)

    same = cost()
    larger = cost(describe={"size": 16})
    assert (same.describe_size, larger.describe_size, larger.replay_size) == (1, 16, 1)
    # More than the graph of an image, and than the message of the gradients.
    assert larger.memory["working memory"] == 16e6
    assert sum(larger.memory.values()) > sum(same.memory.values())
    assert larger.seconds["replay"] == same.seconds["replay"]
    # one pass over the 16 images of a rank, in place of sixteen
    assert larger.seconds["describe"] == pytest.approx(MACHINE.forward(16))
    assert same.seconds["describe"] == pytest.approx(16 * MACHINE.forward(1))


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.parametrize("ranks", [1, 7])
def test_the_greatest_sizes_fit_and_greater_ones_do_not(engine, ranks):
    machine = MACHINE._replace(memory=60e6)
    settings = recipe(replay={"size": 2}, engine={"name": engine})

    def cost(**replay) -> StepCost:
        return StepCost(changed(settings, replay=replay), 20_000, NETWORK, machine, ranks)

    size = cost().greatest_replay_size
    keep = cost().greatest_keep
    assert size > 2 and keep > 1
    for greater, fits in ((0, True), (1, False)):
        for changes in ({"size": size + greater}, {"keep": keep + greater}):
            assert (sum(cost(**changes).memory.values()) <= machine.memory) is fits


# Engines, ranks, and the peak of a rank in bytes a parameter that `benchmarks towers` has measured
# for 64 equal blocks of 2,048 x 2,048 parameters.
BY_BLOCKS = {"name": "fsdp", "unit": "blocks"}
MEASURED = [
    ({"name": "ddp"}, 8, 17.04),
    ({"name": "fsdp", "unit": "network"}, 8, 13.51),
    ({"name": "fsdp", "unit": "network"}, 512, 12.03),
    (BY_BLOCKS, 8, 9.60),
    (BY_BLOCKS, 512, 8.12),
    (BY_BLOCKS | {"gather": "bf16"}, 8, 7.62),
    (BY_BLOCKS | {"gather": "bf16"}, 512, 6.14),
    (BY_BLOCKS | {"reshard": "pass"}, 8, 2.55),
    (BY_BLOCKS | {"reshard": "pass"}, 512, 0.340),
    (BY_BLOCKS | {"reshard": "pass", "gather": "bf16"}, 8, 2.54),
    (BY_BLOCKS | {"reshard": "pass", "gather": "bf16"}, 512, 0.207),
    (BY_BLOCKS | {"within": "host"}, 512, 9.61),
    (BY_BLOCKS | {"within": "host", "reshard": "pass"}, 512, 2.55),
]


def predicted(engine, ranks, width=2048):
    """The arithmetic's peak of a rank, in bytes a parameter of the measured tower."""
    numel = BLOCKS * width**2
    settings = recipe(engine=engine, precision="bf16", evaluation={"precision": "bf16"}).engine
    return RankMemory(settings, NetworkSize(numel, numel, width**2), ranks).peak / numel


@pytest.mark.parametrize(("engine", "ranks", "measured"), MEASURED)
def test_the_arithmetic_is_within_5_percent_of_the_measured_peaks(engine, ranks, measured):
    assert predicted(engine, ranks) == pytest.approx(measured, rel=0.05)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's account of a process")
@pytest.mark.parametrize(
    ("engine", "ranks"),
    [({"name": "ddp"}, 8), (BY_BLOCKS, 64), (BY_BLOCKS | {"reshard": "pass"}, 8)],
    ids=str,
)
def test_a_rank_needs_the_memory_that_a_rank_of_a_real_engine_takes(engine, ranks):
    skip_if_fast("processes")
    measured = peak_of_a_rank(engine, ranks, width=1024)
    # of a tower so small that the process's own memory counts
    assert predicted(engine, ranks, width=1024) == pytest.approx(measured, rel=0.1)


def test_a_frozen_tower_in_bf16_needs_two_bytes_a_parameter():
    engine = recipe(
        engine=BY_BLOCKS | {"gather": "bf16"}, precision="bf16", evaluation={"precision": "bf16"}
    ).engine
    size = NetworkSize(10**9, 10**6, 10**7, frozen_bytes=2)
    assert 2.2e9 < RankMemory(engine, size, 8).peak < 2.5e9
    assert RankMemory(recipe().engine, size, 1).peak == pytest.approx(2e9 + 14e6, rel=0.01)


def test_the_first_engine_that_a_tower_of_seven_billion_parameters_fits_is_named():
    tower = NETWORK._replace(
        parameters=6_716_000_000, trained=6_716_000_000, largest_block=168_000_000
    )
    card = MACHINE._replace(memory=72e9)  # usable of 80 GB
    settings = recipe(engine={"name": "ddp"}, precision="bf16", evaluation={"precision": "bf16"})
    step = StepCost(settings, 4096, tower, card, 8)
    assert step.greatest_replay_size == step.greatest_keep == 0
    fits = {name: fits for name, (_, fits) in engine_memory(step).items()}
    assert not fits["ddp"] and not fits["{name: fsdp, unit: network}"]
    assert fits["{name: fsdp, unit: blocks}"] and fits["{name: fsdp, reshard: pass, gather: bf16}"]
    assert "set engine: {name: fsdp, unit: blocks}" in _advice([step])
    lines = described_peaks(NetworkSize(10**9, 10**9, 10**7), 8, 10e9)
    assert [line.endswith("(the first that fits)") for line in lines] == [False] * 2 + [True, False]
    # On four cards of 40 GB nothing but passes fits.
    small = replace(step, machine=card._replace(memory=36e9), ranks=4)
    assert [name for name, (_, fits) in engine_memory(small).items() if fits] == [
        "{name: fsdp, reshard: pass}",
        "{name: fsdp, reshard: pass, gather: bf16}",
    ]


def test_copies_averages_and_evaluations_count_where_they_decide():
    size = NetworkSize(10**9, 10**9, 10**7)
    by_pass = recipe(engine={"name": "fsdp", "reshard": "pass"}).engine
    assert RankMemory(by_pass, size, 8).peak == pytest.approx(2.2e9, rel=0.1)
    assert RankMemory(by_pass, size, 8, in_bf16=True).peak == pytest.approx(4.2e9, rel=0.1)
    assert RankMemory(by_pass, size, 8, averages=True).peak == pytest.approx(2.7e9, rel=0.1)
    # shards of parameters and moments, and the whole network
    assert RankMemory(by_pass, size, 8, evaluates=True).peak == pytest.approx(5.5e9)


def test_proxies_count_by_the_classes_of_a_rank():
    def cost(ranks, **changes):
        loss = {"name": "arc_face", "classes": 10**6}
        settings = recipe(loss=loss, sampling={"name": "random", "batch_size": 64}, **changes)
        pairwise = MACHINE._replace(rank=Line(0, 1.0))
        return StepCost(settings, 64, NETWORK, pairwise, ranks)

    # 10 dimensions: proxies, gradient and two moments
    assert cost(1).memory["proxies"] == 4 * 4 * 10 * 10**6
    assert cost(8).memory["proxies"] == 4 * 4 * 10 * 10**6 / 8
    assert cost(8, rank={"shard_classes": False}).memory["proxies"] == 4 * 4 * 10 * 10**6
    assert cost(8).seconds["rank"] == pytest.approx(2 * 64 * 10**6 / 8, rel=0.01)


def test_passes_send_more_than_steps_and_hosts_less_between_them():
    def sent(**engine) -> dict[str, float]:
        settings = recipe(
            engine={"name": "fsdp"} | engine,
            replay={"size": 4},
            precision="bf16",
            evaluation={"precision": "bf16"},
        )
        network = NETWORK._replace(largest_block=10**5)
        return StepCost(settings, 256, network, MACHINE._replace(gpus_a_host=4), 16).sent

    by_step = sent(unit="blocks")
    assert sent(unit="blocks", gather="bf16")["weights"] == by_step["weights"] / 2
    # 16 images of a rank in 4 micro-batches, which gather weights thrice
    by_pass = sent(unit="blocks", reshard="pass")
    assert by_pass["weights"] == 12 * by_step["weights"]
    assert by_pass["gradients"] == 4 * by_step["gradients"]
    within = sent(unit="blocks", within="host")
    assert within["sums of hosts"] == pytest.approx(2 * 3 / 4 * 1e6)  # a quarter of 4 MB


def test_more_gpus_are_faster_and_never_beyond_linear():
    plan = cost_plan(recipe(replay={"keep": "auto"}), 4096, [1, 8, 64], 50e9, 8, "h100")
    rates = [step["images_per_second"] for step in plan["steps"]]
    assert rates == sorted(rates)
    assert all(step["efficiency"] <= 1 and step["fits"] for step in plan["steps"])
    limit = plan["steps"][1]["greatest_keep"]
    assert re.search(
        rf"on 8 GPUs set replay.size=\d+ replay.keep={limit} data.workers=\d+; a host needs",
        plan["advice"],
    )


def test_a_plan_of_a_data_sheet_is_printed_and_says_what_it_rests_on(tmp_path, capfd):
    asked = recipe(
        steps=None, epochs=7, data={"train": str(tmp_path / "later"), "image_size": SIZE}
    )
    config = tmp_path / "recipe.yaml"
    config.write_text(json.dumps(asked.model_dump(mode="json")))
    plan_command(config, gpus="8,1", batch=32, card="l4")
    output = capfd.readouterr().out
    assert (
        "l4 by its data sheet, of which nothing was measured" in output
        and "resnet10t at 64 px" in output
    )
    assert "on 8 GPUs set replay.size=4" in output and "hours are unknown" in output
    assert "- the first engine that fits: ddp on 1, ddp on 8" in output


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

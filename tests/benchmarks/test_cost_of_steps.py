"""The cost model: its counts against PyTorch's own, its formulas by hand, its bytes against real
steps.
"""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from networks import random_network
from ranks import skip_if_fast
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

# The state of a rank after a step, and what the next step takes, of a replica whose messages a fake
# group answers.
MEASURE = """
import json, sys, torch, torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from benchmarks.measuring import peak_bytes
from distap.config.reading import load_recipe
from distap.world import World

engine, ranks = sys.argv[1], int(sys.argv[2])
data = {"train": "nowhere", "image_size": 64}
sampling = {"name": "random", "batch_size": 8}
asked = {"run": "r", "steps": 1, "data": data, "sampling": sampling, "engine": engine}
settings = load_recipe(asked, where="test").engine
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
world, network = World(0, ranks, group=dist.group.WORLD), nn.Sequential()
images, learners = torch.randn(4, 1024), []

def build():
    # So large that libraries and buffers of other sizes do not count.
    network.extend(nn.Linear(1024, 1024, bias=False) for _ in range(64))
    learners.append(settings.build(network, lambda: torch.optim.AdamW(network.parameters()), world))

def step():
    replica = learners[0].replica
    with replica.describing(), torch.no_grad():
        replica.forward(images)
    with replica.replaying():
        for is_last in (False, True):
            descriptors = replica.forward(images)
            replica.backward(descriptors, torch.ones_like(descriptors), is_last)
        replica.reduce()

def state():
    build()
    step()
    learners[0].update(1e-3)

def resident():
    lines = open("/proc/self/status")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))

before = resident()
state()
lasting = resident() - before
print(json.dumps((lasting + peak_bytes(step, torch.device("cpu"))) / (4 * 64 * 1024**2)))
"""
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


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def measured(request):
    """An engine, its ranks, and the peak of a rank in a process of its own, in networks (float32
    parameters).
    """
    skip_if_fast("processes")
    peaks = {}
    # A mapping for each tensor, so that none lies where another's memory was freed and goes
    # uncounted.
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": str(64 * 1024),
        "MALLOC_MMAP_MAX_": "1000000",
    }
    for ranks in (8, 64):
        command = [sys.executable, "-c", MEASURE, request.param, str(ranks)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        peaks[ranks] = json.loads(done.stdout.splitlines()[-1])
    return request.param, peaks


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's account of a process")
def test_a_rank_needs_the_memory_that_a_rank_of_a_real_engine_takes(measured):
    engine, peaks = measured
    for ranks, peak in peaks.items():
        settings = recipe(engine={"name": engine}, loss={"name": "smooth_ap"})
        network = NETWORK._replace(
            dimensions=1, parameters=10**9, trained=10**9, graph=NOTHING, working=NOTHING
        )
        memory = StepCost(settings, ranks, network, MACHINE._replace(memory=1e12), ranks).memory
        assert sum(memory.values()) / 4e9 == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize(
    ("engine", "ranks", "networks"),
    [("ddp", 1, 4.0), ("ddp", 8, 5.0), ("fsdp", 1, 4.0), ("fsdp", 8, 3.42), ("fsdp", 64, 3.09)],
)
def test_the_memory_of_large_networks_is_that_of_the_table_of_measured_peaks(
    engine, ranks, networks
):
    vit_large = NETWORK._replace(
        parameters=303_301_632, trained=303_301_632, graph=NOTHING, working=NOTHING
    )
    memory = StepCost(
        recipe(engine={"name": engine}), 256, vit_large, MACHINE._replace(memory=1e12), ranks
    ).memory
    assert sum(memory.values()) / (4 * vit_large.parameters) == pytest.approx(networks, rel=0.02)


def test_a_tower_of_seven_billion_parameters_does_not_fit_eight_cards_of_80_gb():
    tower = NETWORK._replace(parameters=6_716_000_000, trained=6_716_000_000)
    for engine in ("ddp", "fsdp"):
        settings = recipe(engine={"name": engine})
        cost = StepCost(settings, 4096, tower, MACHINE._replace(memory=80e9), 8)
        assert sum(cost.memory.values()) > 88e9
        assert cost.greatest_replay_size == cost.greatest_keep == 0


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

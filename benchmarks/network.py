"""Two hosts on one machine: network namespaces, joined by a cable whose bandwidth is limited.

A step of two ranks, one on each, says how much of it they wait for each other, beside what `distap plan` predicts
from the cable's rate. Needs root, `ip` and `tc`, and a kernel with token buckets (sch_tbf).
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from distap.apps.plan.measuring import STAGES, Trial
from distap.apps.plan.network_cost import changed, network_cost
from distap.apps.plan.step_cost import NetworkLink, StepCost
from distap.cli.plan import parse_rate
from distap.config.reading import load_recipe
from distap.errors import DistapError
from distap.telemetry.terminal import text_table
from distap.world import joined_world

RESULT = "result: "  # what rank 0 prints its figures behind
PORT = 29500
TCP_SHARE = 0.95  # of a link's rate; the rest is headers
MESSAGE_SECONDS = 1e-4  # through two kernels' TCP
SMALLEST_BURST = 16_384  # bytes that pass a token bucket at once, or what a millisecond lets through


@dataclass(frozen=True)
class Setting:
    """What two ranks do.

    Args:
        config, overrides: the recipe.
        rate: of the cable, bytes a second in each direction.
        batch: B.
        keep: micro-batches of a rank that keep their graph.
        steps: to measure.
        rounds: of the measurement that the prediction rests on.
    """

    config: str
    overrides: list[str]
    rate: float
    batch: int
    keep: int
    steps: int
    rounds: int


@dataclass(frozen=True)
class Figures:
    """Seconds by stage of a step, measured and predicted, and bytes that a rank sends.

    Args:
        wire: seconds of the step in which bytes were under way, without those in which a rank waited for the other
            to come.
    """

    rate: float
    measured: dict[str, float]
    wire: float
    predicted: dict[str, float]
    sent: float


def measure(
    config: Path, overrides: Sequence[str], rates: Sequence[str], batch: int, keep: int, steps: int, rounds: int
) -> Iterator[Figures]:
    """The figures of each rate in turn; the arguments are those of Setting.

    Raises:
        DistapError: this machine has no such network, or a rank failed.
    """
    _refuse_without_tools()
    load_recipe(config, overrides)  # its mistakes are said once, not by every rank
    for rate in [parse_rate(text) for text in rates]:
        setting = Setting(str(config), list(overrides), rate, batch, keep, steps, rounds)
        with _two_hosts(rate) as hosts:
            yield _on(hosts, setting)


def measure_here(setting: Setting) -> Figures | None:
    """What one of the ranks does; None on rank 1."""
    recipe = load_recipe(Path(setting.config), setting.overrides)
    network = network_cost(recipe)
    cable = NetworkLink(TCP_SHARE * setting.rate, MESSAGE_SECONDS)
    with joined_world(recipe.timeout_seconds) as world:
        trial = Trial(recipe, setting.batch, network, world)
        # Of the network nothing is measured: the prediction has the cable's rate only.
        machine = trial.machine(setting.rounds, 1.0, 1)._replace(inside=cable, between=cable)
        step, batch = trial.step(setting.batch, setting.keep)
        slowest, waits = [], []
        for _ in range(setting.steps + 1):
            step.stopwatch.seconds.clear()
            world.barrier()
            step(batch, 0.0)
            own = {stage: step.stopwatch.seconds[stage] for stage in STAGES}
            slowest.append({stage: world.maximum(spent) for stage, spent in own.items()})
            # The rank that comes last to a collective waits for nothing but the wire.
            waits.append(sum(-world.maximum(-own[stage]) for stage in ("gather", "reduce")))
        measured = {stage: statistics.median(one[stage] for one in slowest[1:]) for stage in STAGES}
        predicted = StepCost(changed(trial.recipe, replay={"keep": setting.keep}), setting.batch, network, machine, 2)
        if world.rank:
            return None
        return Figures(
            setting.rate, measured, statistics.median(waits[1:]), predicted.seconds, sum(predicted.sent.values())
        )


def table(figures: Sequence[Figures]) -> Table:
    """The figures for the terminal."""
    headings = ("cable", "", *STAGES, "all", "waits", "wire")
    rows = []
    for row in figures:
        predicted = row.predicted["gather"] + row.predicted["reduce"]
        for what, seconds, wire in (("measured", row.measured, row.wire), ("predicted", row.predicted, predicted)):
            every = sum(seconds.values())
            cells = [*(seconds[stage] for stage in STAGES), every]
            shares = [(seconds["gather"] + seconds["reduce"]) / every, wire / every]
            rows.append(
                [f"{8 * row.rate / 1e6:,.0f} Mb/s", what, *(f"{c:.3f}" for c in cells), *(f"{s:.0%}" for s in shares)]
            )
    sent = figures[0].sent / 1e6 if figures else 0
    caption = (
        f"Each rank sends {sent:,.1f} MB a step. waits: share of the step that the slower rank spends in gather and "
        "reduce; wire: share in which bytes were under way, without waiting for the other rank. Predicted from "
        f"the network's own seconds, measured here, and {TCP_SHARE:.0%} of the cable's rate, without having tried it."
    )
    return text_table("seconds of a step, two hosts with a rank each", caption, headings, rows)


@dataclass(frozen=True)
class _Host:
    name: str
    card: str
    address: str


@contextmanager
def _two_hosts(rate: float) -> Iterator[tuple[_Host, _Host]]:
    """Network namespaces with a cable of `rate` bytes a second in each direction."""
    name = uuid.uuid4().hex[:6]
    hosts = tuple(_Host(f"distap-{name}-{end}", f"d{name}{end}", f"10.79.0.{n}") for n, end in ((1, "a"), (2, "b")))
    bits, burst = f"{8 * rate:.0f}bit", f"{max(SMALLEST_BURST, rate / 1000):.0f}"
    with ExitStack() as stack:
        for host in hosts:
            _run("ip", "netns", "add", host.name)
            stack.callback(subprocess.run, ["ip", "netns", "del", host.name], check=False)
        a, b = hosts
        ends = ["netns", a.name, "type", "veth", "peer", "name", b.card, "netns", b.name]
        _run("ip", "link", "add", a.card, *ends)
        for host in hosts:
            _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.card)
            for link in ("lo", host.card):
                _run("ip", "-n", host.name, "link", "set", link, "up")
            bucket = ["tbf", "rate", bits, "burst", burst, "latency", "200ms"]
            _run("tc", "-n", host.name, "qdisc", "add", "dev", host.card, "root", *bucket)
        yield a, b


def _on(hosts: tuple[_Host, _Host], setting: Setting) -> Figures:
    """Start a rank on each host, and take what the first one says."""
    processes = []
    for rank, host in enumerate(hosts):
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": host.card,
            "CUDA_VISIBLE_DEVICES": "",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # such as that these addresses have no names
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 2) // 2))),
        }
        command = ["ip", "netns", "exec", host.name, sys.executable, "-m", "benchmarks.network"]
        processes.append(
            subprocess.Popen(
                [*command, json.dumps(asdict(setting))],
                env=os.environ | environment,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    try:
        said = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    found = [line.removeprefix(RESULT) for line in said[0].splitlines() if line.startswith(RESULT)]
    if not found or any(process.returncode for process in processes):
        raise DistapError("the ranks on two hosts failed; see above")
    return Figures(**json.loads(found[0]))


def _refuse_without_tools() -> None:
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise DistapError(f"two hosts on one machine need {' and '.join(missing)}, of the package iproute2")
    if os.geteuid() != 0:
        raise DistapError("two hosts on one machine are network namespaces, which only root may make")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        problem = done.stderr.strip()
        hint = "; this kernel has no token buckets (sch_tbf)" if "qdisc kind is unknown" in problem else ""
        raise DistapError(f"{' '.join(command)}: {problem}{hint}")


if __name__ == "__main__":
    figures = measure_here(Setting(**json.loads(sys.argv[1])))
    if figures is not None:
        print(RESULT + json.dumps(asdict(figures)), flush=True)

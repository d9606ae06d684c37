"""Two hosts on one machine, as network namespaces that are joined by a cable of limited bandwidth.

A step of two ranks, one on each host, shows how long they wait for each other, next to the
prediction of `benchmarks plan` from the cable's rate. It needs root, `ip` and `tc`, and a kernel
with token buckets (sch_tbf).
"""

import os
import shutil
import statistics
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any, ClassVar, NamedTuple

from typer import Option

from benchmarks.harness import (
    Benchmark,
    FiguresTable,
    Report,
    worker_command,
    worker_pipes,
    worker_result,
)
from benchmarks.plan.command import parse_rate
from benchmarks.plan.measuring import STAGES, Trial
from benchmarks.plan.network_cost import changed, network_cost
from benchmarks.plan.step_cost import NetworkLink, StepCost
from distap.cli.options import OVERRIDES, RECIPE_ARGUMENT
from distap.config.reading import load_recipe
from distap.errors import DistapError
from distap.telemetry.terminal import track
from distap.world import World

PORT = 29500
TCP_SHARE = 0.95  # of a link's rate; the rest is headers
MESSAGE_SECONDS = 1e-4  # through two kernels' TCP
SMALLEST_BURST = 16_384  # bytes that pass a token bucket at once, or the bytes of a millisecond


class NetworkBenchmark(Benchmark):
    """Print the share of a step that two ranks on two hosts wait for each other, measured and as
    predicted.

    The hosts are network namespaces of this machine, and the cable between them is limited to each
    rate in turn; by default 50 Mb, 200 Mb and 1 Gb a second. Needs root, and the tools ip and tc.
    Trains on random pixels.
    """

    name: ClassVar[str] = "network"
    config: RECIPE_ARGUMENT
    overrides: OVERRIDES = None
    rate: Annotated[list[str], Option(help="Rate of the cable each way; repeat for several.")] = [
        "50Mb",
        "200Mb",
        "1Gb",
    ]
    batch: Annotated[int, Option(help="Images of a global batch.", min=4)] = 128
    keep: Annotated[int, Option(help="Micro-batches of a rank that keep their graph.", min=0)] = 0
    steps: Annotated[int, Option(help="Measured steps; the median counts.", min=1)] = 5
    rounds: Annotated[
        int, Option(help="Rounds of the measurement behind the prediction.", min=1)
    ] = 5

    def report(self) -> Report:
        """Measure each rate in turn.

        Raises:
            DistapError: this machine has no such network, or a rank failed.
        """
        _refuse_without_tools()
        load_recipe(self.config, self.overrides or [])  # reports mistakes once, not on every rank
        figures = []
        for rate in track(self.rate, "rates", len(self.rate)):
            with _two_hosts(parse_rate(rate)) as hosts:
                figures.append(_on_hosts(hosts, self.model_copy(update={"rate": [rate]})))
        rows = []
        for row in figures:
            predicted = row["predicted"]["gather"] + row["predicted"]["reduce"]
            for method, wire in (("measured", row["wire"]), ("predicted", predicted)):
                seconds = row[method]
                total = sum(seconds.values())
                waits = seconds["gather"] + seconds["reduce"]
                cells = [
                    f"{8 * row['rate'] / 1e6:,.0f} Mb/s",
                    method,
                    *(f"{seconds[stage]:.3f}" for stage in STAGES),
                ]
                rows.append([*cells, f"{total:.3f}", f"{waits / total:.0%}", f"{wire / total:.0%}"])
        caption = (
            f"Each rank sends {figures[0]['sent'] / 1e6:,.1f} MB a step. waits: share of the step"
            " that the slower rank spends in gather and reduce; wire: share in which bytes were"
            " under way and no rank waited for the other. The prediction rests on the network's"
            f" own seconds, measured here, and {TCP_SHARE:.0%} of the cable's rate."
        )
        title = "seconds of a step, two hosts with a rank each"
        return Report(
            figures,
            [FiguresTable(title, caption, ("cable", "", *STAGES, "all", "waits", "wire"), rows)],
        )

    def on_rank(self, world: World) -> dict[str, Any]:
        """Measure steps, and predict them without measuring the network between the hosts."""
        recipe = load_recipe(self.config, self.overrides or [])
        rate = parse_rate(self.rate[0])
        network = network_cost(recipe)
        cable = NetworkLink(TCP_SHARE * rate, MESSAGE_SECONDS)
        trial = Trial(recipe, self.batch, network, world)
        machine = trial.machine(self.rounds, rate, 1)._replace(inside=cable, between=cable)
        step, batch = trial.step(self.batch, self.keep)
        slowest = []
        waits = []
        for _ in range(self.steps + 1):
            step.stages.stopwatch.seconds.clear()
            world.barrier()
            step(batch, 0.0)
            stage_seconds = {stage: step.stages.stopwatch.seconds[stage] for stage in STAGES}
            slowest.append({stage: world.maximum(spent) for stage, spent in stage_seconds.items()})
            # The rank that comes last to a collective waits for nothing but the wire.
            waits.append(
                sum(-world.maximum(-stage_seconds[stage]) for stage in ("gather", "reduce"))
            )
        cost = StepCost(
            changed(trial.recipe, replay={"keep": self.keep}),
            self.batch,
            network,
            machine,
            world.size,
        )
        return {
            "rate": rate,
            "measured": {
                stage: statistics.median(seconds[stage] for seconds in slowest[1:])
                for stage in STAGES
            },
            "predicted": cost.seconds,
            "wire": statistics.median(waits[1:]),
            "sent": sum(cost.sent.values()),
        }


class _Host(NamedTuple):
    name: str
    card: str
    address: str


@contextmanager
def _two_hosts(rate: float) -> Iterator[list[_Host]]:
    """Join two network namespaces by a cable of `rate` bytes a second in each direction."""
    name = uuid.uuid4().hex[:6]
    hosts = [
        _Host(f"distap-{name}-{end}", f"d{name}{end}", f"10.79.0.{n}")
        for n, end in ((1, "a"), (2, "b"))
    ]
    bits = f"{8 * rate:.0f}bit"
    burst = f"{max(SMALLEST_BURST, rate / 1000):.0f}"
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
        yield hosts


def _on_hosts(hosts: list[_Host], benchmark: Benchmark) -> dict[str, Any]:
    """Start a rank on each host, and return the figures of the first."""
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
            # silences warnings, such as that these addresses have no names
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "OMP_NUM_THREADS": os.environ.get(
                "OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 2) // 2))
            ),
        }
        command = ["ip", "netns", "exec", host.name, *worker_command(benchmark)]
        processes.append(subprocess.Popen(command, env=os.environ | environment, **worker_pipes()))
    try:
        output = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    status = max(abs(process.returncode) for process in processes)
    result: dict[str, Any] = worker_result(benchmark, output[0], status)
    return result


def _refuse_without_tools() -> None:
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise DistapError(
            "package.missing",
            f"two hosts on one machine need {' and '.join(missing)}, of the package iproute2",
        )
    if os.geteuid() != 0:
        raise DistapError(
            "command.not_root",
            "two hosts on one machine are network namespaces, which only root may make",
        )


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        problem = done.stderr.strip()
        hint = (
            "; this kernel has no token buckets (sch_tbf)"
            if "qdisc kind is unknown" in problem
            else ""
        )
        raise DistapError("run.failed", f"{' '.join(command)}: {problem}{hint}")

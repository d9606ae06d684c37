"""What a user with a new machine runs first: can its GPUs train with distap, and how fast?"""

import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from typer import Option

from benchmarks import harness
from benchmarks.gpu import exactness_task, fed, gradient_of_step, tf32_allowed
from benchmarks.measuring import relative_difference
from benchmarks.step import StepBenchmark
from distap.errors import DistapError
from distap.world import DRIVER, World

EXACT = 1e-3  # of a gradient in float32 without TF32, relative to that in float64
SECONDS = {"exactness": 60, "messages": 60, "speed": 90}  # after which a check is ended
MESSAGE = 2**24  # numbers of an all-reduce
Capability = tuple[int, int]  # major and minor, such as (7, 5) of a T4


class SmokeBenchmark(harness.Benchmark):
    """Tell in two minutes what keeps this machine's GPUs from training, in a sentence each.

    It checks the driver, torch's CUDA, each card, NCCL, a step next to the CPU's, and the images a
    second of loader and network. The status is 1 if anything is wrong. `--device cpu` tries the
    same parts on the CPU.
    """

    name: ClassVar[str] = "smoke"
    device: Annotated[Literal["cuda", "cpu"], Option(help="What to try.")] = "cuda"
    backbone: harness.Backbone = "resnet50"
    image_size: harness.ImageSize = 224
    batch: Annotated[int, Option(help="Images of the step that is timed.", min=16)] = 512
    micro_batch: harness.MicroBatch = 64
    check: Annotated[str, Option(hidden=True)] = ""

    def run(self) -> None:
        started = time.perf_counter()
        wrong = list(self.problems())
        for sentence in wrong:
            print(f"wrong: {sentence}", flush=True)
        spent = time.perf_counter() - started
        faults = "1 thing is wrong" if len(wrong) == 1 else f"{len(wrong)} things are wrong"
        print(faults if wrong else "all is well", f"({spent:.0f} s)")
        raise SystemExit(1 if wrong else 0)

    def problems(self) -> list[str]:
        """Check everything that can be, print what works, and return a sentence for each fault."""
        if self.device == "cuda":
            wrong = gpu_problems()
            if wrong:
                return wrong
        ranks = torch.cuda.device_count() if self.device == "cuda" else 2
        backend = "NCCL" if self.device == "cuda" else "gloo"
        judges: dict[str, Callable[[Any], tuple[str, str]]] = {
            "exactness": judged_exactness,
            "messages": lambda figures: judged_messages(figures, ranks, backend),
            "speed": judged_speed,
        }
        wrong = []
        for check, judge in judges.items():
            if check == "messages" and ranks == 1:
                print("ok: one card needs no messages: NCCL is not tried", flush=True)
                continue
            of_check = self.model_copy(update={"check": check})
            count = ranks if check == "messages" else 1
            try:
                figures = harness.measure_in_time(
                    of_check, check, SECONDS[check], self.device, count
                )
            except DistapError as error:
                wrong.append(failure(check, backend, str(error)))
                continue
            sentence, problem = judge(figures)
            print(f"{'but' if problem else 'ok'}: {sentence}", flush=True)
            wrong += [problem] if problem else []
        return wrong

    def on_rank(self, world: World) -> harness.Row:
        checks = {"exactness": self._exactness, "messages": self._messages, "speed": self._speed}
        return checks[self.check](world)

    def _exactness(self, world: World) -> harness.Row:
        expected = gradient_of_step(exactness_task(World(), torch.float64, 32), "ap_q")
        with tf32_allowed(False):
            actual = gradient_of_step(exactness_task(world, torch.float32, 32), "ap_q")
        return {"difference": relative_difference(actual, expected)}

    def _messages(self, world: World) -> harness.Row:
        total = world.sum(torch.full((MESSAGE,), 1.0 + world.rank, device=world.device))
        harness.synchronise(world.device)
        started = time.perf_counter()
        world.sum(torch.ones(MESSAGE, device=world.device))
        harness.synchronise(world.device)
        seconds = time.perf_counter() - started
        expected = world.size * (world.size + 1) / 2
        sent = 2 * (world.size - 1) / world.size * 4 * MESSAGE
        return {"is_right": bool((total == expected).all()), "rate": sent / seconds}

    def _speed(self, world: World) -> harness.Row:
        is_gpu = world.device.type == "cuda"
        settings = StepBenchmark(
            backbone=self.backbone,
            image_size=self.image_size,
            batch=self.batch,
            micro_batch=self.micro_batch,
            ranks=1,
            bf16=is_gpu and torch.cuda.is_bf16_supported(including_emulation=False),
        )
        rows, _ = fed(settings, world, rounds=1)
        rates = {row["step"]: row["rate"] for row in rows}
        workers = max(len(os.sched_getaffinity(0)) - 1, 1)
        return {"network": rates["eager"], "loader": rates["reading alone"], "workers": workers}


def gpu_problems() -> list[str]:
    """Return why torch cannot use this machine's GPUs; print what it sees if it can."""
    version = re.search(r"\d+(\.\d+)+", DRIVER.read_text()) if DRIVER.is_file() else None
    has_driver = version is not None or shutil.which("nvidia-smi") is not None
    error = ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as caught:
        error = str(caught)
    count = torch.cuda.device_count() if not error else 0
    wrong = why_no_gpu(
        version[0] if version else "" if not has_driver else "of unknown version", error, count
    )
    if wrong:
        return wrong
    built_for = torch.cuda.get_arch_list()
    for number in range(count):
        name = torch.cuda.get_device_name(number)
        capability = torch.cuda.get_device_capability(number)
        if not is_supported(capability, built_for):
            wrong.append(
                f"card {number}, {name}, has compute capability {capability[0]}.{capability[1]},"
                f" but torch {torch.__version__} is built for {', '.join(built_for)}: install an"
                " older torch, or take a newer card"
            )
        else:
            print(f"ok: card {number}: {name}", flush=True)
    return wrong


def why_no_gpu(
    driver: str, error: str, count: int, torch_cuda: str | None = torch.version.cuda
) -> list[str]:
    """Return a sentence for each reason why torch has no GPU.

    Args:
        driver: version of the NVIDIA driver; empty if there is none.
        error: of torch's start of CUDA; empty if it started.
        count: cards that torch sees.
        torch_cuda: CUDA for which torch is built.
    """
    wrong = []
    if not driver:
        wrong.append(
            "no NVIDIA driver is here: install one, or start the container with its GPUs (docker:"
            " --gpus all; Kubernetes: nvidia.com/gpu)"
        )
    if torch_cuda is None:
        wrong.append(
            f"torch {torch.__version__} is built without CUDA: install a build for CUDA"
            " (https://pytorch.org/get-started)"
        )
    if wrong:
        return wrong
    if "too old" in error or "insufficient" in error:
        return [
            f"driver {driver} is too old for CUDA {torch_cuda}, for which torch"
            f" {torch.__version__} is built: install a newer driver, or a torch for an older CUDA"
        ]
    if error:
        return [f"CUDA does not start with driver {driver}: {error.splitlines()[0]}"]
    if not count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        reason = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
        return [f"driver {driver} is here, but torch sees no card{reason}"]
    return []


def is_supported(capability: Capability, built_for: Sequence[str]) -> bool:
    """Return whether a build for such as sm_80 or compute_90 runs on a card.

    Code of a major version runs on cards of the same and a later minor one; compute_90 is compiled
    for any later card when it is loaded.
    """
    for name in built_for:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", name)
        if match is None:
            continue
        major, minor = int(match[2]), int(match[3])
        if match[1] == "sm" and major == capability[0] and minor <= capability[1]:
            return True
        if match[1] == "compute" and (major, minor) <= capability:
            return True
    return False


def failure(check: str, backend: str, error: str) -> str:
    """Return the sentence for a check that failed or took too long."""
    if check == "messages":
        return (
            f"{backend} cannot sum over the cards: {error}; NCCL_DEBUG=INFO says more, and"
            " NCCL_P2P_DISABLE=1 shows whether the links between the cards are at fault"
        )
    return f"{check} could not be measured: {error}"


def judged_exactness(figures: harness.Row) -> tuple[str, str]:
    """Return what was found, and what is wrong with it, if anything."""
    difference = figures["difference"]
    sentence = f"the gradient of a step is within {difference:.0e} of that in float64 on the CPU"
    if difference <= EXACT:
        return sentence, ""
    return sentence, (
        f"the gradient of a step is {difference:.0e} off, more than {EXACT:g}: the card computes"
        " wrongly, or an environment variable allows it to round (NVIDIA_TF32_OVERRIDE)"
    )


def judged_messages(figures: harness.Row, ranks: int, backend: str) -> tuple[str, str]:
    sentence = f"{backend} sums over {ranks} ranks at {figures['rate'] / 1e9:,.1f} GB/s of each"
    if figures["is_right"]:
        return sentence, ""
    return sentence, f"{backend} sums wrongly over {ranks} ranks: a link or a card is broken"


def judged_speed(figures: harness.Row) -> tuple[str, str]:
    sentence = (
        f"the network trains on {figures['network']:,.0f} images per second, and"
        f" {figures['workers']} workers read {figures['loader']:,.0f}"
    )
    if figures["loader"] >= figures["network"]:
        return sentence, ""
    needed = figures["workers"] * figures["network"] / figures["loader"]
    return sentence, (
        f"the loader is slower than the network: {figures['workers']} workers read"
        f" {figures['loader']:,.0f} images per second, and the network could train on"
        f" {figures['network']:,.0f}; it needs about {needed:.0f} cores for each card, or smaller"
        " images (distap data pack --side)"
    )

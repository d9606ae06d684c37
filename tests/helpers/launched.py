"""What ranks run in tests of faults: `launched.py BEHAVIOUR FOLDER TIMEOUT_SECONDS`, on gloo,
without a training.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

from distap.errors import FAILED, FINISHED, RESTART, DistapError
from distap.world import World, joined_world


def main(behaviour: str, folder: Path, timeout_seconds: float) -> int:
    attempt = len(list(folder.glob(f"{os.environ['RANK']}.*")))
    (folder / f"{os.environ['RANK']}.{attempt}").write_text(str(os.getpid()))
    if behaviour == "absent" and os.environ["RANK"] == "1":
        time.sleep(2 * timeout_seconds)
        return FAILED
    with joined_world(timeout_seconds) as world:
        if world.watchdog is not None:
            (folder / "store").write_text(world.watchdog.party.address)
        return BEHAVIOURS.get(behaviour, finish)(world, folder, attempt)


def exchange(world: World, step: int) -> None:
    world.note(f"gather of step {step}")
    world.gather_rows(torch.ones(1, 2), world.size)
    world.note(f"describe of step {step + 1}")


def go_on(world: World, folder: Path, attempt: int) -> int:
    """Train for ever."""
    for step in range(10**6):
        exchange(world, step)
        (folder / f"step-{world.rank}").write_text(str(step))
        time.sleep(0.02)
    return FINISHED


def finish(world: World, folder: Path, attempt: int) -> int:
    exchange(world, 0)
    return FINISHED


def mistake(world: World, folder: Path, attempt: int) -> int:
    if world.rank == 1:
        raise DistapError("data.missing", "no such data")
    return go_on(world, folder, attempt)


def stop_when_asked(world: World, folder: Path, attempt: int) -> int:
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    for step in range(10**6):
        exchange(world, step)
        (folder / f"step-{world.rank}").write_text(str(step))
        if not world.all_agree(not asked):
            (folder / f"stopped-{world.rank}").touch()
            return RESTART
        time.sleep(0.02)
    return FINISHED


def stuck(world: World, folder: Path, attempt: int) -> int:
    """Rank 1 does not come to a collective; nor does rank 2, which is busy, but would."""
    for step in range(10**6):
        if step == 3 and world.rank == 1:
            world.note("describe of step 3")
            time.sleep(600)
        exchange(world, step)
    return FINISHED


BEHAVIOURS = {
    function.__name__: function for function in (go_on, finish, mistake, stop_when_asked, stuck)
}


if __name__ == "__main__":
    status: int = FAILED
    try:
        status = main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
    except DistapError as error:
        print(f"error of rank {os.environ['RANK']}: {error}", file=sys.stderr)
        status = error.status
    sys.exit(status)

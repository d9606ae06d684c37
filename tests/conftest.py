import gc
import logging
import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from browser import Browser, chromium
from hosts import Hosts, two_hosts
from hypothesis import settings
from images import write_images
from servers import s3_server

from benchmarks.photos import pack
from distap.processes.stopping import SIGNALS, TRACE_SIGNAL
from distap.storage import remotes
from distap.telemetry import terminal

# Processes that the tests start hear Ctrl-C, also where the tests run in the background of a shell.
signal.signal(signal.SIGINT, signal.default_int_handler)
HEARD = {number: signal.getsignal(number) for number in (*SIGNALS, TRACE_SIGNAL)}
# As every command does on a CPU.
torch.set_flush_denormal(True)

# Loops that one run compiled serve the next one, and all workers and ranks: a minute of two cores.
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CACHE / "distap-tests/inductor"))

# CI tries the same cases every time; on other machines hypothesis goes on looking for new ones.
settings.register_profile("ci", derandomize=True, max_examples=50)
settings.register_profile("searching", max_examples=50)
settings.load_profile("ci" if "CI" in os.environ else "searching")


# A million imported objects stay: looking for garbage among them would take a third of the time of
# collecting tests.
gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()
    session.config.add_cleanup(gc.unfreeze)  # or C++ would print what Python leaves behind


# The longest files come first, so that none is left alone at the end; those that mostly wait are
# apart.
FIRST = """
container multi_node recipes partial_training engines watchdog multistage faults examples tune
slurm losses commands trainer cut_network wheel compiled_loops length_and_rates ranks nccl_rules
trained_losses export study engine_trainings stored_run from_run_to_run decoders site peak_memory
extraction backbones reads scraped_training listening service serving
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Choose the order in which workers take files."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    place = {f"test_{name}": number for number, name in enumerate(FIRST.split())}
    items.sort(key=lambda item: (place.get(item.path.stem, len(FIRST)), -slow[item.path]))


@pytest.fixture(scope="module")
def s3() -> Iterator[None]:
    with s3_server():
        yield


@pytest.fixture(scope="session", autouse=True)
def _another_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the files that libraries write to the user's cache folder out of the real one."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(autouse=True)
def _state_of_a_new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A command sets up the log and the signals of its process, and may leave threads behind; a
    test's goes on.
    """
    logger = logging.getLogger("distap")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(terminal, "origin", terminal.LogOrigin())
    monkeypatch.setattr(remotes, "FIRST_PAUSE", 0)
    level = logger.level
    # a fixture of the module may have trained, and left its own
    for number, handler in HEARD.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
    with patch.dict(os.environ):  # libraries may leave the variables of a rank there
        yield
    logger.setLevel(level)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Makes a file system of a size such as `128k` or `1m`."""
    disks = []

    def make(size: str) -> Path:
        folder = tmp_path / f"disk-{len(disks)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if (
            os.geteuid()
            or shutil.which("mount") is None
            or subprocess.run(command, capture_output=True).returncode
        ):
            pytest.skip("mounting needs root")
        disks.append(folder)
        return folder

    yield make
    for folder in disks:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Three classes of 4, 3 and 2 images."""
    return write_images(tmp_path / "images", {"apple": 4, "bear": 3, "car": 2})


@pytest.fixture
def shards(tmp_path: Path, image_folder: Path) -> Path:
    """The same, packed four to a shard."""
    pack(image_folder, tmp_path / "shards", images_per_shard=4)
    return tmp_path / "shards"


@pytest.fixture(scope="session")
def training_shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two data sets of different classes, to train on and to evaluate on; not to be written to."""
    folder = tmp_path_factory.mktemp("training")
    for split, seed in (("train", 1), ("test", 2)):
        images = write_images(
            folder / f"{split}-images", {f"{split}-{c}": 3 + c % 4 for c in range(12)}, 40, seed
        )
        pack(images, folder / split, images_per_shard=20)
    return folder / "train", folder / "test"


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of photos of several shapes; not to be written to."""
    from extractions import write_photos  # loads the network, which other tests do without

    return write_photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One headless Chromium for all tests of pages."""
    with chromium(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two hosts with a network between them."""
    with two_hosts() as built:
        yield built

"""What a pod asks for, against the loaders that will run in it."""

import time
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest
from built_manifests import STORAGE, request
from small_trainings import recipe

from distap.apps.k8s.sizes import GIB, handed_over_bytes, sizes_of
from distap.data.images.whole_images import PREFETCH
from distap.evaluation.extraction.parts import CHUNK, worker_requests
from distap.stopwatch import Stopwatch
from distap.training.build import images_of
from distap.world import World


def shared_memory(workers):
    """Sizes by inode of the shared memory that workers have made, and of that which this process has taken."""
    sizes = {}
    for process in workers:
        for entry in Path(f"/proc/{process.pid}/fd").iterdir():
            try:
                if str(entry.readlink()).startswith("/dev/shm/torch_"):
                    about = entry.stat()
                    sizes[about.st_ino] = about.st_size
            except FileNotFoundError:  # closed meanwhile
                continue
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/dev/shm/torch_" in line:
            start, _, stop = line.split()[0].partition("-")
            sizes[int(line.split()[4])] = int(stop, 16) - int(start, 16)
    return sizes


@pytest.mark.parametrize("sizes", [{"describe__size": 6}, {"replay": {"size": 3}}, {"replay": {"size": "auto"}}])
def test_what_loader_workers_read_ahead_fits_with_a_chunk_to_spare_for_each(tmp_path, training_shards, sizes):
    data = {"train": str(training_shards[0]), "image_size": 64, "workers": 2, "prefetch": 3}
    settings = recipe(tmp_path, training_shards, data=data, sampling__batch_size=48, **sizes)
    before, others = shared_memory([]), active_children()
    shares = images_of(settings, World(), Stopwatch()).shares(range(100))
    next(shares).images(slice(0, 1))
    workers = [process for process in active_children() if process not in others]
    each = data["workers"] * settings.loader_chunk * 3 * 64**2  # whole pages
    deadline = time.monotonic() + 30
    seen = 0
    while seen < data["prefetch"] * each:
        assert time.monotonic() < deadline, f"{seen} of {data['prefetch'] * each} bytes"
        time.sleep(0.01)
        seen = sum(size for number, size in shared_memory(workers).items() if number not in before)
    shares.close()
    assert data["prefetch"] * each <= seen <= (data["prefetch"] + 1) * each == handed_over_bytes(settings, 48)


@pytest.mark.parametrize("batch_size", [1, 10, 64])
def test_what_evaluations_hand_over_fits_whatever_their_images(tmp_path, training_shards, batch_size):
    evaluation = {"every": 5, "batch_size": batch_size, "also": {"whole": {"data": "elsewhere", "max_side": 300}}}
    settings = recipe(
        tmp_path, training_shards, evaluation=evaluation, data__workers=4, data__validation=str(training_shards[1])
    )
    held = handed_over_bytes(settings, 25) - 4 * 3 * 5 * 4 * 32**2
    numbers = np.random.default_rng(0)
    for side in (32, 300):
        areas = numbers.integers(side**2 // 4, side**2, 1000, endpoint=True)
        areas[::7] = side**2
        requests = worker_requests(list(range(1000)), areas, batch_size * 32**2)
        assert held >= 4 * (PREFETCH + 1) * 3 * max(areas[one].sum() for one in requests)
    assert held == 4 * (PREFETCH + 1) * 3 * max(300**2, min(CHUNK * 300**2, batch_size * 32**2))


def test_describing_more_images_at_once_than_are_replayed_takes_as_much_more_shared_memory(tmp_path, training_shards):
    data = {"train": str(training_shards[0]), "image_size": 224, "workers": 4}
    asked = request(ranks=8, **STORAGE["claims"])
    few, many = (
        sizes_of(
            recipe(tmp_path, training_shards, data=data, describe__size=size, sampling__batch_size=8192),
            asked,
        ).shared_memory
        for size in (64, 256)
    )
    assert many * GIB > 8 * 4 * 5 * 256 * 3 * 224**2
    assert many > 3 * few


def test_several_gpus_of_a_host_have_shared_memory_for_nccl_beside_what_loaders_hand_over(tmp_path, training_shards):
    settings = recipe(tmp_path, training_shards, sampling__batch_size=48)
    sizes = [sizes_of(settings, request(gpus=gpus, **STORAGE["claims"])).shared_memory for gpus in (1, 8)]
    assert sizes[0] == 1
    assert sizes[1] * GIB >= 8 * handed_over_bytes(settings, 2) + 2 * GIB

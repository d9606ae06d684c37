"""What a host's pod asks for, from the recipe: rules of thumb, which options overrule."""

from dataclasses import dataclass
from math import ceil

from distap.config import Recipe
from distap.manifests.request import Request

GIB = 2**30
RANK_BYTES = 6 * GIB  # torch with its libraries, a network and its micro-batches on a CPU
GPU_RANK_BYTES = 10 * GIB  # page-locked buffers, and what CUDA keeps on the host
WORKER_BYTES = GIB  # a loader process, with the images that it decodes
COPIES = 2  # of what workers read ahead in shared memory: being written, and being read
SPARE = 1.1
TEMPORARY = 20  # GiB of /tmp: downloaded weights, compiled kernels
OWN_RUN = 20  # GiB of /runs where it is a pod's own: the newest checkpoints, on their way to the object store
AUTO_MICRO_BATCH = 64  # images that `replay.size: auto` is taken for


@dataclass(frozen=True)
class Sizes:
    """Of a host's pod: cores, and GiB."""

    cpu: int
    memory: int
    shared_memory: int
    spool: int


def sizes_of(recipe: Recipe, request: Request) -> Sizes:
    """What the recipe needs on each host."""
    ranks, data = request.ranks_a_host, recipe.data
    image_bytes = 3 * data.image_size**2
    share_bytes = ceil(recipe.sampling.size / request.world) * image_bytes
    way = data.pixels.way(share_bytes)
    micro_batch = AUTO_MICRO_BATCH if recipe.replay.size == "auto" else recipe.replay.size
    ahead_bytes = data.workers * data.prefetch * micro_batch * image_bytes
    shared = _gib(COPIES * ranks * ahead_bytes)
    rank_bytes = GPU_RANK_BYTES if request.gpus else RANK_BYTES
    rank_bytes += data.workers * WORKER_BYTES + (share_bytes if way == "memory" else 0)
    cached_bytes = data.cache.max_bytes if data.cache else 0
    spooled_bytes = ranks * share_bytes if way == "spool" else 0
    return Sizes(
        cpu=ranks * (2 + data.workers),
        memory=_gib(ranks * rank_bytes) + shared,
        shared_memory=shared,
        spool=_gib(spooled_bytes + cached_bytes),
    )


def _gib(size: float) -> int:
    """GiB that hold so many bytes, with some to spare; one at least."""
    return max(1, ceil(SPARE * size / GIB))

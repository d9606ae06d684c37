"""Estimate the resources of a host's pod from the recipe; options overrule these rules of thumb."""

from math import ceil
from typing import NamedTuple

from distap.apps.k8s.request import Request
from distap.config.recipe import Recipe

GIB = 2**30
RANK_BYTES = 6 * GIB  # torch with its libraries, a network and its micro-batches on a CPU
NCCL_BYTES = 2 * GIB  # in /dev/shm, through which NCCL joins GPUs of a host that do not reach each other directly
GPU_RANK_BYTES = 10 * GIB  # page-locked buffers, and what CUDA keeps on the host
WORKER_BYTES = GIB  # a loader process, with the images that it decodes
SPARE = 1.1
WHOLE_SIDE = 1024  # pixels of an image at its original size, such as those of Oxford and Paris
TEMPORARY = 20  # GiB of /tmp: downloaded weights, compiled kernels
OWN_RUN = 20  # GiB of a pod's own /runs: the newest checkpoints, on their way to the object store
# Chunks of evaluations, copied from distap.evaluation.extraction and distap.data.images.whole_images to avoid torch.
EVALUATION_CHUNK, EVALUATION_PREFETCH = 16, 2


class Sizes(NamedTuple):
    """Cores, and GiB of memory and disk, of a host's pod."""

    cpu: int
    memory: int
    shared_memory: int
    spool: int


def sizes_of(recipe: Recipe, request: Request) -> Sizes:
    ranks, data = request.ranks_a_host, recipe.data
    share = ceil(recipe.sampling.size / request.world)
    share_bytes = share * 3 * data.image_size**2
    way = data.pixels.way(share_bytes)
    shared = _gib(ranks * handed_over_bytes(recipe, share) + (NCCL_BYTES if request.gpus > 1 else 0))
    rank_bytes = GPU_RANK_BYTES if request.gpus else RANK_BYTES
    rank_bytes += data.workers * WORKER_BYTES + (share_bytes if way == "memory" else 0)
    spooled = ranks * share_bytes if way == "spool" else 0
    spool = _gib(spooled + (data.cache.max_bytes if data.cache else 0))
    return Sizes(ranks * (2 + data.workers), _gib(ranks * rank_bytes) + shared, shared, spool)


def handed_over_bytes(recipe: Recipe, share: int) -> int:
    """Return the bytes of shared memory between loader workers and a rank with `share` images of a batch."""
    data, evaluation = recipe.data, recipe.evaluation
    # Each worker has `prefetch` chunks ready, and one more is in use. Chunks of training stay during evaluations.
    training = (data.prefetch + 1) * min(recipe.loader_chunk, share) * data.image_size**2
    evaluated = 0
    if evaluation.every != 0 and data.validation is not None:
        sized = (evaluation, *(other.within(evaluation) for other in evaluation.also.values()))
        of_image = [WHOLE_SIDE if each.original else each.max_side or each.crop or data.image_size for each in sized]
        of_batch = evaluation.batch_size * data.image_size**2
        # A worker hands over at most as much as is described at once, but at least one image.
        chunk = max(min(EVALUATION_CHUNK * side**2, max(of_batch, side**2)) for side in of_image)
        evaluated = (EVALUATION_PREFETCH + 1) * chunk
    return data.workers * 3 * (training + evaluated)


def _gib(size: float) -> int:
    return max(1, ceil(SPARE * size / GIB))

"""Build a Faiss index over descriptors, from a named kind or from any factory string of Faiss.

A factory string such as `OPQ64,IVF4096,PQ64` lists the parts of an index from its first transformation to its codes
(https://github.com/facebookresearch/faiss/wiki/The-index-factory). A named kind is a factory string, with search
parameters, whose numbers follow from the size of the gallery.
"""

import math
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
from jaxtyping import Float

from distap.errors import DistapError
from distap.randomness import permutation
from distap.retrieval.nearest import as_float32, bounded_threads, gallery_blocks

ADDED_NUMBERS = 2**20  # numbers added at once: few, so that a slowly growing graph shows its progress
SAMPLE_NUMBERS = 2**27  # most numbers that an index is trained on: 512 MB in float32
SAMPLE_ROWS, SAMPLE_ROWS_OF_A_LIST = 2**16, 64  # descriptors to train on: 256 for each of 256 codes, 64 for each list


def flat(images: int, dimensions: int) -> tuple[str, str]:
    """Exact search: all descriptors in float32, each compared with the query."""
    return "Flat", ""


def hnsw(images: int, dimensions: int) -> tuple[str, str]:
    """Fastest at high recall: a search walks a graph of neighbours (Malkov and Yashunin 2018)."""
    return "HNSW32", "efConstruction=100,efSearch=64"


def ivf_pq(images: int, dimensions: int) -> tuple[str, str]:
    """Smallest: product-quantised codes (Jégou et al. 2011) in lists, of which a search reads the nearest.

    About 4 √N lists with at least 39 descriptors each, of which a sixteenth is read, at least 8. A code has one part
    for every two dimensions, at most 256, of 8 bits, or fewer if there are under 1,024 descriptors.
    """
    lists = 2 ** int(math.log2(max(min(4 * math.sqrt(images), images / 39), 1)))
    parts = max(part for part in range(1, max(min(dimensions // 2, 256), 1) + 1) if dimensions % part == 0)
    bits = min(8, max(int(math.log2(max(images, 2) / 4)), 1))
    # np: without polysemous training, a slow preparation for a filter that we do not use
    return f"IVF{lists},PQ{parts}x{bits}np", f"nprobe={min(max(lists // 16, 8), lists)}"


KINDS = {"flat": flat, "ivf-pq": ivf_pq, "hnsw": hnsw}


@dataclass(frozen=True)
class BuiltIndex:
    """A Faiss index over a whole gallery."""

    index: Any  # on the CPU
    kind: str  # one of KINDS, or the factory string
    factory: str
    search: str  # parameters such as `nprobe=64`, comma-separated
    seconds: float  # spent on training and adding


def build_index(
    values: Float[np.ndarray, "N C"],
    kind: str,
    search: str = "",
    track: Callable[[Iterable[Any], str, int], Iterable[Any]] | None = None,
    gpu: bool = False,
) -> BuiltIndex:
    """Train an index on a sample and add all descriptors.

    Args:
        values: of length 1; a memory map is read in blocks.
        kind: one of KINDS, or a factory string of Faiss.
        search: parameters of Faiss's ParameterSpace, such as `nprobe=64,k_factor_rf=8`; they override the kind's.
        track: shows progress: called with the blocks, a description and their number, yields the blocks.
        gpu: train and add on all GPUs of this machine.
    Raises:
        DistapError: there is nothing to index, a number is not finite, or Faiss cannot build this index.
    """
    images, dimensions = values.shape
    if not images or not dimensions:
        raise DistapError(f"there is nothing to index in descriptors of shape {values.shape}")
    factory, derived = KINDS[kind](images, dimensions) if kind in KINDS else (kind, "")
    search = ",".join(part for part in (derived, search) if part)
    started = time.perf_counter()
    bounded_threads()
    try:
        index = faiss.index_factory(dimensions, factory, faiss.METRIC_INNER_PRODUCT)
        if index.metric_type != faiss.METRIC_INNER_PRODUCT:
            raise DistapError(f"{factory!r} cannot search by inner product; choose another index")
        if search:
            faiss.ParameterSpace().set_index_parameters(index, search)  # type: ignore[arg-type]  # it takes text
        ivf: Any = faiss.try_extract_index_ivf(index)
        sample = max(SAMPLE_ROWS, SAMPLE_ROWS_OF_A_LIST * (ivf.nlist if ivf else 0))
        if kind == "ivf-pq":  # its settings suit a small gallery, so Faiss need not warn of it
            codes: Any = faiss.downcast_index(ivf)
            codes.cp.min_points_per_centroid = codes.pq.cp.min_points_per_centroid = 1
        if gpu:
            index = _on_gpus(index)
        if not index.is_trained:
            rows = np.sort(permutation(images, 0)[: min(sample, max(SAMPLE_NUMBERS // dimensions, 1))])
            index.train(as_float32(values[rows], 0, "sampled descriptor"))
        blocks = gallery_blocks(values, ADDED_NUMBERS)
        total = -(-images // max(ADDED_NUMBERS // dimensions, 1))
        for _, block in track(blocks, f"indexing ({kind})", total) if track else blocks:
            index.add(block)
        if gpu:
            index = faiss.index_gpu_to_cpu(index)
        index.search(as_float32(values[:1], 0, "descriptor"), 1)  # Faiss checks some parameters only here
    except RuntimeError as error:
        reason = re.sub(r"^Error in .*\.cpp:\d+: (Error: '.*' failed: )?", "", str(error))
        parameters = f" with search parameters {search!r}" if search else ""
        raise DistapError(
            f"Faiss cannot build an index {factory!r}{parameters} over {images} descriptors of {dimensions} "
            f"dimensions: {reason}"
        ) from error
    return BuiltIndex(index, kind, factory, search, time.perf_counter() - started)


def _on_gpus(index: Any) -> Any:
    if not hasattr(faiss, "StandardGpuResources") or faiss.get_num_gpus() == 0:
        raise DistapError(
            "--gpu: the installed Faiss has no GPU, or this machine has none; install faiss-gpu instead of "
            "faiss-cpu, or leave --gpu out"
        )
    try:
        return faiss.index_cpu_to_all_gpus(index)
    except RuntimeError as error:
        raise DistapError(f"--gpu: Faiss builds this index on the CPU only; leave --gpu out: {error}") from error

"""Kinds of Faiss indexes, each with settings that follow from the size of the gallery where none are given."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import faiss
import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from distap.errors import DistapError
from distap.randomness import permutation
from distap.retrieval.nearest import as_float32, bounded_threads, gallery_blocks

Track = Callable[[Iterable[Any], str, int], Iterable[Any]]  # yields the items and shows how far it is

NUMBERS_ADDED_AT_ONCE = 2**20  # few, so that a graph that grows slowly shows its progress
SAMPLE_NUMBERS = 2**27  # that an index is trained on, at most: 512 MB in float32


@dataclass(frozen=True)
class Flat:
    """All descriptors in float32, each compared with the query: exact."""

    name: ClassVar[str] = "flat"

    def fitted(self, images: int, dimensions: int) -> "Flat":
        """The same with every setting known."""
        return self

    def empty(self, dimensions: int) -> Any:
        """An index that holds nothing yet."""
        return faiss.IndexFlatIP(dimensions)

    def sample(self, images: int) -> int:
        """Descriptors to train on."""
        return 0


@dataclass(frozen=True)
class IvfPq:
    """Product-quantised codes (Jégou et al. 2011) in lists around centroids, of which a search reads the nearest.

    The smallest. With `refine` the best by their codes are compared again in half precision, for 2 C bytes each.
    """

    name: ClassVar[str] = "ivf-pq"
    nlist: int | None = None  # lists; None for about 4 √N, with 39 descriptors to each at least
    nprobe: int | None = None  # lists that a search reads; None for a sixteenth, 8 at least
    m: int | None = None  # parts of a code; None for half the dimensions, 256 at most
    bits: int | None = None  # of a part; None for 8, or fewer where there are under 1,024 descriptors
    refine: bool = False

    def fitted(self, images: int, dimensions: int) -> "IvfPq":
        """The same with every setting known.

        Raises:
            DistapError: a setting does not fit the number of descriptors, or their dimensions.
        """
        nlist = self.nlist or _power_of_two_below(min(4 * math.sqrt(images), images / 39))
        bits = self.bits or min(8, max(int(math.log2(max(images, 2) / 4)), 1))
        most = max(min(dimensions // 2, 256), 1)
        m = self.m or max(part for part in range(1, most + 1) if dimensions % part == 0)
        if dimensions % m:
            raise DistapError(f"ivf-pq: m = {m} parts do not divide {dimensions} dimensions")
        if nlist > images or 2**bits > images:
            raise DistapError(
                f"ivf-pq: nlist = {nlist} and bits = {bits} need at least {max(nlist, 2**bits)} descriptors to learn "
                f"from, there are {images}; ask for less, or take --kind flat"
            )
        nprobe = min(self.nprobe or max(nlist // 16, 8), nlist)
        return replace(self, nlist=nlist, nprobe=nprobe, m=m, bits=bits)

    def empty(self, dimensions: int) -> Any:
        """An index that holds nothing yet."""
        assert self.nlist is not None and self.nprobe is not None and self.m is not None and self.bits is not None
        quantizer = faiss.IndexFlatIP(dimensions)
        index = faiss.IndexIVFPQ(quantizer, dimensions, self.nlist, self.m, self.bits, faiss.METRIC_INNER_PRODUCT)
        index.nprobe = self.nprobe
        index.cp.spherical = True
        index.cp.min_points_per_centroid = index.pq.cp.min_points_per_centroid = 1  # `fitted` chose
        if not self.refine:
            return index
        exact = faiss.IndexScalarQuantizer(dimensions, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT)
        refined = faiss.IndexRefine(index, exact)
        refined.k_factor = 8
        return refined

    def sample(self, images: int) -> int:
        """Descriptors to train on: 64 to a list, 256 to an entry of the code book."""
        assert self.nlist is not None and self.bits is not None
        return min(images, max(64 * self.nlist, 256 << self.bits))


@dataclass(frozen=True)
class Hnsw:
    """All descriptors in float32 and a graph of near ones that a search walks (Malkov and Yashunin 2018): fastest."""

    name: ClassVar[str] = "hnsw"
    links: int = 32  # of a descriptor, twice as many at the bottom
    ef: int = 64  # candidates that a search keeps
    ef_construction: int = 100  # candidates that are kept while it is built

    def fitted(self, images: int, dimensions: int) -> "Hnsw":
        """The same with every setting known."""
        return self

    def empty(self, dimensions: int) -> Any:
        """An index that holds nothing yet."""
        index = faiss.IndexHNSWFlat(dimensions, self.links, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction, index.hnsw.efSearch = self.ef_construction, self.ef
        return index

    def sample(self, images: int) -> int:
        """Descriptors to train on."""
        return 0


Kind = Flat | IvfPq | Hnsw
KINDS: dict[str, type[Kind]] = {kind.name: kind for kind in (Flat, IvfPq, Hnsw)}


def index_kind(name: str, **settings: Any) -> Kind:
    """The kind of that name with the settings that are not None.

    Raises:
        DistapError: there is no such kind, or it has no such setting.
    """
    if name not in KINDS:
        raise DistapError(f"no index is of kind {name!r}; expected one of {', '.join(KINDS)}")
    given = {setting: value for setting, value in settings.items() if value is not None}
    known = [setting.name for setting in fields(KINDS[name])]
    for setting in given:
        if setting not in known:
            owners = [other for other, kind in KINDS.items() if setting in {f.name for f in fields(kind)}]
            raise DistapError(f"{name} has no setting {setting!r}, which is one of {', '.join(owners) or 'none'}")
    return KINDS[name](**given)


@dataclass(frozen=True)
class BuiltIndex:
    """An index over a whole gallery."""

    index: Any  # of Faiss, on the CPU
    kind: Kind  # with every setting known
    seconds: float  # that training and adding took


def build_index(
    values: Float[np.ndarray, "N C"], kind: Kind, track: Track | None = None, gpu: bool = False
) -> BuiltIndex:
    """Train an index on a sample and add all descriptors.

    Args:
        values: of length 1; a memory map is read in blocks.
        kind: settings that are None are chosen by N and C.
        track: shows how many blocks are added.
        gpu: train and add on all GPUs of this machine.
    Raises:
        DistapError: there is nothing to index, a setting does not fit, a number is not finite, or Faiss cannot.
    """
    images, dimensions = values.shape
    if not images or not dimensions:
        raise DistapError(f"there is nothing to index in descriptors of shape {values.shape}")
    kind = kind.fitted(images, dimensions)
    started = time.perf_counter()
    bounded_threads()
    try:
        index = kind.empty(dimensions)
        if gpu:
            index = _on_gpus(index, kind)
        if not index.is_trained:
            index.train(_sampled(values, kind.sample(images)))
        blocks = gallery_blocks(values, NUMBERS_ADDED_AT_ONCE)
        total = -(-images // max(NUMBERS_ADDED_AT_ONCE // dimensions, 1))
        for _, block in track(blocks, f"indexing ({kind.name})", total) if track else blocks:
            index.add(block)
        if gpu:
            index = faiss.index_gpu_to_cpu(index)
    except RuntimeError as error:
        raise DistapError(f"Faiss cannot build {kind} over {images} x {dimensions}: {error}") from error
    return BuiltIndex(index, kind, time.perf_counter() - started)


def _sampled(values: NDArray[Any], count: int) -> NDArray[np.float32]:
    count = min(count, max(SAMPLE_NUMBERS // values.shape[1], 1))
    rows = np.sort(permutation(len(values), 0)[:count])
    return as_float32(values[rows], 0, "sampled descriptor")


def _on_gpus(index: Any, kind: Kind) -> Any:
    if not hasattr(faiss, "StandardGpuResources") or faiss.get_num_gpus() == 0:
        raise DistapError(
            "--gpu: the installed Faiss has no GPU, or this machine has none; install faiss-gpu instead of "
            "faiss-cpu, or leave --gpu out"
        )
    if isinstance(kind, Hnsw) or (isinstance(kind, IvfPq) and kind.refine):
        raise DistapError(f"--gpu: Faiss builds {kind.name} with these settings on the CPU only; leave --gpu out")
    return faiss.index_cpu_to_all_gpus(index)


def _power_of_two_below(number: float) -> int:
    return int(2 ** max(math.floor(math.log2(max(number, 1))), 0))

"""Ways to choose the images of a global batch; a new one is a file here and a line in `SAMPLING`."""

from distap.data.plan import Sampling
from distap.data.sampling.classes import ClassesSampling
from distap.data.sampling.p_by_k import PByKSampling
from distap.data.sampling.random import RandomSampling
from distap.data.sampling.streams import StreamsSampling
from distap.data.sampling.super_p_by_k import SuperPByKSampling

SAMPLING: dict[str, type[Sampling]] = {
    "random": RandomSampling,
    "classes": ClassesSampling,
    "p_by_k": PByKSampling,
    "super_p_by_k": SuperPByKSampling,
    "streams": StreamsSampling,
}

__all__ = [
    "SAMPLING",
    "ClassesSampling",
    "PByKSampling",
    "RandomSampling",
    "StreamsSampling",
    "SuperPByKSampling",
]

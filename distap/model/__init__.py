"""The network that turns an image into a descriptor: a timm backbone, pooling, a head, L2; and how it is sped up."""

from distap.model.checkpointing import activation_checkpointing
from distap.model.compiling import compile_backbone
from distap.model.describing import Describer
from distap.model.folding import FoldedNetwork
from distap.model.multiscale import MultiScaleNetwork
from distap.model.network import RetrievalNetwork, build_network
from distap.model.pooling import POOLING, GeM

__all__ = [
    "POOLING",
    "Describer",
    "FoldedNetwork",
    "GeM",
    "MultiScaleNetwork",
    "RetrievalNetwork",
    "activation_checkpointing",
    "build_network",
    "compile_backbone",
]

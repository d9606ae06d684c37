"""The network that turns an image into a descriptor: a timm backbone, pooling, a head, L2; and how it is sped up."""

from distap.model.multiscale import MultiScaleNetwork
from distap.model.network import RetrievalNetwork, build_network
from distap.model.pooling import POOLING, GeM
from distap.model.speed.activation_checkpointing import activation_checkpointing
from distap.model.speed.compiling import compile_backbone
from distap.model.speed.describing import Describer
from distap.model.speed.folding import FoldedNetwork

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

"""The network that turns an image into a descriptor: a timm backbone, pooling, a head, L2."""

from distap.model.network import RetrievalNetwork, build_network
from distap.model.pooling import POOLING, GeM

__all__ = ["POOLING", "GeM", "RetrievalNetwork", "build_network"]

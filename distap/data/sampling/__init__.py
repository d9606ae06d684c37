"""Ways to choose the images of a global batch."""

from distap.data.sampling.every_class import ClassesSampling as ClassesSampling
from distap.data.sampling.mined import MinedSampling as MinedSampling
from distap.data.sampling.p_by_k import PByKSampling as PByKSampling
from distap.data.sampling.random_images import RandomSampling as RandomSampling
from distap.data.sampling.super_p_by_k import SuperPByKSampling as SuperPByKSampling

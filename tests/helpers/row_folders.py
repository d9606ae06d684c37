"""A loss that takes a teacher's rows, and folders of such rows as `distap extract` writes them."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import kl_div, normalize

import distap
from distap.retrieval.descriptor_files import (
    DESCRIPTORS_FILE,
    DescribedBy,
    DescriptorSet,
    write_described,
)

DIMENSIONS = 7


@distap.loss
def of_relations(descriptors, labels, teacher):
    """Each image's similarities to the others as the teacher has them."""
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    ours, theirs = (
        (rows @ rows.t() / 0.1).masked_fill(itself, -1e9).log_softmax(1)
        for rows in (descriptors, normalize(teacher.to(descriptors)))
    )
    return kl_div(ours, theirs, reduction="batchmean", log_target=True)


def teacher_rows(keys, seed=0, dtype=np.float32) -> dict[str, np.ndarray]:
    """A row of each image, by its name."""
    generator = np.random.default_rng(seed)
    return {
        str(key): generator.standard_normal(DIMENSIONS).astype(dtype)
        for key in sorted(map(str, keys))
    }


def write_rows(
    folder: Path,
    rows: dict[str, np.ndarray],
    left_out=None,
    network="teacher",
) -> Path:
    """A folder of rows, in another order than any data set's."""
    keys = np.random.default_rng(1).permutation([*rows])
    return write_table(
        folder,
        keys,
        np.stack([rows[key] for key in keys]),
        left_out,
        network,
    )


def write_table(folder, keys, values, left_out=None, network="teacher") -> Path:
    """A folder of rows with these names."""
    described = DescriptorSet(
        values,
        keys,
        keys,
        DescribedBy(network, "crop 32"),
        "images",
        left_out or {},
    )
    write_described(
        folder,
        described,
        {DESCRIPTORS_FILE: partial(np.save, arr=values)},
    )
    return folder

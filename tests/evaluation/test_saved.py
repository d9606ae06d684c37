from pathlib import Path

import numpy as np
import pytest
from run_folders import retrieved, write_retrieved

from distap.errors import DistapError
from distap.evaluation.saved import Retrieved, read_evaluation


def write_some(run, step):
    return write_retrieved(run, step, retrieved(step), figures={"mAP": 0.5})


def test_an_evaluation_is_read_as_it_was_written(tmp_path):
    read = read_evaluation(write_some(tmp_path, 3)).retrieved()
    written = retrieved(3)
    for name in Retrieved.__dataclass_fields__:
        assert np.array_equal(getattr(read, name), getattr(written, name))


def cut(path):
    path.write_bytes(path.read_bytes()[:-30])


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("retrieved.npz", cut, "retrieved.npz: not readable"),
        ("retrieved.npz", Path.unlink, "retrieved.npz: no such file; `distap eval` writes it"),
        ("result.json", cut, "result.json: not readable"),
        ("result.json", lambda path: path.write_text("[]"), "result.json: not readable"),
        (
            "result.json",
            lambda path: path.write_text('{"figures": 3}'),
            "result.json: not readable",
        ),
    ],
)
def test_a_damaged_evaluation_is_refused(tmp_path, file, damage, message):
    folder = write_some(tmp_path, 0)
    damage(folder / file)
    with pytest.raises(DistapError, match=message):
        read_evaluation(folder).retrieved()

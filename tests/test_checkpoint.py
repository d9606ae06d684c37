import json

import pytest
import torch

from distap.checkpoint import find_checkpoint, list_checkpoints, load_checkpoint, save_checkpoint
from distap.errors import DistapError

STATE = {"step": 3, "weights": {"a": torch.arange(6.0)}, "names": ["x"]}


def test_what_is_saved_is_loaded(tmp_path):
    path = save_checkpoint(tmp_path / "checkpoints", 3, STATE, keep=2)
    loaded = load_checkpoint(path)
    assert torch.equal(loaded["weights"]["a"], STATE["weights"]["a"])
    assert loaded["names"] == ["x"]
    assert find_checkpoint(tmp_path) == find_checkpoint(path) == path


def test_the_newest_are_kept(tmp_path):
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, step, STATE, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000002", "step-00000010"]


def test_an_unfinished_checkpoint_is_no_checkpoint(tmp_path):
    save_checkpoint(tmp_path, 1, STATE, keep=2)
    (tmp_path / ".step-00000002.tmp").mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001"]


@pytest.mark.parametrize("file", ["state.pt", "manifest.json"])
def test_a_flipped_bit_is_found_before_anything_is_loaded(tmp_path, file):
    save_checkpoint(tmp_path, 1, STATE, keep=3)
    path = save_checkpoint(tmp_path, 2, STATE, keep=3)
    damaged = bytearray((path / file).read_bytes())
    damaged[len(damaged) // 2] ^= 4
    (path / file).write_bytes(damaged)
    with pytest.raises(DistapError, match=r"step-00000002: corrupt checkpoint: .*go on from .*step-00000001"):
        load_checkpoint(path)


def test_a_missing_file_is_a_corrupt_checkpoint(tmp_path):
    path = save_checkpoint(tmp_path, 1, STATE, keep=1)
    (path / "state.pt").unlink()
    with pytest.raises(DistapError, match="corrupt checkpoint"):
        load_checkpoint(path)


def test_a_checkpoint_runs_no_code(tmp_path):
    """The manifest is right, so only weights_only stands between the pickle and its code."""

    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "written"), "w"))

    path = save_checkpoint(tmp_path, 1, STATE, keep=1)
    torch.save({"step": Evil()}, path / "state.pt")
    import hashlib

    data = (path / "state.pt").read_bytes()
    identity = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "manifest.json").write_text(json.dumps({"step": 1, "files": {"state.pt": identity}}))
    with pytest.raises(DistapError, match="corrupt checkpoint"):
        load_checkpoint(path)
    assert not (tmp_path / "written").exists()


def test_no_checkpoint_is_an_error(tmp_path):
    with pytest.raises(DistapError, match="no checkpoint there"):
        find_checkpoint(tmp_path)
    with pytest.raises(DistapError, match="no such checkpoint"):
        find_checkpoint(tmp_path / "step-00000005")

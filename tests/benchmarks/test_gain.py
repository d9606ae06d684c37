import json

import pytest
from images import write_images

from benchmarks.gain import GainBenchmark
from benchmarks.photos import pack


@pytest.mark.slow
@pytest.mark.nightly
def test_each_trains_at_its_best_rate_and_a_line_is_not_trained_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("benchmarks.gain.FEW_STEPS", 1)
    for seed, split in enumerate(("train", "test")):
        images = write_images(
            tmp_path / split, {f"{split} {number}": 6 for number in range(5)}, 64, seed
        )
        pack(images, tmp_path / "data/digits/shards" / split)
    asked = {"set": ["digits"], "seconds": 0.1, "output": tmp_path / "gain.jsonl"}
    loops = GainBenchmark(
        **asked, contender=["triplet", "ArcFace", "Multistage"], rate=[1e-4, 1e-2], seeds=1
    )
    rows = loops.report().figures
    lines = [json.loads(line) for line in loops.output.read_text().splitlines()]
    assert len(lines) == 3 * (2 + 1) and all(line["updates"] > 0 for line in lines)
    for row in rows:
        tried = [
            line for line in lines if line["contender"] == row["contender"] and line["held_out"]
        ]
        assert row["rate"] == max(tried, key=lambda line: line["mAP"])["rate"]
    assert [row["less"] is None for row in rows].count(True) == 1  # the best loop
    assert [row["mAP"] for row in loops.report().figures] == [row["mAP"] for row in rows]
    assert len(loops.output.read_text().splitlines()) == len(lines)
    shown = [row["by_query"] for row in rows if row["less"] is not None]
    assert all(text.startswith(("yes", "no")) for text in shown)
    small = "small: data.image_size=32; replay={size: 8}"
    one_rate = GainBenchmark(**asked, contender=["init"], variant=[small], rate=[1e-4], seeds=1)
    of_init, of_small = one_rate.report().figures
    assert of_init["less"] is None and of_small["less"].mean == pytest.approx(
        of_small["mAP"].mean - of_init["mAP"].mean
    )
    # a rate that is the only one is not chosen
    assert len(loops.output.read_text().splitlines()) == len(lines) + 2

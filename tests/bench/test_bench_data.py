import io
import json

import pytest
from rich.console import Console

from distap.bench.data import Setting, measure, table, write_results
from distap.bench.photos import jpeg, photo

SETTING = Setting(image=96, outputs=(16, 80), crop=0.5, quality=90, count=32, workers=0, rounds=2)


def test_a_photo_is_a_function_of_its_seed_and_compresses_as_photographs_do():
    data = jpeg(photo(512, 512, seed=3), 90)
    assert data == jpeg(photo(512, 512, seed=3), 90)
    assert data != jpeg(photo(512, 512, seed=4), 90)
    assert 1.5 < 8 * len(data) / 512**2 < 4  # bits a pixel


def test_every_decoder_is_measured_for_every_size(tmp_path):
    figures = list(measure(SETTING))
    assert [(row.what, row.output) for row in figures] == [("decode", 16), ("decode", 80)]
    assert 0.2 < figures[0].scale < 0.5  # crops of 68 to 96 pixels
    assert figures[1].scale == 1
    for row in figures:
        assert set(row.images_per_second) == {"distap", "Pillow", "torchvision", "unscaled"}
        assert set(row.faster) == {"Pillow", "torchvision", "unscaled"}
        assert min(row.images_per_second.values()) > 0
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(figures))
    assert "…" not in console.export_text()
    page = write_results(tmp_path / "out", figures, "32 <images>")
    assert "32 &lt;images&gt;" in page.read_text()
    assert json.loads((tmp_path / "out" / "data.json").read_text())[0]["kilobytes"] == figures[0].kilobytes


@pytest.mark.slow
def test_the_loader_is_measured_beside_webdatasets():
    setting = Setting(image=64, outputs=(16,), crop=0.5, quality=90, count=32, workers=1, rounds=1)
    figures = [row for row in measure(setting) if row.what == "load"]
    assert [set(row.images_per_second) for row in figures] == [{"distap", "WebDataset"}]
    assert figures[0].faster["WebDataset"] > 0

import re
from pathlib import Path

import pytest
from commands import distap
from dataset_trees import TREES

from distap.data.converters import DATASETS
from distap.data.shards.index import load_index

GUIDES = Path(__file__).parents[3] / "docs" / "guides"


@pytest.fixture
def run(monkeypatch, capsys):
    """`distap data convert`: its exit status, and what it printed."""
    return lambda *arguments: (
        distap(monkeypatch, "data", "convert", *arguments),
        "".join(capsys.readouterr()),
    )


def test_the_command_says_what_it_did_and_what_is_wrong(run, tmp_path, caplog):
    source = tmp_path / "source"
    output = tmp_path / "out"
    TREES["sop"](source)
    (source / "chair_final" / "1_0.JPG").unlink()
    (source / "mug_final" / "4_0.JPG").write_bytes(b"no image")
    status, printed = run(
        "sop", source, output, "--workers", 1, "--left-out", tmp_path / "left.csv"
    )
    assert status == 0
    assert (
        "train differs from the published split: its list names 4 images, 2 classes, published are"
        " 59,551 images, 11,318 classes" in caplog.text
    )
    for text in (
        f"{output}/train: 3 images of 2 classes",
        f"left out: 1 listed images that are not there ({source}/chair_final/1_0.JPG)",
        "left out: 1 decode_error: not an image of",
    ):
        assert text in printed
    rows = (tmp_path / "left.csv").read_text().splitlines()
    assert (
        rows[1] == f"{source}/chair_final/1_0.JPG,listed images that are not there"
        and len(rows) == 3
    )


def test_splits_the_size_of_shards_and_their_order_are_chosen(run, tmp_path):
    TREES["inshop"](tmp_path / "source")
    assert (
        run(
            "inshop",
            tmp_path / "source",
            tmp_path / "out",
            "--workers",
            1,
            "--split",
            "query",
            "--split",
            "gallery",
            "--images-per-shard",
            1,
            "--order",
            "listed",
        )[0]
        == 0
    )
    assert len(load_index(tmp_path / "out" / "gallery").shard_name) == 2
    assert not (tmp_path / "out" / "train").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sopp", "."], "no data set is called 'sopp'; did you mean sop?"),
        (
            ["sop", "nowhere"],
            "nowhere: no such folder; docs/guides/data-set-files.md says where sop is",
        ),
        (["cub", "."], "images.txt: no such file; docs/guides/data-set-files.md says where cub is"),
    ],
)
def test_a_mistake_is_answered_with_what_to_do(arguments, message, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, printed = run(*arguments[:2], "out", *arguments[2:])
    assert status == 2
    assert printed.startswith("error: ") and "Traceback" not in printed
    assert message in printed
    assert not (tmp_path / "out").exists()


def test_every_data_set_is_named_in_the_guide():
    guide = (GUIDES / "data-sets.md").read_text()
    files = (GUIDES / "data-set-files.md").read_text()
    for name, dataset in DATASETS.items():
        assert f"`{name}`" in guide
        assert f"| `{re.sub('^dyml-.*', 'dyml-*', name)}`" in files
        for split in dataset.splits:
            assert f"`{split.name}`" in guide
            for count in split.published:
                for number in filter(None, (count.images, count.classes)):
                    assert f"{number:,}" in guide

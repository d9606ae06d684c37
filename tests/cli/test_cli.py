import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from commands import distap
from images import write_images

from distap.cli import app
from distap.cli.options import App, run
from distap.config.reading import RECIPES
from distap.errors import FAILED
from distap.storage.files import Storage


@pytest.fixture
def config(tmp_path, training_shards):
    """Eight steps on the small training set."""
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"run: {tmp_path / 'run'}\nsteps: 8\ndata: {{train: {training_shards[0]}, validation:"
        f" {training_shards[1]}, image_size: 32, workers: 0}}\nsampling: {{name: p_by_k, classes:"
        " 6, images: 4}\nmodel: {backbone: resnet10t, weights: {name: random}}\noptimizer:"
        " {learning_rate: 1e-3}\nevaluation: {every: 4}\n"
    )
    return path


def test_a_dry_run_finds_out_whether_the_store_can_be_written_to(monkeypatch, config, capfd, s3):
    dry_run = monkeypatch, "train", config, "--dry-run"
    assert distap(*dry_run, "checkpoint.store=s3://nowhere/run") == 2
    assert "checkpoint.store: s3://nowhere/run: its bucket does not exist" in capfd.readouterr().err
    assert distap(*dry_run, "checkpoint.store=s3://shards/dry") == 0
    assert Storage("s3://shards/dry").names("*") == []


def test_a_dry_run_says_what_would_be_done_and_does_nothing(tmp_path, monkeypatch, config, capfd):
    assert distap(monkeypatch, "train", config, "--dry-run", "--ranks", 5) == 0
    printed = capfd.readouterr().out
    assert (
        "device      cpu, 5 ranks" in printed
        and "24 images by p_by_k; an epoch is 2.25 steps" in printed
    )
    assert "each rank   15,360 bytes of pixels and 49,152 bytes of descriptors per step" in printed
    assert re.search(
        r"0\.\d\d GB  ddp  \(the first that fits\)\n +0\.\d\d GB  \{name: fsdp", printed
    )
    assert "nothing is wrong" in printed and "/run, from the start" in printed
    assert not (tmp_path / "run").exists()
    assert distap(monkeypatch, "train", config, "steps=1", "evaluation.every=0") == 0
    assert distap(monkeypatch, "train", config, "--dry-run", "--ranks", "auto") == 0
    assert "/run, from its newest checkpoint" in capfd.readouterr().out


def test_our_recipes_are_listed_and_printed(monkeypatch, capfd):
    assert distap(monkeypatch, "recipes") == 0
    heading, *listed = capfd.readouterr().out.splitlines()
    assert heading.split() == ["name", "paper", "data", "expected"]
    assert [line.split()[0] for line in listed] == sorted(
        path.stem for path in RECIPES.glob("*.yaml")
    )
    assert distap(monkeypatch, "recipes", "emoji") == 0
    assert capfd.readouterr().out == (RECIPES / "emoji.yaml").read_text()
    assert distap(monkeypatch, "recipes", "emojo") == 2
    assert "did you mean emoji?" in capfd.readouterr().err


def test_packing_says_what_it_did(tmp_path, monkeypatch, capsys):
    images = write_images(tmp_path / "images", {"a": 2, "b": 2})
    (images / "a" / "0.png").write_bytes(b"damage")
    (images / "b" / "copy of 1.png").write_bytes((images / "b" / "1.png").read_bytes())
    assert distap(monkeypatch, "data", "pack", images, tmp_path / "out") == 0
    printed = "".join(capsys.readouterr())
    assert "4 images of 2 classes in 1 shard:" in printed
    assert re.search(
        r"left out: 1 decode_error: not an image of JPEG, .*\(.*a/0\.png\)",
        printed.replace("\n", ""),
    )
    twice = "1 images are twice in a class, by size and CRC-32, such as b/1.png and b/copy of 1.png"
    assert twice in printed.replace("\n", " ")
    assert distap(monkeypatch, "data", "index", tmp_path / "out") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "{config}", "data.train={tmp}/nothing"], "{tmp}/nothing: no such data set"),
        (["train", "{config}", "model.backbone=resnet5"], "timm knows no network named 'resnet5'"),
        (["train", "{config}", "--ranks", "2", "sampling.classes=100"], "set it to 12 or less"),
        (
            ["train", "{config}", "--dry-run", "--ranks", "25"],
            "24 images a batch, fewer than the 25 ranks",
        ),
        (
            [
                "train",
                "{config}",
                "--ranks",
                "2",
                "model.backbone=test_maxvit",
                "data.image_size=30",
            ],
            "test_maxvit does not take images of 30 px",
        ),
        (
            ["train", "{config}", "--ranks", "2", "data.validation={train}"],
            "classes with the training set",
        ),
        *(
            ([command, "{tmp}/no.yaml"], "no.yaml: the recipe cannot be read")
            for command in ("train", "recipes")
        ),
        (["eval", "--checkpoint", "{tmp}"], "no checkpoint there"),
        (["report", "{tmp}", "--output", "{tmp}"], "no such run log"),
    ],
)
def test_bad_input_gets_one_clear_error_and_a_non_zero_exit(
    tmp_path, monkeypatch, capfd, config, training_shards, arguments, message
):
    filled = [
        argument.format(config=config, tmp=tmp_path, train=training_shards[0])
        for argument in arguments
    ]
    assert distap(monkeypatch, *filled) == 2
    printed = capfd.readouterr().err
    # The latter if the recipe has been read.
    assert re.search(r"^(error: |\S+ ERROR run=run rank=[0-] step=- )", printed, re.MULTILINE)
    assert printed.count(message.format(tmp=tmp_path)) == 1
    assert "Traceback" not in printed


WITHOUT_TORCH = """
import sys
# Importing them fails.
sys.modules.update(dict.fromkeys(("torch", "torchvision", "timm", "webdataset")))
from distap.cli import main
for command in sys.stdin.read().splitlines():
    sys.argv = ["distap", *command.split()]
    try:
        main()
    except SystemExit as end:
        print(f"STATUS {end.code or 0}: {command}")
    except BaseException as error:
        print(f"STATUS {error!r}: {command}")
"""
COMPUTES_NOTHING = """
0: --version
0: --help
0: recipes
0: recipes emoji
0: init {tmp}/images --output {tmp}/new.yaml
0: data pack {tmp}/images {tmp}/packed
0: data pack {tmp}/listed.csv {tmp}/listed --order random
0: data index {tmp}/packed
0: data check {tmp}/packed
0: data check imagefolder:{tmp}/images
0: data stats {tmp}/packed
0: report {tmp}/run
2: data pack {tmp}/wrong.csv {tmp}/none
2: data convert cars {tmp}/images {tmp}/none
2: data convert sop {tmp}/images {tmp}/none
2: data stats {tmp}/none
2: init {tmp}/none
2: train missing.yaml
2: train emoji loss=smoth_ap
2: train emoji steps=-1
2: train emoji loss.binz=3
2: train emoji optimizer.lr=1 --dry-run
2: config emoji model.pooling.powr=3
2: eval emoji data.augmentation.flop=1
2: eval emoji --figurs mAP
2: eval
2: eval --checkpoint {tmp}/none
2: extract {tmp}/packed {tmp}/out --checkpoint {tmp}/none
2: export {tmp}/none {tmp}/out
2: whiten {tmp}/none
2: index {tmp}/none {tmp}/out
2: search {tmp}/packed 0 --checkpoint {tmp}/none
2: serve {tmp}/packed --checkpoint {tmp}/none
2: report {tmp}/none
"""


def test_a_command_that_computes_nothing_loads_no_torch(tmp_path, monkeypatch, config):
    write_images(tmp_path / "images", {"a": 3, "b": 3})
    # is decoded
    (tmp_path / "images/a/3.png").write_bytes((tmp_path / "images/a/0.png").read_bytes()[:-20])
    (tmp_path / "listed.csv").write_text("path,label,box\nimages/a/0.png,a,\nimages/b/0.png,b,\n")
    (tmp_path / "wrong.csv").write_text("file_path,label\nimages/a/0.png,a\n")
    assert distap(monkeypatch, "train", config, "steps=1", "evaluation.every=0") == 0
    expected = [line.format(tmp=tmp_path) for line in COMPUTES_NOTHING.split("\n") if line]
    commands = "\n".join(line.partition(": ")[2] for line in expected)
    output = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], input=commands, capture_output=True, text=True
    )
    answers = [
        line.removeprefix("STATUS ")
        for line in output.stdout.splitlines()
        if line.startswith("STATUS ")
    ]
    assert answers == expected, output.stderr


def test_a_terminal_is_told_at_once_that_a_command_starts():
    ours, theirs = pty.openpty()
    code = (
        "import sys; sys.modules.update(timm=None, torchvision=None); from distap.cli import main;"
        " main()"
    )
    command = [sys.executable, "-c", code, "config", "emoji"]
    subprocess.run(command, stderr=theirs, stdout=subprocess.DEVNULL, check=True)
    assert os.read(ours, 2**16).decode().count("distap config: starting ...") == 1


def commands(command, path=()):
    """Every command and group of commands, as what is typed."""
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


@pytest.mark.parametrize("command", list(commands(typer.main.get_command(app))), ids=" ".join)
def test_every_command_explains_itself(monkeypatch, capsys, command):
    assert distap(monkeypatch, *command, "-h") == 0
    assert "Usage: distap" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["recipes"], ["recipes", "emoji"], ["config", "emoji"], ["--help"]]
)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_standard_output_that_is_full_is_an_error_in_one_line(arguments):
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "distap.cli", *arguments]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
    assert ended.returncode == 2
    assert re.fullmatch(
        r"error: .*output: cannot be written: No space left on device \[\w+\.\w+\]\n",
        ended.stderr,
    )


@pytest.mark.parametrize("arguments", [["recipes"], ["config", "emoji"]])
def test_a_reader_that_leaves_early_is_no_failure(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "distap.cli", *arguments]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_nothing_is_written_in_the_place_of_a_device(tmp_path, monkeypatch, capfd):
    os.mkfifo(tmp_path / "recipe.yaml")
    write_images(tmp_path / "images", {"a": 2, "b": 2})
    arguments = [
        "data",
        "pack",
        tmp_path / "images",
        tmp_path / "out",
        "--left-out",
        tmp_path / "recipe.yaml",
    ]
    assert distap(monkeypatch, *arguments) == 2
    assert "recipe.yaml: no regular file" in capfd.readouterr().err


def test_memory_that_ends_is_an_error_in_one_line(monkeypatch, capfd):
    application = App()

    @application.command()
    def exhaust() -> None:
        torch.empty(2**48)

    monkeypatch.setattr(sys, "argv", ["distap"])
    with pytest.raises(SystemExit) as status:
        run(application, "distap")
    assert status.value.code == FAILED
    printed = capfd.readouterr().err
    assert re.fullmatch(
        r"error: memory ran out: .*DefaultCPUAllocator.* \[memory.ran_out\]\n", printed
    )

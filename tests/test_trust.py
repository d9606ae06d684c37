"""Records of networks come from strangers: what they name runs no code and reads no other files
without trust.
"""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from commands import distap as command
from launching import Program, started
from raising import raises
from small_trainings import recipe

import distap
from distap.checkpoint.manifest import MANIFEST_FILE, STATE_FILE, parse_manifest
from distap.errors import MISTAKE, DistapError
from distap.storage.atomic import file_identity
from distap.trainer import Trainer
from distap.training.prepared import prepare
from distap.world import World

CODE = """
from dataclasses import dataclass
from pathlib import Path
from distap.model.pooling import GeMPooling

Path(__file__).with_suffix(".ran").touch()

@dataclass(frozen=True)
class Part(GeMPooling):
    pass
"""
GEM = {"name": "gem", "power": 3.0}
PART = "stranger:Part"


def saved_run(folder, shards, **changes) -> Path:
    settings = {
        "steps": 1,
        "sampling": {"name": "random", "batch_size": 8},
        "data__validation": str(shards[1]),
    }
    settings |= {
        "evaluation": {"every": 0},
        "model": {"backbone": "test_resnet", "weights": "random", "pooling": GEM},
    }
    Trainer(prepare(recipe(folder, shards, **settings | changes), World()), World()).train()
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory, training_shards) -> Path:
    """A run of one step."""
    return saved_run(tmp_path_factory.mktemp("trained") / "run", training_shards)


@pytest.fixture(scope="module")
def index(tmp_path_factory, run, photos) -> Path:
    """An index of the run's descriptors."""
    folder = tmp_path_factory.mktemp("indexed")
    with pytest.MonkeyPatch.context() as patch:
        assert (
            command(
                patch,
                "extract",
                photos,
                folder / "extracted",
                "--checkpoint",
                run,
                "evaluation.sizing=side 40",
                "data.workers=0",
            )
            == 0
        )
        assert command(patch, "index", folder / "extracted", folder / "index") == 0
    return folder / "index"


@pytest.fixture
def ran(tmp_path, monkeypatch) -> Path:
    """The file that the stranger's code writes, which any import could find."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code/stranger.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path / "code")
    return tmp_path / "code/stranger.ran"


def of_stranger(run: Path, folder: Path, **model) -> Path:
    """A copy of a run whose record says something else of the model, with sums that fit."""
    shutil.copytree(run, folder)
    [checkpoint] = (folder / "checkpoints").glob("step-*")
    state = json.loads((checkpoint / STATE_FILE).read_text())
    state["recipe"]["model"] |= model
    (checkpoint / STATE_FILE).write_text(json.dumps(state))
    manifest = parse_manifest((checkpoint / MANIFEST_FILE).read_bytes(), str(checkpoint))
    files = manifest.files | {STATE_FILE: file_identity(checkpoint / STATE_FILE)}
    (checkpoint / MANIFEST_FILE).write_text(replace(manifest, files=files).text())
    return folder


def exported(run: Path, folder: Path, **model) -> Path:
    """An export of a run, whose config.json says something else of the model."""
    distap.load(run, device="cpu").save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["distap"]["model"] |= model
    (folder / "config.json").write_text(json.dumps(config))
    return folder


NAMING = [
    {"pooling": {"name": PART}},
    {"pooling": PART},
    {"backbone": {"name": PART}},
    {"backbone": PART},
    {"adapter": {"name": PART}},
]


@pytest.mark.parametrize("model", NAMING, ids=str)
@pytest.mark.parametrize("made", [of_stranger, exported])
def test_loading_imports_no_class_that_a_record_names(tmp_path, run, ran, made, model):
    with raises("recipe.value", "stranger:Part"):
        distap.load(made(run, tmp_path / "taken", **model), device="cpu")
    assert not ran.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["extract", "{photos}", "{tmp}/out", "--checkpoint", "{taken}"],
        ["eval", "--checkpoint", "{taken}"],
        ["search", "{index}", "{photos}", "--checkpoint", "{taken}"],
        ["export", "{taken}", "{tmp}/out"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_no_command_imports_a_class_that_a_record_names(
    tmp_path, monkeypatch, capsys, run, ran, index, photos, arguments
):
    taken = of_stranger(run, tmp_path / "taken", pooling={"name": PART})
    call_arguments = [
        element.format(photos=photos, tmp=tmp_path, taken=taken, index=index)
        for element in arguments
    ]
    assert command(monkeypatch, *call_arguments) == MISTAKE
    assert (
        "'stranger:Part' is a class" in " ".join(capsys.readouterr().err.split())
        and not ran.exists()
    )


def test_a_server_imports_no_class_that_a_record_names(tmp_path, run, ran, index):
    taken = of_stranger(run, tmp_path / "taken", pooling={"name": PART})
    message = "serve", str(index), "--checkpoint", str(taken), "--port", "0"
    path = os.pathsep.join((str(ran.parent), str(Path(distap.__file__).parents[1])))
    with started(Program(("-m", "distap.cli", *message)), tmp_path, PYTHONPATH=path) as job:
        assert job.status() == MISTAKE
        assert "'stranger:Part' is a class" in " ".join(job.said.split()) and not ran.exists()


def test_ranks_import_nothing_from_the_working_folder(tmp_path, run, photos):
    """Also not with the run's folder as the working folder, as people do with what they have
    downloaded.
    """
    taken = of_stranger(run, tmp_path / "taken", pooling={"name": PART})
    for name in ("stranger", "helper", "faiss", "tqdm"):
        (taken / f"{name}.py").write_text(CODE)
    message = "extract", str(photos), str(tmp_path / "out"), "--checkpoint", ".", "--ranks", "2"
    with started(Program(("-m", "distap.cli", *message), folder=taken), tmp_path) as job:
        assert job.status() == MISTAKE
        assert "'stranger:Part' is a class" in " ".join(job.said.split())
    assert not list(taken.glob("*.ran"))


@pytest.mark.parametrize(
    "weights",
    [
        {"name": PART},
        {"name": "package", "package": "stranger.part"},
        {"name": "run", "path": "{nested}"},
    ],
)
def test_the_base_of_an_adapter_that_a_record_names_runs_no_code(tmp_path, run, ran, weights):
    nested = of_stranger(run, tmp_path / "nested", pooling={"name": PART})
    weights = {key: value.format(nested=nested) for key, value in weights.items()}
    folder = exported(run, tmp_path / "taken", weights=weights, adapter=None)
    config = json.loads((folder / "config.json").read_text())
    config["distap"]["base"] = {"timm": "1", "sha256": {}}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(folder / "head.safetensors", folder / "changed.safetensors")
    with pytest.raises(DistapError, match=r"stranger"):
        distap.load(folder, device="cpu")
    assert not ran.exists()


def test_a_training_that_begins_from_a_run_imports_no_class_that_its_record_names(
    tmp_path, run, ran, training_shards
):
    taken = of_stranger(run, tmp_path / "taken", pooling={"name": PART})
    weights = {"name": "run", "path": str(taken)}
    with raises("recipe.value", "stranger:Part"):
        saved_run(
            tmp_path / "run", training_shards, model={"backbone": "test_resnet", "weights": weights}
        )
    assert not ran.exists()


@pytest.mark.parametrize("architecture", ["local-dir:/elsewhere", "hf-hub:somebody/network"])
def test_an_architecture_from_elsewhere_that_a_record_names_is_not_read(
    tmp_path, run, architecture
):
    with raises("network.untrusted", architecture):
        distap.load(of_stranger(run, tmp_path / "taken", backbone=architecture), device="cpu")


def test_a_record_with_an_empty_base_is_that_of_a_whole_network(tmp_path, run):
    folder = exported(run, tmp_path / "taken", backbone="local-dir:/elsewhere")
    config = json.loads((folder / "config.json").read_text())
    config["distap"]["base"] = None
    (folder / "config.json").write_text(json.dumps(config))
    with raises("network.untrusted", "local-dir:/elsewhere"):
        distap.load(folder, device="cpu")


@pytest.mark.parametrize("argument", ["checkpoint_path", "pretrained_cfg", "cache_dir"])
def test_an_argument_by_which_timm_reads_files_elsewhere_is_refused(tmp_path, run, argument):
    with raises("network.reserved_argument", argument, "model.arguments"):
        distap.load(
            of_stranger(run, tmp_path / "taken", arguments={argument: "/elsewhere"}), device="cpu"
        )


def test_a_config_cannot_say_itself_that_it_is_trusted(tmp_path, run, ran):
    folder = exported(run, tmp_path / "taken", pooling={"name": PART})
    config = json.loads((folder / "config.json").read_text())
    config |= {"trust": True, "trusts": True, "trusted": True}
    config["distap"] |= {"trust": True, "trusted": True}
    (folder / "config.json").write_text(json.dumps(config))
    with raises("recipe.value", "stranger:Part"):
        distap.load(folder, device="cpu")
    assert not ran.exists()


def of_friend(tmp_path, monkeypatch, run, module) -> Path:
    (tmp_path / f"{module}.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    return of_stranger(run, tmp_path / "taken", pooling={"name": f"{module}:Part", "power": 3.0})


def test_who_trusts_a_record_gets_its_classes(tmp_path, monkeypatch, run):
    taken = of_friend(tmp_path, monkeypatch, run, "friend")
    assert distap.load(taken, device="cpu", trust=True).dimensions == 96
    assert (tmp_path / "friend.ran").exists()


def test_a_command_that_is_told_to_trust_a_record_imports_its_classes(
    tmp_path, monkeypatch, run, photos
):
    taken = of_friend(tmp_path, monkeypatch, run, "another_friend")
    assert (
        command(
            monkeypatch,
            "extract",
            photos,
            tmp_path / "out",
            "--checkpoint",
            taken,
            "--trust",
            "data.workers=0",
            "evaluation.sizing=side 40",
        )
        == 0
    )
    assert (tmp_path / "another_friend.ran").exists()


def test_a_training_with_a_class_of_its_own_goes_on_and_is_begun_from_without_trust(
    tmp_path, training_shards
):
    """In new processes, whose launcher runs in the folder of the class."""
    (tmp_path / "mine.py").write_text(CODE)
    model = {
        "backbone": "test_resnet",
        "weights": {"name": "random"},
        "pooling": {"name": "mine:Part", "power": 3.0},
    }
    settings = {
        **{"run": "first", "steps": 1, "device": "cpu", "model": model},
        "data": {"train": str(training_shards[0]), "image_size": 32, "workers": 0},
        "sampling": {"name": "random", "batch_size": 8},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(settings))
    train = "-m", "distap.launcher", "--nproc-per-node=2", "recipe.yaml"
    changes = [], ["steps=2"], ["run=second", "model.weights={name: run, path: first}"]
    for number, changed in enumerate(changes):
        program = Program((*train, *changed), folder=tmp_path)
        path = os.pathsep.join((str(tmp_path), str(Path(distap.__file__).parents[1])))
        with started(program, tmp_path / f"log-{number}", PYTHONPATH=path) as job:
            assert job.status() == 0, job.said

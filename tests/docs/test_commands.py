"""The commands of README.md and docs/: those of tutorial and guides run, and all of them parse."""

import os
import re
import shlex
import tomllib
from itertools import pairwise

import httpx
import pytest
import typer
import yaml
from dataset_trees import photo, sop
from images import write_images
from launching import ROOT, Program, output_of, started
from serving import url_when_ready
from torch.distributed.run import get_args_parser

from benchmarks.__main__ import BENCHMARKS, command_line
from benchmarks.photos import pack
from benchmarks.study.grid import Study
from distap.cli import app
from distap.config.reading import RECIPES, load_recipe
from distap.config.recipe import Recipe
from docs.recipe_keys import recipe_keys

README = ROOT / "README.md"
TUTORIAL = ROOT / "docs/tutorial.md"
GUIDES = ROOT / "docs/guides"
PAPERS = [ROOT / "docs/papers.md", *(ROOT / "docs/papers").glob("*.md")]
DOCUMENTS = [
    *(README, ROOT / "CONTRIBUTING.md"),
    *(
        file
        for folder in ("docs", "k8s", "launch", "distap")
        for file in (ROOT / folder).rglob("*.md")
    ),
]
DEMO = RECIPES / "emoji.yaml"
OURS = re.compile(
    r"distap |python -m (distap|benchmarks)\b|torchrun |sbatch |(\./)?launch/[\w-]+( |$)|pip"
    r" install 'distap"
)
PLACEHOLDERS = {"...", "RUN...", "[key=value", "...]"}
SMALL = (
    "steps=2 data.image_size=32 model.backbone=test_resnet model.weights=random metrics.port=null"
)
MADE_SMALL = {
    "--ranks 8": "--ranks 2",
    "steps=200": f"{SMALL} sampling.batch_size=24 evaluation.every=2",
    "train recipe.yaml --dry-run": f"train recipe.yaml --dry-run {SMALL}",
    "train recipe.yaml\n": f"train recipe.yaml {SMALL}\n",
    "recipe.yaml run=runs/cars": f"recipe.yaml {SMALL} sampling.classes=18 run=runs/cars",
}
# documents whose commands run in one folder from top to bottom, and what is there afterwards
RUN = {
    "tutorial": ([TUTORIAL], ["runs/recipe/report.html", "found", "hits.html", "exported"]),
    "guides": (
        [GUIDES / name for name in ("own-images.md", "data.md", "evaluation.md", "retrieval.md")],
        ["runs/mine/report.html", "hits.html", "found", "shards/sop/train/index.npz"],
    ),
    "mixtures": ([GUIDES / "mixtures.md"], ["runs/recipe/report.html", "runs/cars/metrics.jsonl"]),
}


def blocks_of(documents, language):
    texts = "\n".join(document.read_text() for document in documents)
    return re.findall(rf"^```{language}\n(.*?)^```", texts, re.DOTALL | re.MULTILINE)


def shell_script(documents):
    """Commands of blocks that need no network, no cluster and nothing left to fill in, with
    trainings made small.
    """
    outside = ("./launch/", "CONFIG", "benchmarks fetch", "benchmarks plan", "--ranks auto")
    blocks = (
        block for block in blocks_of(documents, "sh") if not any(word in block for word in outside)
    )
    script = re.sub("^pip install .*", "", "".join(blocks), flags=re.MULTILINE)
    for printed, small in MADE_SMALL.items():
        script = script.replace(printed, small)
    return script.replace("\\\n", " ")


def lines_of(text):
    """Lines of commands: in blocks, and between backticks."""
    text = text.replace("\\\n", " ")
    blocks = [line.strip() for line in re.findall(r"^    .*", text, re.MULTILINE)]
    blocks += "\n".join(
        re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    ).splitlines()
    spans = [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
    return {line for line in (*blocks, *spans) if OURS.match(line)}


def words_of(line):
    words = shlex.split(re.split(" [|>] ", line)[0], comments=True)
    return [word for word in words if word not in PLACEHOLDERS]


def check_overrides(words):
    """Check the words KEY=VALUE, but not NAME=SET behind --data."""
    overrides = [word for before, word in pairwise(["", *words]) if before != "--data"]
    load_recipe(DEMO, [word for word in overrides if "=" in word and word[0] != "-"])


def check_options(command, words):
    try:
        command.make_context("distap", list(words))
    except Exception as error:  # text often names a command without all that it needs
        if type(error).__name__ not in ("MissingParameter", "NoArgsIsHelpError"):
            raise
    if command.name in ("train", "plan", "eval"):
        check_overrides(words)


def check(words):
    """Raise an error if a command line names a program, command, option or key that does not
    exist."""
    program, *arguments = words
    if program == "distap":
        command = typer.main.get_command(app)
        while arguments and arguments[0] in getattr(command, "commands", {}):
            command = command.commands[arguments.pop(0)]
        arguments = [word for word in arguments if word != "--help"]
        assert not arguments or not hasattr(command, "commands"), f"no command {arguments[0]}"
        check_options(command, arguments)
    elif program == "torchrun" or arguments[:2] in (
        ["-m", "distap.launcher"],
        ["-m", "distap.train"],
    ):
        arguments = arguments if program == "torchrun" else arguments[2:]
        if arguments:
            parsed = get_args_parser().parse_args(
                [*arguments, "recipe"] if arguments[-1][0] == "-" else arguments
            )
            check_overrides(parsed.training_script_args)
    elif arguments[:2] == ["-m", "benchmarks"]:
        if arguments[2:] not in ([], ["--help"]):
            check_options(
                typer.main.get_command(command_line([arguments[2]])).commands[arguments[2]],
                arguments[3:],
            )
    elif program == "pip":
        names = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
            "optional-dependencies"
        ]
        assert set(re.search(r"\[(.+)\]", words[-1])[1].split(",")) <= set(names)
    else:
        (script,) = (ROOT / word for word in words if word.removeprefix("./").startswith("launch/"))
        assert os.access(script, os.X_OK) or program == "sbatch"
        own_values = arguments if program != "sbatch" else []  # Slurm's own come first
        assert all(word in script.read_text() for word in own_values if word.startswith("--"))
        check_overrides(arguments)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_of_the_documents_parses(document):
    for line in sorted(lines_of(document.read_text())):
        try:
            check(words_of(line))
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{line}: {error!r}") from error


@pytest.mark.parametrize(
    "line",
    [
        "distap evaluate RUN",
        "python -m benchmarks plan CONFIG --gpus-a-host many",
        "python -m distap.launcher --nproc-per-node 2 CONFIG step=3",
        "launch/train-multi-node --host HOST --hosts 2 RECIPE",
        "python -m benchmarks speed",
        "pip install 'distap[tensorbord]'",
    ],
)
def test_a_command_that_does_not_exist_is_found(line):
    (command,) = lines_of(f"Start it with `{line}`.")
    with pytest.raises((Exception, SystemExit)):
        check(words_of(command))


def test_the_keys_that_documents_name_are_those_of_recipes(tmp_path, monkeypatch):
    (loss,) = (
        block
        for block in blocks_of([GUIDES / "own-loss.md"], "python")
        if "# in my_package/losses.py" in block
    )
    (tmp_path / "my_package").mkdir()
    function = (ROOT / "docs/examples/own_loss.py").read_text().partition("if __name__")[0]
    (tmp_path / "my_package/losses.py").write_text(function + loss)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "docs/examples")
    texts = "\n".join(
        document.read_text() for document in (README, TUTORIAL, *sorted(GUIDES.glob("*.md")))
    )
    spans = re.findall(r"`([a-z_]+(?:\.[a-z_]+)*(?:=|: )[^`]+)`", texts)
    named = [span for span in spans if re.split(r"[.=:]", span)[0] in Recipe.model_fields]
    assert len(named) >= 20
    streams = ["data.reading=streamed", "sampling={name: random, batch_size: 4096}"]
    rounded = ["precision=bf16", "evaluation.precision=bf16"]
    sets = ["data.train={cars: shards/cars, birds: shards/birds}"]
    for span in named:
        is_of_shell = "=" in span.split(": ")[0]
        words = (
            shlex.split(span)
            if is_of_shell
            else [re.sub(": N$", ": 1", span).replace(": ", "=", 1)]
        )
        needed = streams if "stream" in span else sets if "follow_loss" in span else []
        needed = rounded if re.search(r"(base|gather): bf16", span) else needed
        check_overrides([*needed, *words])


def options_of(command):
    options = {
        option for element in command.params for option in (*element.opts, *element.secondary_opts)
    }
    return options.union(*map(options_of, getattr(command, "commands", {}).values()))


@pytest.fixture(scope="module")
def known():
    """All options of commands, of torchrun and in scripts of launch/, and all keys of recipes and
    their sections.
    """
    commands = [typer.main.get_command(element) for element in (app, command_line(BENCHMARKS))]
    torchrun = {option for action in get_args_parser()._actions for option in action.option_strings}
    scripts = [
        file.read_text()
        for file in (ROOT / "launch").rglob("*")
        if file.is_file() and file.suffix != ".txt"
    ]
    options = set().union(
        torchrun, *map(options_of, commands), *(re.findall(r"--[a-z-]+", text) for text in scripts)
    )
    keys = {key.path for key in recipe_keys()}
    return options, keys | {key.rpartition(".")[0] for key in keys}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_option_and_key_that_a_document_names_exists(document, known):
    options, keys = known
    spans = re.findall(r"`([^`\s][^`\n]*)`", document.read_text())
    remaining = {"--cascade", "--tmpfs"}  # of kubectl and docker
    # Papers name the authors' own and have tests of their keys, and errors.md names codes.
    if document not in PAPERS and document.name != "errors.md":
        named = {option for span in spans for option in re.findall(r"^--[a-z-]+", span)}
        assert named - options - remaining == set()
        dotted = {
            key for span in spans for key in re.findall(r"^([a-z_]+\.[a-z_.]+)(?:[=:].*)?$", span)
        }
        files = (".jsonl", ".json", ".py", ".safetensors", ".yaml")
        named = {
            key
            for key in dotted
            if key.split(".")[0] in Recipe.model_fields and not key.endswith(files)
        }
        assert named - keys == set()


GONE = {  # what was removed since 0.1.0, and the pattern that no page may have any more
    "distap eval --descriptors": r"--descriptors\b",
    "evaluation.resize": r"evaluation\.(resize|crop|max_side|original)\b",
    "python -m distap": r"python -m distap(?![.\w])",
    "`whiten` of": r"`whiten`",
    "metric_learning": r"`metric_learning`|\bMetricLearning\b",
    "_pairs.json": r"--pairs\b|_pairs\.json",
    "schedule.length": r"schedule\.length|schedule=step\b|name: step\b",
    "export.json": r"export\.json",
    "distap index --gpu": r"distap index\b.*--gpu\b",
    "distap eval --gap": r"--gap\b|decomposability|gaps of `?results",
    "diffusion": r"diffusion",
    "distap eval --compare": r"--compare\b",
    "step.compile": r"step\.compile",
    "distap report RUN RUN": r"distap report RUN RUN|--before\b|--after\b",
    "precision_at_recall": r"precision_at_recall|most confused classes",
    "--queries": r"--queries\b",
    "tracking_uri": r"\btracking_uri\b",
    "--drain-seconds": r"--drain-seconds",
    "POST /trace": r"POST /trace",
    "describe.precision": r"describe\.precision|rank\.memory_bytes|--(dynamic-size|dtype)\b",
    "distap extract --precision": r"--precision\b",
    "not_finite.jsonl": r"not_finite\.jsonl",
    "step.activation_checkpointing": r"activation_checkpointing|\boffload\b",
    "rmac": r"\brmac\b|\bcrow\b",
    "replay.size: auto": r"replay\.size(: |=)auto",
}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_document_names_what_was_removed(document):
    text = document.read_text()
    assert {
        name: re.findall(pattern, text)
        for name, pattern in GONE.items()
        if re.search(pattern, text)
    } == {}


def test_the_yaml_of_guides_is_a_study_and_parts_of_recipes():
    (study,) = blocks_of([GUIDES / "studies.md"], "yaml")
    Study.model_validate(yaml.safe_load(study))
    rows = re.findall(r"^\| `(\w+)` \|", (GUIDES / "studies.md").read_text(), re.MULTILINE)
    assert rows == [*Study.model_fields]
    load_recipe(DEMO, [*map(yaml.safe_load, blocks_of([GUIDES / "mixtures.md"], "yaml"))])
    (sections,) = blocks_of([GUIDES / "losses.md"], "yaml")
    for line in sections.splitlines():
        check_overrides([line.partition("  #")[0].replace(": ", "=", 1)])


def test_each_command_of_the_readme_is_one_of_the_tutorial_which_runs():
    readme, tutorial = (
        {" ".join(shlex.split(line, comments=True)) for line in shell_script([file]).splitlines()}
        for file in (README, TUTORIAL)
    )
    assert readme and readme <= tutorial


@pytest.mark.slow
@pytest.mark.parametrize("documents", RUN)
def test_the_commands_of_the_documents_run_as_they_are_printed(tmp_path, documents):
    """In one folder, from top to bottom; only trainings are made small."""
    for split, seed in (("train", 1), ("test", 2)):
        write_images(
            tmp_path / "photos" / split, {f"{split}-{number}": 6 for number in range(12)}, 48, seed
        )
    for seed, name in enumerate(("cars", "birds") if documents == "mixtures" else ()):
        classes = {f"{name}-{number}": 6 for number in range(24)}
        write_images(tmp_path / "photos" / name, classes, 48, seed)
    pack(tmp_path / "photos/test", tmp_path / "shards/others")
    (tmp_path / "shards/others/index.npz").unlink()
    sop(tmp_path / "downloads/sop")
    photo(tmp_path / "photo.jpg")
    (tmp_path / "photos.csv").write_text(
        "path,class\nphoto.jpg,cup\nphotos/test/test-0/0.png,pen\n"
    )
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    files, made = RUN[documents]
    script, _, served = shell_script(files).partition("distap serve ")
    for line in script.splitlines():
        if documents == "guides" and line.startswith("distap export"):  # the tutorial exports
            continue
        program, *tail = shlex.split(line, comments=True) or [""]
        if program == "rm":
            (tmp_path / tail[0]).unlink()
        elif program:
            arguments = ("-m", "distap.cli", *tail) if program == "distap" else tuple(tail)
            output_of(Program(arguments, tmp_path), tmp_path)
    assert [name for name in made if not (tmp_path / name).exists()] == []
    if served:
        (options,) = (shlex.split(line, comments=True) for line in served.splitlines())
        server = Program(("-m", "distap.cli", "serve", *options, "--port", "0"), tmp_path)
        with started(server, tmp_path / "job") as job:
            search = f"{url_when_ready(job)}/api/search?k=5"
            image = (tmp_path / "photo.jpg").read_bytes()
            answer = httpx.post(search, files={"image": image}, timeout=60)
            assert len(answer.json()["hits"]) == 5, answer.text

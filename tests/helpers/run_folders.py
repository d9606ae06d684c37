"""Run folders and evaluations as a training writes them, with made-up figures."""

import json
from pathlib import Path

import numpy as np
from images import write_images

from benchmarks.photos import pack
from distap.data.shards.image_files import ImageFile
from distap.data.shards.index import Index
from distap.evaluation.saved import Evaluation, Retrieved, folder_of_step

FIGURES = {"mAP": 0.25, "mAP@R": 0.19, "R@1": 0.43, "R@5": 0.65, "R@10": 0.73}
ODD = '<b>&"'


def step(number: int, **changes) -> dict:
    """The log's line on a training step."""
    seconds = {
        "data_wait": 0.1,
        "describe": 2.0,
        "gather": 0.1,
        "rank": 0.2,
        "replay": 6.0,
        "reduce": 0.1,
    }
    return {
        "step": number,
        "loss": 1 / number,
        "batch_mAP": 1 - 1 / number,
        "learning_rate": 1e-4,
        "images_per_second": 120.0,
        "gradient_norm": 0.5,
        "replay_drift": 0.0,
        "images": 25,
        "ranks": 1,
        "seconds": {**seconds, "optimizer": 0.02, "other": 0.03, "step": 8.55, "network": 7.9},
        **changes,
    }


def write_run(folder: Path, steps: int | list[dict] = 24, validated: bool = True, **recipe) -> Path:
    """A run folder with a recipe and a log, without evaluations; `steps` are a number or the log's
    lines.
    """
    lines = [step(number) for number in range(1, steps + 1)] if isinstance(steps, int) else steps
    last = lines[-1]["step"] if lines else 24
    if validated:
        figures = {0: FIGURES, last: {name: value + 0.1 for name, value in FIGURES.items()}}
        lines = lines + [
            {"step": number, "validation": element, "seconds": {"evaluation": 1.0}}
            for number, element in figures.items()
        ]
    settings = {
        "run": str(folder),
        "steps": last,
        "data": {"train": "train", "validation": "d", "image_size": 32},
        "loss": {"name": "ap_q", "bins": 20},
        "model": {"backbone": "resnet10t", "pooling": {"name": "gem"}},
        "sampling": {"name": "random"},
        **recipe,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(json.dumps(settings))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def oddly_named_shards(folder: Path) -> Path:
    """40 images of 5 classes whose names and keys are markup, packed."""
    images = write_images(folder / "images", {f"{number}": 8 for number in range(5)}, size=24)
    files = sorted(images.rglob("*.png"))
    pack([ImageFile(path, ODD + path.parent.name, (ODD,)) for path in files], folder / "shards")
    return folder / "shards"


def retrieved(seed: int = 0, index: Index | None = None) -> Retrieved:
    """Random neighbours and APs of 40 images, those of an index or made-up ones."""
    random = np.random.default_rng(seed)
    names = np.array([f"class-{name}" for name in range(5)]) if index is None else index.class_name
    label = random.integers(0, 5, 40) if index is None else index.label.astype(np.int64)
    other_rows = [random.permutation(np.delete(np.arange(40), row))[:6] for row in range(40)]
    return Retrieved(
        sample=np.arange(40) * (3 if index is None else 1),
        key=np.array([f"key-{row}" for row in range(40)]) if index is None else index.key,
        class_name=names[label],
        average_precision=random.random(40).round(1),
        first_positive=random.integers(0, 4, 40),
        neighbours=np.stack(other_rows),
    )


def write_retrieved(
    run: Path, step: int, element: Retrieved, figures: dict[str, float] = FIGURES, **record
) -> Path:
    """Keep an evaluation in a run; its folder."""
    gain = 0.1 * bool(step)
    folder = folder_of_step(run, step)
    record = {"data": "d", "fingerprint": "f", "images": 40, **record}
    figures = {name: value + gain * (figures is FIGURES) for name, value in figures.items()}
    queries = int((element.first_positive > 0).sum())
    Evaluation(figures=figures, queries=queries, hits=element, **record).save(folder, step=step)
    return folder

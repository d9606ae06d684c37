"""A run's report page and summary, from what training and evaluation left in their folders."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from distap.data.index import Index, load_index
from distap.data.locations import parse_source
from distap.data.reading import Reader
from distap.data.storage import RemoteSettings
from distap.errors import DistapError
from distap.evaluation import NEIGHBOURS_FILE, RESULT_FILE
from distap.randomness import permutation
from distap.telemetry.report import Example, Hit, write_report
from distap.telemetry.runlog import read_run_log
from distap.whole_files import write_whole

EXAMPLES = 12
THUMBNAIL = 112  # pixels
SUMMARY_FIGURES = ("mAP", "mAP@R", "R@1")


def report(run: Path, before: Path, after: Path, output: Path) -> dict[str, Any]:
    """Write output/report.html and output/summary.json.

    Args:
        run: folder of the training.
        before, after: what `distap eval --output` wrote for the network before and after it.
        output: folder to write to.
    Returns:
        The summary.
    Raises:
        DistapError: a folder lacks its files, or the two evaluations are of different data.
    """
    entries = read_run_log(run)
    steps = [entry for entry in entries if "loss" in entry]
    validations = [entry for entry in entries if "validation" in entry]
    results = {"before": _result(before), "after": _result(after)}
    if results["before"]["fingerprint"] != results["after"]["fingerprint"]:
        raise DistapError(f"{before} and {after} are evaluations of different data: they cannot be compared")
    summary: dict[str, Any] = {
        when: {name: result["figures"][name] for name in SUMMARY_FIGURES} for when, result in results.items()
    }
    summary["train_seconds"] = sum(_wall_seconds(entry["seconds"]) for entry in entries)
    summary["outside_network_share"] = _outside_network(steps)
    first = {"step": 0, "validation": results["before"]["figures"]}
    same_data = str(_recipe(run)["data"]["validation"]) == results["before"]["data"]
    write_report(
        output / "report.html",
        title=f"distap: {run}",
        steps=steps,
        validations=[first, *validations] if same_data and validations else validations,
        before=results["before"]["figures"],
        after=results["after"]["figures"],
        examples=_examples(_recipe(run)["data"], results["after"]["data"], before, after),
        facts=_facts(run, steps, results["after"], summary),
    )
    write_whole(output / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


def _result(folder: Path) -> dict[str, Any]:
    path = folder / RESULT_FILE
    try:
        result: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DistapError(f"{path}: not a readable result; `distap eval --output {folder}` writes it") from error
    return result


def _recipe(run: Path) -> dict[str, Any]:
    recipe: dict[str, Any] = yaml.safe_load((run / "recipe.yaml").read_text())
    return recipe


def _wall_seconds(seconds: dict[str, float]) -> float:
    """A step's line holds its parts as well; an evaluation's or a checkpoint's only itself."""
    return seconds["step"] if "step" in seconds else sum(seconds.values())


def _outside_network(steps: list[dict[str, Any]]) -> float:
    total, network = (sum(step["seconds"][name] for step in steps) for name in ("step", "network"))
    return 1 - network / total if total else float("nan")


def _facts(run: Path, steps: list[dict[str, Any]], after: dict[str, Any], summary: dict[str, Any]) -> dict[str, str]:
    recipe = _recipe(run)
    step: dict[str, Any] = steps[-1] if steps else {"images": 0, "ranks": 0}
    return {
        "network": f"{recipe['model']['backbone']}, {recipe['model']['pooling']['name']} pooling",
        "loss": f"{recipe['loss']['name']}, {recipe['loss']['bins']} bins",
        "trained on": f"{recipe['data']['train']}, {recipe['data']['image_size']} px",
        "evaluated on": f"{after['data']}: {after['queries']} queries",
        "batch": f"{step['images']} images ({recipe['sampling']['name']})",
        "steps": f"{len(steps)} on {step['ranks']} ranks",
        "training time": f"{summary['train_seconds']:.0f} s",
        "outside the network": f"{100 * summary['outside_network_share']:.1f}% of a step",
    }


def _examples(recipe: dict[str, Any], data: str, before: Path, after: Path) -> list[Example]:
    """Queries drawn at random, not the most flattering ones, with their neighbours before and after."""
    remote = RemoteSettings(**recipe.get("remote", {}))
    kept = recipe.get("validation_index") if data == recipe["validation"] else None
    source = parse_source(data, kept and Path(kept))
    index = load_index(source, remote)
    reader = Reader(source, index, remote=remote)
    query, neighbours = _neighbours(before), _neighbours(after)
    common = sorted(set(query) & set(neighbours))
    chosen = [common[number] for number in permutation(len(common), 0)[:EXAMPLES]]
    return [
        Example(
            str(index.key[number]),
            str(index.class_name[index.label[number]]),
            _thumbnail(reader, number),
            [_hit(reader, index, number, hit) for hit in query[number]],
            [_hit(reader, index, number, hit) for hit in neighbours[number]],
        )
        for number in chosen
    ]


def _neighbours(folder: Path) -> dict[int, list[int]]:
    path = folder / NEIGHBOURS_FILE
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return dict(zip(arrays["query"].tolist(), arrays["neighbour"].tolist(), strict=True))
    except (OSError, ValueError, KeyError) as error:
        raise DistapError(f"{path}: not readable: {error}; `distap eval --output {folder}` writes it") from error


def _hit(reader: Reader, index: Index, query: int, hit: int) -> Hit:
    return Hit(str(index.key[hit]), _thumbnail(reader, hit), bool(index.label[hit] == index.label[query]))


def _thumbnail(reader: Reader, sample: int) -> bytes:
    image = reader.image(sample)
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()

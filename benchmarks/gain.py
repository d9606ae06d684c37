"""What a recipe gains on unseen classes, beside plain loops of pytorch-metric-learning in the same processor time."""

import tempfile
import time
from importlib import import_module
from itertools import chain, repeat
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from typer import Option

from benchmarks import harness
from distap.config.reading import load_recipe
from distap.config.recipe import Recipe
from distap.data.images.augmentation import seeded
from distap.data.loading.reader import Reader
from distap.data.shards.index import load_index
from distap.errors import DistapError
from distap.evaluation.sets import open_set
from distap.model.network import RetrievalNetwork
from distap.randomness import seed_for
from distap.telemetry.terminal import track
from distap.trainer import Trainer
from distap.training.build import describing_of, network_of, trained_network
from distap.world import World

LOSSES = ("MultiSimilarityLoss", "TripletMarginLoss", "FastAPLoss")
MINERS = {"MultiSimilarityLoss": "MultiSimilarityMiner", "TripletMarginLoss": "TripletMarginMiner"}
SHOWN = "contender={contender}|rate={rate:.0e}|seed={seed}|updates={updates}|mAP={mAP:.1f}|mAP@R={mAP@R:.1f}|"
SHOWN += "R@1={R@1:.1f}|gain={gain:+.1f}"
CAPTION = "in percent, on data.validation; gain: of mAP@R. All start from the same network, and see the same images."


class GainBenchmark(harness.Benchmark):
    """Print what a recipe gains on data.validation, beside plain loops of pytorch-metric-learning.

    The recipe is trained as it is. Each loop has the processor time that it took, one batch a step, and each of some
    learning rates, which fall linearly.
    """

    name: ClassVar[str] = "gain"
    recipe: Annotated[Path, Option(help="A recipe with data.validation, such as `distap init` writes.")] = Path(
        "recipe.yaml"
    )
    set: Annotated[list[str], Option(help="A change to the recipe, such as steps=100; repeat for several.")] = []
    rate: Annotated[list[float], Option(help="A learning rate of the loops; repeat for several.")] = [
        1e-4,
        3e-4,
        1e-3,
    ]
    batch: Annotated[int, Option(help="Images of a batch of the loops.", min=4)] = 64
    seeds: Annotated[int, Option(help="Trainings of each, from seed 0 on.", min=1)] = 1
    threads: harness.Threads = 1

    def report(self) -> harness.Report:
        torch.set_num_threads(self.threads)
        rows, seconds = list[harness.Row](), list[float]()
        jobs = [(loss, rate) for loss in (None, *LOSSES) for rate in ([None] if loss is None else self.rate)]
        runs = [(seed, *job) for seed in range(self.seeds) for job in jobs]
        with tempfile.TemporaryDirectory() as folder:
            for seed, loss, rate in track(runs, "trainings", len(runs)):
                own = [f"run={folder}/{seed}", f"seed={seed}", "data.workers=0", "evaluation.every=0"]
                recipe = load_recipe(self.recipe, [*self.set, *own])
                if recipe.data.validation is None:
                    raise DistapError(f"{self.recipe}: data.validation is missing, so nothing shows a gain")
                if loss is None:
                    before = figures_of(recipe, network_of(recipe, World()))
                    network, updates, spent = trained(recipe)
                    seconds.append(spent)
                else:
                    network, updates = looped(recipe, loss, float(rate or 0), seconds[seed], self.batch)
                about = {"contender": loss or "distap", "rate": rate or recipe.optimizer.learning_rate, "seed": seed}
                found = figures_of(recipe, network)
                gain = found["mAP@R"] - before["mAP@R"]
                rows.append({**about, "updates": updates, **found, "gain": gain, "before": before})
        each, first = ", ".join(f"{spent:.0f}" for spent in seconds), rows[0]["before"]
        note = f"before: {', '.join(f'{name} {value:.1f}' for name, value in first.items())}; processor s: {each}"
        return harness.Report(rows, [harness.table_of(f"gain of {self.recipe}", CAPTION, rows, SHOWN)], [note])


def trained(recipe: Recipe) -> tuple[RetrievalNetwork, int, float]:
    """Train a recipe; return the network, the updates and the seconds of processor time without the start."""
    trainer = Trainer(recipe, World())
    started = time.process_time()
    trainer.train()
    spent = time.process_time() - started
    return trained_network(recipe.run, World())[1], trainer.done, spent


def looped(recipe: Recipe, loss: str, rate: float, seconds: float, batch: int) -> tuple[RetrievalNetwork, int]:
    """Train the recipe's network for so many seconds of processor time, as one would write it with the library."""
    library = "pytorch_metric_learning"
    losses, miners, samplers = (import_module(f"{library}.{part}") for part in ("losses", "miners", "samplers"))
    function = getattr(losses, loss)()
    miner = getattr(miners, MINERS[loss])() if loss in MINERS else None
    data, network = recipe.data, network_of(recipe, World()).train()
    index = load_index(data.train_source)
    reader = Reader(data.train_source, index)
    transform = data.augmentation.transform(data.image_size)
    classes = len(index.class_name)
    a_class = max(batch // classes, 4)
    sampler = samplers.MPerClassSampler(index.label, a_class, min(batch, a_class * classes), len(index))
    optimizer, updates, order = torch.optim.Adam(network.parameters()), 0, chain.from_iterable(repeat(sampler))
    torch.manual_seed(recipe.seed)
    started = time.process_time()
    while (done := (time.process_time() - started) / seconds) < 1:
        optimizer.param_groups[0]["lr"] = rate * (1 - done)
        samples = [int(next(order)) for _ in range(min(batch, a_class * classes))]
        pixels = [
            seeded(transform, reader.encoded(sample), seed_for(recipe.seed, updates, slot))
            for slot, sample in enumerate(samples)
        ]
        labels = torch.from_numpy(index.label[samples])
        descriptors = network(torch.stack(pixels))
        value: Tensor = function(descriptors, labels, *([] if miner is None else [miner(descriptors, labels)]))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        updates += 1
    return network, updates


def figures_of(recipe: Recipe, network: RetrievalNetwork) -> dict[str, Any]:
    """mAP, mAP@R and R@1 in percent on data.validation."""
    assert recipe.data.validation is not None
    found = open_set(recipe.data.validation).describe(describing_of(recipe, network, World())).evaluate().figures
    return {name: 100 * found[name] for name in ("mAP", "mAP@R", "R@1")}

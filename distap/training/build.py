"""Build the parts of a training from a recipe: images, network, engine, step, evaluations."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distap.checkpoint.agreement import first_on_rank_0, on_rank_0
from distap.config.reading import is_recipe, load_recipe, recorded_recipe
from distap.config.recipe import NetworkRecipe, Recipe
from distap.data.loading.share import LoadingJob, MixedSource, Sizes, TrainingImages
from distap.errors import DistapError, logger
from distap.evaluation.described_images import DescribedTraining
from distap.evaluation.evaluation_set import EvaluationSet
from distap.evaluation.sets import open_set
from distap.model.adapters import freeze
from distap.model.backbone import TimmBackbone
from distap.model.folding import fold_batchnorm
from distap.model.network import GivenNetwork, RetrievalNetwork, build_network
from distap.model.trained import TrainedNetwork, read_checkpoint
from distap.model.weights import RandomWeights
from distap.ranking.loss import Loss
from distap.ranking.losses.within import BySet
from distap.ranking.memory import CrossBatchMemory
from distap.ranking.rank import shard_classes
from distap.registry import Part
from distap.stages.blocks import compile_blocks
from distap.stages.exactness import default_drift, make_writable
from distap.stages.micro_batches import MicroBatchSizes
from distap.stages.replica import Replica, refuse_hooks, refuse_unusable
from distap.stages.step import ThreeStages
from distap.stopwatch import Stopwatch
from distap.training.by_set import set_names
from distap.training.filling import built_once, fill
from distap.training.learner import Learner, TrainingStep
from distap.training.optimizer import TimmOptimizer, parameter_groups, trained_parameters
from distap.world import World

# Keys of the model for which a network in Python stands, and those that it cannot have.
GIVEN_PARTS = ("backbone", "weights", "pooling")
# Up to so many classes (15 MB of 128 dimensions) a step is no slower with whole proxies.
MOST_WHOLE_CLASSES = 30_000
OF_HEADS = ("projection", "whitening", "layer_norm", "unit_length")


def images_of(recipe: Recipe, world: World, stopwatch: Stopwatch) -> TrainingImages:
    """Open the recipe's training images for this rank, by the source `data.reading`."""
    data = recipe.data

    def sizes(augmentation: Any) -> Sizes:
        return tuple((at, size, augmentation.transform(size)) for at, size in data.sizes)

    sources = data.train_sources
    sets = data.train_sets
    weights = {name: settings.weight for name, settings in sets.items()}
    is_mixed = isinstance(data.train, Mapping)
    job = LoadingJob(
        source=MixedSource(sources, weights) if is_mixed else sources[""],
        sampling=recipe.sampling,
        seed=recipe.seed,
        sizes=sizes(data.augmentation),
        own_sizes={
            name: sizes(settings.augmentation)
            for name, settings in sets.items()
            if settings.augmentation is not None
        },
        chunk=recipe.replay.size,
        workers=data.workers,
        prefetch=data.prefetch,
        requests=data.requests,
        cache=data.cache,
        longest_wait=recipe.timeout_seconds,
        pixels=data.pixels,
    )
    return (DescribedTraining if data.is_described else data.reading.open)(job, world, stopwatch)


def network_of(
    recipe: NetworkRecipe, world: World, weights: Any = None, whole: bool = True
) -> RetrievalNetwork:
    """Build the recipe's network on this rank's device, with the same parameters on every rank.

    Rank 0 alone builds it in full and loads weights, the recipe's if `weights` is None, and sends
    them to the others.

    Args:
        whole: whether the other ranks get the values at once. Otherwise `network.awaits_values`,
            and `learner_of` sends each rank what its engine holds.
    """
    model = recipe.model
    # The other ranks need parameters of the same shapes alone.
    chosen = (weights or model.weights) if world.rank == 0 else RandomWeights()

    def build() -> RetrievalNetwork:
        # The first parameters are a function of the seed, whatever was drawn before.
        torch.manual_seed(recipe.seed)
        options: dict[str, Any] = {"layer_norm": model.layer_norm, "unit_length": model.unit_length}
        if isinstance(model.backbone, TimmBackbone):
            options |= {"arguments": model.arguments, "image_size": recipe.data.image_size}
        return build_network(
            model.backbone, chosen, model.pooling, model.projection, model.batchnorm, **options
        )

    if isinstance(model.backbone, GivenNetwork):  # every rank has it already
        network = first_on_rank_0(world, partial(_given_network, recipe, chosen, world))
    else:
        network = built_once(build, world)
    if world.rank == 0:
        network.to(world.device)
    network.awaits_values = not whole
    if whole:
        fill(network, world)
    return network


def _given_network(recipe: NetworkRecipe, weights: Any, world: World) -> RetrievalNetwork:
    """Wrap the recipe's network in Python; load `weights` if they are of a whole network."""
    model = recipe.model
    for key in OF_HEADS:
        if getattr(model, key):
            raise DistapError(
                "network.ends_itself",
                f"model.{key}: a network given in Python ends as it does: leave the key out",
            )
    module = model.backbone.given
    refuse_unusable(module, freezes_batchnorm=True)
    refuse_hooks(module)
    make_writable(module)
    network: RetrievalNetwork = model.backbone.retrieval_network(
        recipe.data.image_size, model.batchnorm, world.device
    )
    if getattr(weights, "whole", False):
        weights.load(network)
    return network


def with_given(recipe: NetworkRecipe, network: nn.Module | None, where: str) -> NetworkRecipe:
    """Put the Python network into a recorded recipe, if the run was started with one.

    Raises:
        DistapError: the network is missing, or the recipe builds its own.
    """
    backbone = recipe.model.backbone
    needs_network = isinstance(backbone, Part)
    if network is None and needs_network:
        raise DistapError(
            "network.missing",
            f"{where}: its network was an object in Python, {backbone.keys['of']}: build one like"
            " it, and load its parameters by distap.load(..., network=...)",
        )
    if network is None:
        return recipe
    if not needs_network:
        raise DistapError(
            "network.unexpected",
            f"{where}: its network is that of its recipe; leave `network` out",
        )
    model = recipe.model.model_copy(update=dict.fromkeys(GIVEN_PARTS, GivenNetwork(network)))
    return recipe.model_copy(update={"model": model})


def sets_of(recipe: Recipe) -> dict[str, EvaluationSet]:
    """Open the data sets that a training evaluates on, by name, those of data.validation first."""
    data = recipe.data
    if recipe.evaluation.every == 0:
        return {}
    validation = {
        name: open_set(
            source,
            name,
            gallery=data.gallery,
            gallery_draws=data.gallery_draws,
            figures=recipe.evaluation.figures,
        )
        for name, source in data.validation_sets.items()
    }
    return validation | {
        name: open_set(
            section.data,
            name,
            gallery=section.gallery,
            gallery_draws=section.gallery_draws,
            figures=section.figures,
            truth=section.truth,
            gallery_rows=section.gallery_rows or (),
        )
        for name, section in recipe.evaluation.also.items()
    }


def learner_of(recipe: Recipe, network: RetrievalNetwork, world: World) -> Learner:
    """Build the learner: the network, spread over ranks by the engine, with its optimiser."""
    optimizer = recipe.optimizer
    choose_trained(recipe, network, world)
    trained = {name.partition(".")[0] for name, _ in trained_parameters(network)}
    if optimizer.head_only and trained == {"backbone"}:
        raise DistapError(
            "network.nothing_to_train",
            "optimizer.head_only: nothing but the backbone has parameters to train; set"
            " model.projection",
        )

    def build() -> Any:
        # Further modules of a network learn as its head does.
        modules = {
            name: (module, getattr(optimizer, name, optimizer.head))
            for name, module in network.named_children()
        }
        return optimizer.chosen.build(parameter_groups(modules, optimizer.layer_decay))

    if recipe.step.fold_batchnorm:
        send_values(network, world)
        fold_batchnorm(network)
    learner: Learner = recipe.engine.build(
        network, build, world, optimizer.clip_norm, recipe.precision
    )
    if recipe.model.compile is not None:  # after FSDP, whose hooks stay outside
        compile_blocks(network, world.device)
    if recipe.ema is not None:
        learner.keep_average(recipe.ema)
    return learner


def send_values(network: RetrievalNetwork, world: World) -> None:
    """Give every rank the whole network, if only rank 0 has its values yet."""
    if network.awaits_values:
        fill(network, world)
        network.awaits_values = False


def choose_trained(recipe: Recipe, network: RetrievalNetwork, world: World) -> None:
    """Add the recipe's adapter to the network, and freeze the parameters that it does not train."""
    model = recipe.model
    if model.adapter is not None:
        model.adapter.adapt(network, recipe.data.image_size, recipe.seed)
        for _, parameter in () if network.awaits_values else trained_parameters(network):
            parameter.data.copy_(world.broadcast(parameter.data.contiguous()))
        model.adapter.round_base(network, torch.bfloat16)
    if model.freeze is not None:
        freeze(network, model.freeze)
    if recipe.data.is_described:
        # No gradient reaches the parameters before the head.
        names = [name for name, _ in network.named_parameters() if not name.startswith("head.")]
        freeze(network, names)


def loss_of(
    recipe: Recipe, images: TrainingImages, network: RetrievalNetwork, world: World
) -> Loss:
    """Build the recipe's loss, with the same parameters on all ranks if it has any."""
    classes = None if images.index is None else torch.from_numpy(images.index.classes.numbers)
    _refuse_other_sets(recipe.loss, set_names(images))
    loss: Loss = recipe.loss.sized(classes, network.dimensions, recipe.seed)
    _shard_classes(recipe, loss, world)
    if loss.learned is not None:
        for tensor in loss.learned.to(world.device).state_dict().values():
            if not isinstance(tensor, DTensor):  # of which each rank has drawn its own part
                tensor.copy_(world.broadcast(tensor.contiguous()))
    return loss


def _shard_classes(recipe: Recipe, loss: Loss, world: World) -> None:
    """Share the classes of the loss out over the ranks, as `rank.shard_classes` says.

    Raises:
        DistapError: they are to be shared out, but the loss or the mode cannot.
    """
    most = most_whole_classes(recipe)
    if recipe.rank.shard_classes is True:
        shard_classes(loss, world, recipe.rank.mode)
    elif most is not None:
        loss.shard_classes(world, above=most)


def most_whole_classes(recipe: Recipe) -> int | None:
    """Return the most classes whose proxies each rank holds whole; None: however many there are."""
    wanted = recipe.rank.shard_classes
    if wanted is False or recipe.rank.mode != "sharded":
        return None
    if wanted is True:
        return 0
    # Another optimiser may not take tensors that are shared out.
    return MOST_WHOLE_CLASSES if isinstance(recipe.optimizer.chosen, TimmOptimizer) else None


def _refuse_other_sets(loss: Loss, names: Sequence[str]) -> None:
    """Raise a DistapError if a loss by set, or one within it, is of other sets than these."""
    if isinstance(loss, BySet) and {*loss.losses} != {*names}:
        raise DistapError(
            "loss.other_sets",
            f"loss: by_set has losses for {', '.join(sorted(loss.losses))}, but data.train names"
            f" {', '.join(names) or 'no two data sets'}: give a loss for each of them",
        )
    for _, term in getattr(loss, "parts", ()):
        _refuse_other_sets(term, names)


def loss_learner_of(recipe: Recipe, loss: Loss, world: World) -> Learner | None:
    """Return the learner of the loss's own parameters; None for a loss without parameters.

    Every rank gets the whole gradient of the parameters that it holds from stage two, so there is
    nothing to reduce.
    """
    if loss.learned is None or not loss.parameters:
        return None
    groups = parameter_groups({"loss": (loss.learned, recipe.optimizer.loss)})
    # As of a single rank: nothing is left to sum.
    return Learner(
        Replica(loss.learned, World(device=world.device)), recipe.optimizer.chosen.build(groups)
    )


def step_of(
    recipe: Recipe, learner: Learner, loss: Loss, world: World, stopwatch: Stopwatch | None = None
) -> TrainingStep:
    """Build the recipe's step, which keeps no graph in the first step if `replay.keep` is auto."""
    replica = learner.replica
    keep = recipe.keep
    if keep == "auto" and not replica.keeps_graphs:
        logger.warning("replay.keep: this engine can hold only one graph at a time: none is kept")
    stages = ThreeStages(
        replica,
        loss,
        world,
        recipe.seed,
        MicroBatchSizes(
            recipe.replay.size,
            keep=0 if keep == "auto" else keep,
            describe=recipe.describe.size or 0,
        ),
        mode=recipe.rank.mode,
        memory=CrossBatchMemory(recipe.memory.size),
        memory_after=recipe.memory.after,
        max_drift=recipe.replay.max_drift
        or default_drift(world.device, recipe.precision == "float32"),
        stopwatch=Stopwatch() if stopwatch is None else stopwatch,
        skip_below=recipe.replay.skip_below,
    )
    return TrainingStep(stages, learner, loss_learner_of(recipe, loss, world))


def trained_network(
    path: Path | str,
    world: World,
    best: bool = False,
    overrides: Sequence[str] = (),
    network: nn.Module | None = None,
    trusted: bool = False,
) -> tuple[NetworkRecipe, RetrievalNetwork]:
    """Load the network of a checkpoint, or of a run's newest or best one, on disk or behind a URL.

    Rank 0 alone reads it.

    Args:
        path: a run, one of its checkpoints, or a recipe: then it is the network that training
            begins with, without a projection that would be random.
        overrides: changes of the recorded recipe.
        network: the network of a run that was started with one in Python; it gets the run's
            parameters.
        trusted: the record may name classes that are not distap's, and have files read elsewhere.
    Returns:
        The part of the recipe about network and images, and the network.
    """
    if is_recipe(path):
        begun = first_on_rank_0(world, partial(load_recipe, Path(path), overrides))
        is_whole = getattr(begun.model.weights, "whole", False) and not begun.data.is_described
        if not is_whole:
            model = begun.model.model_copy(update={"projection": None})
            begun = begun.model_copy(update={"model": model})
        return begun, network_of(begun, world)
    read: list[TrainedNetwork] = []

    def read_record() -> list[Any]:
        trained = read_checkpoint(path, best, trusted)
        read.append(trained)
        return [trained.settings, trained.where, trained.folder]

    settings, where, folder = on_rank_0(world, read_record)
    recipe = first_on_rank_0(
        world, partial(recorded_recipe, settings, where, folder, overrides, trusted)
    )
    recipe = with_given(recipe, network, where)
    return recipe, network_of(recipe, world, read[0] if read else None)

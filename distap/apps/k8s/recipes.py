"""Fit a recipe to its pods: arguments of the container, and checks of the recipe as the pods will read it."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from distap.apps.k8s.request import Request, claim_of, parsed_image, quantity_bytes
from distap.config.reading import load_recipe
from distap.config.recipe import Recipe
from distap.errors import DistapError
from distap.registry import by_path, name_of
from distap.storage.redact import without_secrets

RECIPE = "/etc/distap/recipe.yaml"
SET_HERE = {  # keys that the manifests rely on, and their values
    "run": "set by --name",
    "metrics.port": "9400, where probes and Prometheus look",
    "metrics.address": "0.0.0.0, since Prometheus is another pod",
    "data.pixels.spool_folder": "/spool, a volume",
    "checkpoint.store": "set by --checkpoints",
}
WEB_PORTS = {"http": 80, "https": 443}
ALL_ADDRESSES = "::"  # of IPv6, for a cluster without IPv4; YAML needs quotes around it


def arguments_of(base: Sequence[str], request: Request, recipe: Path, overrides: Sequence[str]) -> list[str]:
    """Return the container's arguments: torchrun's options and the recipe, which are `base`, and its overrides."""
    changes = ["device=cuda"] if request.gpus else []  # pods with broken drivers do not train on their CPUs
    changes += [_checked_override(override, request) for override in overrides]
    runs = request.run_claim
    folder = PurePosixPath("/runs", runs.folder if runs else "", request.name)
    replaced = {"run": f"run={folder}", "--rdzv-conf": f"--rdzv-conf=join_timeout={request.join_timeout}"}
    arguments = [replaced.get(argument.partition("=")[0], argument) for argument in base] + changes
    for key, (option, text) in request.data_sets.items():
        if text is not None:
            claim = claim_of(text, option)
            arguments.append(f"{key}={PurePosixPath('/data', claim.folder) if claim else text}")
    if runs is None:
        arguments.append(f"checkpoint.store={request.checkpoints.rstrip('/')}/{request.name}")
    # Folders and stores that the recipe names give way to volumes.
    named = _read(recipe, arguments)
    if named.data.cache is not None:
        arguments.append("data.cache.folder=/spool")
    if named.checkpoint.store is not None and runs is not None:
        arguments.append("checkpoint.store=null")
    return arguments


def checked_recipe(path: Path, arguments: Sequence[str], request: Request) -> Recipe:
    """Return the recipe as the pods will read it; raise a DistapError if it does not fit the options or a pod."""
    recipe = _read(path, arguments)
    _check_batch(recipe, request)
    if recipe.precision == "fp16" and not request.gpus:
        raise DistapError("--gpus 0: precision fp16 needs GPUs; set precision=bf16 or float32, or --gpus")
    for key, text in _local_paths(recipe):
        _check_path(key, text, request)
    cache = recipe.data.cache
    if cache is not None and request.spool and quantity_bytes(request.spool, "--spool") < cache.max_bytes:
        raise DistapError(
            f"--spool {request.spool}: pods would be evicted once data.cache is full, at the {cache.max_bytes} bytes "
            "of data.cache.max_bytes; make one of them fit, or leave --spool out"
        )
    return recipe


def cautions(recipe: Recipe, request: Request) -> Iterator[str]:
    """Yield preparations outside of the manifests that the training needs."""
    if parsed_image(request.image)["digest"] is None:
        yield f"--image {request.image}: a tag can change while a training restarts; better NAME@sha256:DIGEST"
    for key, value in by_path(recipe.model_dump(mode="json"), "."):
        for text in map(str, value if isinstance(value, list) else [value]):
            with suppress(ValueError):  # the port is a pattern
                address = urlsplit(text)
                port = address.port or WEB_PORTS.get(address.scheme)
                if address.scheme in WEB_PORTS and port != 443:
                    yield (
                        f"{key}: {without_secrets(text)}: pods may connect to port 443 only; add a NetworkPolicy for "
                        f"their label app.kubernetes.io/instance, with an egress rule for TCP port {port}"
                    )
    if recipe.step.compile:
        yield (
            "step.compile: the image of launch/container/Dockerfile has no C++ compiler, without which no rank "
            "starts; take one with g++ and python3-dev on top (docs/guides/clusters.md says how)"
        )


def _checked_override(override: str, request: Request) -> str:
    key, _, given = override.partition("=")
    if key == "metrics.address" and given.strip("'\"") == ALL_ADDRESSES:
        return f'{key}="{ALL_ADDRESSES}"'
    option, asked = request.data_sets.get(key, ("", None))
    if asked is not None:
        raise DistapError(without_secrets(f"{override}: {option} {asked} says this already; leave one out"))
    for one, value in SET_HERE.items():
        if one == key:
            raise DistapError(f"{override}: in a pod {key} is {value}; leave it out")
        if one.startswith(f"{key}."):
            replaced = f"the whole section {key}, of which {one} is {value}"
            raise DistapError(f"{override}: replaces {replaced}; give its keys one by one, as {key}.KEY=VALUE")
    return override


def _read(path: Path, arguments: Sequence[str]) -> Recipe:
    return load_recipe(path, arguments[arguments.index(RECIPE) + 1 :])


def _check_batch(recipe: Recipe, request: Request) -> None:
    batch, world = recipe.sampling.size, request.world
    hosts = f"--nodes {request.nodes} {'--gpus' if request.gpus else '--ranks'} {request.ranks_a_host}"
    if batch < world:
        raise DistapError(f"{hosts}: {world} ranks, but a batch has {batch} images (sampling); take fewer ranks")
    if name_of("sampling", recipe.sampling) == "streams" and recipe.sampling.streams % world:
        streams = f"the {recipe.sampling.streams} streams of sampling.streams"
        raise DistapError(f"{hosts}: {world} ranks do not divide {streams}, of which each reads whole ones")


def _local_paths(recipe: Recipe) -> Iterator[tuple[str, str]]:
    data = recipe.data
    for key, path in (
        ("data.train (--data)", data.train),
        ("data.validation (--validation)", data.validation),
        ("data.gallery", data.gallery),
        ("data.train_index", data.train_index),
        ("data.validation_index", data.validation_index),
        ("data.reading.label_map", getattr(data.reading, "label_map", None)),
        ("engine.config", getattr(recipe.engine, "config", None)),
    ):
        if path is not None:
            yield key, str(path)
    if name_of("weights", recipe.model.weights) in ("file", "run"):
        yield "model.weights.path", str(recipe.model.weights.path)
    for name, other in recipe.evaluation.also.items():
        yield f"evaluation.also.{name}.data", other.data
        for key, path in (("gallery", other.gallery), *(("distractors", path) for path in other.distractors)):
            if path is not None:
                yield f"evaluation.also.{name}.{key}", path


def _check_path(key: str, text: str, request: Request) -> None:
    if text.startswith("pipe:") or ("://" in text and not text.startswith("file://")):
        return
    if text.startswith("hf:") and not text.startswith("hf:/"):
        return  # a name on a hub
    plain = text.removeprefix("file://").removeprefix("imagefolder:").removeprefix("hf:")
    path = PurePosixPath(plain.partition("#")[0])
    volumes = {"/data": request.data_claim, "/runs": request.run_claim}
    filled = [folder for folder, claim in volumes.items() if claim]
    if ".." in path.parts or not any(path.is_relative_to(folder) for folder in filled):
        below = f"a path without .. below {' or '.join(filled)}, or a URL" if filled else "a URL"
        raise DistapError(
            f"{key}: {text} is a path where pods see nothing; expected {below} (--data pvc://CLAIM/FOLDER mounts a "
            "claim at /data; /spool, /tmp and what is in no volume are each pod's own, and empty)"
        )

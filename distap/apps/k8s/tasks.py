"""Write a folder for `kubectl apply -k` that runs commands of distap: a Job, or a Deployment of `distap serve`."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distap.apps.k8s.pod_patch import read_pod_patch
from distap.apps.k8s.rendering import TEMPLATES, manifests_folder, require_own
from distap.apps.k8s.request import TaskRequest
from distap.apps.k8s.sizes import TEMPORARY
from distap.errors import DistapError
from distap.storage.atomic import replacing_folder

CONTAINER = "distap"
SERVE = ["serve", "--host=0.0.0.0", "--drain-seconds=10"]  # options in the command go before these


class Command(NamedTuple):
    """A command of distap: its words, and all its options by their parameter's name."""

    words: Sequence[str]
    options: Mapping[str, Any]


def with_defaults(words: Sequence[str]) -> list[str]:
    """Return the words of a command with the options that a pod needs, before its own."""
    return [*SERVE, *words[1:]] if words[:1] == ["serve"] else list(words)


def render_task(output: Path, request: TaskRequest, commands: Sequence[Command]) -> None:
    """Write the folder `output`, in which each command starts when the one before it has succeeded.

    An earlier call's folder is replaced, unless it holds other files. A DistapError names what does not go together.
    """
    programs = [command.words[0] for command in commands]
    is_server = "serve" in programs
    if is_server and len(programs) > 1:
        raise DistapError("serve: runs until it is stopped; give it a task of its own")
    require_own(output)
    values = {
        "request": request,
        "server": commands[0].options if is_server else None,
        "commands": [command.words for command in commands],
        "claims": request.claims,
        "patch": request.patch and read_pod_patch(request.patch, CONTAINER),
        "writable": {"data": "data" in programs, "runs": not is_server},
        "ranks": max(command.options.get("ranks") or 1 for command in commands),
        "container": CONTAINER,
        "temporary": TEMPORARY,
    }
    with replacing_folder(output.resolve()) as folder:
        (folder / "task").mkdir()
        shutil.copyfile(manifests_folder() / "base" / "network-policy.yaml", folder / "task" / "network-policy.yaml")
        for file, template in (("kustomization.yaml", "task-kustomization.yaml"), ("task/task.yaml", "task.yaml")):
            (folder / file).write_text(TEMPLATES.get_template(template).render(values), encoding="utf-8")

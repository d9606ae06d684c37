"""`distap k8s`: write the manifests of a training, a task or a server, and rules for Prometheus."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distap.apps.k8s.request import Request, TaskRequest
from distap.cli.commands import App
from distap.cli.options import CONFIG, OVERRIDES, with_options
from distap.errors import DistapError

if TYPE_CHECKING:
    from distap.apps.k8s.tasks import Command

FOLDER = "Folder for kubectl apply -k, new or written by this command; - prints the manifests."
COMMANDS = "Commands of distap without `distap`, each in quotes, which run one after the other; or one `serve ...`."
OUTPUT = Annotated[Path, typer.Option(help=FOLDER)]
k8s = App(help="Kubernetes manifests of a training, a task or a server, and rules for Prometheus.")


@k8s.command("rules")
def rules_command(
    runbook: Annotated[
        str, typer.Option(help="URL of k8s/monitoring/RUNBOOK.md, for the links of the alerts.")
    ] = "k8s/monitoring/RUNBOOK.md",
) -> None:
    """Print the recording rules and alerts as a rule file for a Prometheus without its operator."""
    from distap.apps.k8s.rendering import plain_rules

    typer.echo(plain_rules(runbook), nl=False)


@k8s.command("render")
@with_options(Request)
def render_command(
    config: CONFIG,
    overrides: OVERRIDES = None,
    *,
    output: OUTPUT,
    **options: Any,
) -> None:
    """Write the manifests of a training: a folder for `kubectl apply -k`.

    The recipe is checked as the pods will read it. This command does not talk to a cluster.
    """
    from distap.apps.k8s.rendering import render

    request = Request(**options)
    with _written(output, request.name) as folder:
        for caution in render(folder, request, config, overrides or []):
            typer.echo(f"warning: {caution}", err=True)


@k8s.command("task")
@with_options(TaskRequest)
def task_command(
    commands: Annotated[list[str], typer.Argument(metavar="COMMAND...", help=COMMANDS, show_default=False)],
    *,
    output: OUTPUT,
    **options: Any,
) -> None:
    """Write the manifests of other commands: a Job, or a Deployment and a Service for `serve`.

    For example distap k8s task "extract /data/train /runs/found --checkpoint /runs/emoji" --runs pvc://distap-runs
    """
    from distap.apps.k8s.tasks import render_task

    request = TaskRequest(**options)
    with _written(output, request.name) as folder:
        render_task(folder, request, [_command(text) for text in commands])


def _command(text: str) -> "Command":
    """Read a command as the pod will; its own error says what is wrong with it."""
    from distap.apps.k8s.tasks import Command, with_defaults
    from distap.cli import app

    try:
        words = with_defaults(shlex.split(text))
    except ValueError as error:
        raise DistapError(f"{text}: {error}; each COMMAND is one text in quotes") from error
    command: Any = typer.main.get_command(app)
    rest = words
    while known := getattr(command, "commands", None):
        if not rest or rest[0] not in known:
            raise DistapError(f"{text}: expected a command of distap: {', '.join(known)}")
        command, rest = known[rest[0]], rest[1:]
    return Command(words, command.make_context(f"distap {words[0]}", list(rest)).params)


@contextmanager
def _written(output: Path, name: str) -> Iterator[Path]:
    """Give a folder to write, and print what it builds if `output` is -."""
    from distap.apps.k8s.rendering import built

    with TemporaryDirectory() as scratch:
        is_printed = str(output) == "-"
        folder = Path(scratch, name) if is_printed else output
        yield folder
        typer.echo(built(folder) if is_printed else f"{output}: kubectl apply -k {output}", nl=not is_printed)

"""`distap k8s`: write the manifests of a training, and rules for Prometheus."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from distap.apps.k8s.request import Request
from distap.cli.options import CONFIG, OVERRIDES, with_options

k8s = typer.Typer(help="Kubernetes manifests of a training, and rules for Prometheus.", no_args_is_help=True)


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
    output: Annotated[
        Path,
        typer.Option(help="Folder for kubectl apply -k, new or written by this command; - prints the manifests."),
    ],
    **options: Any,
) -> None:
    """Write the manifests of a training: a folder for `kubectl apply -k`.

    The recipe is checked as the pods will read it. This command does not talk to a cluster.
    """
    from distap.apps.k8s.rendering import built, render

    request = Request(**options)
    with TemporaryDirectory() as scratch:
        is_printed = str(output) == "-"
        folder = Path(scratch, request.name) if is_printed else output
        for caution in render(folder, request, config, overrides or []):
            typer.echo(f"warning: {caution}", err=True)
        typer.echo(built(folder) if is_printed else f"{output}: kubectl apply -k {output}", nl=not is_printed)

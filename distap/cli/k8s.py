"""`distap k8s`: manifests, and rules for Prometheus."""

from typing import Annotated

import typer

k8s = typer.Typer(help="Kubernetes manifests of a training, and rules for Prometheus.", no_args_is_help=True)


@k8s.command("rules")
def rules_command(
    runbook: Annotated[
        str, typer.Option(help="URL at which k8s/monitoring/RUNBOOK.md is read, for the links of the alerts.")
    ] = "k8s/monitoring/RUNBOOK.md",
) -> None:
    """Print the recording rules and alerts as a rule file for a Prometheus without its operator."""
    from distap.manifests import manifests_folder
    from distap.manifests.rules import plain_rules

    typer.echo(plain_rules(manifests_folder(), runbook), nl=False)

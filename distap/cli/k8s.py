"""`distap k8s`: manifests, and rules for Prometheus."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal

import typer

from distap.train import CONFIG, OVERRIDES

k8s = typer.Typer(help="Kubernetes manifests of a training, and rules for Prometheus.", no_args_is_help=True)


@k8s.command("rules")
def rules_command(
    runbook: Annotated[
        str, typer.Option(help="URL at which k8s/monitoring/RUNBOOK.md is read, for the links of the alerts.")
    ] = "k8s/monitoring/RUNBOOK.md",
) -> None:
    """Print the recording rules and alerts as a rule file for a Prometheus without its operator."""
    from distap.apps.k8s import manifests_folder
    from distap.apps.k8s.rules import plain_rules

    typer.echo(plain_rules(manifests_folder(), runbook), nl=False)


@k8s.command("render")
def render_command(
    config: CONFIG,
    overrides: OVERRIDES = None,
    *,
    name: Annotated[str, typer.Option(help="Of the training, its objects, and the folder of its run.")],
    image: Annotated[str, typer.Option(help="The container image, best by digest: NAME@sha256:DIGEST.")],
    checkpoints: Annotated[
        str, typer.Option(help="pvc://CLAIM/FOLDER that all pods can write to, or s3:// or gs:// and a prefix.")
    ],
    output: Annotated[
        Path,
        typer.Option(help="A folder for kubectl apply -k, new or written by this before; - prints the manifests."),
    ],
    kind: Annotated[
        Literal["indexed-job", "jobset", "trainjob"], typer.Option(help="What runs it; k8s/README.md compares them.")
    ] = "indexed-job",
    nodes: Annotated[int, typer.Option(help="Hosts.")] = 1,
    gpus: Annotated[int, typer.Option(help="GPUs of a host, one rank on each; 0 trains on CPUs.")] = 0,
    ranks: Annotated[int | None, typer.Option(help="Ranks of a host without GPUs.", show_default="1")] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Shards to train on: pvc://CLAIM/FOLDER or a URL.", show_default="data.train of the recipe"
        ),
    ] = None,
    validation: Annotated[
        str | None,
        typer.Option(help="Shards to evaluate on, the same way.", show_default="data.validation of the recipe"),
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="Of all objects.", show_default="kubectl's")] = None,
    queue: Annotated[str | None, typer.Option(help="Kueue's LocalQueue.", show_default="not queued")] = None,
    secret: Annotated[
        str, typer.Option(help="Secret whose keys become environment variables; it may be missing.")
    ] = "distap-credentials",
    monitoring: Annotated[str, typer.Option(help="Namespace whose Prometheus may read the metrics.")] = "monitoring",
    cpu: Annotated[
        int | None, typer.Option(help="Cores of a pod.", show_default="2 a rank, and 1 a loader worker")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Of a pod, such as 64Gi.", show_default="estimated from the recipe")
    ] = None,
    spool: Annotated[
        str | None,
        typer.Option(help="Disk of a pod for pixels and kept shards.", show_default="computed from the recipe"),
    ] = None,
    priority: Annotated[str | None, typer.Option(help="PriorityClass.", show_default="the cluster's default")] = None,
    runtime: Annotated[
        Literal["namespace", "cluster"],
        typer.Option(
            help="With --kind trainjob: a TrainingRuntime, or a ClusterTrainingRuntime, which needs more rights."
        ),
    ] = "namespace",
) -> None:
    """Write the manifests of a training: a folder for `kubectl apply -k`.

    The recipe is checked as the pods will read it. Nothing is asked of a cluster.
    """
    options = dict(locals())
    from distap.apps.k8s import manifests_folder
    from distap.apps.k8s.rendering import render, rendered
    from distap.apps.k8s.request import Request, parsed_image

    request = Request(**{field.name: options[field.name] for field in fields(Request)})
    if parsed_image(image).digest is None:
        _warn(
            f"--image {image}: a tag can change between the pods of a training and its restarts; better "
            "NAME@sha256:DIGEST"
        )
    if str(output) == "-":
        typer.echo(rendered(manifests_folder(), request, config, overrides or [], _warn), nl=False)
        return
    render(manifests_folder(), output, request, config, overrides or [], _warn)
    typer.echo(f"{output}: kubectl apply -k {output}")


def _warn(what: str) -> None:
    typer.echo(f"warning: {what}", err=True)

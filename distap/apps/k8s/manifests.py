"""Read the manifests of k8s/, which the installed package contains, and build them with kubectl."""

import shutil
import subprocess
from pathlib import Path

import yaml

from distap.errors import DistapError

RUNBOOK = "k8s/monitoring/RUNBOOK.md"


def manifests_folder() -> Path:
    """Return the folder of kustomize bases, overlays and components; raise a DistapError if it is missing."""
    folder = Path(__file__).parent / "files"
    if not (folder / "monitoring").is_dir():
        raise DistapError(f"{folder}: the manifests are missing; install distap anew, from a clone with its k8s/")
    return folder


def built(folder: Path) -> str:
    """Return the manifests of a kustomization as YAML; this needs kubectl, but no cluster.

    Raises:
        DistapError: kubectl is missing, or refuses the folder.
    """
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise DistapError(
            "--output -: kubectl is not installed, which builds the manifests; install it, or name a folder with "
            "--output and build that elsewhere (`kubectl apply -k FOLDER` or `kustomize build FOLDER`)"
        )
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True)
    if done.returncode:
        raise DistapError(f"{folder}: kubectl kustomize refuses it: {done.stderr.strip()}")
    return done.stdout


def plain_rules(manifests: Path, runbook: str = RUNBOOK) -> str:
    """Return the recording rules and alerts as a rule file for a Prometheus without its operator.

    Args:
        manifests: k8s/.
        runbook: URL of RUNBOOK.md, which the alerts link to.
    """
    rule = yaml.safe_load((manifests / "monitoring" / "prometheusrule.yaml").read_text())
    for alert in (one for group in rule["spec"]["groups"] for one in group["rules"] if "alert" in one):
        annotations = alert["annotations"]
        annotations["runbook_url"] = runbook + annotations["runbook_url"].removeprefix(RUNBOOK)
    groups = {"groups": rule["spec"]["groups"]}
    return yaml.dump(groups, Dumper=_Blocks, sort_keys=False, allow_unicode=True, width=118)


class _Blocks(yaml.SafeDumper):
    """Write expressions of several lines as blocks, as in the source."""


_Blocks.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)

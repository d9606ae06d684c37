"""Kustomize, through kubectl, which needs no cluster for it."""

import shutil
import subprocess
from pathlib import Path

from distap.errors import DistapError


def built(folder: Path) -> str:
    """The manifests of a kustomization, as YAML.

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

"""The Kubernetes manifests of k8s/, which are also a part of the installed package."""

from pathlib import Path

from distap.errors import DistapError


def manifests_folder() -> Path:
    """Folder of the kustomize bases, overlays and components.

    Raises:
        DistapError: distap was installed without them.
    """
    folder = Path(__file__).parent / "files"
    if not (folder / "monitoring").is_dir():
        raise DistapError(f"{folder}: the manifests are missing; install distap anew, from a clone with its k8s/")
    return folder

"""Every check on every build; tests/apps/k8s/test_manifest_checks.py shows that each check can fail."""

import kubernetes_validate
import pytest
import yaml
from built_manifests import BUILDS, K8S, needs_kubectl, objects_of
from manifest_checks import CHECKS, KUBERNETES
from manifest_parts import parts_of


@needs_kubectl
@pytest.mark.parametrize("build", BUILDS)
def test_a_training_is_valid_and_all_its_references_hold(build):
    parts = parts_of(objects_of(build))
    for check in CHECKS:
        check(parts)


def test_the_claims_are_valid():
    for claim in yaml.safe_load_all((K8S / "storage" / "claims.yaml").read_text()):
        kubernetes_validate.validate(claim, KUBERNETES, strict=True)
        assert claim["spec"]["accessModes"] == ["ReadWriteMany"]

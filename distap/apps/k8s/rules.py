"""The PrometheusRule as a rule file for a Prometheus without its operator."""

from pathlib import Path

import yaml

RUNBOOK = "k8s/monitoring/RUNBOOK.md"


class _Blocks(yaml.SafeDumper):
    """Writes expressions of several lines as they stand in the source."""


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Blocks.add_representer(str, _string)


def plain_rules(manifests: Path, runbook: str = RUNBOOK) -> str:
    """The groups of recording rules and alerts, as Prometheus itself reads them.

    Args:
        manifests: folder of the manifests.
        runbook: where RUNBOOK.md is read, which the alerts link to.
    """
    rule = yaml.safe_load((manifests / "monitoring" / "prometheusrule.yaml").read_text())
    groups = rule["spec"]["groups"]
    for alert in (one for group in groups for one in group["rules"] if "alert" in one):
        annotations = alert["annotations"]
        annotations["runbook_url"] = runbook + annotations["runbook_url"].removeprefix(RUNBOOK)
    return yaml.dump({"groups": groups}, Dumper=_Blocks, sort_keys=False, allow_unicode=True, width=118)

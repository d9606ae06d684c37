"""The alerts and recording rules, in promtool's eyes."""

import shutil
from pathlib import Path

import pytest
import yaml
from monitors import plain_rules, promtool, rules

CASES = sorted((Path(__file__).parent / "rules").glob("*.yaml"))
ALERTS = {rule["alert"] for rule in rules("alert")}


def run_cases(folder: Path, text: str) -> tuple[int, str]:
    """How promtool leaves after all cases with these rules, and what it says; the cases leave annotations out."""
    content = yaml.safe_load(text)
    for rule in (rule for group in content["groups"] for rule in group["rules"]):
        rule.pop("annotations", None)
    (folder / "rules.yaml").write_text(yaml.safe_dump(content))
    for case in CASES:
        shutil.copy(case, folder)
    done = promtool("test", "rules", *(str(folder / case.name) for case in CASES))
    return done.returncode, done.stdout + done.stderr


def with_every_alert(expression: str, **settings: str) -> str:
    """The rules with one expression in all alerts."""
    content = yaml.safe_load(plain_rules())
    for rule in (rule for group in content["groups"] for rule in group["rules"] if "alert" in rule):
        rule.update(expr=expression, **settings)
    return yaml.safe_dump(content)


def test_promtool_passes_the_rules(tmp_path):
    (tmp_path / "rules.yaml").write_text(plain_rules())
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", str(tmp_path / "rules.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules('alert')) + len(rules('record'))} rules found" in done.stdout


def test_each_alert_fires_for_the_sick_training_alone_and_not_before_its_time(tmp_path):
    status, said = run_cases(tmp_path, plain_rules())
    assert status == 0, said


def test_each_alert_is_tried_both_firing_and_silent():
    tried = [
        entry
        for case in CASES
        for one in yaml.safe_load(case.read_text())["tests"]
        for entry in one["alert_rule_test"]
    ]
    assert {entry["alertname"] for entry in tried if entry["exp_alerts"]} == ALERTS
    assert {entry["alertname"] for entry in tried if not entry["exp_alerts"]} == ALERTS


@pytest.mark.parametrize("expression", ["vector(1)", "vector(1) > 2"])
def test_the_cases_notice_an_alert_that_always_fires_and_one_that_never_does(tmp_path, expression):
    status, said = run_cases(tmp_path, with_every_alert(expression, **{"for": "0s"}))
    assert status != 0
    assert {alert for alert in ALERTS if f"alertname: {alert}," in said} == ALERTS


def test_each_alert_says_how_bad_it_is_for_how_long_and_where_to_read_on():
    for rule in rules("alert"):
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), rule["alert"]
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}, rule["alert"]
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}, rule["alert"]

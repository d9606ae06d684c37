"""The alerts and recording rules, in promtool's eyes."""

import shutil
from pathlib import Path

import yaml
from monitors import plain_rules, promtool, rules

CASES = sorted((Path(__file__).parent / "rules").glob("*.yaml"))


def test_promtool_passes_the_rules(tmp_path):
    (tmp_path / "rules.yaml").write_text(plain_rules())
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", str(tmp_path / "rules.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules('alert')) + len(rules('record'))} rules found" in done.stdout


def test_each_alert_fires_for_the_sick_training_alone_and_not_before_its_time(tmp_path):
    content = yaml.safe_load(plain_rules())
    for rule in (rule for group in content["groups"] for rule in group["rules"]):
        rule.pop("annotations", None)  # which the cases leave out
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(content))
    copies = [shutil.copy(case, tmp_path) for case in CASES]
    done = promtool("test", "rules", *map(str, copies))
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_is_tried_both_firing_and_silent():
    cases = [item for case in CASES for item in yaml.safe_load(case.read_text())["tests"]]
    tried = {
        (entry["alertname"], bool(entry["exp_alerts"]))
        for item in cases
        for entry in item["alert_rule_test"]
    }
    assert tried == {(rule["alert"], fires) for rule in rules("alert") for fires in (True, False)}

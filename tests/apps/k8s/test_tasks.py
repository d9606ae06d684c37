"""What `distap k8s task` writes: Jobs of other commands, and the Deployment of a search server."""

import re
import shlex
import sys

import httpx
import kubernetes_validate
import pytest
import typer
import yaml
from built_manifests import COPY, DIGEST, GUIDE, K8S, PATCH, needs_kubectl
from galleries import make_gallery
from launching import Program, output_of, started
from manifest_checks import KUBERNETES, METADATA, OUTSIDE, lets_out
from serving import is_ready

from distap.cli import app, main
from distap.errors import MISTAKE, RESTART
from distap.telemetry.senders import is_own_host

CLAIMS = ["--runs", "pvc://runs", "--data", "pvc://shards"]
SERVE = "serve /runs/found --checkpoint /runs/emoji"
EXTRACT = "extract /data/train /runs/found --checkpoint /runs/emoji"
TASKS = {
    "a server": [SERVE, *CLAIMS],
    "a server with every option": [
        f"{SERVE} --port 8080 --drain-seconds 20 --timeout-seconds 60 --allowed-host search.example",
        *CLAIMS,
        *("--replicas", "3", "--gpus", "1", "--cpu", "8", "--memory", "32Gi", "--namespace", "research"),
        *("--priority", "high", "--secret", "keys", "--monitoring", "prometheus", "--env", "GREETING=of $(HOME)"),
    ],
    "descriptors and an index": [EXTRACT, "index /runs/found /runs/index", *CLAIMS, "--restarts", "2"],
    "descriptors by four GPUs": [f"{EXTRACT} --ranks 4", *CLAIMS, "--gpus", "4", "--cpu", "32"],
    "shards": ["data pack /runs/photos /data/photos", *CLAIMS],
    "no claim": ["data stats s3://bucket/train"],
}


def run(monkeypatch, capsys, *arguments):
    """Run `distap k8s task` in this process; its status and what it says."""
    words = ["distap", "k8s", "task", *arguments, "--name", "search", "--image", DIGEST]
    monkeypatch.setattr(sys, "argv", [*words, *(() if "--output" in arguments else ("--output", "-"))])
    with pytest.raises(SystemExit) as status:
        main()
    return int(status.value.code or 0), capsys.readouterr()


@pytest.fixture
def objects(monkeypatch, capsys):
    """Objects of a task by kind, from the words of its command line."""

    def made(*arguments):
        status, said = run(monkeypatch, capsys, *arguments)
        assert status == 0, said.err
        return {one["kind"]: one for one in yaml.safe_load_all(said.out)}

    return made


def workload_of(objects):
    return objects.get("Job") or objects["Deployment"]


def pod_of(objects):
    return workload_of(objects)["spec"]["template"]["spec"]


def containers_of(objects):
    pod = pod_of(objects)
    return [*pod.get("initContainers", []), *pod["containers"]]


def parsed(container):
    """Parameters that distap reads from a container's arguments."""
    name, *rest = (word.replace("$$", "$") for word in container["args"])
    command = typer.main.get_command(app).commands[name]
    while hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    return command.make_context(name, rest).params


@needs_kubectl
@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_valid_and_all_its_references_hold(objects, task):
    made = objects(*TASKS[task])
    for one in made.values():
        kubernetes_validate.validate(one, KUBERNETES, strict=True)
    template, pod = workload_of(made)["spec"]["template"], pod_of(made)
    labels, policy = template["metadata"]["labels"], made["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    assert (labels["app.kubernetes.io/name"], labels["app.kubernetes.io/instance"]) == ("distap", "search")
    assert {one["metadata"]["name"] for one in made.values()} == {"search"}
    assert pod["securityContext"]["runAsNonRoot"] and pod["automountServiceAccountToken"] is False
    for container in containers_of(made):
        parsed(container)
        assert container["command"] == ["tini", "--", "distap"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert sorted(mounts.values()) == sorted(volume["name"] for volume in pod["volumes"])
        assert {"/tmp", "/dev/shm"} <= set(mounts)
        assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
    for address in METADATA:
        assert not lets_out(policy, address, 443), address
    assert all(lets_out(policy, address, 443) for address in OUTSIDE)


@needs_kubectl
@pytest.mark.parametrize("task", ["a server", "a server with every option"])
def test_a_server_is_found_asked_scraped_and_drained(objects, task):
    made = objects(*TASKS[task])
    (container,) = containers_of(made)
    options, labels = parsed(container), workload_of(made)["spec"]["template"]["metadata"]["labels"]
    assert options["host"] == "0.0.0.0" and {"http": options["port"]} == {
        port["name"]: port["containerPort"] for port in container["ports"]
    }
    assert made["Service"]["spec"]["selector"] == workload_of(made)["spec"]["selector"]["matchLabels"] == labels
    assert [port["targetPort"] for port in made["Service"]["spec"]["ports"]] == ["http"]
    assert {container[f"{probe}Probe"]["httpGet"]["port"] for probe in ("startup", "liveness", "readiness")} == {
        "http"
    }
    named = [name.replace("$(NAMESPACE)", "research") for name in options["allowed_host"]]
    assert all(is_own_host(f"search{end}", named) for end in ("", ".research", ".research.svc:80"))
    assert not is_own_host("search.other.svc", named)
    (variable,) = [one for one in container["env"] if one["name"] == "NAMESPACE"]
    assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.namespace"
    monitor = yaml.safe_load((K8S / "monitoring" / "podmonitor.yaml").read_text())["spec"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert {"port": "http", "path": "/metrics"}.items() <= monitor["podMetricsEndpoints"][-1].items()
    among, asking = made["NetworkPolicy"]["spec"]["ingress"]
    assert "ports" not in among and asking["ports"] == [{"protocol": "TCP", "port": options["port"]}]
    asked = "prometheus" if "every" in task else "monitoring"
    assert asking["from"][0] == {"podSelector": {}}
    assert asking["from"][1]["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": asked}
    grace = pod_of(made)["terminationGracePeriodSeconds"]
    assert options["drain_seconds"] > 0 and grace > options["drain_seconds"] + 2 * options["timeout_seconds"] + 1


@needs_kubectl
def test_what_was_asked_for_is_in_the_manifests_of_a_server(objects):
    made = objects(*TASKS["a server with every option"])
    (container,), pod = containers_of(made), pod_of(made)
    assert workload_of(made)["spec"]["replicas"] == 3 and pod["priorityClassName"] == "high"
    assert {one["metadata"]["namespace"] for one in made.values()} == {"research"}
    limits = {"memory": "32Gi", "nvidia.com/gpu": "1"}
    assert container["resources"]["limits"] == limits and container["resources"]["requests"].items() >= limits.items()
    assert [one["key"] for one in pod["tolerations"]] == ["nvidia.com/gpu"]
    assert container["envFrom"] == [{"secretRef": {"name": "keys", "optional": True}}]
    assert {"name": "GREETING", "value": "of $$(HOME)"} in container["env"]
    assert parsed(container)["drain_seconds"] == 20 and "search.example" in parsed(container)["allowed_host"]


@needs_kubectl
def test_a_job_runs_its_commands_in_order_and_reads_their_statuses(objects):
    made = objects(*TASKS["descriptors and an index"])
    assert [container["args"][0] for container in containers_of(made)] == ["extract", "index"]
    assert set(made) == {"Job", "NetworkPolicy"} and len(made["NetworkPolicy"]["spec"]["ingress"]) == 1
    job = made["Job"]["spec"]
    exits = {
        rule["onExitCodes"]["values"][0]: rule for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule
    }
    assert {code: rule["action"] for code, rule in exits.items()} == {MISTAKE: "FailJob", RESTART: "Ignore"}
    assert not any("containerName" in rule["onExitCodes"] for rule in exits.values()), "of every command"
    assert (job["backoffLimit"], job["template"]["spec"]["restartPolicy"]) == (2, "Never")
    assert job["template"]["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"] == "true"


@needs_kubectl
@pytest.mark.parametrize(
    ("task", "writable"), [("a server", set()), ("descriptors and an index", {"runs"}), ("shards", {"runs", "data"})]
)
def test_only_commands_that_write_to_a_claim_may(objects, task, writable):
    made = objects(*TASKS[task])
    for container in containers_of(made):
        assert {m["name"] for m in container["volumeMounts"] if not m.get("readOnly")} == {"tmp", "shm"} | writable
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in pod_of(made)["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert claims == {"runs": "runs", "data": "shards"}


@needs_kubectl
def test_ranks_share_the_cores(objects):
    (container,) = containers_of(objects(*TASKS["descriptors by four GPUs"]))
    assert {"name": "OMP_NUM_THREADS", "value": "8"} in container["env"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"


@needs_kubectl
@pytest.mark.parametrize("task", ["a server", "descriptors and an index"])
def test_a_patch_changes_the_pods_of_a_task(objects, tmp_path, task):
    (tmp_path / "patch.yaml").write_text(PATCH)
    made = objects(*TASKS[task], "--patch", str(tmp_path / "patch.yaml"))
    kubernetes_validate.validate(workload_of(made), KUBERNETES, strict=True)
    assert pod_of(made)["serviceAccountName"] == "trainer" and "runAsUser" not in pod_of(made)["securityContext"]
    assert [one["key"] for one in pod_of(made)["tolerations"]] == ["nvidia.com/gpu", "example.org/reserved"]


@needs_kubectl
def test_the_tasks_of_the_guide_are_written(objects, tmp_path, monkeypatch):
    commands = re.findall(r"    (distap k8s task (?:.*\\\n)*.*)", GUIDE)
    assert len(commands) == 4
    monkeypatch.chdir(tmp_path)
    (tmp_path / "copy.yaml").write_text(COPY)
    for command in commands:
        words = shlex.split(command.replace("\\\n", ""))[3:]
        for option in ("--name", "--image", "--output"):
            del words[words.index(option) : words.index(option) + 2]
        made = objects(*words)
        kubernetes_validate.validate(workload_of(made), KUBERNETES, strict=True)
        if "--patch" in words:
            copy, index = containers_of(made)
            assert (copy["name"], index["args"][:2]) == ("copy", ["data", "index"])
            assert {mount["name"] for mount in copy["volumeMounts"]} <= {
                one["name"] for one in pod_of(made)["volumes"]
            }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["frob"], "frob: expected a command of distap: init,"),
        (["data"], "data: expected a command of distap: convert,"),
        ([""], ": expected a command of distap"),
        (["extract 'a"], "extract 'a: No closing quotation"),
        (["serve /runs/found"], "Missing option '--checkpoint'"),
        ([f"{SERVE} --prot 80"], "No such option: --prot"),
        ([SERVE, EXTRACT], "serve: runs until it is stopped"),
        ([SERVE, "--runs", "runs"], "--runs runs: expected pvc://CLAIM"),
        ([SERVE, "--data", "pvc://shards/train"], "--data pvc://shards/train: expected pvc://CLAIM"),
        ([SERVE, "--memory", "much"], "--memory 'much'"),
        ([SERVE, "--env", "A"], "--env 'A': expected NAME=VALUE"),
    ],
)
def test_a_wrong_task_is_refused_with_what_is_wrong(monkeypatch, capsys, arguments, said):
    status, told = run(monkeypatch, capsys, *arguments)
    assert status == MISTAKE
    assert said in " ".join(re.sub(r"[│╭╮╰╯─]", " ", told.err).split())


@needs_kubectl
def test_a_folder_is_written_anew_but_no_other_files_are_lost(monkeypatch, capsys, tmp_path):
    folder = tmp_path / "out"
    for _ in range(2):
        assert run(monkeypatch, capsys, SERVE, "--output", str(folder))[0] == 0
    (folder / "notes.md").write_text("mine")
    status, told = run(monkeypatch, capsys, SERVE, "--output", str(folder))
    assert status == MISTAKE and "notes.md would be lost" in " ".join(told.err.split())


@needs_kubectl
@pytest.mark.slow
def test_what_pods_run_makes_an_index_and_a_server_that_answers_by_the_name_of_its_service(
    objects, tmp_path, training_shards
):
    gallery = make_gallery(tmp_path / "made", training_shards)
    places = {"/data/train": gallery.shards, "/runs/emoji": gallery.run}
    places |= {path: tmp_path / path.lstrip("/") for path in ("/runs/found", "/runs/index")}

    def program(container, *more):
        words = [str(places.get(word, word)).replace("$(NAMESPACE)", "research") for word in container["args"]]
        return Program(("-m", "distap.cli", *words, *more), tmp_path)

    describe, index = containers_of(objects(*TASKS["descriptors and an index"]))
    for container in (describe, describe, index):  # a new pod begins with the first command, which is done already
        output_of(program(container), tmp_path)
    (container,) = containers_of(objects(SERVE.replace("found", "index"), *CLAIMS))
    with started(program(container, "--port", "0"), tmp_path / "server") as job:
        job.wait_until(lambda: "serving on " in job.said)
        url = re.search(r"serving on http://[^:]+(:\d+)", job.said)[1]
        url = f"http://127.0.0.1{url}"
        job.wait_until(lambda: is_ready(url))
        for host, status in (("search.research.svc.cluster.local", 200), ("search.other.svc", 421)):
            assert httpx.get(f"{url}/healthz", headers={"Host": host}).status_code == status

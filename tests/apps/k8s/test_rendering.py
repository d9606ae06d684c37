import re
import sys

import pytest
import yaml
from built_manifests import DIGEST, K8S, RECIPE, RENDERED, REQUESTS, STORAGE, needs_kubectl, objects_of, request
from manifest_parts import parts_of

from distap.apps.k8s.rendering import built, render
from distap.apps.k8s.request import parsed_image, quantity_bytes
from distap.cli import main
from distap.config.reading import load_recipe
from distap.errors import MISTAKE, DistapError

CLAIMS = STORAGE["claims"]


@pytest.fixture
def recipe(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    return file


def rendered_folder(folder, recipe, *overrides, **options):
    render(folder, request(**{**CLAIMS, **options}), recipe, overrides)
    return folder


def objects_rendered(folder, recipe, *overrides, **options):
    return list(yaml.safe_load_all(built(rendered_folder(folder, recipe, *overrides, **options))))


def distap(monkeypatch, *arguments):
    """Run the command line in this process; its exit status."""
    monkeypatch.setattr(sys, "argv", ["distap", *map(str, arguments)])
    with pytest.raises(SystemExit) as status:
        main()
    return int(status.value.code or 0)


def job_of(folder):
    return yaml.safe_load((folder / "training" / "job.yaml").read_text())["spec"]["template"]["spec"]


def test_a_folder_needs_nothing_from_outside_it(tmp_path, recipe):
    folder = rendered_folder(tmp_path / "out", recipe, kind="trainjob", gpus=2)
    for file in folder.rglob("*.yaml"):
        assert "../" not in file.read_text()
        assert not file.is_symlink()
    assert (folder / "training" / "recipe.yaml").read_text() == RECIPE


@pytest.mark.parametrize("uri", ["http://me:hidden@mlflow:5000", "http://mlflow:5000/?token=hidden"])
def test_a_secret_in_the_address_of_a_logger_is_refused_and_not_repeated(tmp_path, recipe, uri):
    recipe.write_text(RECIPE + f"\nloggers: {{mlflow: {{tracking_uri: '{uri}'}}}}\n")
    with pytest.raises(DistapError, match=r"loggers\.mlflow: .*tracking_uri holds a secret") as refused:
        rendered_folder(tmp_path / "out", recipe)
    assert "hidden" not in str(refused.value) and not (tmp_path / "out").exists()
    recipe.write_text(RECIPE)
    with pytest.raises(DistapError, match="MLFLOW_TRACKING_URI"):
        rendered_folder(tmp_path / "out", recipe, f"loggers.mlflow={{tracking_uri: '{uri}'}}")


@needs_kubectl
@pytest.mark.parametrize("build", RENDERED)
def test_what_was_asked_for_is_in_the_manifests(build):
    asked, parts = request(**REQUESTS[build]), parts_of(objects_of(build))
    kinds = {"indexed-job": "Job", "jobset": "JobSet", "trainjob": "TrainJob"}
    assert (parts.outer["kind"], parts.name) == (kinds[asked.kind], "emoji")
    assert (parts.hosts, int(parts.launch.nproc_per_node)) == (asked.nodes, asked.ranks_a_host)
    assert parts.container["image"] == DIGEST
    assert {one["metadata"].get("namespace") for one in parts.objects} == {asked.namespace}
    assert parts.outer["metadata"]["labels"].get("kueue.x-k8s.io/queue-name") == asked.queue
    assert parts.pod.get("priorityClassName") == asked.priority
    assert parts.container["envFrom"][0]["secretRef"]["name"] == asked.secret
    scraper = parts.one("NetworkPolicy")["spec"]["ingress"][1]["from"][0]["namespaceSelector"]["matchLabels"]
    assert scraper == {"kubernetes.io/metadata.name": asked.monitoring}
    requests = parts.container["resources"]["requests"]
    assert asked.cpu in (None, int(requests["cpu"]))
    assert asked.memory in (None, requests["memory"])
    assert asked.spool in (None, parts.mounts["/spool"]["emptyDir"]["sizeLimit"])
    assert asked.environment.items() <= parts.environment.items()
    for name, count in asked.devices.items():
        assert requests[name] == parts.container["resources"]["limits"][name] == str(count)
    assert f"--rdzv-conf=join_timeout={asked.join_timeout}" in parts.arguments
    policy = parts.job_set["failurePolicy"] if parts.job_set else parts.job
    of_kind = ("backoffLimitPerIndex", 6) if parts.job_set is None else ("maxRestarts", 10)
    assert policy[of_kind[0]] == (of_kind[1] if asked.restarts is None else asked.restarts)


@needs_kubectl
def test_data_and_checkpoints_are_where_the_options_say():
    on_claims = parts_of(objects_of("indexed-job cpu claims"))
    recipe = on_claims.recipe
    assert (recipe.data.train, recipe.data.validation) == ("/data/train", "/data/test")
    assert on_claims.mounts["/data"]["persistentVolumeClaim"] == {"claimName": "shards", "readOnly": True}
    assert str(recipe.run) == "/runs/team/emoji" and recipe.checkpoint.store is None
    assert on_claims.mounts["/runs"]["persistentVolumeClaim"] == {"claimName": "runs"}
    in_a_store = parts_of(objects_of("indexed-job cpu object store"))
    recipe = in_a_store.recipe
    assert recipe.data.train == "s3://bucket/{000..009}.tar"
    assert recipe.checkpoint.store == "s3://bucket/runs/emoji"
    assert "/data" not in in_a_store.mounts and set(in_a_store.mounts["/runs"]) >= {"emptyDir"}


@needs_kubectl
def test_trainings_have_nothing_in_common_but_the_secret(tmp_path, recipe):
    def names(name):
        objects = objects_rendered(tmp_path / name, recipe, name=name)
        return {(one["kind"], one["metadata"]["name"]) for one in objects}

    assert not names("first") & names("second")


@needs_kubectl
def test_a_changed_recipe_is_another_object(tmp_path, recipe):
    def configuration():
        objects = objects_rendered(tmp_path / "out", recipe)
        return next(one["metadata"]["name"] for one in objects if one["kind"] == "ConfigMap")

    before = configuration()
    recipe.write_text(RECIPE.replace("steps: 100", "steps: 200"))
    assert configuration() != before


@pytest.mark.parametrize("gpus", [0, 2])
def test_pods_with_gpus_refuse_to_train_on_their_cpus(tmp_path, recipe, gpus):
    arguments = job_of(rendered_folder(tmp_path / "out", recipe, gpus=gpus))["containers"][0]["args"]
    assert ("device=cuda" in arguments) == (gpus > 0)


def test_overrides_are_arguments_and_checked(tmp_path, recipe):
    folder = rendered_folder(tmp_path / "out", recipe, "steps=7", "stop.grace_seconds=1000")
    assert job_of(folder)["terminationGracePeriodSeconds"] == 1045
    assert "steps=7" in job_of(folder)["containers"][0]["args"]


def test_what_options_say_need_not_be_in_the_recipe(tmp_path, recipe):
    recipe.write_text(
        "steps: 100\nsampling: {name: random, batch_size: 64}\nevaluation: {every: 5}\ndata: {image_size: 224}"
    )
    arguments = job_of(rendered_folder(tmp_path / "out", recipe))["containers"][0]["args"]
    assert {"run=/runs/team/emoji", "data.train=/data/train", "data.validation=/data/test"} <= set(arguments)


@needs_kubectl
def test_a_store_of_the_recipe_gives_way_to_a_claim(tmp_path, recipe):
    recipe.write_text(RECIPE + "checkpoint: {store: s3://bucket/mine}")
    parts = parts_of(objects_rendered(tmp_path / "out", recipe))
    assert parts.recipe.checkpoint.store is None


@needs_kubectl
def test_text_of_an_override_reaches_the_program_as_it_was_given(tmp_path, recipe):
    text = "of $(HOME), $$ and 'a: b'"
    objects = objects_rendered(tmp_path / "out", recipe, f'logs.run_id="{text}"')
    assert parts_of(objects).recipe.run_id == text


@needs_kubectl
def test_a_claim_for_both_is_asked_for_once_to_be_written_to(tmp_path, recipe):
    places = {"data": "pvc://team/data", "validation": None, "checkpoints": "pvc://team/runs"}
    parts = parts_of(objects_rendered(tmp_path / "out", recipe, **places))
    assert parts.mounts["/data"]["persistentVolumeClaim"] == {"claimName": "team"}
    assert parts.mounts["/data"]["readOnly"]


def test_a_spool_is_as_large_as_the_pixels_and_the_cache(tmp_path, recipe):
    size = ("sampling.batch_size=40000", "data.image_size=1000")
    cache = "data.cache={folder: /anywhere, max_bytes: 1000000000000}"
    bare = job_of(rendered_folder(tmp_path / "bare", recipe, *size))
    both = job_of(rendered_folder(tmp_path / "both", recipe, *size, cache))
    (spool, with_cache) = (
        next(quantity_bytes(one["emptyDir"]["sizeLimit"], "") for one in pod["volumes"] if one["name"] == "spool")
        for pod in (bare, both)
    )
    assert spool > 40000 / 4 * 3 * 1000**2
    assert with_cache - spool >= 10**12
    assert "data.cache.folder=/spool" in both["containers"][0]["args"]


REFUSED = [
    ({"name": "Emoji"}, "--name 'Emoji'"),
    ({"name": "9lives"}, "--name '9lives'"),
    ({"name": "e" * 56}, "make it 1 shorter"),
    ({"name": "e" * 49, "kind": "jobset"}, "make it 1 shorter"),
    ({"namespace": "a_b"}, "--namespace 'a_b'"),
    ({"queue": "-"}, "--queue '-'"),
    ({"ranks": 2, "gpus": 4}, "--ranks 2"),
    ({"gpus": 32}, "--gpus 32: 16 ranks"),
    ({"cpu": 1, "ranks": 2}, "--cpu 1"),
    ({"image": "my image"}, "--image 'my image'"),
    ({"image": "registry.example/Team/Distap:1.0"}, "the name in lower case"),
    ({"namespace": "research.vision"}, "--namespace 'research.vision'"),
    ({"memory": "64GB"}, "--memory '64GB'"),
    ({"spool": "much"}, "--spool 'much'"),
    ({"data": "pvc://Shards"}, "--data pvc://Shards"),
    ({"data": "pvc://shards/../other"}, "--data pvc://shards/../other"),
    ({"validation": "pvc://others/test"}, "--validation pvc://others/test"),
    ({"checkpoints": "/mnt/runs"}, "--checkpoints /mnt/runs"),
    ({"checkpoints": "https://example.org/runs"}, "--checkpoints https"),
    ({"checkpoints": "s3://"}, "--checkpoints s3://: expected"),
    ({"checkpoints": "s3://bucket/runs?region=here"}, "--checkpoints s3://bucket/runs?region=here: expected"),
    ({"env": ["NCCL_DEBUG"]}, "--env 'NCCL_DEBUG': expected NAME=VALUE"),
    ({"env": ["PET_NNODES=3"]}, "--env PET_NNODES=3: PET_NNODES follows from other options"),
    ({"rdma": "ib"}, "--rdma 'ib': expected an extended resource"),
    ({"runtime": "cluster"}, "--runtime cluster: needs --kind trainjob"),
    ({"runtime": "cluster", "kind": "trainjob", "namespace": "research"}, "leave --namespace out"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_a_wrong_option_is_named(options, said):
    with pytest.raises(DistapError) as error:
        request(**{**CLAIMS, **options})
    assert said in str(error.value)


UNFIT = [
    (["sampling.batch_size=3"], {}, "4 ranks, but a batch has 3 images"),
    (["precision=fp16"], {}, "--gpus 0: precision fp16"),
    (["run=/elsewhere"], {}, "run is set by --name"),
    (["checkpoint.store=s3://a/b"], {}, "checkpoint.store is set by --checkpoints"),
    (["metrics={port: 9999}"], {}, "replaces the whole section metrics, of which metrics.port is 9400"),
    (["data.cache={folder: /any, max_bytes: 2000000000}"], {"spool": "1Gi"}, "--spool 1Gi: pods would be evicted"),
    (["step.sise=1"], {}, "unknown key"),
    (["data.train_index=indexes/train.npz"], {}, "data.train_index: indexes/train.npz"),
    (
        ["data.reading={name: streamed, label_map: map.json}", "sampling={name: streams, streams: 16}"],
        {},
        "data.reading.label_map: map.json",
    ),
    (["model.weights={name: file, path: weights.pt}"], {}, "model.weights.path: weights.pt"),
    (["model.weights={name: run, path: runs/first}"], {}, "model.weights.path: runs/first"),
    (["data.validation=shards/test"], {"validation": None}, "data.validation (--validation): shards/test"),
    (["data.validation=imagefolder:test"], {"validation": None}, "data.validation (--validation): imagefolder:test"),
    (["data.validation=hf:/saved"], {"validation": None}, "data.validation (--validation): hf:/saved"),
    (["data.train=/data/train"], {"data": None, "validation": None}, "data.train (--data): /data/train"),
    (["data.train=/spool/shards"], {"data": None, "validation": None}, "data.train (--data): /spool/shards"),
    (
        ["data.train=file:///tmp/shards"],
        {"data": None, "validation": None},
        "data.train (--data): file:///tmp/shards",
    ),
    (
        ["data.validation=/runs/shards"],
        {"validation": None, "checkpoints": "s3://bucket/runs"},
        "data.validation (--validation): /runs/shards",
    ),
    (["data.validation=/data/../tmp"], {"validation": None}, "expected a path without .. below /data or /runs"),
    (["data.train=s3://other/train"], {}, "data.train=s3://other/train: --data pvc://shards/train says this already"),
    (["data.validation=s3://other/test"], {}, "--validation pvc://shards/test says this already"),
    (["metrics.address=127.0.0.1"], {}, "metrics.address is 0.0.0.0"),
    (["engine={name: deepspeed, config: zero.json}"], {}, "engine.config: zero.json"),
    (
        ["data.reading=streamed", "sampling={name: streams, batch_size: 64, streams: 16}"],
        {"nodes": 3},
        "3 ranks do not divide the 16 streams",
    ),
]


@pytest.mark.parametrize(("overrides", "options", "said"), UNFIT)
def test_a_recipe_that_cannot_run_in_these_pods_is_refused(tmp_path, recipe, overrides, options, said):
    with pytest.raises(DistapError) as error:
        rendered_folder(tmp_path / "out", recipe, *overrides, **options)
    assert said in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


@pytest.mark.parametrize("written", ["::", '"::"', "'::'"])
def test_a_cluster_without_ipv4_has_its_metrics_on_all_addresses_of_ipv6(tmp_path, recipe, written):
    arguments = job_of(rendered_folder(tmp_path / "out", recipe, f"metrics.address={written}"))["containers"][0][
        "args"
    ]
    assert load_recipe(recipe, arguments[arguments.index("/etc/distap/recipe.yaml") + 1 :]).metrics.address == "::"


@pytest.mark.parametrize(
    ("overrides", "options", "said"),
    [
        ([], {"data": "http://shards.example/{000..009}.tar"}, "data.train: http://.* egress rule for TCP port 80"),
        (
            [],
            {"data": "https://shards.example:8443/{000..009}.tar"},
            "data.train: .* egress rule for TCP port 8443",
        ),
        (
            ["data.remote.options={s3: {client_kwargs: {endpoint_url: 'http://minio.storage:9000'}}}"],
            {},
            "data.remote.options.s3.client_kwargs.endpoint_url: http://minio.storage:9000: .* TCP port 9000",
        ),
        (["step.compile=true", "model.batchnorm=frozen"], {}, "step.compile: .* no C\\+\\+ compiler"),
        ([], {"data": "https://shards.example/{000..009}.tar"}, None),
        (["data.validation=imagefolder:/data/test"], {"validation": None}, None),
        (["data.validation=hf:/data/saved#test"], {"validation": None}, None),
        (["data.validation=hf:somebody/photos#test"], {"validation": None}, None),
        (["data.remote.options={s3: {endpoint_url: 'https://store.example:443'}}"], {}, None),
    ],
)
def test_what_needs_somebody_beside_the_manifests_is_said(tmp_path, recipe, overrides, options, said):
    asked = request(**{**CLAIMS, **({"validation": None} if options else {}), **options})
    told = render(tmp_path / "out", asked, recipe, overrides)
    assert [bool(re.match(said, one)) for one in told] == [True] if said else not told


def test_a_folder_of_something_else_is_left_alone_and_an_own_one_replaced(tmp_path, recipe):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "kustomization.yaml").write_text("resources: []")
    with pytest.raises(DistapError, match="would be lost; move it elsewhere"):
        rendered_folder(foreign, recipe)
    own = rendered_folder(tmp_path / "own", recipe, kind="jobset")
    rendered_folder(own, recipe, kind="indexed-job")
    assert not (own / "components" / "jobset").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foreign", "own", "recipe.yaml"]


@pytest.mark.parametrize("kind", ["indexed-job", "jobset", "trainjob"])
def test_what_somebody_put_into_a_rendered_folder_is_named_and_not_lost(tmp_path, recipe, kind):
    own = rendered_folder(tmp_path / "own", recipe, kind=kind, gpus=1)
    rendered_folder(own, recipe, kind=kind, gpus=1)
    (own / "patches").mkdir()
    (own / "notes.md").write_text("mine")
    before = {path: path.read_text() for path in own.rglob("*") if path.is_file()}
    with pytest.raises(DistapError, match=r"notes\.md, patches would be lost"):
        rendered_folder(own, recipe, kind=kind, gpus=2)
    assert {path: path.read_text() for path in own.rglob("*") if path.is_file()} == before


def test_a_folder_that_cannot_be_written_is_named(tmp_path, recipe):
    (tmp_path / "file").write_text("")
    with pytest.raises(DistapError, match=r"/file/out: cannot be written"):
        rendered_folder(tmp_path / "file" / "out", recipe)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("distap", ("distap", None, None)),
        ("distap:1.0", ("distap", "1.0", None)),
        ("host:5000/team/distap", ("host:5000/team/distap", None, None)),
        (f"host:5000/distap:1.0@sha256:{'a' * 64}", ("host:5000/distap", "1.0", f"sha256:{'a' * 64}")),
    ],
)
def test_an_image_is_taken_apart(text, parts):
    image = parsed_image(text)
    assert (image["name"], image["tag"], image["digest"]) == parts


ARGUMENTS = ["--name", "emoji", "--checkpoints", "pvc://runs", "--data", "pvc://shards"]


def test_the_command_warns_of_a_tag_and_says_what_to_do_next(tmp_path, recipe, monkeypatch, capsys):
    output = tmp_path / "out"
    arguments = [recipe, "steps=7", *ARGUMENTS, "--image", "distap:1.0", "--output", output]
    assert distap(monkeypatch, "k8s", "render", *arguments) == 0
    said = capsys.readouterr()
    assert "warning: --image distap:1.0" in said.err
    assert f"kubectl apply -k {output}" in said.out
    assert "steps=7" in job_of(output)["containers"][0]["args"]


@needs_kubectl
def test_the_command_prints_the_manifests(recipe, monkeypatch, capsys):
    assert distap(monkeypatch, "k8s", "render", recipe, *ARGUMENTS, "--image", DIGEST, "--output", "-") == 0
    said = capsys.readouterr()
    assert {one["kind"] for one in yaml.safe_load_all(said.out)} == {"ConfigMap", "Service", "NetworkPolicy", "Job"}
    assert said.err == ""


def test_without_kubectl_the_command_says_what_is_missing(recipe, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert distap(monkeypatch, "k8s", "render", recipe, *ARGUMENTS, "--image", DIGEST, "--output", "-") == MISTAKE
    assert "kubectl is not installed" in capsys.readouterr().err


@pytest.mark.slow
def test_an_installed_package_has_the_manifests_inside(tmp_path, recipe, installed):
    output = tmp_path / "out"
    arguments = ["k8s", "render", recipe, *ARGUMENTS, "--image", DIGEST, "--output", output]
    installed.run("distap", *arguments, folder=tmp_path)
    inside = installed.package / "apps" / "k8s" / "files"
    assert {str(file.relative_to(inside)) for file in inside.rglob("*") if file.is_file()} == {
        str(file.relative_to(K8S)) for file in K8S.rglob("*") if file.is_file()
    }
    assert (output / "base" / "job.yaml").read_text() == (K8S / "base" / "job.yaml").read_text()

import subprocess
import sys
from pathlib import Path

import pytest
from raising import raises

from benchmarks.metric_learning import MetricLearning
from distap.config.reading import RECIPES, load_recipe
from distap.data.sampling import RandomSampling
from distap.errors import DistapError
from distap.ranking.losses.calibration import Calibration
from distap.ranking.losses.quantized import QuantizedAP
from distap.ranking.losses.smooth import SmoothAP, SupAP
from distap.ranking.losses.sums import WeightedSum

PML = "benchmarks.metric_learning:MetricLearning"  # a class that is none of ours


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "run: runs/x\nsteps: 10\ndata: {train: shards}\nsampling: {name: p_by_k, classes: 5,"
        " images: 4}\nmodel: {weights: {name: package, package: some-package}}\n"
    )
    return path


def test_overrides_change_values_deep_down(recipe):
    loaded = load_recipe(
        recipe, ["loss.bins=25", "optimizer.backbone.factor=0.1", "data.augmentation.flip=0"]
    )
    assert loaded.loss.bins == 25
    assert loaded.optimizer.backbone.factor == 0.1
    assert loaded.data.augmentation.flip == 0
    assert load_recipe(
        recipe, ["sampling={name: random, batch_size: 8}"]
    ).sampling == RandomSampling(batch_size=8)


@pytest.mark.parametrize(
    ("overrides", "same"),
    [
        (["loggers=[tensorboard]"], ["loggers=[{name: tensorboard}]"]),
        (["optimizer=sgd"], ["optimizer={name: sgd}"]),
        (["loss=smooth_ap", "loss.tau=0.1"], ["loss={name: smooth_ap, tau: 0.1}"]),
        (["sampling={batch_size: 8}"], ["sampling={name: random, batch_size: 8}"]),
        (["model.pooling=gem", "model.pooling.power=4"], ["model.pooling={name: gem, power: 4}"]),
        (["engine.stage=1", "engine.name=deepspeed"], ["engine={name: deepspeed, stage: 1}"]),
    ],
)
def test_a_name_alone_and_keys_without_a_name_mean_what_they_say(recipe, overrides, same):
    assert load_recipe(recipe, overrides) == load_recipe(recipe, same)


def test_a_recipe_in_a_checkpoint_is_read_again_as_the_same(recipe):
    loaded = load_recipe(
        recipe, ["optimizer={name: lion, betas: [0.9, 0.99]}", "schedule=cosine", "engine=fsdp"]
    )
    assert load_recipe(loaded.model_dump(mode="json"), where="checkpoint") == loaded
    assert loaded.model_dump()["model"]["backbone"] == loaded.model.architecture == "resnet50"
    assert loaded.model_dump()["optimizer"]["name"] == "lion"


@pytest.mark.parametrize(
    ("text", "loss"),
    [
        ("smooth_ap", SmoothAP()),
        ("{name: sup_ap, preset: released, tau: 0.02}", SupAP(tau=0.02, offset=-3.56, delta=0.05)),
        ("{bins: 30}", QuantizedAP(bins=30)),
        (
            "{sup_ap: 0.25, calibration: 0.75}",
            WeightedSum(((0.25, SupAP()), (0.75, Calibration()))),
        ),
        (
            "{sup_ap: {weight: 2, preset: released}}",
            WeightedSum(((2.0, SupAP(offset=-3.56, delta=0.05)),)),
        ),
        (f"{{name: '{PML}', function: ContrastiveLoss}}", MetricLearning("ContrastiveLoss")),
    ],
)
def test_a_loss_is_a_name_or_options_or_a_preset_or_a_sum(recipe, text, loss):
    loaded = load_recipe(recipe, [f"loss={text}"])
    assert loaded.loss == loss
    # What is written into a checkpoint is read again as the same.
    assert load_recipe(loaded.model_dump(mode="json"), where="checkpoint").loss == loss


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("loss.binz=3", "loss.binz: unknown key; did you mean bins"),
        ("stpes=3", "stpes: unknown key; did you mean steps"),
        (
            "optimizer.backbone.facto=3",
            "optimizer.backbone.facto: unknown key; did you mean factor",
        ),
        ("loss.bins=1", "bins is 1; 2 to 128 are possible"),
        ("loss={name: smooth_ap, taw: 1}", "loss.taw: unknown key; did you mean tau"),
        (
            "loss={sup_ap: 0.5, calibratoin: 0.5}",
            "'calibratoin' is unknown; did you mean calibration",
        ),
        ("loss={sup_ap: {weight: 0.5, taw: 1}}", "loss.sup_ap.taw: unknown key; did you mean tau"),
        ("loss={name: ap_q, bins: 20, bins: 30}", "the key bins stands twice"),
        ("loss={name: ap_q} # mine", "a comment within a value; put quotes around"),
        ("loss={sup_ap: many}", "loss.sup_ap.weight: 'many': must be a number"),
        (
            "loss={name: ap_t, form: complete}",
            "loss.form: 'complete': must be 'simplified' or 'full'",
        ),
        ("optimizer.betaz=[0.9, 0.99]", "optimizer.betaz: unknown key; did you mean betas"),
        ("optimizer.warmup=5", r"optimizer.warmup: unknown key; did you mean schedule.warmup\?"),
        (
            "optimizer.weight_decay=0.1",
            "weight_decay: unknown key; did you mean weight_decay of optimizer.backbone",
        ),
        (
            "optimizer.momentum=0.9",
            "optimizer: momentum is set, but the optimiser adam has no momentum",
        ),
        ("schedule={name: multistep}", "schedule: the schedule multistep needs milestones"),
        ("optimizer.learning_rate=-1", "optimizer.learning_rate: -1: must be greater than 0"),
        ("model.weights={name: file}", "model.weights.path: missing"),
        (
            "evaluation.also={oxford: {data: shards}}",
            "evaluation.also is set, but data.validation names no data set",
        ),
        ("engine=horovod", "engine 'horovod' is unknown; expected one of ddp, fsdp, deepspeed"),
        (
            "data.image_sizes={0: 64}",
            r"data: image_sizes: expected sizes that rise to image_size, 224, not \[64\]",
        ),
        (
            "precision=bf61",
            r"precision: 'bf61': must be 'float32', 'bf16' or 'fp16'; did you mean bf16\?",
        ),
        ("replay.size=many", "replay.size: 'many': must be a whole number$"),
        ("replay.keep=-1", "replay.keep: -1: must be .* or 'auto'$"),
        *(
            (f"{key}=.inf", f"{key}: inf: must be a finite")
            for key in ("timeout_seconds", "optimizer.learning_rate")
        ),
        ("optimizer={chosen: sgd, name: adam}", "optimizer.chosen: unknown key"),
        ("replay.skip_below=1", "replay.skip_below: 1: must be less than 1"),
        ("loss={name: sup_recall_at_k, form: released}", "loss.form: 'released': must be 'paper'"),
        ("model.freeze={blocks: x}", "model.freeze.blocks: 'x': must be a whole number$"),
        ("steps", "expected key=value"),
        ("steps.more=3", "steps is a value, it has no keys"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_what_was_expected(recipe, override, message):
    with pytest.raises(DistapError, match=message):
        load_recipe(recipe, [override])


def test_what_an_engine_cannot_do_is_refused_with_the_reason(recipe):
    with raises("recipe.value", "step.fold_batchnorm", "3"):
        load_recipe(recipe, ["engine={name: deepspeed, stage: 3}", "step.fold_batchnorm=true"])
    load_recipe(recipe, ["engine={name: deepspeed, stage: 2}", "step.fold_batchnorm=true"])
    with raises("recipe.value", "replay.keep is 2", "engine.reshard: pass"):
        load_recipe(recipe, ["engine={name: fsdp, reshard: pass}", "replay.keep=2"])
    load_recipe(recipe, ["engine={name: fsdp, reshard: pass}", "replay.keep=auto"])


def test_a_mistake_in_a_file_is_told_with_its_line_and_one_of_an_override_without(recipe):
    recipe.write_text(recipe.read_text() + "optimizer:\n  learning_rate: -1\nstpes: 3\n")
    with pytest.raises(DistapError) as refused:
        load_recipe(recipe, ["memory.size=-1"])
    places = [
        line.removeprefix(str(recipe)).split(": ")[:2] for line in str(refused.value).split("\n")
    ]
    assert places == [["", "memory.size"], [":7", "optimizer.learning_rate"], [":8", "stpes"]]


def test_keys_that_are_numbers_make_a_value_that_is_replaced_whole(recipe):
    first = load_recipe(recipe, ["data.image_sizes={0: 32, 0.5: 224}"])
    sizes = {"data.image_sizes": {0: 64, 0.7: 224}}
    assert load_recipe(recipe, ["data.image_sizes={0: 32, 0.5: 224}", sizes]).data.sizes == [
        (0, 64),
        (0.7, 224),
    ]
    assert first.data.sizes == [(0, 32), (0.5, 224)]


@pytest.mark.parametrize(
    "text", ["", "- a\n", "a: [", "\0", "[" * 5000, "steps: 1\nrun: x\nsteps: 2\n"]
)
def test_a_file_that_is_no_recipe_is_named(tmp_path, text):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with raises("recipe.not_yaml", "broken.yaml"):
        load_recipe(path)


def test_a_name_is_one_of_our_recipes_unless_a_file_has_it(tmp_path, monkeypatch, recipe):
    monkeypatch.chdir(tmp_path)
    assert load_recipe(Path("emoji"), ["steps=3"]) == load_recipe(
        RECIPES / "emoji.yaml", ["steps=3"]
    )
    with raises("recipe.not_found", "emojj"):
        load_recipe(Path("emojj"))
    Path("emoji").mkdir()
    assert load_recipe(Path("emoji")).steps == 24
    Path("emoji").rmdir()
    recipe.rename("emoji")
    assert load_recipe(Path("emoji")).run == Path("runs/x")


@pytest.mark.parametrize("key", ["run", "data.train", "model.weights", "checkpoint.store"])
def test_a_password_in_a_recipe_is_refused_and_not_repeated(key):
    with raises("recipe.secret", key, "URL") as caught:
        load_recipe(Path("emoji"), [f"{key}=https://user:PASSWORD@host/x"])
    assert "PASSWORD" not in str(caught.value)


def test_a_url_is_no_folder_of_a_run():
    with raises("recipe.run_not_local", "run"):
        load_recipe(Path("emoji"), ["run=s3://bucket/run"])


def test_a_recipe_is_read_without_what_shares_networks_out():
    program = (
        "import sys; from pathlib import Path; from distap.config.reading import load_recipe;"
        " load_recipe(Path('emoji'));"
        " print([name for name in ('torch.distributed.tensor', 'torch.distributed.fsdp',"
        " 'torch.distributed.checkpoint') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"

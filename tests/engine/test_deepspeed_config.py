"""The user's DeepSpeed JSON and what distap makes of it; no rank is started."""

import json

import pytest

from distap.errors import DistapError
from distap.training.deepspeed_config import merged_config


@pytest.fixture
def merged(tmp_path):
    """Merge a JSON, given as what it holds or as text, for stage 2, 4 ranks and clipping at 0.5."""

    def merge(content):
        path = tmp_path / "deepspeed.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return merged_config(2, path, 4, 1001, 0.5)

    return merge


def test_what_changes_a_training_is_said_and_not_assumed():
    config = merged_config(1, None, 4, 1001, None)
    assert config["gradient_clipping"] == 0.0
    assert (config["train_batch_size"], config["gradient_accumulation_steps"]) == (4, 1)
    assert [config[name]["enabled"] for name in ("fp16", "bf16", "torch_autocast")] == [False] * 3


def test_all_parameters_are_one_bucket_of_even_size():
    zero = merged_config(2, None, 4, 1001, None)["zero_optimization"]
    assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == 1002


def test_the_users_keys_are_merged_in_at_every_depth(merged):
    config = merged(
        {
            "wall_clock_breakdown": True,
            "zero_optimization": {"reduce_bucket_size": 64, "offload_optimizer": {"device": "cpu"}},
        }
    )
    assert config["wall_clock_breakdown"] is True
    zero = config["zero_optimization"]
    assert zero["reduce_bucket_size"] == 64 and zero["stage"] == 2
    assert zero["offload_optimizer"] == {"device": "cpu"}


def test_values_that_are_distaps_anyway_or_auto_are_fine(merged):
    config = merged(
        {
            "train_batch_size": "auto",
            "gradient_clipping": 0.5,
            "bf16": {"enabled": "auto"},
            "fp16": {"enabled": False, "initial_scale_power": 12},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
        }
    )
    assert config["train_batch_size"] == 4 and config["bf16"] == {"enabled": False}
    assert config["zero_optimization"]["reduce_bucket_size"] == 1002


@pytest.mark.parametrize(
    ("content", "key", "remedy"),
    [
        ({"train_micro_batch_size_per_gpu": 8}, "train_micro_batch_size_per_gpu is 8", "replay.size"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps is 4", "replay.size"),
        ({"pipeline": {"stages": 2}}, "pipeline is", "share out the images"),
        ({"gradient_clipping": 1.0}, "gradient_clipping is 1.0", "optimizer.clip_norm"),
        ({"optimizer": {"type": "Adam"}}, 'optimizer is {"type": "Adam"}', "set `optimizer`"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler is", "set `schedule`"),
        ({"fp16": {"enabled": True}}, "fp16.enabled is true", "precision: fp16"),
        ({"bf16": {"enabled": True}}, "bf16.enabled is true", "sums gradients in 16 bits"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage is 3", "engine.stage"),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, "zero_quantized_gradients", "not be that of"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "offload_param.device", "checkpoint"),
        ({"zero_optimization": 2}, "zero_optimization is 2", "expected an object"),
        ({"zero_optimisation": {}}, "does not pass on zero_optimisation", "did you mean zero_optimization"),
        ([1], "holds a list", "expected an object"),
        ('{"fp16": ', "not valid JSON", "line 1"),
        ('{"zero_optimization": {"stage": 2, "stage": 2}}', "not valid JSON", "'stage' appears twice"),
    ],
)
def test_a_key_that_is_distaps_or_nobodys_is_refused_with_file_and_remedy(merged, content, key, remedy):
    with pytest.raises(DistapError) as caught:
        merged(content)
    text = str(caught.value)
    assert "deepspeed.json: " in text and key in text and remedy in text


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(DistapError, match=r"nowhere\.json: engine\.config cannot be read: No such file"):
        merged_config(2, tmp_path / "nowhere.json", 1, 10, None)

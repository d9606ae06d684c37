"""`launch/gpu-smoke`: what it says of machines, and that it says it within its time."""

import subprocess

import pytest
import torch
from launching import ROOT

from benchmarks.smoke import (
    SmokeBenchmark,
    failure,
    is_supported,
    judged_exactness,
    judged_messages,
    judged_speed,
    why_no_gpu,
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_told_so_by_the_script_with_a_status():
    done = subprocess.run([ROOT / "launch/gpu-smoke"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0].startswith("wrong: ") and "driver" in lines[0]
    assert lines[-1].startswith("1 thing is wrong")


@pytest.mark.parametrize(
    ("driver", "error", "count", "cuda", "words"),
    [
        ("", "", 0, "13.2", [["no NVIDIA driver", "--gpus all"]]),
        ("580.65", "", 0, None, [["without CUDA"]]),
        ("", "", 0, None, [["no NVIDIA driver"], ["without CUDA"]]),
        (
            "470.82",
            "The NVIDIA driver on your system is too old (found version 11040).",
            0,
            "13.2",
            [["470.82", "too old", "13.2"]],
        ),
        ("580.65", "CUDA driver initialization failed\nmore", 0, "13.2", [["580.65", "failed"]]),
        ("580.65", "", 0, "13.2", [["580.65", "no card"]]),
        ("580.65", "", 2, "13.2", []),
    ],
)
def test_each_reason_why_there_is_no_gpu_has_its_sentence(driver, error, count, cuda, words):
    sentences = why_no_gpu(driver, error, count, cuda)
    assert len(sentences) == len(words)
    for sentence, expected in zip(sentences, words, strict=True):
        assert all(word in sentence for word in expected), sentence


def test_an_empty_list_of_visible_cards_is_named(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    [sentence] = why_no_gpu("580.65", "", 0, "13.2")
    assert "CUDA_VISIBLE_DEVICES is ''" in sentence


@pytest.mark.parametrize(
    ("capability", "built_for", "expected"),
    [
        ((7, 5), ["sm_75", "sm_80", "sm_90"], True),  # T4
        ((7, 0), ["sm_75", "sm_80", "sm_90"], False),  # V100, too old
        ((8, 9), ["sm_80", "sm_90"], True),  # of the same major version
        ((8, 0), ["sm_86"], False),
        ((12, 0), ["sm_80", "sm_90"], False),  # too new, without code to compile
        ((12, 0), ["sm_80", "compute_90"], True),
        ((9, 0), ["sm_90a"], True),
        ((6, 1), [], False),
    ],
)
def test_a_card_is_supported_by_code_of_its_major_version_or_code_to_compile(
    capability, built_for, expected
):
    assert is_supported(capability, built_for) is expected


def test_a_build_of_torch_supports_the_cards_that_it_names():
    names = torch._C._cuda_getArchFlags().split() if torch.version.cuda else []
    for name in (name for name in names if name.startswith("sm_")):
        number = int("".join(filter(str.isdigit, name)))
        assert is_supported(divmod(number, 10), names)


def test_what_is_slower_wrong_or_broken_has_its_sentence():
    assert judged_exactness({"difference": 1e-5})[1] == ""
    assert "2e-02" in judged_exactness({"difference": 0.02})[1]
    assert judged_messages({"is_right": True, "rate": 5e10}, 8, "NCCL") == (
        "NCCL sums over 8 ranks at 50.0 GB/s of each",
        "",
    )
    assert "8 ranks" in judged_messages({"is_right": False, "rate": 5e10}, 8, "NCCL")[1]
    figures = {"network": 2480.0, "loader": 1000.0, "workers": 14}
    _, problem = judged_speed(figures)
    assert all(word in problem for word in ("1,000", "2,480", "14", "35 cores"))
    assert judged_speed(figures | {"loader": 2500.0})[1] == ""
    assert "NCCL_DEBUG" in failure("messages", "NCCL", "it took more than 60 s")


@pytest.mark.nightly
@pytest.mark.parametrize("check", ["exactness", "messages", "speed"])
def test_each_check_runs_on_the_cpu(check):
    from benchmarks import harness

    smoke = SmokeBenchmark(
        device="cpu", backbone="resnet10t", image_size=64, batch=32, micro_batch=8, check=check
    )
    figures = harness.measure_in_time(smoke, check, 300, "cpu", ranks=1 + (check == "messages"))
    judge = {
        "exactness": judged_exactness,
        "messages": lambda row: judged_messages(row, 2, "gloo"),
        "speed": judged_speed,
    }[check]
    sentence, problem = judge(figures)
    assert sentence
    if check != "speed":  # whose loader may be slower here
        assert problem == ""

import math
import threading
import urllib.request

import torch
from prometheus_client.parser import text_string_to_metric_families
from servers import free_ports

from distap.telemetry.endpoint import Endpoint
from distap.telemetry.metrics import TrainingMetrics, memory_used


def scraped_utilization() -> float:
    """What a rank's endpoint answers, with all other metrics."""
    port = free_ports(1)
    with Endpoint().served(port, "127.0.0.1") as endpoint:
        TrainingMetrics(True, (), endpoint.registry)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    [sample] = families["distap_device_utilization_ratio"].samples
    return sample.value


def test_the_utilization_is_that_of_the_rank_and_not_of_the_thread_that_answers(monkeypatch):
    main = threading.get_ident()

    def present() -> int:
        return 3 if threading.get_ident() == main else 0

    def utilization(device: int | None = None) -> int:
        return {0: 10, 3: 40}[present() if device is None else device]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", present)
    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    assert scraped_utilization() == 0.4


def test_memory_in_use_is_that_of_the_container_without_caches(tmp_path):
    assert math.isnan(memory_used(tmp_path))  # no control group
    (tmp_path / "memory.stat").write_text("anon 600\nfile 9000\nshmem 200\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert math.isnan(memory_used(tmp_path))
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory_used(tmp_path) == 0.8

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import active_children

import pytest
import torch
from costly_images import KINDS, arithmetic_jpeg, costly_image
from galleries import upload
from ranks import skip_if_fast
from serving import resident

from distap.apps.serve.uploads import Decoders, DecodingJob, RefusedError
from distap.data.sizing import Sizing

JOB = DecodingJob(Sizing("crop", 32), max_pixels=50_000_000, seconds=60, memory_bytes=500_000_000)


@pytest.fixture(autouse=True, scope="module")
def _prepared() -> None:
    skip_if_fast("decoders")


@pytest.fixture
def decoders() -> Iterator[Decoders]:
    made = Decoders(JOB, 1)
    yield made
    made.close()


def refusal(decoders: Decoders, data: bytes) -> tuple[int, str, str]:
    with pytest.raises(RefusedError) as refused:
        decoders(data)
    return refused.value.status, refused.value.reason, str(refused.value)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_pixels_are_those_of_the_same_process(decoders, form):
    data = upload(3, form)
    assert torch.equal(decoders(data), JOB(data))


@pytest.mark.parametrize(
    ("data", "status", "reason"),
    [
        (upload(0)[:200], 400, "damaged"),
        (b"a text", 415, "unknown_format"),
        (arithmetic_jpeg(4000, 4000, scans=3600), 413, "too_many_pixels"),
    ],
)
def test_a_bad_image_is_refused_and_its_decoder_goes_on(decoders, data, status, reason):
    before = active_children()
    assert refusal(decoders, data)[:2] == (status, reason)
    assert decoders(upload(3)).shape == (3, 32, 32) and active_children() == before


def test_an_image_that_takes_too_long_ends_its_decoder_and_the_next_one_is_decoded():
    decoders = Decoders(replace(JOB, seconds=0.2, max_pixels=1_000_000_000), 1)
    (process,) = active_children()
    status, reason, message = refusal(decoders, arithmetic_jpeg(7000, 7000, scans=100))
    assert (status, reason) == (413, "too_many_pixels") and "takes more than 0.2 s or" in message
    process.join(60)
    assert not process.is_alive()
    assert decoders(upload(3)).shape == (3, 32, 32)
    decoders.close()


@pytest.mark.parametrize("kind", ["RGB PNG", "RGBA WEBP", "RGBA TIFF", "RGB AVIF"])
def test_an_image_that_takes_too_much_memory_is_refused_and_the_next_one_is_decoded(kind):
    if kind not in KINDS:
        pytest.skip("no reader of this format")
    decoders = Decoders(replace(JOB, memory_bytes=40_000_000), 1)
    status, reason, message = refusal(decoders, costly_image(kind, 3000))
    assert (status, reason) == (
        413,
        "too_many_pixels",
    ) and "or 40,000,000 bytes of memory" in message
    assert decoders(upload(3)).shape == (3, 32, 32)
    decoders.close()


@pytest.mark.parametrize("kind", KINDS)
def test_no_costly_image_takes_more_memory_than_is_allowed(kind):
    decoders = Decoders(replace(JOB, memory_bytes=60_000_000), 1)
    (process,) = active_children()
    before = resident(process.pid)
    try:
        assert decoders(costly_image(kind, 1500)).shape == (3, 32, 32)
        assert resident(process.pid, "VmHWM") < before + 64_000_000
    except RefusedError as refused:
        assert refused.status in (400, 413)
    decoders.close()


def test_a_decoder_that_was_killed_is_replaced(decoders, monkeypatch):
    (process,) = active_children()
    process.kill()
    process.join()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no memory"):
        patch.setattr(Decoders, "_started", lambda _: os.open("/no memory", 0))
        decoders(upload(3))
    assert decoders(upload(3)).shape == (3, 32, 32)  # the next one starts it again


def test_only_the_server_ends_a_decoder(decoders):
    (process,) = active_children()
    process.terminate()  # as a service manager does with all processes of a service
    os.kill(process.pid, signal.SIGINT)
    assert decoders(upload(3)).shape == (3, 32, 32) and active_children() == [process]

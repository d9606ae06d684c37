"""Servers for tests, each a process of its own as `distap serve` starts it, and uploads that are
good and bad.
"""

import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import httpx
from galleries import Gallery, upload
from launching import Job, Program, started

LIMITS = {
    "--max-upload-bytes": 300_000,
    "--max-pixels": 1_000_000,
    "--max-k": 50,
    "--timeout-seconds": 120,
}
BOUNDARY = "limit-of-parts"
MULTIPART = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


@contextmanager
def serving(gallery: Gallery, folder: Path) -> Iterator[tuple[str, Job]]:
    """URL of a server that is ready, and its process."""
    options = (
        "serve",
        gallery.index,
        "--checkpoint",
        gallery.run,
        "--port",
        0,
        *chain(*LIMITS.items()),
    )
    with started(Program(("-m", "distap.cli", *map(str, options))), folder) as job:
        yield url_when_ready(job), job


def url_when_ready(job: Job) -> str:
    """URL of a server once it is ready: two processes of it import torch before, on a machine that
    may be busy.
    """
    job.wait_until(lambda: " on http://" in job.said)
    url = re.search(r"serving .* on (http\S+)", job.said)[1]
    job.wait_until(lambda: is_ready(url))
    return url


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


def resident(pid: int, name: str = "VmRSS") -> int:
    """Bytes of memory that a process holds, or has held at most (`VmHWM`)."""
    return 1024 * int(re.search(rf"{name}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


def body(image: bytes, name: str = "image") -> bytes:
    """A multipart body as a browser sends it."""
    record = (
        f'Content-Disposition: form-data; name="{name}"; filename="../../x.png"\r\nContent-Type:'
        " image/png"
    )
    return f"--{BOUNDARY}\r\n{record}\r\n\r\n".encode() + image + f"\r\n--{BOUNDARY}--\r\n".encode()


def bomb(width: int = 60_000, height: int = 60_000) -> bytes:
    """A small PNG that claims to be huge."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(10_000)))
        + chunk(b"IEND", b"")
    )


PNG = upload(0)
# What is sent (body, headers), and the status and reason of the answer.
BAD = {
    "truncated": (body(PNG[: len(PNG) // 2]), MULTIPART, 400, "damaged"),
    "damaged": (body(PNG[:60] + bytes(20) + PNG[80:]), MULTIPART, 400, "damaged"),
    "bomb": (body(bomb()), MULTIPART, 413, "too_many_pixels"),
    "text": (body(b"this is a text"), MULTIPART, 415, "unknown_format"),
    "postscript": (
        body(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"),
        MULTIPART,
        415,
        "unknown_format",
    ),
    "svg": (body(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), MULTIPART, 415, "unknown_format"),
    "empty file": (body(b""), MULTIPART, 400, "empty"),
    "large": (body(bytes(400_000)), MULTIPART, 413, "too_large"),
    "json": (b"{}", {"Content-Type": "application/json"}, 415, "not_multipart"),
    "no type": (PNG, {}, 415, "not_multipart"),
    "no body": (b"", MULTIPART, 422, "missing_field"),
    "no boundary": (body(PNG), {"Content-Type": "multipart/form-data"}, 400, "bad_request"),
    "other field": (body(PNG, name="picture"), MULTIPART, 422, "missing_field"),
    "broken parts": (b"--other\r\n" + PNG, MULTIPART, 400, "bad_request"),
}

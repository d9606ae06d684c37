"""`python -m benchmarks serve`: many clients at search servers that run, in turns."""

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import aiohttp
import numpy as np
import typer

from distap.errors import DistapError
from distap.telemetry.terminal import print_result, text_table

SERVERS = (
    "Servers as NAME=URL, such as distap=http://127.0.0.1:8000; the first is what the others are"
    " compared with."
)
KEY = "Search by this key of the index."
IMAGE = "Search by this image file instead."


@dataclass
class Load:
    """What the clients of one server saw."""

    seconds: list[float] = field(default_factory=list)  # of each answer
    refused: int = 0  # answers 503, after which a client waits as long as it is told
    failed: int = 0  # other answers, and connections that broke
    measured_seconds: float = 0.0


def serve_command(
    servers: Annotated[
        list[str], typer.Argument(metavar="NAME=URL...", help=SERVERS, show_default=False)
    ],
    key: Annotated[str | None, typer.Option(help=KEY, show_default=False)] = None,
    image: Annotated[Path | None, typer.Option(help=IMAGE, show_default=False)] = None,
    clients: Annotated[
        int, typer.Option(help="Clients at a time, each with a connection that it keeps.", min=1)
    ] = 500,
    seconds: Annotated[float, typer.Option(help="Seconds of each turn.", min=1)] = 20.0,
    rounds: Annotated[int, typer.Option(help="Turns of each server.", min=1)] = 3,
) -> None:
    """Ask search servers by many clients at a time, each of which waits for its answer before it
    asks again.

    `benchmarks/plain_server.py` is a server to compare with. Start `distap serve` with a --queue
    above the number of clients, or it refuses those that find its queue full.
    """
    if (key is None) == (image is None):
        raise DistapError("command.key_and_image", "give --key or --image, and not both")
    urls = dict(server.split("=", 1) for server in servers)
    upload = None if image is None else image.read_bytes()
    loads = {name: Load() for name in urls}
    for _ in range(rounds):
        for name, url in urls.items():
            asyncio.run(_turn(f"{url}/api/search", key, upload, clients, seconds, loads[name]))
    print_result(
        text_table(
            "searches", "", HEADINGS, [_row(name, load, loads) for name, load in loads.items()]
        )
    )


HEADINGS = ("server", "answers/s", "times the first", "median ms", "95% ms", "refused", "failed")


def _row(name: str, load: Load, loads: dict[str, Load]) -> list[str]:
    first = next(iter(loads.values()))
    rate = len(load.seconds) / load.measured_seconds
    first_rate = len(first.seconds) / first.measured_seconds
    median, late = np.percentile(load.seconds, [50, 95]) if load.seconds else (np.nan, np.nan)
    return [
        name,
        f"{rate:.1f}",
        f"{rate / first_rate:.2f}" if first_rate else "",
        f"{1000 * median:.0f}",
        f"{1000 * late:.0f}",
        str(load.refused),
        str(load.failed),
    ]


async def _turn(
    url: str, key: str | None, upload: bytes | None, clients: int, seconds: float, load: Load
) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=60)
    ) as session:
        started = time.monotonic()
        end = started + seconds
        await asyncio.gather(
            *(_client(session, url, key, upload, end, load) for _ in range(clients))
        )
        load.measured_seconds += time.monotonic() - started


async def _client(
    session: aiohttp.ClientSession,
    url: str,
    key: str | None,
    upload: bytes | None,
    end: float,
    load: Load,
) -> None:
    while (started := time.monotonic()) < end:
        try:
            if upload is None:
                request = session.get(url, params={"key": key or "", "k": "10"})
            else:
                form = aiohttp.FormData()
                form.add_field(
                    "image", upload, filename="image", content_type="application/octet-stream"
                )
                request = session.post(url, data=form, params={"k": "10"})
            async with request as answer:
                await answer.read()
        except (aiohttp.ClientError, TimeoutError):
            load.failed += 1
            continue

        if answer.status == 200:
            load.seconds.append(time.monotonic() - started)
        elif answer.status == 503:
            load.refused += 1
            await asyncio.sleep(float(answer.headers.get("Retry-After", "1")))
        else:
            load.failed += 1

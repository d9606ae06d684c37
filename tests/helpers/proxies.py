"""A proxy that shows a server below a path which it takes away, as nginx's `proxy_pass
http://server/;` does.
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

OF_A_CONNECTION = {
    "connection",
    "content-length",
    "accept-encoding",
    "transfer-encoding",
    "content-encoding",
}


@contextmanager
def proxy(server: str, path: str) -> Iterator[str]:
    """The URL below which the proxy shows the server; `path` has slashes at both ends."""

    async def forward(request: Request) -> Response:
        # As proxies do, it keeps the name by which the client knows the server.
        headers = {
            name: value for name, value in request.headers.items() if name not in OF_A_CONNECTION
        }
        url = httpx.URL(f"{server}/{request.path_params['rest']}", query=request.url.query.encode())
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.request(
                request.method, url, content=await request.body(), headers=headers
            )
        kept_rows = {
            name: value for name, value in answer.headers.items() if name not in OF_A_CONNECTION
        }
        return Response(answer.content, answer.status_code, kept_rows)

    app = Starlette(routes=[Route(path + "{rest:path}", forward, methods=["GET", "POST"])])
    listening = socket.create_server(("127.0.0.1", 0))
    proxying = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none", lifespan="off"))
    thread = threading.Thread(target=proxying.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}{path}"
    finally:
        proxying.should_exit = True
        thread.join()

"""A proxy that shows a server below a path which it takes away, as nginx's `proxy_pass http://server/;` does."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

OWN = {"host", "connection", "content-length", "accept-encoding", "transfer-encoding", "content-encoding"}


@contextmanager
def proxy(server: str, path: str) -> Iterator[str]:
    """The URL below which the proxy shows the server, with a slash at its end."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 5  # seconds in which an idle connection ends

        def do_GET(self) -> None:
            if not self.path.startswith(path):
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            # As proxies do, it keeps the name by which the client knows the server.
            headers = {name: value for name, value in self.headers.items() if name.lower() not in OWN}
            url = f"{server}/{self.path.removeprefix(path)}"
            answer = httpx.request(
                self.command, url, content=body, headers={**headers, "Host": self.headers["Host"]}, timeout=60
            )
            self.send_response(answer.status_code)
            for name, value in answer.headers.items():
                if name.lower() not in OWN:
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:
            """Keep the terminal free."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}{path}"
        finally:
            listening.shutdown()
            thread.join()

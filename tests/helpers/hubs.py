"""A server that answers as the Hugging Face Hub does what its file system asks for one data set."""

import base64
import json
from pathlib import Path
from urllib.parse import unquote, urlsplit

from servers import Handler, WebServer

REPOSITORY = "user/photos"
API = f"/api/datasets/{REPOSITORY}"
FILES = f"/datasets/{REPOSITORY}/resolve/"


class HubHandler(Handler):
    """Answers for the revisions `main` and `v1` of a data set, which are the server's folder."""

    server: "HubServer"

    def do_GET(self) -> None:  # noqa: N802
        self.server.tokens.append(self.headers.get("Authorization", ""))
        path = unquote(urlsplit(self.path).path)
        if self.server.token and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self._refuse(401, "RepoNotFound")
        elif self.server.is_gated:
            self._refuse(403, "GatedRepo")
        elif path.startswith(FILES):
            revision, _, name = path.removeprefix(FILES).partition("/")
            if revision in self.server.revisions and (self.server.folder / name).is_file():
                self.path = f"/{name}"
                super().do_GET()
            else:
                self._refuse(404, "EntryNotFound")
        elif path == API:
            self._send({"id": REPOSITORY})
        elif path.startswith(f"{API}/revision/"):
            known = path.rpartition("/")[2] in self.server.revisions
            if known:
                self._send({"id": REPOSITORY})
            else:
                self._refuse(404, "RevisionNotFound")
        elif path.startswith(f"{API}/tree/"):
            self._send_tree(path.removeprefix(f"{API}/tree/").partition("/")[2])
        else:
            self._refuse(404, "RepoNotFound")

    def do_POST(self) -> None:  # noqa: N802
        sent = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.headers.get("Authorization") != f"Bearer {self.server.writer}":
            self._refuse(403, "")
        elif "/preupload/" in self.path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(sent)["files"]
            ]
            self._send({"files": files})
        else:
            for operation in map(json.loads, sent.splitlines()):
                if operation["key"] == "file":
                    content = base64.b64decode(operation["value"]["content"])
                    (self.server.folder / operation["value"]["path"]).write_bytes(content)
            self._send(
                {"commitUrl": f"{self.server.url}/datasets/{REPOSITORY}/commit/1", "commitOid": "1"}
            )

    def _send_tree(self, name: str) -> None:
        folder = self.server.folder / name
        if not folder.is_dir():
            self._refuse(404, "EntryNotFound")
            return
        self._send([self._entry(path) for path in sorted(folder.iterdir())])

    def _entry(self, path: Path) -> dict[str, object]:
        name = path.relative_to(self.server.folder).as_posix()
        kind = "directory" if path.is_dir() else "file"
        return {"type": kind, "path": name, "oid": "1", "size": path.stat().st_size}

    def _send(self, answer: object) -> None:
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


class HubServer(WebServer):
    handler = HubHandler
    revisions = ("main", "v1")
    base_of_files = f"hf://datasets/{REPOSITORY}"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.token = ""  # that a reader has to send
        self.writer = "writer"  # token of who may write
        self.is_gated = False
        self.tokens: list[str] = []  # what each request for reading had of them

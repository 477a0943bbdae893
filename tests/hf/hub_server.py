"""A server that speaks the hub's protocol, with the models and datasets of a directory: DIR/org/name/*."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serving(place: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields the endpoint, and the list of the requests so far."""
    seen: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, place, seen))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()


class Handler(BaseHTTPRequestHandler):
    def __init__(self, place: Path, seen: list[str], *connection: Any) -> None:
        self.place, self.seen = place, seen
        super().__init__(*connection)

    def do_GET(self) -> None:
        self.seen.append(f"{self.command} {self.path}")
        path = self.path.partition("?")[0].strip("/").removeprefix("api/")
        organization, name, *rest = [*path.removeprefix("models/").removeprefix("datasets/").split("/"), ""]
        what, revision, file = (*rest, "", "")[0], (*rest, "", "")[1], "/".join(rest[2:-1])
        repository = self.place / organization / name
        if organization == "gated":
            self.refuse(403, "GatedRepo")
        elif not repository.is_dir():
            self.refuse(404, "RepoNotFound")
        elif revision not in ("", "main", COMMIT):
            self.refuse(404, "RevisionNotFound")
        elif what == "resolve":
            data = (repository / file).read_bytes()
            self.answer(data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT})
        else:
            self.answer(json.dumps(self.listing(repository, what)).encode())

    def do_HEAD(self) -> None:
        self.do_GET()

    def listing(self, repository: Path, what: str) -> Any:
        files = sorted(one for one in repository.rglob("*") if one.is_file())
        if what == "tree":
            return [
                {"type": "file", "path": str(one.relative_to(repository)), "size": one.stat().st_size, "oid": "0" * 40}
                for one in files
            ]
        return {
            "id": repository.name,
            "sha": COMMIT,
            "siblings": [{"rfilename": str(one.relative_to(repository))} for one in files],
        }

    def refuse(self, code: int, name: str) -> None:
        self.answer(b"{}", {"X-Error-Code": name, "X-Error-Message": name}, code)

    def answer(self, data: bytes, headers: dict[str, str] | None = None, code: int = 200) -> None:
        self.send_response(code)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass

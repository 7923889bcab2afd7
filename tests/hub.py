"""A Hugging Face hub of one repository on the loopback interface: enough of it to read from."""

import contextlib
import hashlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Iterator

COMMIT = "c0ffee" + "0" * 34


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves `files` (path -> bytes) as a repository with one commit; `asked` has the paths of all
    requests. A file is sent whole, also to those who ask for a range: small files are one range."""

    protocol_version = "HTTP/1.1"
    repository = "datasets/me/corpus"  # or models/me/gpt
    files: dict[str, bytes] = {}
    asked: list[str] = []

    def log_message(self, *args) -> None:
        pass

    def do_GET(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.asked.append(path)
        api = f"/api/{self.repository}"
        # files of models stand at the root
        folder = f"/{self.repository.removeprefix('models/')}/resolve/{COMMIT}/"
        if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
            names = [{"rfilename": name} for name in self.files]
            self.answer({"id": self.repository, "sha": COMMIT, "siblings": names})
        elif path.startswith(f"{api}/tree/{COMMIT}"):
            entries = []
            for name, content in sorted(self.files.items()):
                oid = hashlib.sha1(name.encode()).hexdigest()
                entries.append({"type": "file", "path": name, "size": len(content), "oid": oid})
            self.answer(entries)
        elif path.removeprefix(folder) in self.files:
            content = self.files[path.removeprefix(folder)]
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            self.answer(content, {"X-Repo-Commit": COMMIT, "ETag": etag})
        else:
            is_known = self.repository.removeprefix("models/") in path
            code = "EntryNotFound" if is_known else "RepoNotFound"
            self.answer({}, {"X-Error-Code": code}, 404)

    do_HEAD = do_GET

    def answer(self, body: object, headers: dict[str, str] | None = None, code: int = 200) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextlib.contextmanager
def serve(
    files: dict[str, bytes], repository: str = Hub.repository
) -> Iterator[tuple[str, type[Hub]]]:
    """The address of a hub that serves `files`, and its handler class."""
    handler = type("Handler", (Hub,), {"files": files, "repository": repository, "asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", handler
        server.shutdown()

"""A Hugging Face hub of one repository on the loopback interface: enough of it to read from."""

import contextlib
import hashlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Iterator

COMMIT, LATER = "c0ffee" + "0" * 34, "beef" + "0" * 36


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves `files` (path -> bytes) as a repository at COMMIT, which need not be the `newest`; the
    first `failures` requests for parquet files get no answer."""

    protocol_version = "HTTP/1.1"
    repository = "datasets/me/corpus"  # or models/me/gpt
    files: dict[str, bytes] = {}
    failures = 0
    newest = COMMIT
    asked: list[str] = []

    def log_message(self, *args) -> None:
        pass

    def answer(self, body: bytes, code: int = 200, **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        self.asked.append(urllib.parse.unquote(url.path))
        kind, rest = "/api", self.asked[-1].removeprefix(f"/api/{self.repository}")
        if rest == self.asked[-1]:  # files of models stand at the root
            kind, rest = "", rest.removeprefix("/" + self.repository.removeprefix("models/"))
        if type(self).failures and rest.endswith(".parquet"):
            type(self).failures -= 1
            self.close_connection = True
        elif kind and rest in ("", "/revision/main", f"/revision/{COMMIT}"):
            names = [{"rfilename": name} for name in self.files]
            sha = COMMIT if rest.endswith(COMMIT) else self.newest
            name = self.repository.partition("/")[2]
            about = {"_id": "1", "id": name, "sha": sha, "siblings": names}
            self.answer(json.dumps({**about, "private": False, "tags": []}).encode())
        elif kind and rest.startswith(f"/tree/{COMMIT}"):
            folder = rest.removeprefix(f"/tree/{COMMIT}").strip("/")
            self.answer(json.dumps(self.tree(folder, "recursive=true" in url.query)).encode())
        elif rest.startswith(f"/resolve/{COMMIT}/") and rest.split("/", 3)[3] in self.files:
            self.send_file(self.files[rest.split("/", 3)[3]])
        else:
            missing = "RepoNotFound" if rest == self.asked[-1] else "EntryNotFound"
            self.answer(b"{}", 404, X_Error_Code=missing)

    do_HEAD = do_GET

    def tree(self, folder: str, recursive: bool) -> list[dict]:
        """What lies in a folder, or anywhere below it."""
        start = folder + "/" if folder else ""
        entries = {}
        for name, content in self.files.items():
            if name.startswith(start):
                parts = name.removeprefix(start).split("/")
                entries[name] = {"type": "file", "size": len(content)}
                for depth in range(1, len(parts)):
                    entries[start + "/".join(parts[:depth])] = {"type": "directory", "size": 0}
        return [
            {"path": path, "oid": hashlib.sha1(path.encode()).hexdigest(), **entry}
            for path, entry in sorted(entries.items())
            if recursive or "/" not in path.removeprefix(start)
        ]

    def send_file(self, content: bytes) -> None:
        headers = {"X_Repo_Commit": COMMIT, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        wanted = self.headers.get("Range")
        if wanted is None:
            self.answer(content, **headers)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        first, last = int(first), min(int(last or len(content)), len(content) - 1)
        headers["Content_Range"] = f"bytes {first}-{last}/{len(content)}"
        self.answer(content[first : last + 1], 206, **headers)


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

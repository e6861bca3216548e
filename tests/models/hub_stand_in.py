"""The real client of the Hugging Face Hub against a stand-in: python hub_stand_in.py MODEL PICTURES HOME

Pushes the model, fetches it under its name, compares the vectors of the pictures and prints the names that were pushed.
The stand-in answers what the client asks for on that way, and no more.
"""

import base64
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def running() -> Iterator[tuple[str, dict[str, bytes]]]:
    """The address of a server with one repository, and the files that were pushed to it."""
    files: dict[str, bytes] = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Hub", (_Hub,), {"files": files}))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", files
    finally:
        server.shutdown()
        server.server_close()


class _Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]

    def do_POST(self) -> None:
        body = b"".join(self._body())
        *_, what, _ = self.path.split("/")
        if self.path == "/api/repos/create":
            self._answer({"url": f"http://{self.headers['Host']}/owner/name"})
        elif self.path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif what == "preupload":
            about = {"uploadMode": "regular", "shouldIgnore": False}
            self._answer({"files": [{"path": one["path"], **about} for one in json.loads(body)["files"]]})
        elif what == "commit":
            for one in map(json.loads, body.splitlines()):
                if one["key"] == "file":
                    self.files[one["value"]["path"]] = base64.b64decode(one["value"]["content"])
            address = f"http://{self.headers['Host']}/owner/name/commit/{COMMIT}"
            self._answer({"commitUrl": address, "commitOid": COMMIT, "success": True, "hookOutput": ""})
        else:
            self._answer({}, 404)

    def do_GET(self) -> None:
        _, _, found = self.path.partition("/owner/name/resolve/")
        content = self.files.get(found.partition("/")[2])
        if content is not None:
            digest = hashlib.sha1(content).hexdigest()
            self._answer(content, headers={"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT})
        elif self.path.startswith("/api/models/owner/name/tree/"):
            about = {"type": "file", "oid": COMMIT}
            self._answer([{"path": name, "size": len(one), **about} for name, one in self.files.items()])
        elif self.path.startswith("/api/models/owner/name"):
            names = [{"rfilename": name} for name in self.files]
            self._answer({"id": "owner/name", "sha": COMMIT, "siblings": names, "private": False})
        else:
            self._answer({}, 404)

    do_HEAD = do_GET  # noqa: N815 - the server looks for this name

    def _body(self) -> Iterator[bytes]:
        if self.headers.get("Transfer-Encoding") != "chunked":
            yield self.rfile.read(int(self.headers.get("Content-Length") or 0))
            return
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _answer(self, content: Any, code: int = 200, headers: dict[str, str] | None = None) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(raw)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def main(model: str, pictures: str, home: str) -> None:
    with running() as (address, files):
        # The client reads these when it is imported.
        os.environ |= {"HF_ENDPOINT": address, "HF_HOME": home, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        import numpy as np

        import bier

        ours, images = bier.load(model), np.load(pictures)
        ours.push_to_hub("owner/name", token="hf_of_a_stand_in")
        assert np.array_equal(bier.load("hf:owner/name").encode(images), ours.encode(images))
        print(json.dumps({name: len(content) for name, content in files.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])

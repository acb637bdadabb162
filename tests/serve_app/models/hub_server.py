"""A hub of models on this machine, for the real client of Hugging Face."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tests.progress import STILL_S
from tests.serve_app.models.doubles import GB, QWEN_7B

COMMIT = "0" * 40


class Answers(BaseHTTPRequestHandler):
    """A hub with the models `org/open`, `org/gated`, `org/bare` and `org/broken`.

    Attributes:
        folder: The files of `org/folder`.
    """

    folder = Path("/nowhere")

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        if "org/broken" in path:
            self._error(503, "")
        elif "no-such-revision" in path:
            self._error(404, "RevisionNotFound")
        elif "org/forbidden" in path:
            self._error(403, "")
        elif path.startswith("/api/models/org/") and not path.endswith(("none", "cut")):
            files = [
                {"rfilename": "config.json", "size": 600},
                {"rfilename": "model.safetensors", "size": 15 * GB},
            ]
            self._send(json.dumps({"id": "org/open", "sha": COMMIT, "siblings": files}).encode())
        elif path.startswith("/org/folder/resolve/"):
            file = self.folder / path.rpartition("/")[2]
            if file.exists():
                self._send(file.read_bytes())
            else:
                self._error(404, "EntryNotFound")
        elif path.startswith("/org/open/resolve/"):
            self._send(json.dumps(QWEN_7B).encode())
        elif path.startswith("/org/gated/resolve/"):
            self._error(401 if "authorization" not in self.headers else 403, "GatedRepo")
        elif path.startswith("/org/bare/resolve/"):
            self._error(404, "EntryNotFound")
        elif path.endswith("org/cut"):
            self._send(b"<html>")
        else:
            self._error(401, "RepoNotFound")

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.send_header("x-repo-commit", COMMIT)
        self.send_header("etag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _error(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("x-error-code", code)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@contextmanager
def running_hub(folder: Path = Path("/nowhere")) -> Iterator[str]:
    """Serve the hub; yield its URL.

    Args:
        folder: The files of `org/folder`.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("FolderAnswers", (Answers,), {"folder": folder}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(STILL_S)


def without_account(monkeypatch: pytest.MonkeyPatch, folder: Path, url: str | None = None) -> None:
    """Let the client have no token, and its cache below a folder.

    Args:
        monkeypatch: Changes the client's settings.
        folder: The folder.
        url: The URL of the hub; None: every caller names it.
    """
    if url is not None:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

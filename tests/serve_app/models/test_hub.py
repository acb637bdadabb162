"""Models of the hub: the real client against a small server, and the choice between hub and cache."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from serve_app.models.errors import ModelError
from serve_app.models.hub import HubAwayError, HuggingFaceHub, read_model
from tests.serve_app.models.doubles import GB, QWEN_7B, FakeHub, write_model

COMMIT = "0" * 40


class Answers(BaseHTTPRequestHandler):
    """A hub with the models `org/open`, `org/gated`, `org/bare` and `org/broken`."""

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
        self.send_header("etag", '"1"')
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


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_a_model_is_read_without_its_weights(endpoint: str, tmp_path: Path) -> None:
    files = read_model("org/open", None, HuggingFaceHub(endpoint))
    assert files.config == QWEN_7B
    assert (files.source, files.weight_bytes, files.download) == ("org/open", 15 * GB, True)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("id", "revision", "message"),
    [
        ("org/none", None, r"no model org/none, .*huggingface\.co/org/none.*HF_TOKEN.*hf auth login"),
        (
            "org/gated",
            None,
            r"org/gated is gated: accept its terms on https://.*HF_TOKEN or run `hf auth login`",
        ),
        ("org/open", "no-such-revision", r"org/open has no revision 'no-such-revision'"),
        ("org/bare", None, r"org/bare has no config\.json"),
        ("org/forbidden", None, r"org/forbidden: the Hugging Face hub answers 403"),
        ("org/broken", None, r"org/broken: the Hugging Face hub can't be reached .*not downloaded before"),
        ("org/cut", None, r"org/cut: the Hugging Face hub can't be reached"),
        ("org/--bad", None, r"'org/--bad' is not a Hugging Face id"),
    ],
)
def test_an_error_of_the_hub_is_one_line(endpoint: str, id: str, revision: str | None, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read_model(id, revision, HuggingFaceHub(endpoint))
    assert "\n" not in str(caught.value)


def test_a_token_without_access_is_told_apart(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    with pytest.raises(ModelError, match=r"your Hugging Face token has no access"):
        read_model("org/gated", None, HuggingFaceHub(endpoint))


def test_a_hub_that_is_down_is_away() -> None:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        # Bound, and nothing listens.
        hub = HuggingFaceHub(f"http://127.0.0.1:{probe.getsockname()[1]}")
        with pytest.raises(HubAwayError, match="can't be reached"):
            hub.sizes("org/open", None)


def test_offline_mode_is_told(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set, and the model was not downloaded before"):
        read_model("org/open", None, HuggingFaceHub(endpoint))


def test_what_was_downloaded_before_is_found(endpoint: str) -> None:
    hub = HuggingFaceHub(endpoint)
    assert hub.cached("org/open", None) is None
    path = hub.config("org/open", None)
    assert hub.cached("org/open", None) == path.parent


def test_a_model_in_the_cache_needs_no_hub(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "snapshot", QWEN_7B, 15 * GB)
    files = read_model("org/model", None, FakeHub({}, away=True, cache={"org/model": folder}))
    assert (files.source, files.weight_bytes, files.download) == ("org/model", 15 * GB, False)


def test_half_a_model_in_the_cache_is_told(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "snapshot", QWEN_7B, 12 * GB, files=3)
    (folder / "model-00001-of-00003.safetensors").unlink()
    with pytest.raises(
        ModelError, match=r"can't be reached, and what was downloaded before is incomplete: .*1 of 3"
    ):
        read_model("org/model", None, FakeHub({}, away=True, cache={"org/model": folder}))


def test_the_revision_reaches_the_hub(tmp_path: Path) -> None:
    hub = FakeHub({"org/model": write_model(tmp_path / "model", QWEN_7B, GB)})
    read_model("org/model", "v2", hub)
    assert hub.asked == [("org/model", "v2")]

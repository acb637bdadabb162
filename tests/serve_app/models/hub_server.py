"""A hub of models on this machine, for the real client of Hugging Face."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.fakes.service import Asked, Reply, serving
from tests.serve_app.models.doubles import GB, QWEN_7B

COMMIT = "0" * 40


def _answer(asked: Asked, folder: Path) -> Reply:
    """Return the answer of a hub with the models `org/open`, `org/gated`, `org/bare` and `org/broken`."""
    path = asked.path.partition("?")[0]
    if "org/broken" in path:
        return _error(503)
    if "no-such-revision" in path:
        return _error(404, "RevisionNotFound")
    if "org/forbidden" in path:
        return _error(403)
    if path.startswith("/api/models/org/") and not path.endswith(("none", "cut")):
        files = [
            {"rfilename": "config.json", "size": 600},
            {"rfilename": "model.safetensors", "size": 15 * GB},
        ]
        return _file(json.dumps({"id": "org/open", "sha": COMMIT, "siblings": files}).encode())
    if path.startswith("/org/folder/resolve/"):
        file = folder / path.rpartition("/")[2]
        return _file(file.read_bytes()) if file.exists() else _error(404, "EntryNotFound")
    if path.startswith("/org/open/resolve/"):
        return _file(json.dumps(QWEN_7B).encode())
    if path.startswith("/org/gated/resolve/"):
        return _error(401 if "authorization" not in asked.headers else 403, "GatedRepo")
    if path.startswith("/org/bare/resolve/"):
        return _error(404, "EntryNotFound")
    if path.endswith("org/cut"):
        return _file(b"<html>")
    return _error(401, "RepoNotFound")


def _file(body: bytes) -> Reply:
    return Reply(body, headers={"x-repo-commit": COMMIT, "etag": f'"{hashlib.sha256(body).hexdigest()}"'})


def _error(status: int, code: str = "") -> Reply:
    return Reply(status=status, headers={"x-error-code": code} if code else {})


@contextmanager
def running_hub(folder: Path = Path("/nowhere")) -> Iterator[str]:
    """Serve the hub; yield its URL.

    Args:
        folder: The files of `org/folder`.
    """
    with serving(lambda asked: _answer(asked, folder)) as service:
        yield service.url


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

"""Checks of the models' sources, with a hub on this machine."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from serve_app.cli.checks.finding import GIB, Finding
from serve_app.cli.checks.sources import check_sources
from serve_app.system.limits import Space
from tests.ports import free_port
from tests.serve_app.cli.checks.machines import FakeMachine, case, needs_of

Hub = Callable[..., str]


@pytest.fixture
def hub() -> Iterator[Hub]:
    """Starts a hub with one answer; `asked` collects the path and the token of each request."""
    servers = []

    def start(status: int, code: str = "", asked: list[tuple[str, str]] | None = None) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                if asked is not None:
                    asked.append((self.path, self.headers.get("authorization", "")))
                self.send_response(status)
                if code:
                    self.send_header("x-error-code", code)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                """Log nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def look(source: str, machine: FakeMachine | None = None, **engine: Any) -> Finding | None:
    return check_sources(case(machine, needs_of(models=[{"id": "m", "source": source, "engine": engine}])))


def machine(home: Path, url: str, token: str = "", space: Space | None = None, **more: str) -> FakeMachine:
    variables = {"HF_HOME": str(home), "HF_ENDPOINT": url, **({"HF_TOKEN": token} if token else {}), **more}
    return FakeMachine(environment=variables, spaces={str(home / "hub"): space} if space else {})


def cached(home: Path) -> None:
    snapshot = home / "hub/models--org--model/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()


@pytest.mark.parametrize("source", ["saturate://demo", "s3://bucket/model"])
def test_sources_that_are_not_looked_at(source: str) -> None:
    assert look(source) is None


def test_a_directory(tmp_path: Path) -> None:
    found = look(str(tmp_path))
    assert found
    assert found.level == "ok"
    found = look(str(tmp_path / "no"))
    assert found
    assert found.level == "problem"
    assert "m: " in found.text
    assert "is not a directory here" in found.text


def test_a_directory_in_the_home_of_no_user() -> None:
    found = look("~no user/model")
    assert found
    assert "~no user/model is not a directory here" in found.text


def test_a_model_that_may_be_read(hub: Hub, tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []
    found = look("org/model", machine(tmp_path, hub(302, asked=asked), "secret"), revision="v2")
    assert found
    assert found.level == "ok"
    assert asked == [("/org/model/resolve/v2/config.json", "Bearer secret")]
    assert "secret" not in found.text


def test_a_token_may_be_in_a_file(hub: Hub, tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []
    url = hub(200, asked=asked)
    fake = FakeMachine(
        environment={"HF_HOME": str(tmp_path), "HF_ENDPOINT": url}, texts={f"{tmp_path}/token": "filed\n"}
    )
    look("org/model", fake)
    assert asked == [("/org/model/resolve/main/config.json", "Bearer filed")]


@pytest.mark.parametrize(
    ("status", "code", "token", "level", "text", "fix"),
    [
        (404, "EntryNotFound", "", "ok", "has org/model (without a token)", ""),
        (401, "GatedRepo", "", "problem", "org/model is gated, and there is no token", "accept the licence"),
        (403, "GatedRepo", "t", "problem", "org/model is gated", "accept the licence"),
        (401, "RepoNotFound", "", "problem", "has no org/model in revision main", "correct `source`"),
        (401, "RepoNotFound", "t", "problem", "has no org/model", "HF_TOKEN"),
        (401, "", "t", "problem", "refuses the token", "HF_TOKEN"),
        (404, "RevisionNotFound", "", "problem", "has no org/model", "correct `source`"),
        (503, "", "", "warning", "answers 503", "again later"),
    ],
)
def test_answers_of_the_hub(
    hub: Hub, tmp_path: Path, status: int, code: str, token: str, level: str, text: str, fix: str
) -> None:
    found = look("org/model", machine(tmp_path, hub(status, code), token))
    assert found
    assert found.level == level
    assert text in found.text
    assert fix in found.fix


def test_a_hub_that_can_not_be_reached(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    found = look("org/model", machine(tmp_path, url))
    assert found
    assert found.level == "problem"
    assert f"{url} can't be reached" in found.text
    cached(tmp_path)
    found = look("org/model", machine(tmp_path, url))
    assert found
    assert (found.level, "HF_HUB_OFFLINE=1" in found.fix) == ("warning", True)


def test_offline_the_cache_counts(tmp_path: Path) -> None:
    offline = machine(tmp_path, "http://192.0.2.1", HF_HUB_OFFLINE="1")
    found = look("org/model", offline)
    assert found
    assert found.level == "problem"
    assert "HF_HUB_OFFLINE is set, and org/model is not in" in found.text
    cached(tmp_path)
    found = look("org/model", offline)
    assert found
    assert found.level == "ok"


@pytest.mark.parametrize(("free", "level"), [(300.0, "ok"), (12.0, "warning"), (0.5, "problem")])
def test_space_for_a_model_that_is_not_there_yet(hub: Hub, tmp_path: Path, free: float, level: str) -> None:
    url = hub(200)
    fake = machine(tmp_path, url, space=Space(500 * GIB, int(free * GIB)))
    found = look("org/model", fake)
    assert found
    assert found.level == level
    cached(tmp_path)
    found = look("org/model", fake)
    assert found
    assert found.level == "ok"

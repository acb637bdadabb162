"""The command `saturate top`, in front of a fake service."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from serve_app.cli.main import saturate
from tests.ports import free_port
from tests.progress import STILL_S, run
from tests.serve_app.cli.fake_service import FakeService, llm, stats_of

LIMIT_S = STILL_S


@pytest.fixture
def service() -> Iterator[FakeService]:
    asked = 0

    def answer(path: str, headers: dict[str, str]) -> tuple[int, Any]:
        nonlocal asked
        asked += 1
        models = {"demo": {"replicas": [llm("a", out=100 * asked, tenants={"acme": asked})]}}
        return 200, stats_of(models, {"demo": {"state": "ready", "replicas": 1}}).body()

    service = FakeService(answer)
    yield service
    service.stop()


def ask(*arguments: str) -> Result:
    return CliRunner().invoke(saturate, ["top", *arguments])


def test_once_prints_a_picture(service: FakeService) -> None:
    result = ask(service.url, "--once")
    assert result.exit_code == 0, result.output
    assert "demo" in result.stdout
    assert "acme" in result.stdout
    assert "\x1b" not in result.stdout


def test_without_a_terminal_it_is_as_once(service: FakeService) -> None:
    result = ask(service.url)
    assert result.exit_code == 0, result.output
    assert "demo" in result.stdout


def test_columns_bound_the_width(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert max(map(len, ask(service.url).stdout.splitlines())) <= 70


def test_json(service: FakeService) -> None:
    for arguments in (["--json"], ["--once", "--json"]):
        body = json.loads(ask(service.url, *arguments).stdout)
        assert body["url"] == service.url
        model = body["models"]["demo"]
        assert (model["state"], model["ready_replicas"]) == ("ready", 1)
        assert (model["total"]["running"], model["total"]["kv_used"]) == (3, 0.25)
        assert model["total"]["output_tokens_per_s"] > 0
        assert model["replicas"][0]["batcher"]["running"] == 3
        assert list(body["tenants"]) == ["acme"]


def test_no_service() -> None:
    result = ask(f"http://127.0.0.1:{free_port()}")
    assert result.exit_code == 1
    assert "no service is there" in result.stderr
    assert "Traceback" not in result.output


def test_the_key_comes_from_the_environment(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    inner, keys = service.answer, []

    def answer(path: str, headers: dict[str, str]) -> tuple[int, Any]:
        keys.append(headers.get("authorization"))
        return inner(path, headers) if keys[-1] else (401, {"error": {"message": "An API key is required"}})

    service.answer = answer
    monkeypatch.setenv("MY_KEY", "secret")
    assert ask(service.url, "--api-key-env", "MY_KEY").exit_code == 0
    assert set(keys) == {"Bearer secret"}
    result = ask(service.url)
    assert result.exit_code == 1
    assert "--api-key-env NAME" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--api-key-env", "NO_SUCH_KEY"], "--api-key-env NO_SUCH_KEY: no such variable in the environment"),
        (["--api-key-env", "EMPTY_KEY"], "--api-key-env EMPTY_KEY: no such variable in the environment"),
        (["--interval", "0"], "0"),
        (["ftp://host"], "must begin with http:// or https://"),
    ],
)
def test_a_mistake_is_told(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMPTY_KEY", "")
    result = ask(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_help_has_no_need_of_ray() -> None:
    modules = "serve_app.cli.top, serve_app.cli.doctor"
    script = f"import sys, {modules}; print('ray' in sys.modules)"
    done = run([sys.executable, "-c", script], check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_on_a_terminal_it_lives_until_it_is_told_to_end(service: FakeService, number: int) -> None:
    near, far = pty.openpty()
    command = [sys.executable, "-m", "serve_app.cli", "top", service.url, "--interval", "0.5"]
    process = subprocess.Popen(
        command,
        stdin=far,
        stdout=far,
        stderr=far,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
    )
    os.close(far)
    said = b""
    deadline = time.monotonic() + LIMIT_S
    told = False
    try:
        while time.monotonic() < deadline:
            readable, _, _ = select.select([near], [], [], 1.0)
            if readable:
                try:
                    piece = os.read(near, 65_536)
                except OSError:
                    # The other end is closed.
                    break
                said += piece
            if not told and b"acme" in said:
                process.send_signal(number)
                told = True
        assert process.wait(timeout=LIMIT_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(near)
    text = said.decode(errors="replace")
    assert "\x1b[?1049h" in text
    assert "\x1b[?1049l" in text
    assert "Traceback" not in text

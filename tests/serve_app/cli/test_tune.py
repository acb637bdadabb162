"""The command `saturate tune`, on a tiny service on the loopback interface."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import psutil
import pytest
from click.testing import CliRunner, Result

from serve_app.cli.main import saturate
from serve_app.cli.tune import measured
from serve_app.client import ServiceError
from serve_app.system.progress import Progress
from serve_app.tuning.goals import parse_goals
from serve_app.tuning.load import Axis, BenchError
from serve_app.tuning.tuner import Tuning
from serve_app.tuning.workload import TokenLengths
from tests.progress import STILL_S
from tests.serve_app.tuning.loads import SCRIPTED
from tests.serve_app.tuning.streaming_server import StreamingServer, streaming_server
from tests.serve_app.tuning.test_load import GUIDELLM, VLLM

SHORT = ("--input", "5", "--output", "4", "--seconds", "1")
GOAL = ("--goal", "ttft_p99<5")


@contextmanager
def served(**fields: Any) -> Iterator[StreamingServer]:
    """Serve from another thread: the command has an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = streaming_server(**fields)
    try:
        yield asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(10)
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(STILL_S)
        loop.close()


def ask(*arguments: object) -> Result:
    return CliRunner().invoke(saturate, ["tune", *map(str, arguments)], standalone_mode=False)


def code(result: Result) -> int:
    """Return the exit code, of an error too."""
    if result.exception is not None:
        found: int = getattr(result.exception, "exit_code", 99)
        return found
    returned: int = result.return_value
    return returned


def message(result: Result) -> str:
    return str(getattr(result.exception, "message", result.exception))


async def scripted(
    server: StreamingServer,
    goals: str = "tpot_p99<0.085",
    over: Axis = "concurrency",
    lengths: tuple[TokenLengths, TokenLengths] = (TokenLengths(5), TokenLengths(4)),
) -> Tuning:
    """Return the result of a run with the scripted benchmark: n clients have n * 10 ms per token."""
    found = Tuning("", "", parse_goals(goals), over)
    progress = Progress(quiet=True)
    await measured(found, server.url, None, None, lengths, 2.0, 0, None, progress, command=SCRIPTED)
    return found


async def test_the_highest_concurrency_is_found() -> None:
    async with streaming_server() as server:
        found = await scripted(server)
    assert [point.value for point in found.points] == [1, 2, 4, 8, 16, 12, 10, 9]
    assert found.best is not None
    assert (found.model, found.best.value, found.holds) == ("m", 8, True)


async def test_the_highest_rate_is_found() -> None:
    async with streaming_server() as server:
        found = await scripted(server, over="rate")
    assert found.best is not None
    assert 7.5 < found.best.value <= 8.5


async def test_a_lone_client_that_misses_the_goals_ends_the_run() -> None:
    async with streaming_server() as server:
        found = await scripted(server, "ttft_p99<0.05")
    assert ([point.value for point in found.points], found.best) == ([1], None)
    assert "No load holds: at 1 client, ttft_p99 is 100 ms\n" in found.text()


async def test_other_traffic_is_told() -> None:
    async with streaming_server(others_running=3) as server:
        found = await scripted(server)
    assert found.warnings[0] == "3 other requests ran or waited at the begin"


async def test_lengths_beyond_the_context_are_told_before_any_load() -> None:
    async with streaming_server() as server:
        with pytest.raises(click.UsageError, match=r"may have 4,104 tokens .* context of m has 4,096; take"):
            await scripted(server, lengths=(TokenLengths(4_100), TokenLengths(4)))
        assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("model", "said"),
    [("dies", "ended by itself, with status 7"), ("refuses", "all requests fail: Too Many Requests")],
)
async def test_a_run_that_cannot_begin_is_told(model: str, said: str) -> None:
    async with streaming_server(model=model) as server:
        with pytest.raises(BenchError, match=said):
            await scripted(server)


async def test_refusals_from_a_load_on_are_its_edge() -> None:
    async with streaming_server(model="full") as server:
        found = await scripted(server)
    assert found.best is not None
    assert found.best.value == 4
    assert {point.misses(found.goals) for point in found.points if point.value > 4} == {("errors",)}


async def test_an_engine_that_ends_during_a_load_ends_the_run() -> None:
    async with streaming_server(model="full", renamed_after=1) as server:
        with pytest.raises(ServiceError, match="1 of 1 replicas of full ended during the load"):
            await scripted(server)


def test_reports_are_read_in_place_of_loads(tmp_path: Path) -> None:
    paths = [tmp_path / "guide.json", tmp_path / "vllm.json"]
    for path, report in zip(paths, (GUIDELLM, VLLM), strict=True):
        path.write_text(json.dumps(report))
    config, path = tmp_path / "config.yaml", tmp_path / "tuned.json"
    config.write_text("applications: [{args: {models: [{id: m}]}}]  # mine")
    result = ask(*GOAL, "--model", "m", "--from", paths[0], "--write", config, "--json", path)
    assert code(result) == 0, message(result)
    assert "m: loads of guide.json; ttft_p99<5" in result.stdout
    assert "highest load that holds: 16 clients" in result.stdout
    assert "ttft_p99_s: 5" in config.read_text()
    assert json.loads(path.read_text())["highest"]["load"] == 16
    assert code(ask("--goal", "ttft_p99<0.1", "--from", paths[1])) == 3
    result = ask("--goal", "ttft_p95<0.1", "--from", paths[1])
    assert code(result) == 2
    assert "vllm.json: it has no figure for ttft_p95" in message(result)


def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    with served(silent=False, token_s=0.5) as server:
        command = [sys.executable, "-m", "serve_app.cli", "tune", server.url, *GOAL, *SHORT]
        run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert run.stderr is not None
        for line in run.stderr:
            if "a lone client" in line:
                break
        process = psutil.Process(run.pid)
        while not (children := process.children()):
            os.sched_yield()
        run.send_signal(signal.SIGINT)
        rest = run.stderr.read()
        assert run.wait(STILL_S) == 130
        assert "Traceback" not in rest
        assert not any(child.is_running() for child in children)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--goal", "ttft<1"), "'ttft<1'"),
        ((*GOAL, "--input", "x"), "'x' is no length"),
        ((*GOAL, "--api-key-env", "NO_SUCH_VARIABLE"), "no such variable"),
        ((*GOAL, "--from", "/nowhere.json"), "--from /nowhere.json: No such file"),
        ((*GOAL, "--write", "/nowhere.yaml"), "--write /nowhere.yaml: No such file"),
        ((*GOAL, "--json", "/nowhere/a.json"), "there is no folder /nowhere"),
        (("http://other.example:8000", *GOAL, "--apply"), "--apply: other.example isn't this machine"),
    ],
)
def test_a_mistake_is_told_before_any_load(arguments: tuple[object, ...], said: str) -> None:
    result = ask(*arguments)
    assert code(result) == 2
    assert said in message(result)


def test_a_service_that_is_not_saturate_is_told() -> None:
    # Port 9 has no server.
    result = ask("http://127.0.0.1:9", *GOAL)
    assert code(result) == 1
    assert "no service is there" in message(result)
    with served() as server:
        result = ask(f"{server.url}/elsewhere", *GOAL)
        assert code(result) == 1
        assert "/v1/models: 404 Not Found" in message(result)
        result = ask(server.url, *GOAL, "--model", "n")
    assert code(result) == 1
    assert "it has no model 'n'" in message(result)

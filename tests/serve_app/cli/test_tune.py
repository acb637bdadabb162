"""The command `saturate tune`, on a tiny service on the loopback interface."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from serve_app.cli import tune_config
from serve_app.cli.tune import tune
from serve_app.ledger.rows import LedgerRow, encode
from tests.progress import STILL_S
from tests.serve_app.tuning.streaming_server import StreamingServer, streaming_server

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
    return CliRunner().invoke(tune, [*map(str, arguments)], standalone_mode=False)


def code(result: Result) -> int:
    """Return the exit code, of an error too."""
    if result.exception is not None:
        found: int = getattr(result.exception, "exit_code", 99)
        return found
    returned: int = result.return_value
    return returned


def message(result: Result) -> str:
    return str(getattr(result.exception, "message", result.exception))


def test_one_rate_is_measured_and_written(tmp_path: Path) -> None:
    with served() as server:
        result = ask(server.url, *GOAL, *SHORT, "--rate", 40, "--json", tmp_path / "tuned.json")
    assert code(result) == 0, message(result)
    assert "m: 5 tokens in, 4 out; ttft_p99<5" in result.stdout
    assert "settings for 40 requests/s, in deployments:" in result.stdout
    read = json.loads((tmp_path / "tuned.json").read_text())
    (lone, single) = read["steps"]
    assert (lone["loop"], lone["value"]) == ("closed", 1)
    assert (single["loop"], single["value"], single["holds"]) == ("open", 40, True)
    assert read["choice"]["rate"] == 40


def test_a_concurrency_that_breaks_the_goal_has_an_exit_code() -> None:
    with served(token_s=0.02) as server:
        result = ask(server.url, "--goal", "latency_p50<0.001", *SHORT, "--concurrency", 4)
    assert code(result) == 3
    assert "No load: no load holds latency_p50<0.001: a request alone in the service takes" in result.stdout


def test_a_dataset_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(
        "".join(json.dumps({"messages": [{"role": "user", "content": str(n)}]}) + "\n" for n in range(5))
    )
    with served() as server:
        result = ask(server.url, *GOAL, *SHORT, "--concurrency", 2, "--dataset", path)
        assert code(result) == 0, message(result)
        assert "5 prompts of a dataset, answers of at most 4 tokens" in result.stdout
        assert set(server.paths) == {"/v1/chat/completions", "/v1/completions"}
        assert {len(body["messages"]) for body in server.bodies[1:]} == {1}


def ledger(folder: Path, *rows: LedgerRow) -> Path:
    path = folder / "usage" / f"day={rows[0].day}" / "a.00000.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"".join(map(encode, rows)))
    return folder / "usage"


def call(number: int, **fields: Any) -> LedgerRow:
    given: dict[str, Any] = {"time": datetime.now(UTC), "model": "m", "prompt_tokens": 8, "output_tokens": 3}
    return LedgerRow(call=f"a-{number}", **(given | fields))


def test_the_lengths_are_those_of_the_ledger(tmp_path: Path) -> None:
    place = ledger(tmp_path, call(1), call(2, prompt_tokens=12, cached_tokens=5, output_tokens=6))
    with served() as server:
        result = ask(server.url, *GOAL, "--seconds", 1, "--concurrency", 2, "--ledger", place)
        assert code(result) == 0, message(result)
        sent = {(len(body["prompt"]), body["max_tokens"]) for body in server.bodies[1:]}
    assert sent == {(8, 3), (12, 6)}
    told = "lengths of 2 calls in the ledger, on average 10 tokens in (25% from the prefix cache), 4 out"
    assert told in result.stdout


def test_a_ledger_without_calls_of_the_model_is_told(tmp_path: Path) -> None:
    place = ledger(tmp_path, call(1, model="other"))
    with served() as server:
        result = ask(server.url, *GOAL, "--ledger", place)
    assert code(result) == 2
    assert "no answered call of m in this time (models with calls: other); use an earlier --since" in message(
        result
    )
    # Mistakes that need no service are reported before the service is asked.
    for arguments in (
        ["--ledger", place, "--model", "m"],
        ["--ledger", ledger(tmp_path / "old", call(1, time=datetime(2020, 1, 1, tzinfo=UTC)))],
    ):
        result = ask("http://127.0.0.1:9", *GOAL, *arguments)
        assert code(result) == 2
        assert "--ledger: no answered call of " in message(result)


def test_other_traffic_is_told() -> None:
    with served(others_running=3) as server:
        result = ask(server.url, *GOAL, *SHORT, "--concurrency", 1)
    assert code(result) == 0, message(result)
    assert "warning: 3 other requests run or wait" in result.stderr


def test_batch_work_beside_live_traffic(tmp_path: Path) -> None:
    with served(max_running=4) as server:
        result = ask(server.url, *GOAL, *SHORT, "--rate", 20, "--beside-batch", "--json", tmp_path / "b.json")
        assert {"flex", "default"} <= {body.get("service_tier") for body in server.bodies}
    assert code(result) == 0, message(result)
    assert "beside live traffic of 20 requests/s batch work has" in result.stdout
    beside = json.loads((tmp_path / "b.json").read_text())["beside_batch"]
    assert beside["live"]["holds"]
    assert beside["batch_tokens_per_s"] > 100


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--goal", "ttft<1"), "'ttft<1'"),
        ((*GOAL, "--input", "x"), "'x' is no length"),
        ((*GOAL, "--beside-batch"), "give the rate of the live traffic with --rate"),
        ((*GOAL, "--loop", "open", "--rate", 3), "leave it out"),
        ((*GOAL, "--apply", "--loop", "closed"), "settings need the highest rate or --rate"),
        ((*GOAL, "--api-key-env", "NO_SUCH_VARIABLE"), "no such variable"),
        ((*GOAL, "--dataset", "/nowhere.jsonl"), "/nowhere.jsonl"),
        ((*GOAL, "--ledger", "/nowhere"), "--ledger: /nowhere: there is no such folder"),
        ((*GOAL, "--ledger", "/nowhere", "--input", "5"), "the ledger has the lengths; leave out --input"),
        ((*GOAL, "--since", "7d"), "--since: needs --ledger"),
        ((*GOAL, "--ledger", "/nowhere", "--since", "soon"), "'soon' is not a time; write 90m"),
        ((*GOAL, "--write", "/nowhere.yaml"), "--write /nowhere.yaml: No such file"),
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


class FakeDashboard:
    """Stands for Ray's dashboard; a deployed config takes effect at once."""

    def __init__(self, config: Any, server: StreamingServer, refusal: str = "") -> None:
        self.running = config
        self.deployed: list[Any] = []
        self._server = server
        self._refusal = refusal

    def applications(self) -> Any:
        return {}

    def config(self) -> Any:
        return self.running

    def deploy(self, config: Any) -> str:
        self.deployed.append(config)
        if not self._refusal:
            (app,) = config["applications"]
            batcher = app["deployments"][-1]["user_config"]["batcher"]
            self._server.max_running = batcher["max_running"]
        return self._refusal


CONFIG = {
    "applications": [{"name": "llm", "args": {"models": [{"id": "m", "source": "org/m"}]}, "deployments": []}]
}


def use(monkeypatch: pytest.MonkeyPatch, dashboard: FakeDashboard | None) -> None:
    """Have the command find a dashboard, or one that knows no config."""
    none: Callable[[int], Any] = lambda port: type("None", (), {"config": lambda self: {}})()  # noqa: E731
    monkeypatch.setattr(tune_config, "Dashboard", none if dashboard is None else lambda port: dashboard)


def test_settings_are_applied_measured_and_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("# a comment\n" + yaml.safe_dump(CONFIG))
    with served() as server:
        use(monkeypatch, dashboard := FakeDashboard(CONFIG, server))
        result = ask(server.url, *GOAL, *SHORT, "--rate", 40, "--apply", "--write", path)
    assert code(result) == 0, message(result)
    (config,) = dashboard.deployed
    (engine,) = config["applications"][0]["deployments"]
    assert engine["user_config"]["batcher"]["max_running"] == server.max_running
    assert "with these settings, at 40 requests/s: the goals hold" in result.stdout
    assert "a comment" in (tmp_path / "config.yaml.before").read_text()
    written = yaml.safe_load(path.read_text())["applications"][0]
    batcher = written["deployments"][0]["user_config"]["batcher"]
    assert (batcher["max_running"], batcher["goals"]) == (server.max_running, {"ttft_p99_s": 5.0})


def test_a_refusal_of_the_settings_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as server:
        use(monkeypatch, FakeDashboard(CONFIG, server, "400: no"))
        result = ask(server.url, *GOAL, *SHORT, "--rate", 40, "--apply")
    assert code(result) == 1
    assert "--apply: Ray Serve refuses the settings: 400: no" in message(result)


def test_what_was_measured_is_kept_when_the_settings_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "found.json"
    with served() as server:
        use(monkeypatch, FakeDashboard(CONFIG, server, "400: no"))
        result = ask(server.url, *GOAL, *SHORT, "--rate", 40, "--apply", "--json", path)
    assert code(result) == 1
    assert "settings for 40 requests/s" in result.stdout
    found = json.loads(path.read_text())
    assert [step["value"] for step in found["steps"]] == [1, 40]
    assert found["applied"] == []


def test_a_service_without_a_dashboard_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, None)
    result = ask("http://127.0.0.1:8000", *GOAL, "--apply")
    assert code(result) == 2
    assert "the dashboard of the service's Ray isn't on this machine" in message(result)

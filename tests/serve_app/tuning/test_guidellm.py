"""GuideLLM as the load generator: a report of version 0.8.1, a command that plays it, and the real one."""

import copy
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.client import ServiceError
from serve_app.relay.usage import Tokens
from serve_app.tuning.goals import parse_goals
from serve_app.tuning.guidellm import GuideLLM, check_guidellm, read_report
from serve_app.tuning.load_step import Load
from serve_app.tuning.requests import Requests
from serve_app.tuning.service import Service
from serve_app.tuning.workload import Lengths
from tests.serve_app.tuning.streaming_server import StreamingServer, streaming_server

REPORT = json.loads((Path(__file__).parent / "guidellm_report.json").read_text())
"""Four requests of two runs: two answered, one cut off at the end, one refused."""

OPEN = Load("open", 20.0)

FAKE = """#!{python}
import json, os, sys
config = json.loads(open(sys.argv[sys.argv.index("--config") + 1]).read())
json.dump([sys.argv[1:], config, [json.loads(line) for line in open(config["spec"]["data"][0]["path"])]],
          open(os.environ["FAKE_SEEN"], "w"))
if os.environ.get("FAKE_FAILS"):
    sys.exit("Traceback\\nRuntimeError: Backend validation request failed.")
seconds = config["spec"]["constraints"][0]["seconds"]
report = json.loads(open(os.environ["FAKE_REPORT"]).read())
(benchmark,) = report["benchmarks"]
first = benchmark["requests"]["successful"][0]
start = first["info"]["scheduler_start_time"]
made = []
for number in range(int(seconds * 10)):
    request = json.loads(json.dumps(first))
    times = request["info"]["timings"]
    shift = start + number / 10 - times["targeted_start"]
    for name in ("targeted_start", "request_start", "first_token_iteration", "request_end", "resolve_end"):
        times[name] += shift
    made.append(request)
benchmark["requests"] = {{"successful": made, "incomplete": [], "errored": []}}
json.dump(report, open(config["spec"]["outputs"][0]["path"], "w"))
"""


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """A command `guidellm` that sends nothing: ten requests per second have the times of a real one.

    Returns what it was given: its words, its configuration and its rows; None: it has not run.
    """
    report = tmp_path / "report.json"
    report.write_text(json.dumps(REPORT))
    command = tmp_path / "bin" / "guidellm"
    command.parent.mkdir()
    command.write_text(FAKE.format(python=sys.executable))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_REPORT", str(report))
    monkeypatch.setenv("FAKE_SEEN", str(tmp_path / "seen.json"))
    path = tmp_path / "seen.json"
    return lambda: json.loads(path.read_text()) if path.exists() else None


def generator(service: Service, **fields: Any) -> GuideLLM:
    requests = Requests("m", Lengths(5), Lengths(4), **fields)
    return GuideLLM(service, requests, parse_goals("ttft_p99<5,tpot_p99<5"))


async def step(server: StreamingServer, load: Load = OPEN, **fields: Any) -> Any:
    key = fields.pop("api_key", None)
    async with Service(server.url, api_key=key) as service, generator(service, **fields) as made:
        return await made.step(load, seconds=2.0, warm_up=0.5, drain=0.5, seed=3)


def test_a_report_has_the_times_of_requests() -> None:
    answers, start, end, late_s = read_report(REPORT, OPEN)
    done, other, running, _ = answers
    assert [answer.failed for answer in answers] == [False, False, False, True]
    assert (done.tokens, other.tokens) == (4, 5)
    assert done.first_at is not None
    assert done.ended_at is not None
    # A request counts from when it was due: 19 ms before its first token, 50 ms before its end.
    assert done.first_at - done.sent_at == pytest.approx(0.0190, abs=1e-4)
    assert done.ended_at - done.sent_at == pytest.approx(0.0503, abs=1e-4)
    assert running.ended_at is None
    assert running.tokens >= 4
    assert start < done.sent_at < end
    assert 0.005 < late_s < 0.01


def test_clients_send_when_they_do() -> None:
    answers, _, _, late_s = read_report(REPORT, Load("closed", 4))
    assert answers[0].first_at is not None
    assert answers[0].first_at - answers[0].sent_at == pytest.approx(0.0133, abs=1e-4)
    assert late_s == 0


def test_a_report_of_another_version_is_told() -> None:
    other = copy.deepcopy(REPORT)
    del other["benchmarks"][0]["requests"]["successful"][0]["info"]["timings"]
    with pytest.raises(ServiceError, match=r"GuideLLM 0\.8\.1: its report has another form than that"):
        read_report(other, OPEN)
    with pytest.raises(ServiceError, match=r"GuideLLM \?: its report"):
        read_report({}, OPEN)


async def test_a_step_is_a_run_of_the_command(seen: Callable[[], Any]) -> None:
    async with streaming_server() as server:
        found = await step(server, api_key="secret", tier="flex")
    words, config, rows = seen()
    assert words[0] == "run"
    assert "secret" not in str(words)
    spec = config["spec"]
    assert spec["profile"]["kind"] == "poisson"
    assert spec["profile"]["rate"] == [20.0]
    assert spec["constraints"] == [{"kind": "max_duration", "seconds": 3.0}]
    assert spec["backend"]["api_key"] == "secret"
    assert spec["backend"]["extras"]["body"]["service_tier"] == "flex"
    # More than 60 requests are prepared, so that they suffice.
    assert len(rows) > 90
    assert {len(row["prompt"].split()) for row in rows} == {5}
    assert {row["output_tokens_count"] for row in rows} == {4}
    # Ten requests per second came, in the two seconds behind the warm-up.
    assert found.sent == pytest.approx(20, abs=1)
    assert found.holds
    assert found.figure("ttft", 50) == pytest.approx(0.0190, abs=1e-4)


async def test_clients_have_requests_enough_for_the_time_of_a_lone_one(seen: Callable[[], Any]) -> None:
    async with (
        streaming_server(token_s=0.05) as server,
        Service(server.url) as service,
        generator(service) as made,
    ):
        lone = await made.step(Load("closed", 1), seconds=0.3, warm_up=0.0, drain=1.0, seed=1)
        assert seen() is None
        await made.step(Load("closed", 4), seconds=2.0, warm_up=0.5, drain=0.5, seed=1)
    _, config, rows = seen()
    assert config["spec"]["profile"] == {"kind": "concurrent", "streams": [4]}
    assert len(rows) > 4 * 3.0 / lone.samples["latency"][0]


async def test_prompts_keep_their_common_beginning(seen: Callable[[], Any]) -> None:
    async with streaming_server() as server:
        await step(server, calls=[Tokens(20, 12, 4)])
    _, _, rows = seen()
    prompts = {tuple(row["prompt"].split()) for row in rows}
    assert len(prompts) > 50
    assert len({prompt[:12] for prompt in prompts}) == 1


async def test_texts_of_a_dataset_are_sent(seen: Callable[[], Any]) -> None:
    async with streaming_server() as server:
        await step(server, prompts=["one", "two"])
    _, _, rows = seen()
    assert {row["prompt"] for row in rows} == {"one", "two"}


async def test_a_run_that_fails_is_told(seen: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAILS", "1")
    async with streaming_server() as server:
        with pytest.raises(ServiceError, match=r"failed \(exit code 1\): RuntimeError: Backend validation"):
            await step(server)


async def test_a_run_that_ends_early_is_told(seen: Callable[[], Any]) -> None:
    command = Path(os.environ["PATH"].split(":")[0]) / "guidellm"
    command.write_text(command.read_text().replace("int(seconds * 10)", "3"))
    async with streaming_server() as server:
        with pytest.raises(ServiceError, match=r"GuideLLM ended after 0 s of 2: it had no more prompts"):
            await step(server)


def test_a_missing_command_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ServiceError, match=r"there is no command guidellm; install GuideLLM 0\.8, in an env"):
        check_guidellm()


@pytest.mark.long
@pytest.mark.skipif(shutil.which("guidellm") is None, reason="GuideLLM is not installed")
async def test_the_real_command_measures_what_the_own_generator_does() -> None:
    async with streaming_server(token_s=0.02) as server:
        found = await step(server)
        clients = await step(server, Load("closed", 3), calls=[Tokens(9, 4, 4)])
    assert (found.failed, found.cut) == (0, False)
    assert found.figure("tpot", 50) == pytest.approx(0.02, rel=0.5)
    assert found.sent == pytest.approx(40, abs=25)
    assert clients.peak == 3
    assert {len(body["prompt"].split()) for body in server.bodies} == {5, 9}

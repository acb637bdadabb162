"""Loads from vLLM's benchmark in a child process, and from reports."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from serve_app.tuning.goals import parse_goals
from serve_app.tuning.load import BENCH, Axis, Bench, BenchError, ReportError, read_reports
from serve_app.tuning.workload import TokenLengths
from tests.serve_app.tuning.loads import SCRIPTED
from tests.serve_app.tuning.streaming_server import streaming_server

GOALS = parse_goals("ttft_p99<0.5,tpot_p99<0.05")


def bench(model: str = "m", over: Axis = "concurrency", url: str = "http://there", **changes: Any) -> Bench:
    lengths = TokenLengths(5), TokenLengths(4)
    return Bench(url, model, "secret", over, *lengths, GOALS, 2.0, **({"command": SCRIPTED} | changes))


async def test_the_child_measures_loads_with_the_benchmark_of_vllm() -> None:
    before = set(psutil.Process().children())
    async with streaming_server() as server, bench(url=server.url, command=BENCH) as found:
        alone = await found.alone()
        (child,) = set(psutil.Process().children()) - before
        three = await found.measure(3)
        server.broken = True
        broken = await found.measure(2)
    assert (alone.value, alone.completed, alone.failed) == (1, 10, 0)
    assert (three.value, three.failed, three.error) == (3, 0, "")
    assert three.completed >= 10
    # A token takes a millisecond, and the loopback interface a little more.
    assert 0.001 < three.seconds["ttft_p50"] < three.seconds["ttft_p99"] < 5
    assert 0.001 < three.seconds["tpot_p50"] < 5
    assert (broken.completed, broken.error) == (0, "an answer broke off")
    assert not child.is_running()
    bodies = [body for body in server.bodies if len(body["prompt"]) == 5]
    assert {
        (body["model"], body["max_tokens"], body["ignore_eos"], body["temperature"]) for body in bodies
    } == {("m", 4, True, 0)}
    assert len({tuple(body["prompt"]) for body in bodies}) == len(bodies) == found.sent


async def test_the_first_and_the_last_requests_of_a_load_do_not_count() -> None:
    async with bench() as found:
        await found.alone()
        eight = await found.measure(8)
    # 8 clients at 2 s per load: a lone client has 1 request in 0.13 s.
    assert eight.completed == 124
    assert found.sent == 12 + 8 + 124 + 8
    assert eight.in_flight == pytest.approx(8, rel=0.1)


async def test_a_rate_begins_with_a_lone_client() -> None:
    async with bench(over="rate") as found:
        alone = await found.alone()
        ten = await found.measure(10.0)
    assert alone.value == alone.rate
    assert ten.value == 10.0
    assert ten.completed == 20


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("fails", "vLLM's benchmark failed: ValueError: no"),
        ("dies", "vLLM's benchmark ended by itself, with status 7; is vLLM installed?"),
    ],
)
async def test_a_failure_of_the_benchmark_is_told(model: str, said: str) -> None:
    async with bench(model) as found:
        with pytest.raises(BenchError) as told:
            await found.measure(2)
    assert str(told.value) == said


async def test_a_failure_inside_vllm_is_its_last_line() -> None:
    script = "import sys; from serve_app.engine.vllm import bench; bench.main()"
    async with bench(command=[BENCH[0], "-c", script], url="ftp://there") as found:
        # The child refuses a task of another form before it imports vLLM.
        assert found._process.stdin is not None
        found._process.stdin.write(b"{}\n")
        with pytest.raises(BenchError, match=r"^vLLM's benchmark failed: TypeError: .* required positional"):
            await found.measure(1)


async def test_requests_that_are_refused_have_a_reason() -> None:
    async with bench("refuses") as found:
        alone = await found.alone()
    assert (alone.completed, alone.failed, alone.error) == (0, 10, "Too Many Requests")
    assert alone.misses(GOALS) == ("errors",)


async def test_the_child_ends_with_its_parent() -> None:
    script = (
        "import asyncio, os, sys; from tests.serve_app.tuning.test_load import bench\n"
        "async def main():\n"
        "    async with bench(command=[sys.executable, '-m', 'serve_app.engine.vllm.bench']) as found:\n"
        "        print(found._process.pid, flush=True); await asyncio.Event().wait()\n"
        "asyncio.run(main())"
    )
    parent = await asyncio.create_subprocess_exec(BENCH[0], "-c", script, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    child = psutil.Process(int(await parent.stdout.readline()))
    parent.kill()
    await parent.wait()
    await asyncio.to_thread(child.wait, 60)


def test_the_key_goes_by_the_environment_and_no_other_one() -> None:
    found = bench()
    assert found._environment["OPENAI_API_KEY"] == "secret"
    os.environ["OPENAI_API_KEY"] = "of another service"
    try:
        keyless = Bench("http://there", "m", None, "rate", TokenLengths(5), TokenLengths(4), GOALS, 2.0)
    finally:
        del os.environ["OPENAI_API_KEY"]
    assert "OPENAI_API_KEY" not in keyless._environment


# Reports

VLLM = {
    "model_id": "org/m",
    "max_concurrency": 8,
    "request_rate": "inf",
    "completed": 300,
    "failed": 1,
    "request_throughput": 4.0,
    "output_throughput": 512.0,
    "total_output_tokens": 38_400,
    "median_ttft_ms": 100.0,
    "p99_ttft_ms": 300.0,
    "median_tpot_ms": 15.0,
    "p99_tpot_ms": 20.0,
}


def summary(mean: float, **percentiles: float) -> Any:
    return {"successful": {"mean": mean, "median": mean, "percentiles": percentiles}}


GUIDELLM = {
    "benchmarks": [
        {
            "metrics": {
                "request_totals": {"successful": 300, "errored": 2, "incomplete": 1, "total": 303},
                "requests_per_second": summary(rate),
                "request_concurrency": summary(2 * rate),
                "request_latency": summary(2.0, p95=3.0, p99=4.0),
                "output_token_count": summary(100.0),
                "time_to_first_token_ms": summary(100.0, p95=200.0, p99=100.0 * rate),
                "inter_token_latency_ms": summary(15.0, p95=18.0, p99=20.0),
            }
        }
        for rate in (8.0, 4.0)
    ]
}


def read(folder: Path, *reports: Any, over: Axis = "concurrency", goals: str = "ttft_p99<0.5") -> Any:
    paths = [folder / f"{number}.json" for number in range(len(reports))]
    for path, report in zip(paths, reports, strict=True):
        path.write_text(report if isinstance(report, str) else json.dumps(report))
    return read_reports(paths, over, parse_goals(goals))


def test_results_of_vllm_are_read(tmp_path: Path) -> None:
    model, (low, high) = read(tmp_path, VLLM | {"max_concurrency": 16, "p99_ttft_ms": 900.0}, VLLM)
    assert (model, low.value, high.value) == ("org/m", 8, 16)
    assert (low.completed, low.failed, low.rate, low.tokens_per_s, low.in_flight) == (300, 1, 4.0, 512.0, 8)
    assert low.seconds == pytest.approx({"ttft_p50": 0.1, "tpot_p50": 0.015, "ttft_p99": 0.3})
    _, (found,) = read(tmp_path, VLLM | {"request_rate": 4.0}, over="rate")
    # An answer has 128 tokens, and takes 2 s.
    assert (found.value, found.in_flight) == (4.0, pytest.approx(8.02))


def test_figures_are_percentiles_of_the_answers(tmp_path: Path) -> None:
    result = {
        "errors": ["", "", "503", ""],
        "ttfts": [0.1, 0.2, 0.0, 0.3],
        "latencies": [1.1, 2.2, 0.0, 0.3],
        "output_lens": [11, 21, 0, 1],
        "start_times": [10.0, 10.0, 10.5, 11.0],
    }
    _, (found,) = read(tmp_path, VLLM | result, goals="latency_p50<1")
    assert (found.completed, found.failed, found.error) == (3, 1, "503")
    assert found.rate == pytest.approx(3 / 2.2)
    assert found.tokens_per_s == pytest.approx(33 / 2.2)
    assert found.in_flight == pytest.approx(3.6 / 2.2)
    assert found.seconds == pytest.approx(
        {"ttft_p50": 0.2, "ttft_p99": 0.3, "tpot_p50": 0.1, "tpot_p99": 0.1, "latency_p50": 1.1}
    )


def test_a_report_of_guidellm_is_read(tmp_path: Path) -> None:
    model, (low, high) = read(tmp_path, GUIDELLM, goals="ttft_p99<0.5,tpot_p99<0.1,latency_p95<5")
    assert (model, low.value, high.value) == ("", 8, 16)
    assert (low.completed, low.failed, low.rate, low.tokens_per_s) == (300, 2, 4.0, 400.0)
    assert low.seconds["ttft_p99"] == pytest.approx(0.4)
    assert low.seconds["latency_p95"] == 3.0
    assert high.seconds["ttft_p99"] == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("report", "goals", "said"),
    [
        ("no JSON", "ttft_p99<1", "this is not JSON; take the file of --save-result"),
        ([], "ttft_p99<1", "this is no report of GuideLLM or of `vllm bench serve --save-result`"),
        ({"benchmarks": []}, "ttft_p99<1", "it has no load"),
        ({"benchmarks": [{"metrics": {}}]}, "ttft_p99<1", "this is no report of GuideLLM"),
        (VLLM | {"max_concurrency": None}, "ttft_p99<1", "it was made without --max-concurrency"),
        (VLLM, "ttft_p90<1", "it has no figure for ttft_p90; add --metric-percentiles 90"),
        (GUIDELLM, "ttft_p42<1", "it has no ttft_p42; its percentiles are p50, p95, p99"),
    ],
)
def test_a_report_that_cannot_be_used_is_told(report: Any, goals: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ReportError) as told:
        read(tmp_path, report, goals=goals)
    assert str(told.value).startswith(f"{tmp_path / '0.json'}: {said}")


def test_a_report_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"none\.json: No such file"):
        read_reports([tmp_path / "none.json"], "rate", GOALS)

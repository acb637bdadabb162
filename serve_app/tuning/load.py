"""Loads and the times of their requests: from vLLM's benchmark in a child process, or from reports."""

import asyncio
import json
import math
import os
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, Self

from serve_app.api.protocol import JSON
from serve_app.engine.vllm.bench import Task
from serve_app.tuning.goals import Goal
from serve_app.tuning.workload import TokenLengths

Axis = Literal["concurrency", "rate"]
"""The load is raised by clients that wait for their answers, or by requests per second at random times."""

FAILED_SHARE = 0.01
"""Largest share of failed requests of a load that holds."""

SURE_MISSES = 3.0
"""Requests that may miss a goal: with fewer, the load is too small for the percentile."""

LEAST_REQUESTS, MOST_REQUESTS = 10, 20_000
"""Least and most requests of a load that count."""

LIMIT_S, LIMIT_FACTOR = 300.0, 20.0
"""Longest time of a load: `LIMIT_S`, plus its planned length times `LIMIT_FACTOR`."""

LINE_BYTES = 1 << 26
"""Longest result of the child process: 3 kB for each request."""

BENCH = (sys.executable, "-m", "serve_app.engine.vllm.bench")

VLLM_NAMES = {"ttft": "ttft", "tpot": "tpot", "latency": "e2el"}
GUIDELLM_NAMES = {
    "ttft": ("time_to_first_token_ms", 1e-3),
    "tpot": ("inter_token_latency_ms", 1e-3),
    "latency": ("request_latency", 1.0),
}
"""Names of the metrics in reports; GuideLLM has milliseconds and seconds."""


class BenchError(Exception):
    """vLLM's benchmark failed; the message has its last line."""


class ReportError(ValueError):
    """A report can't be used; the message says what to do."""


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """The figures of the requests under one load.

    Attributes:
        value: Clients, or requests per second.
        completed: Requests that were answered.
        failed: Requests that were refused, failed or broke off.
        rate: Answered requests per second.
        tokens_per_s: Tokens of answers per second.
        in_flight: Mean number of requests in flight.
        seconds: Percentiles of the times of answered requests, by the name of a goal such as "ttft_p99".
        error: Error of the first request that failed; empty: no request failed.
    """

    value: float
    completed: int
    failed: int
    rate: float
    tokens_per_s: float
    in_flight: float
    seconds: Mapping[str, float] = field(default_factory=dict)
    error: str = ""

    def misses(self, goals: Sequence[Goal]) -> tuple[str, ...]:
        """Return the names of the goals that don't hold, and "errors" where too many requests failed."""
        late = [goal.name for goal in goals if not self.seconds.get(goal.name, 0.0) < goal.bound]
        total = self.completed + self.failed
        return (*late, *(["errors"] if self.failed > FAILED_SHARE * total or not self.completed else []))

    def is_small(self, goals: Sequence[Goal]) -> bool:
        """Return whether there are too few requests for the percentiles of the goals."""
        return any(self.completed * (100 - goal.percentile) / 100 < SURE_MISSES for goal in goals)


def shown(goals: Sequence[Goal]) -> list[Goal]:
    """Return the figures of a table, as goals: median, 99th percentile, and the figures of the goals."""
    points = dict.fromkeys((metric, point) for metric in ("ttft", "tpot") for point in (50, 99))
    points |= dict.fromkeys(goal.key for goal in goals)
    return [Goal(metric, point, math.inf) for metric, point in points]  # type: ignore[arg-type]


# Reports


def point_of(value: float, result: JSON, goals: Sequence[Goal], skip: int = 0) -> LoadPoint:
    """Return the point of a result of vLLM's benchmark with the times of each request.

    Args:
        value: The load.
        result: The result, in the form of `vllm bench serve --save-detailed`.
        goals: The goals.
        skip: Requests at the start and at the end that don't count: the load isn't full there.
    """
    names = ("errors", "ttfts", "latencies", "output_lens", "start_times")
    sent = sorted(zip(*(result[name] for name in names), strict=True), key=lambda row: row[-1])
    rows = sent[skip : len(sent) - skip]
    good = [row for row in rows if not row[0]]
    times: dict[str, list[float]] = {
        "ttft": sorted(row[1] for row in good),
        # An answer of one token has no time per further token.
        "tpot": sorted((row[2] - row[1]) / (row[3] - 1) for row in good if row[3] > 1),
        "latency": sorted(row[2] for row in good),
    }
    ends = [row[4] + row[2] for row in rows] if not skip else [sent[-skip][4]]
    length = max([end - rows[0][4] for end in ends if rows], default=0.0) or 1e-9
    return LoadPoint(
        value=value,
        completed=len(good),
        failed=len(rows) - len(good),
        rate=len(good) / length,
        tokens_per_s=sum(row[3] for row in good) / length,
        in_flight=sum(times["latency"]) / length,
        seconds={goal.name: _percentile(times[goal.metric], goal.percentile) for goal in shown(goals)},
        error=next((str(row[0]).strip().splitlines()[-1] for row in rows if row[0]), ""),
    )


def _percentile(values: Sequence[float], percentile: int) -> float:
    """Return a percentile of ascending values, by nearest rank; 0 if there is no value."""
    return values[max(0, math.ceil(percentile / 100 * len(values)) - 1)] if values else 0.0


def read_reports(paths: Sequence[Path], over: Axis, goals: Sequence[Goal]) -> tuple[str, list[LoadPoint]]:
    """Return the model and the points, by load, from reports of GuideLLM or of `vllm bench serve`.

    Raises:
        ReportError: A file can't be read, is no such report, or lacks the figure of a goal.
    """
    points: list[LoadPoint] = []
    model = ""
    for path in paths:
        try:
            report = json.loads(path.read_text())
        except OSError as error:
            raise ReportError(f"{path}: {error.strerror}") from None
        except ValueError:
            raise ReportError(f"{path}: this is not JSON; take the file of --save-result") from None
        try:
            if "benchmarks" in report:
                points += [_guidellm(each["metrics"], over, goals) for each in report["benchmarks"]]
            else:
                points.append(_vllm(report, over, goals))
                model = report.get("model_id", model)
        except ReportError as error:
            raise ReportError(f"{path}: {error}") from None
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ReportError(
                f"{path}: this is no report of GuideLLM or of `vllm bench serve --save-result` ({error!r})"
            ) from None
    if not points:
        raise ReportError(f"{paths[0]}: it has no load")
    return model, sorted(points, key=lambda point: point.value)


def _vllm(report: JSON, over: Axis, goals: Sequence[Goal]) -> LoadPoint:
    option = "max_concurrency" if over == "concurrency" else "request_rate"
    value = report[option]
    if not isinstance(value, int | float):
        raise ReportError(
            f"it was made without --{option.replace('_', '-')}; make another one, or take --over"
        )
    if "latencies" in report and "ttfts" in report:
        return point_of(value, report, goals)
    metrics = {name: report[f"median_{name}_ms"] for name in ("ttft", "tpot")}
    seconds = {f"{name}_p50": each / 1e3 for name, each in metrics.items()}
    for goal in goals:
        found = report.get(f"p{goal.percentile}_{VLLM_NAMES[goal.metric]}_ms")
        if found is None:
            raise ReportError(
                f"it has no figure for {goal.name}; add --metric-percentiles {goal.percentile} "
                "--percentile-metrics ttft,tpot,e2el to `vllm bench serve`"
            )
        seconds[goal.name] = found / 1e3
    tokens = report["total_output_tokens"] / max(report["completed"], 1)
    life = seconds["ttft_p50"] + seconds["tpot_p50"] * max(tokens - 1, 0)
    rate = report["request_throughput"]
    in_flight = value if over == "concurrency" else rate * life
    done = report["completed"], report.get("failed", 0)
    return LoadPoint(value, *done, rate, report["output_throughput"], in_flight, seconds)


def _guidellm(metrics: JSON, over: Axis, goals: Sequence[Goal]) -> LoadPoint:
    def mean(name: str) -> float:
        return float(metrics[name]["successful"]["mean"])

    seconds = {}
    for goal in shown(goals):
        name, unit = GUIDELLM_NAMES[goal.metric]
        summary = metrics[name]["successful"]
        found = {"p50": summary["median"]} | summary["percentiles"]
        if (point := f"p{goal.percentile:02}") not in found:
            raise ReportError(f"it has no {goal.name}; its percentiles are {', '.join(found)}")
        seconds[goal.name] = found[point] * unit
    totals = metrics["request_totals"]
    rate, in_flight = mean("requests_per_second"), mean("request_concurrency")
    value = round(in_flight) if over == "concurrency" else rate
    tokens = rate * mean("output_token_count")
    return LoadPoint(value, totals["successful"], totals["errored"], rate, tokens, in_flight, seconds)


# The benchmark


class Bench:
    """vLLM's benchmark in a child process, against one model; an asynchronous context manager.

    The child ends with this object, and with this process.

    Attributes:
        sent: Requests so far.

    Args:
        url: Base URL of the service.
        model: The model.
        key: The API key; None: no key.
        over: The load that is raised.
        input: Tokens of a prompt.
        output: Tokens of an answer.
        goals: The goals.
        seconds: Length of a load.
        seed: Seed of the lengths and prompts.
        command: Starts the child.
    """

    def __init__(
        self,
        url: str,
        model: str,
        key: str | None,
        over: Axis,
        input: TokenLengths,
        output: TokenLengths,
        goals: Sequence[Goal],
        seconds: float,
        *,
        seed: int = 0,
        command: Sequence[str] = BENCH,
    ) -> None:
        self._url = url
        self._model = model
        self._over = over
        self._lengths = input, output
        self._goals = goals
        self._seconds = seconds
        self._seeds = count(seed * 1_000)
        self._command = command
        # vLLM's client takes the key, and the way to the service, from the environment.
        self._environment = {name: each for name, each in os.environ.items() if name != "OPENAI_API_KEY"}
        self._environment["NO_PROXY"] = ",".join(
            filter(None, (os.environ.get("NO_PROXY"), "localhost,127.0.0.1,::1"))
        )
        if key is not None:
            self._environment["OPENAI_API_KEY"] = key
        self._last: LoadPoint | None = None
        self.sent = 0

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=self._environment,
            limit=LINE_BYTES,
            # Ctrl-C in a terminal is for this process, which ends the child.
            start_new_session=True,
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def alone(self) -> LoadPoint:
        """Return the point of a lone client. If the rate is raised, the load is the rate of this client."""
        point = await self._measure(1.0, closed=True)
        return point if self._over == "concurrency" else replace(point, value=point.rate)

    async def measure(self, value: float) -> LoadPoint:
        """Return the point of a load.

        Raises:
            BenchError: The benchmark failed, or took too long.
        """
        return await self._measure(value, closed=self._over == "concurrency")

    async def _measure(self, value: float, *, closed: bool) -> LoadPoint:
        last = self._last
        life = last.in_flight / last.rate if last else 0.0
        # Requests per second: as many for each client as under the last load.
        expected = (value * last.rate / last.value if last else 0.0) if closed else value
        counted = min(max(LEAST_REQUESTS, math.ceil(expected * self._seconds)), MOST_REQUESTS)
        # The service fills up during the first requests, and empties during the last requests.
        skip = int(value) if closed else min(math.ceil(value * life), counted)
        seed = next(self._seeds)
        numbers = random.Random(seed)
        input, output = self._lengths
        requests = [(input.draw(numbers), output.draw(numbers)) for _ in range(counted + 2 * skip)]
        task = Task(
            self._url,
            self._model,
            requests,
            clients=int(value) if closed else None,
            rate=None if closed else value,
            ramp_s=life if closed else 0.0,
            seed=seed,
        )
        self.sent += len(requests)
        found = point_of(value, await self._ask(task), self._goals, skip)
        if found.rate:
            self._last = found
        return found

    async def _ask(self, task: Task) -> JSON:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        limit = LIMIT_S + LIMIT_FACTOR * self._seconds
        self._process.stdin.write(f"{json.dumps(task._asdict())}\n".encode())
        try:
            async with asyncio.timeout(limit):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise BenchError(f"a load of {self._seconds:g} s took longer than {limit:.0f} s") from None
        if not line:
            code = await self._process.wait()
            raise BenchError(f"vLLM's benchmark ended by itself, with status {code}; is vLLM installed?")
        answer: dict[str, Any] = json.loads(line)
        if "failure" in answer:
            raise BenchError(f"vLLM's benchmark failed: {answer['failure']}")
        return answer

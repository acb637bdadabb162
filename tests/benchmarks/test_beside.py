"""Parts of the benchmark of live traffic beside rows that can go wrong without a service."""

import asyncio
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from serve_app.settings.models import LLMSettings
from serve_app.simulation.profiles import PROFILES
from tests.benchmarks.beside import plot
from tests.benchmarks.beside.__main__ import main
from tests.benchmarks.beside.runs import (
    ARRIVAL,
    BATCH,
    CASES,
    DEVICE_OF,
    OURS,
    PRIORITIES,
    Run,
    System,
    by_server,
    expected_s,
    runs,
)
from tests.benchmarks.beside.tables import figures, show
from tests.benchmarks.beside.trace import STATIONS, TOTAL, header, rows, stations, times
from tests.benchmarks.beside.trace import show as show_stations
from tests.benchmarks.beside.traffic import TOKENS, TTFT_P99, Rows, Seen, Traffic, send
from tests.benchmarks.measuring import Row, Table
from tests.benchmarks.serve.client import Answer
from tests.benchmarks.serve.models import Model, simulated
from tests.benchmarks.serve.running import Server, UnavailableError

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(text: str) -> bytes:
    return b"%x\r\n%b\r\n" % (len(text), text.encode())


@dataclass
class Face:
    """A server that answers at once.

    Attributes:
        answer: Sent in place of each answer, and the connection ends; empty: answers are right.
        port: Its port.
        rows: Bodies of rows.
        live: Bodies of live requests.
        heads: Heads of live requests.
        at_once: Rows in flight.
        most: Most rows in flight.
    """

    answer: bytes = b""
    port: int = 0
    rows: list[Any] = field(default_factory=list)
    live: list[Any] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    at_once: int = 0
    most: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                (length,) = re.findall(r"content-length: (\d+)", head)
                body = json.loads(await reader.readexactly(int(length)))
                if body.get("stream"):
                    self.live.append(body)
                    self.heads.append(head)
                else:
                    self.rows.append(body)
                    self.at_once += 1
                    self.most = max(self.most, self.at_once)
                    # Further rows come in meanwhile.
                    await asyncio.sleep(0.001)
                    self.at_once -= 1
                writer.write(self.answer or _answer(body))
                if self.answer:
                    return
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


def _answer(body: Any) -> bytes:
    usage = json.dumps({"usage": {"completion_tokens": body["max_tokens"]}})
    if not body.get("stream"):
        return HEAD % b"application/json" + chunk(usage) + b"0\r\n\r\n"
    events = [chunk(f"data: {text}\n\n") for text in ("role", "token", usage, "[DONE]")]
    return HEAD % b"text/event-stream" + b"".join(events) + b"0\r\n\r\n"


@asynccontextmanager
async def face(answer: bytes = b"") -> AsyncIterator[Face]:
    found = Face(answer)
    async with await asyncio.start_server(found.serve, "127.0.0.1", 0) as listening, asyncio.timeout(20):
        found.port = listening.sockets[0].getsockname()[1]
        yield found


# Traffic


def test_arrivals_are_the_same_in_each_run_and_as_many_as_asked() -> None:
    traffic = Traffic(2.0, Rows(1, 64, 64), 150.0, warm_up_s=15.0)
    found = traffic.arrivals()
    assert found == sorted(found) == Traffic(2.0, None, 150.0, warm_up_s=15.0).arrivals()
    assert sum(at >= 15.0 for at in found) == 300
    assert len(found) == 330
    assert found[-1] < 165.0
    # Arrivals of a Poisson stream: the gaps' deviation is their mean.
    gaps = [later - earlier for earlier, later in itertools.pairwise(found)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.25)
    assert Traffic(0.0, None, 10.0).arrivals() == []


async def test_live_requests_and_a_closed_loop_of_rows_reach_the_server() -> None:
    lines = [f"traceparent: {number}\r\n" for number in range(30)]
    traffic = Traffic(100.0, Rows(4, 40, 20, {"service_tier": "flex"}), 0.3, warm_up_s=0.1)
    async with face() as server:
        seen = await send(server.port, traffic, seed=7, headers=lines)
    assert len(seen.live) == 30
    assert len(server.live) == 40
    assert all(0 < answer.ttft_s <= answer.total_s for answer in seen.live)
    assert Counter("traceparent" in head for head in server.heads) == {True: 30, False: 10}
    assert server.most == 4
    assert {len(body["prompt"]) for body in server.rows} == {40}
    assert len({body["prompt"] for body in server.rows}) == len(server.rows) > 10
    assert {body["service_tier"] for body in server.rows} == {"flex"}
    assert all(10 <= body["max_tokens"] <= 30 for body in server.rows)
    assert 0 < seen.tokens <= sum(body["max_tokens"] for body in server.rows)


async def test_rows_alone_end_with_the_measurement() -> None:
    async with face() as server:
        seen = await send(server.port, Traffic(0.0, Rows(2, 40, 20), 0.1, warm_up_s=0.0), seed=1)
    assert not seen.live
    assert not server.live
    assert [row.what for row in seen.figures()] == [TOKENS]


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (b"HTTP/1.1 429 No\r\ncontent-length: 4\r\n\r\nfull", RuntimeError, "429: full"),
        (b"HTTP/1.1 200 OK\r\n", ConnectionError, "closed the connection"),
    ],
)
async def test_a_row_that_fails_ends_the_run(answer: bytes, error: type[Exception], said: str) -> None:
    traffic = Traffic(5.0, Rows(2, 40, 20), 60.0, warm_up_s=0.0)
    async with face(answer) as server:
        with pytest.raises(error, match=said):
            await send(server.port, traffic, seed=1)


def test_figures_of_a_run() -> None:
    live = [Answer(11, 1, 0.0, first_at=at / 1e3, ended_at=at / 1e3 + 0.5) for at in range(1, 101)]
    random.Random(1).shuffle(live)
    found = {row.what: row.median for row in Seen(10.0, live, 5_000).figures()}
    assert found["live: requests"] == 100
    assert found["live: TTFT p50"] == pytest.approx(50, abs=1)
    assert found["live: TTFT p90"] == pytest.approx(90, abs=1)
    assert found[TTFT_P99] == pytest.approx(99, abs=1)
    assert found["live: TTFT max"] == pytest.approx(100)
    assert found["live: TPOT p50"] == pytest.approx(50)
    assert found[TOKENS] == 500


# Runs


def test_every_case_runs_on_every_system_and_servers_are_started_once(tmp_path: Path) -> None:
    planned = runs({"old": tmp_path}, sweep=True, batch=True)
    names = [run.name for run in planned]
    assert len(set(names)) == len(names)
    for case in CASES:
        assert {f"{case}/{kind}" for kind in ("rows-alone", OURS, BATCH, ARRIVAL, PRIORITIES, "old")} <= set(
            names
        )
    for device in DEVICE_OF:
        assert f"{device}/live-alone" in names
    started = [(group[0].device, group[0].system) for group in by_server(planned)]
    assert len(set(started)) == len(started)
    for run in planned:
        arrivals = run.traffic.arrivals()
        if run.traffic.rate:
            assert sum(at >= run.traffic.warm_up_s for at in arrivals) == 300
        if (rows := run.traffic.rows) is not None:
            assert rows.extra == {ARRIVAL: {}, PRIORITIES: {"priority": 10}}.get(
                run.system.kind, {"service_tier": "flex"}
            )
    assert {run.system.tree for run in planned if run.system.kind == "old"} == {tmp_path}
    assert len(runs({}, sweep=False)) < len(planned)


@pytest.mark.parametrize("name", CASES)
def test_one_row_of_each_case_fits_into_the_device(name: str) -> None:
    case = CASES[name]
    profile = PROFILES[DEVICE_OF[case.device].profile]
    assert case.rows.prompt + 1.5 * case.rows.answer <= profile.max_model_len
    assert simulated(profile).engine["max_num_seqs"] >= profile.max_num_seqs
    LLMSettings.model_validate({"id": "demo", **simulated(profile).settings})


# The command line


@dataclass
class Machine:
    """Servers whose runs take no time.

    Attributes:
        broken: Kinds of servers that don't start.
        failing: Names of runs that fail.
        ttft_ms: TTFT p99 of runs beside rows; 100 ms alone.
        taken: Names of the runs.
        started: Servers that were started.
    """

    broken: Sequence[str] = ()
    failing: Sequence[str] = ()
    ttft_ms: float = 120.0
    taken: list[str] = field(default_factory=list)
    started: list[System] = field(default_factory=list)

    @contextmanager
    def start(self, system: System, model: Model, folder: Path) -> Iterator[Server]:
        if system.kind in self.broken:
            raise UnavailableError(f"{system.kind} did not start")
        self.started.append(system)
        log = folder / "log"
        log.write_text("the log")
        yield Server("saturate", 1.0, log, 1)

    def take(self, run: Run, server: Server, seed: int) -> Table:
        self.taken.append(run.name)
        if run.name in self.failing:
            raise RuntimeError("the server answered 500")
        rows = []
        if run.traffic.rate:
            ttft = self.ttft_ms if run.traffic.rows else 100.0
            rows += [Row("live: requests", "", [300.0]), Row(TTFT_P99, "ms", [ttft])]
        if run.traffic.rows:
            rows.append(Row(TOKENS, "tokens/s", [1_000.0 if run.system.kind == ARRIVAL else 960.0]))
        return Table(run.setting, [*rows, Row("cpu: EngineCore", "cores", [0.5])])

    def main(self, *words: str) -> int:
        return main(words, self.start, self.take)


def line(said: str, start: str) -> str:
    (found,) = (each for each in said.splitlines() if each.strip().startswith(start))
    return found


def test_the_command_measures_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine, path = Machine(), tmp_path / "beside.json"
    assert machine.main("--results", str(path), "--only", "l4/*", "l4-64-64/*") == 0
    said = capsys.readouterr().out
    assert line(said, "saturate ").split() == ["saturate", "300", "120", "1.20", "960", "0.96", "0.50"]
    assert line(said, "TTFT p99 / alone") == "  TTFT p99 / alone: 1.2, ≤ 1.35: met"
    assert line(said, "rows' tokens/s") == "  rows' tokens/s / arrival order: 0.96, ≥ 0.95: met"
    found = json.loads(path.read_text())
    assert set(found) == {
        "l4/live-alone",
        *(f"l4-64-64/{kind}" for kind in ("rows-alone", "saturate", "vllm", "vllm-priorities")),
    }
    assert {"machine", "versions", "measured", "goals", "seconds"} <= set(found["l4-64-64/saturate"])
    assert figures(found, "l4-64-64/saturate")["ratio"] == pytest.approx(1.2)
    assert path.with_suffix(".png").exists() or "matplotlib" in said


def test_a_missed_target_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "beside.json")
    assert Machine(ttft_ms=140.0).main("--results", path, "--only", "l4/*", "l4-64-64/*") == 0
    assert line(capsys.readouterr().out, "TTFT p99 / alone").endswith("1.4, ≤ 1.35: MISSED")


def test_a_second_command_goes_on_where_the_first_one_stopped(tmp_path: Path) -> None:
    words = ["--results", str(tmp_path / "beside.json"), "--seconds", "20"]
    first = Machine(broken=[PRIORITIES], failing=["l4-64-256/saturate"])
    assert first.main(*words) == 1
    kept = set(json.loads((tmp_path / "beside.json").read_text()))
    every = {run.name for run in runs({}, sweep=False)}
    # The runs that follow a failure on its server have no server.
    assert kept < every
    assert {"l4/live-alone", "l4-64-64/saturate", "l4-64-64/vllm", "h100/live-alone"} <= kept
    assert "l4-64-256/saturate" not in kept
    second = Machine()
    assert second.main(*words) == 0
    assert set(second.taken) == every - kept
    third = Machine()
    assert third.main(*words) == 0
    assert not third.started
    # Longer runs are made again, and so are those that are named.
    assert third.main(*words[:3], "10") == 0
    assert not third.taken
    assert third.main(*words[:3], "10", "--only", "l4-64-64/vllm") == 0
    assert third.taken == ["l4-64-64/vllm"]
    assert third.main(*words[:3], "30") == 0
    assert set(third.taken) == every


def test_a_dry_run_lists_the_runs_and_their_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine()
    assert machine.main("--dry-run", "--tree", "old=../earlier", "--only", "*/old") == 0
    said = capsys.readouterr().out
    assert not machine.started
    planned = [run for run in runs({"old": Path("x")}, sweep=False) if run.name.endswith("/old")]
    assert len(planned) == len(CASES)
    assert f"{len(planned)} runs on " in said
    assert f"about {expected_s(planned) / 60:.0f} minutes" in said


def test_words_that_are_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert Machine().main("--only", "l4-64-64/vlm") == 2
    assert "l4-64-64/vlm: no such run" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        Machine().main("--tree", "old")
    assert "must be NAME=PATH" in capsys.readouterr().err


def test_a_sweep_is_a_line_of_each_server(tmp_path: Path) -> None:
    path = tmp_path / "beside.json"
    words = ["--results", str(path), "--sweep", "--tree", f"old={tmp_path}", "--only", "l4-512-128/*", "l4/*"]
    assert Machine().main(*words) == 0
    found = json.loads(path.read_text())
    lines = plot.series(found, "l4-512-128")
    case = CASES["l4-512-128"]
    assert {kind: len(points) for kind, points in lines.items()} == {
        OURS: len(case.bounds) + 2,
        ARRIVAL: 1,
        PRIORITIES: 1,
        "old": len(case.earlier_bounds) + 1,
    }
    assert {label for *_, label in lines[OURS]} >= {"", "130 ms", "100 ms"}
    assert "560 ms" in {label for *_, label in lines["old"]}
    assert "old" in show(found)


# The trace of a live request


START = datetime(2026, 11, 28, tzinfo=UTC)


def spans(number: int, late_ms: float = 0.0) -> Iterator[dict[str, Any]]:
    """Yield the spans of a request whose times are a millisecond apart; its step begins late."""

    def at(name: str) -> str:
        place = [station for station, _ in STATIONS].index(name)
        late = late_ms if place >= 7 else 0.0
        return (START + timedelta(milliseconds=place + 1 + late)).isoformat().replace("+00:00", "Z")

    begins = {
        "POST /v1/chat/completions": ("ingress", ["first piece"]),
        "handle": ("relayed", []),
        "engine": ("engine", []),
        "queue": ("submitted", []),
        "generate": ("started", ["tokenized", "queued", "scheduled", "first token", "received"]),
    }
    for name, (begin, events) in begins.items():
        yield {
            "name": name,
            "context": {"trace_id": f"0x{header(number).split('-')[1]}"},
            "start_time": at(begin),
            "events": [{"name": event, "timestamp": at(event)} for event in events],
        }


def test_the_stations_of_a_request_add_up_to_its_ttft() -> None:
    clock_s = START.timestamp() - 100.0
    live = [Answer(64, 1, 100.0, first_at=100.012 + late / 1e3) for late in range(40)]
    written = [span for number in range(40) for span in spans(number, float(number))]
    # The process of one ended before it wrote its spans.
    found = stations([*live, Answer(64, 1, 100.0, first_at=101.0)], written, clock_s)
    assert len(times(written)) == len(found) == 40
    for late, parts in enumerate(found):
        assert parts[TOTAL] == pytest.approx(12 + late)
        assert sum(parts.values()) == pytest.approx(2 * parts[TOTAL], abs=0.1)
        assert parts["the wait for a step with room"] == pytest.approx(1 + late, abs=0.01)
    figures_of = {row.what: row.median for row in rows(found)}
    assert figures_of["requests"] == 40
    assert figures_of["the wait for a step with room: p50"] == pytest.approx(20.5, abs=1)
    assert figures_of[f"{TOTAL}: mean"] == pytest.approx(31.5)
    assert figures_of[f"{TOTAL}: mean of the slowest"] == pytest.approx(50.5)
    text = show_stations(Table("a run", rows(found)))
    assert text.startswith("a run; 40 requests")
    assert line(text, TOTAL).split()[1:] == ["32.0", "51.0", "31.5", "50.5"]

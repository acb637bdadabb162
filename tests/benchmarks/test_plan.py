"""Parts of the benchmark of plans that can go wrong without a service."""

import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve_app.simulation.profiles import PROFILES, Profile
from serve_app.tuning.load import Generator, LoadLevel, LoadStep, Requests
from serve_app.tuning.service import LoadAnswer, Service
from serve_app.tuning.workload import TokenLengths
from tests.benchmarks.measuring import Table
from tests.benchmarks.plan import __main__ as command
from tests.benchmarks.plan import live, tables
from tests.benchmarks.plan.live import Pair
from tests.benchmarks.plan.loads import CASES, Level, case, levels
from tests.benchmarks.plan.planned import planned, trial
from tests.benchmarks.serve.models import Model, simulated
from tests.benchmarks.serve.running import Server, UnavailableError
from tests.serve_app.tuning.streaming_server import streaming_server

H100 = PROFILES["h100-8b"]
SHORT = case("short", "1024:512", "128:64")


def level(load: float = 0.75) -> Level:
    (found,) = levels(H100, SHORT, [load], 20.0)
    return found


def requests(one: Level) -> Requests:
    return Requests("m", one.case.input, one.case.output)


def model(one: Level, seed: int = 1, seconds: float = 60.0) -> LoadStep:
    return planned(H100, one, requests(one), seconds=seconds, seed=seed)


# Loads


@pytest.mark.parametrize("name", CASES)
def test_levels_are_shares_of_what_a_replica_can_do(name: str) -> None:
    assert name in PROFILES
    for each in CASES[name]:
        found = levels(PROFILES[name], each, [0.9, 0.5, 0.75], 20.0)
        assert [one.load for one in found] == pytest.approx([0.5, 0.75, 0.9])
        for one in found:
            figures = trial(PROFILES[name], one)
            assert 0 < figures["ttft", 50] < figures["ttft", 99]
            assert 5 <= one.warm_up_s <= 30


def test_a_rate_is_bounded() -> None:
    found = levels(H100, SHORT, [0.1, 0.5, 0.9], 5.0)
    assert [one.workload.rate for one in found] == pytest.approx([2.17, 5.0], abs=0.01)
    assert found[1].load < 0.5


def test_the_device_is_that_of_the_plan() -> None:
    profile = simulated(H100).simulate
    assert profile is not None
    assert profile == H100.model_copy(update={"load_s": 0.0})
    assert simulated(H100).engine["max_num_batched_tokens"] == H100.max_num_batched_tokens


# The same requests


async def test_the_model_gets_the_requests_that_the_generator_sends() -> None:
    lengths = TokenLengths(20, 10)
    made = Requests("m", lengths, TokenLengths(6, 4))
    async with streaming_server() as server:
        async with Service(server.url) as service, Generator(service, made, ()) as generator:
            seen = await generator.step(LoadLevel("open", 60.0), seconds=0.8, warm_up=0.3, drain=5.0, seed=7)
        sent = [(len(body["prompt"]), body["max_tokens"]) for body in server.bodies]
    arrivals = made.arrivals(60.0, 7)
    due = [next(arrivals) for _ in sent]
    # Two that are due at the same time may come in another order.
    assert sorted(sent) == sorted((each.prompt, each.output) for each in due)
    assert seen.sent == sum(0.3 <= each.at_s < 1.1 for each in due)
    assert seen.ended == seen.ended_per_s * seen.seconds > 0


def test_a_run_of_the_model_is_a_load_step() -> None:
    found = model(level())
    assert found.sent == len(found.samples["latency"]) == 970
    assert found.failed == 0
    assert found.ended_per_s == pytest.approx(16.2, rel=0.1)
    assert found.tokens_per_s == pytest.approx(16.2 * 128, rel=0.1)
    assert found == model(level())
    assert found != model(level(), seed=2)


def test_a_time_outside_the_engine_delays_first_tokens() -> None:
    slow = H100.model_copy(update={"request_ms": 50.0 + H100.request_ms})
    one = level(0.5)
    late = planned(slow, one, requests(one), seconds=60.0, seed=1)
    assert late.figure("ttft", 50) - model(one).figure("ttft", 50) == pytest.approx(0.05, abs=0.005)
    assert late.figure("tpot", 50) == pytest.approx(model(one).figure("tpot", 50), rel=0.05)


# Runs


class Machine:
    """A service whose answers are those of the model, with each first token later by a factor."""

    def __init__(self, factor: float = 1.0, **changes: Any) -> None:
        self.factor = factor
        self.changes = changes
        self.started: list[Model] = []
        self.seeds: list[int] = []

    @contextmanager
    def serve(self, model: Model, folder: Path) -> Iterator[Server]:
        self.started.append(model)
        log = folder / "log"
        log.write_text("the log")
        yield Server("saturate", 1.0, log, 1)

    async def step(
        self, server: Server, made: Requests, load: LoadLevel, warm_up: float, seconds: float, seed: int
    ) -> LoadStep:
        if load.loop == "closed":
            return LoadStep.of(load, (), [LoadAnswer(0.0, 1, 0.1, 0.2)], (0.0, 1.0), began_at=0.0, now=1.0)
        self.seeds.append(seed)
        (one,) = (each for each in levels(H100, SHORT, [0.5, 0.75], 20.0) if each.step == load)
        found = planned(H100, one, made, seconds=seconds, seed=seed)
        later = [self.factor * each for each in found.samples["ttft"]]
        return replace(found, **{"samples": found.samples | {"ttft": later}, **self.changes})


def measured(
    machine: Machine, folder: Path, monkeypatch: pytest.MonkeyPatch, rounds: int = 3
) -> Mapping[str, Sequence[Pair]]:
    monkeypatch.setattr(live, "_step", machine.step)
    found: Mapping[str, Sequence[Pair]] = {}

    def after(pairs: Mapping[str, Sequence[Pair]]) -> None:
        nonlocal found
        found = pairs

    both = levels(H100, SHORT, [0.5, 0.75], 20.0)
    live.measure(H100, both, folder, rounds=rounds, seconds=30.0, after=after, serve=machine.serve)
    return found


def test_a_service_runs_every_level_in_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    found = measured(machine, tmp_path, monkeypatch)
    assert len(machine.started) == 1
    assert len(set(machine.seeds)) == len(machine.seeds) == 6
    # The rounds begin with another level each.
    assert machine.seeds == [1001, 1000, 2000, 2001, 3001, 3000]
    assert {name: len(pairs) for name, pairs in found.items()} == {"short, 50%": 3, "short, 75%": 3}
    for pair in found["short, 50%"]:
        assert pair.live == pair.planned
        assert "client" in pair.cpu


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"failed": 2}, "2 of 528 requests failed"),
        ({"sent": 527}, "527 requests were sent, and the model has 528"),
        ({"samples": {"latency": [1.0] * 500, "ttft": [1.0]}}, "28 of 528 requests were not answered"),
    ],
)
def test_runs_that_mean_nothing_are_refused(
    changes: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnavailableError, match=said) as caught:
        measured(Machine(**changes), tmp_path, monkeypatch)
    assert "the log" in str(caught.value)


# Tables


def made(factor: float, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    pairs = measured(Machine(factor), folder, monkeypatch)["short, 75%"]
    return tables.table(level(), pairs, trial(H100, level()), 30.0)


def test_a_table_has_both_sides_and_their_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {row.what: row for row in made(1.2, tmp_path, monkeypatch).rows}
    for name in ("TTFT p50", "TTFT p99"):
        assert rows[f"{name}, live / planned"].samples == pytest.approx([1.2] * 3)
    for name in ("requests/s", "output", "TPOT p50", "TPOT p99"):
        assert rows[f"{name}, live / planned"].samples == [1.0] * 3
    planned = rows["TTFT p50, planned"].median
    assert rows["TTFT p50, live - planned"].median == pytest.approx(0.2 * planned, rel=0.2)
    assert rows["TTFT p99 of all rounds, live / planned"].samples == pytest.approx([1.2])
    met = {name: row.met for name, row in rows.items() if row.met is not None}
    assert met == {
        "output, live / planned": True,
        "TTFT p99, live / planned": False,
        "TTFT p99 of all rounds, live / planned": False,
    }
    # A p99 of random requests is about that of these.
    assert rows["TTFT p99, planned from random requests"].median == pytest.approx(
        rows["TTFT p99, planned"].median, rel=0.5
    )


@pytest.mark.parametrize(
    ("factor", "word"), [(0.88, "MISSED"), (0.95, "met"), (1.05, "met"), (1.12, "MISSED")]
)
def test_a_table_as_text(factor: float, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = made(factor, tmp_path, monkeypatch)
    shown = tables.text("h100-8b", table)
    (line,) = (
        each
        for each in shown.splitlines()
        if each.startswith("TTFT p99 ") and "of all" not in each and "random" not in each
    )
    assert line.endswith(f"{factor:.2f}  {factor:.2f}–{factor:.2f}  {word}")  # noqa: RUF001
    assert f"0.90 to 1.10 x  {word}" in shown
    assert "CPU, share of all cores" in shown
    # The description comes first, however many lines it has.
    assert shown.index("default settings.") < shown.index("live / planned")
    (row,) = tables.page({"the load": table}).splitlines()[2:]
    assert row.startswith("| the load | 1")
    assert f"ms: {factor:.2f} ({factor:.2f}–{factor:.2f})" in row  # noqa: RUF001


# The command line


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command leaves this process as it is."""
    monkeypatch.setattr(command, "adopt_orphans", lambda: None)
    monkeypatch.setattr(command, "go_first", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)


@pytest.mark.usefixtures("plain")
def test_the_command_prints_and_keeps_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(1.3)
    monkeypatch.setattr(live, "_step", machine.step)
    monkeypatch.setattr(command, "RESULTS", tmp_path / "plan.json")
    measure = live.measure
    monkeypatch.setattr(live, "measure", lambda *args, **named: measure(*args, serve=machine.serve, **named))
    words = ["--device", "h100-8b", "--only", "short", "--load", "50", "--load", "75"]
    assert command.main([*words, "--rounds", "2", "--seconds", "20"]) == 0
    assert command.main([*words, "--rounds", "1", "--seconds", "20", "--check"]) == 1
    said = capsys.readouterr().out
    assert "| h100-8b, 1024:512 in, 128:64 out, 50% | " in said
    assert "targets missed: 4" in said
    kept = json.loads((tmp_path / "plan.json").read_text())
    assert set(kept) == {f"h100-8b, 1024:512 in, 128:64 out, {load}%" for load in (50, 75)}
    for table in kept.values():
        assert {"setting", "measured", "machine", "versions", "request_ms"} <= set(table)


@pytest.mark.usefixtures("plain")
def test_a_device_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine()
    monkeypatch.setattr(live, "_step", machine.step)
    monkeypatch.setattr(command, "RESULTS", tmp_path / "plan.json")
    measure = live.measure

    def some(profile: Profile, *args: Any, **named: Any) -> None:
        if profile.name == "l4-7b":
            raise UnavailableError("saturate did not start:\nits log")
        measure(profile, *args, serve=machine.serve, **named)

    monkeypatch.setattr(live, "measure", some)
    words = ["--device", "l4-7b", "--device", "h100-8b", "--only", "short", "--load", "75", "--rounds", "1"]
    assert command.main([*words, "--seconds", "20"]) == 1
    said = capsys.readouterr()
    assert "l4-7b can't be measured: saturate did not start" in said.err
    assert "| h100-8b, 1024:512 in, 128:64 out, 75% | " in said.out
    assert "targets missed: 0" in said.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--load", "100"], "must be between 0 and 100"),
        (["--input", "100"], "--input and --output belong together"),
        (["--input", "many", "--output", "10"], "'many' is no length"),
        (["--rounds", "0"], "must be above 0"),
        (["--device", "tpu"], "invalid choice"),
    ],
)
def test_options_that_are_wrong(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(words)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err

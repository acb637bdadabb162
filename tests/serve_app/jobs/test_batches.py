"""Batches through their states."""

import asyncio
import errno
import math
import os
import threading
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import from_json

from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON
from serve_app.client import Backoff
from serve_app.jobs import failpoints
from serve_app.jobs.batches import BatchRunner, OpenBatch, RowRate
from serve_app.jobs.content import Content
from serve_app.jobs.key_rules import KeyRules
from serve_app.jobs.models import ENDED, Batch
from serve_app.jobs.store import Store
from serve_app.rows import pacing
from serve_app.rows.pacing import Auto, EngineLoad, Fixed
from serve_app.rows.rows import Row, RowAnswer, RowRequest
from serve_app.rows.runner import Runner
from serve_app.system.database import DatabaseError
from tests.batcher.virtual import virtual
from tests.progress import STILL_S
from tests.serve_app.jobs.engine import USAGE, Engine, Served, custom_id_of
from tests.serve_app.jobs.helpers import (
    DAY_S,
    NOW,
    batch_of,
    limits_of,
    opened,
    put,
    row,
    text_of,
)


class Bench:
    """A runner, its store, and the engines."""

    def __init__(self, store: Store, content: Content[Path], engine: Engine, **options: Any) -> None:
        self.store = store
        self.content = content
        self.engine = engine
        self.now = float(NOW)
        self.at: Callable[[str], None] | None = None
        self.committed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        concurrency = options.pop("concurrency", None)
        self.runner = BatchRunner(
            store,
            content,
            engine,
            KeyRules(
                options.pop("models", {"demo"}), options.pop("limits", limits_of()), options.pop("keys", None)
            ),
            concurrency=Auto if concurrency is None else lambda: concurrency,
            backoff=options.pop("backoff", Backoff(0.0, 0.0)),
            clock=lambda: self.now,
            tick_s=options.pop("tick_s", 0.01),
            **options,
        )

    def add(self, id: str, *rows: JSON | bytes, tenant: str = "anna", **fields: Any) -> None:
        """Add a batch."""
        put(self.store, self.content, f"in-{id}", text_of(*rows), tenant)
        self.store.add_batch(batch_of(id, f"in-{id}", tenant, **fields), 100)
        self.runner.notice()

    async def ended(self, id: str, *, state: str = "completed") -> Batch:
        """Return a batch that has ended."""
        await self.until(lambda: self.store.batch(id).state in ENDED)
        batch = self.store.batch(id)
        assert batch.state == state, batch.errors
        return batch

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition on the store holds, which is looked at after each commit."""
        async with asyncio.timeout(STILL_S):
            while not condition():
                self.committed.clear()
                await self.committed.wait()

    def reach(self, point: str) -> None:
        """Take note of a failpoint."""
        if point == "store.committed":
            self._loop.call_soon_threadsafe(self.committed.set)
        if self.at is not None:
            self.at(point)

    def lines(self, batch: Batch) -> tuple[dict[str, JSON], dict[str, JSON]]:
        """Return the lines of the output and the error file, by `custom_id`."""
        found = []
        for id, size in ((batch.output_file, batch.output_bytes), (batch.error_file, batch.error_bytes)):
            text = b"".join(self.content.pieces(id, size)) if size else b""
            rows = [from_json(line) for line in text.splitlines()]
            found.append({row["custom_id"]: row for row in rows})
        return found[0], found[1]


@asynccontextmanager
async def running(folder: Path, engine: Any, **options: Any) -> AsyncIterator[Bench]:
    """Run batches."""
    store, content = opened(folder)
    bench = Bench(store, content, engine, **options)
    failpoints.hook = bench.reach
    try:
        async with asyncio.timeout(STILL_S), asyncio.TaskGroup() as group:
            bench.task = group.create_task(bench.runner.run())
            yield bench
            bench.runner.stop()
    finally:
        failpoints.hook = None
        store.close()


ODD = (
    '{"body": 1, "custom_id": "ü\\n", "method": "POST", "url": "/v1/chat/completions", "body": '
    '{"model": "demo", "n": 18446744073709551616, "messages": [{"content": "z"}], "service_tier": "default"}}'
).encode()
"""A row with two bodies, of which the last counts."""


async def test_rows_are_sent_as_flex_and_their_answers_written(tmp_path: Path) -> None:
    engine = Engine()
    async with running(tmp_path, engine) as bench:
        bench.add("b", row("x"), b"", row("y"), ODD)
        batch = await bench.ended("b")
        output, errors = bench.lines(batch)
    assert (batch.total, batch.completed, batch.failed, batch.model) == (3, 3, 0, "demo")
    assert output["ü\n"]["id"] == "batch_req_b_4"
    assert output["y"] == {
        "id": "batch_req_b_3",
        "custom_id": "y",
        "response": {
            "status_code": 200,
            "request_id": "batch_req_b_3",
            "body": {"echo": "y", "usage": USAGE},
        },
        "error": None,
    }
    assert errors == {}
    assert engine.bodies["x"] == row("x")["body"] | {"service_tier": "flex"}
    assert (engine.bodies["z"]["n"], engine.bodies["z"]["service_tier"]) == (1 << 64, "flex")


async def test_a_row_without_a_field_in_its_body_is_sent_as_flex(tmp_path: Path) -> None:
    class Bare(Served):
        async def send(self, request: RowRequest) -> RowAnswer:
            return RowAnswer(400, {"sent": request.body})

    async with running(tmp_path, Bare()) as bench:
        line = b'{"custom_id": "x", "method": "POST", "url": "/generate", "body": { }}'
        bench.add("b", line, endpoint="/generate")
        _, errors = bench.lines(await bench.ended("b"))
    assert errors["x"]["response"]["body"] == {"sent": {"service_tier": "flex"}}


async def test_a_row_that_is_refused_stops_no_other(tmp_path: Path) -> None:
    async with running(tmp_path, Engine(lambda id: 400 if id == "bad" else 200)) as bench:
        bench.add("b", row("x"), row("bad"), row("y"))
        batch = await bench.ended("b")
        output, errors = bench.lines(batch)
    assert (set(output), set(errors)) == ({"x", "y"}, {"bad"})
    assert errors["bad"]["response"]["status_code"] == 400
    assert (batch.completed, batch.failed, batch.unrun) == (2, 1, 0)


async def test_a_file_with_bad_lines_fails_the_batch(tmp_path: Path) -> None:
    engine = Engine()
    async with running(tmp_path, engine) as bench:
        bench.add("b", row("x"), b"{", row("x"))
        batch = await bench.ended("b", state="failed")
    assert [(error["code"], error["line"]) for error in batch.errors] == [
        ("invalid_json_line", 2),
        ("duplicate_custom_id", 3),
    ]
    assert engine.sent == []


async def test_batches_of_a_tenant_go_by_deadline_and_rows_in_flight_stay(tmp_path: Path) -> None:
    engine = Engine()
    engine.go.clear()
    async with running(tmp_path, engine, concurrency=Fixed(2)) as bench:
        bench.add("week", *(row(f"week{number}") for number in range(5)), expires_at=NOW + 7 * DAY_S)
        await engine.until(lambda: engine.running == 2)
        for id, hours in (("day", 24), ("hour", 1)):
            bench.add(id, *(row(f"{id}{number}") for number in range(3)), expires_at=NOW + hours * 3600)
        await bench.until(lambda: {bench.store.batch(id).state for id in ("day", "hour")} == {"in_progress"})
        assert engine.running == 2
        engine.go.set()
        for id in ("week", "day", "hour"):
            await bench.ended(id)
    sent = [id.rstrip("01234") for _, id in engine.sent]
    assert sent == ["week"] * 2 + ["hour"] * 3 + ["day"] * 3 + ["week"] * 3
    assert max(engine.tries.values()) == 1


async def test_a_batch_that_will_be_late_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(lambda _: passed())
    warned: dict[str, str] = {}

    def passed() -> int:
        bench.now += 5.0
        warned.update(bench.runner.warnings)
        return 200

    async with running(tmp_path, engine, concurrency=Fixed(4)) as bench:
        # A row takes 5 s, and earlier deadlines go first: the rows of "c" end after 5,600 s.
        for id, rows, expires_s in (("a", 60, 3600), ("b", 60, 4000), ("c", 1000, 4500)):
            bench.add(id, *(row(f"{id}{number}") for number in range(rows)), expires_at=NOW + expires_s)
        await bench.until(lambda: bool(warned))
        for id in ("a", "b"):
            await bench.ended(id)
        bench.store.move("c", "cancelling", NOW)
        bench.runner.notice()
        await bench.ended("c", state="cancelled")
        await bench.until(lambda: not bench.runner.warnings)
    assert warned.keys() == {"c"}
    assert warned["c"].startswith("This batch will end after its completion_window: ")
    assert caplog.text.count("c: This batch will end after its completion_window") == 1


def test_a_rate_is_of_the_last_hour_and_none_before_a_minute() -> None:
    rate = RowRate()
    for second in range(20_000):
        assert (rate.per_s is None) == (second < 60)
        rate.rows += 2 if second < 10_000 else 1
        rate.work(1.0)
    assert rate.per_s == pytest.approx(1.0)
    # The machine slept.
    rate.work(30_000.0)
    assert rate.per_s is None
    waiting = RowRate()
    waiting.work(3000.0)
    assert waiting.per_s is None
    waiting.work(590.0)
    assert waiting.per_s == 0.0


async def test_batches_with_one_deadline_go_in_the_order_of_their_arrival(tmp_path: Path) -> None:
    engine = Engine()
    async with running(tmp_path, engine, concurrency=Fixed(1)) as bench:
        engine.go.clear()
        bench.add("first", row("first"))
        await engine.until(lambda: engine.running == 1)
        # The batches are validated side by side: no row is sent before all of them are.
        for id in ("b", "a", "c"):
            bench.add(id, *(row(f"{id}{number}") for number in range(3)))
        await bench.until(lambda: {bench.store.batch(id).state for id in ("b", "a", "c")} == {"in_progress"})
        engine.go.set()
        for id in ("b", "a", "c"):
            await bench.ended(id)
    assert [id for _, id in engine.sent[1:]] == ["b0", "b1", "b2", "a0", "a1", "a2", "c0", "c1", "c2"]


class TwoModels(Engine):
    """Engines of two models: `slow`, as its base class is, and `quick`, which has 50 places."""

    def __init__(self) -> None:
        super().__init__()
        self.quick = Engine()
        self.quick.places = 50

    async def send(self, request: RowRequest) -> RowAnswer:
        """Answer a row."""
        if request.body["model"] == "quick":
            return await self.quick.send(request)
        return await super().send(request)

    async def load(self, base: str | None) -> EngineLoad | None:
        """Return the load of a model: `slow` has a long queue."""
        return await self.quick.load(base) if base == "quick" else EngineLoad(0, 50, 0)


def rows_of(model: str, count: int) -> list[JSON]:
    """Return rows of a model."""
    rows = [row(f"{model}{number}") for number in range(count)]
    return [one | {"body": one["body"] | {"model": model}} for one in rows]


class Held(Engine):
    """Holds some rows, by `custom_id`, until `go` is set; answers the others."""

    def __init__(self, *rows: str) -> None:
        super().__init__()
        self.held: list[str] = []
        self._rows = rows
        self.go.clear()

    async def send(self, request: RowRequest) -> RowAnswer:
        """Answer a row."""
        id = custom_id_of(request.body)
        if id not in self._rows:
            self.tries[id] += 1
            self.final[id] += 1
            return RowAnswer(200, {"echo": id})
        self.held.append(id)
        try:
            return await super().send(request)
        finally:
            self.held.remove(id)


MODELS = {"slow", "quick"}


async def test_a_batch_does_not_wait_for_one_of_another_model(tmp_path: Path) -> None:
    engine = TwoModels()
    engine.go.clear()
    async with running(tmp_path, engine, models=MODELS) as bench:
        bench.add("first", *rows_of("slow", 9))
        await engine.until(lambda: engine.running == 4)
        bench.add("second", *rows_of("quick", 9))
        assert (await bench.ended("second")).completed == 9
        assert bench.runner.rows.in_flight == 4
        engine.go.set()
        assert (await bench.ended("first")).completed == 9


async def test_a_batch_with_several_models_holds_up_none_with_one(tmp_path: Path) -> None:
    engine = TwoModels()
    engine.go.clear()
    async with running(tmp_path, engine, models=MODELS) as bench:
        bench.add("first", *rows_of("slow", 9), *rows_of("quick", 1))
        await engine.until(lambda: engine.running == 4)
        bench.add("second", *rows_of("quick", 9))
        assert (await bench.ended("second")).completed == 9
        engine.go.set()
        assert (await bench.ended("first")).completed == 10


async def test_a_queue_at_one_model_does_not_lower_the_limit_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "GROWING_S", 0.001)
    monkeypatch.setattr(pacing, "STEADY_S", 0.001)
    engine = TwoModels()
    for each in (engine, engine.quick):
        each.go.clear()
    async with running(tmp_path, engine, models=MODELS) as bench:
        bench.add("slow", *rows_of("slow", 100))
        await engine.until(lambda: engine.running > 0)
        bench.add("quick", *rows_of("quick", 100), tenant="ben")
        await engine.quick.until(lambda: engine.quick.running == 50)
        assert engine.most == 4
        for each in (engine, engine.quick):
            each.go.set()
        await bench.ended("slow")
        await bench.ended("quick")


async def test_tenants_share_what_may_be_in_flight(tmp_path: Path) -> None:
    engine = Engine()
    engine.go.clear()
    async with running(tmp_path, engine, concurrency=Fixed(4)) as bench:
        bench.add("many", *(row(f"m{number}") for number in range(200)))
        await engine.until(lambda: engine.running == 4)
        bench.add("few", *(row(f"f{number}") for number in range(20)), tenant="ben")
        await bench.until(lambda: bench.store.batch("few").state == "in_progress")
        engine.go.set()
        await bench.ended("few")
        before = next(place for place, (_, id) in enumerate(engine.sent) if id == "f19")
        await bench.ended("many")
    # Half of the rows until then are the other tenant's, but for those that were sent while it was alone.
    assert before < 100
    assert engine.most == 4


@pytest.mark.parametrize("limit", [1, 8])
async def test_tenants_share_by_weight(limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    engine.go.clear()
    loop, read = asyncio.get_running_loop(), asyncio.Event()
    async with running(tmp_path, engine, concurrency=Fixed(limit)) as bench:
        finished = bench.store.finished

        def look(batch: str, first: int, last: int) -> set[int]:
            found = finished(batch, first, last)
            if batch == "anna":
                loop.call_soon_threadsafe(read.set)
            return found

        monkeypatch.setattr(bench.store, "finished", look)
        for name, weight in (("ben", None), ("anna", 3.0)):
            bench.add(name, *(row(f"{name}{number}") for number in range(120)), tenant=name, weight=weight)
        # Ben is alone until anna's rows are read.
        async with asyncio.timeout(STILL_S):
            await read.wait()
        engine.go.set()
        await bench.ended("anna")
        await bench.ended("ben")
    sent = [id for _, id in engine.sent]
    # From anna's first row on, a third as many rows are ben's.
    together = sent[sent.index("anna0") : sent.index("anna119")]
    assert 30 <= sum(id.startswith("ben") for id in together) <= 50
    assert engine.weights == {"anna": 3.0, "ben": None}


async def test_what_passes_is_tried_again(tmp_path: Path) -> None:
    left = {"busy": 3, "broken": 2, "gone": 1}

    def status(id: str) -> int:
        left[id] -= 1
        if left[id] < 0:
            return 200
        if id == "gone":
            raise ConnectionError("reset")
        return 429 if id == "busy" else 503

    engine = Engine(status)
    async with running(tmp_path, engine) as bench:
        bench.add("b", *map(row, left))
        batch = await bench.ended("b")
    assert (batch.completed, dict(engine.tries)) == (3, {"busy": 4, "broken": 3, "gone": 2})


async def test_refusals_lower_the_number_of_rows_in_flight(tmp_path: Path) -> None:
    pace = Auto(first=8)
    refused: list[str] = []

    def status(id: str) -> int:
        if id in refused:
            return 200
        refused.append(id)
        return 429

    async with running(tmp_path, Engine(status), concurrency=pace, tick_s=5.0) as bench:
        bench.add("b", *(row(str(number)) for number in range(6)))
        await bench.ended("b")
    # By half, once for all refusals of the same second.
    assert pace.limit == 4


async def test_free_places_of_the_engines_are_filled_before_the_first_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "GROWING_S", 0.001)
    engine = Engine()
    engine.places = 100
    engine.go.clear()
    async with running(tmp_path, engine, concurrency=Auto(most=1000)) as bench:
        bench.add("b", *(row(str(number)) for number in range(300)))
        await engine.until(lambda: engine.running == 100)
        engine.go.set()
        await bench.ended("b")
    # Rows on their way are not counted, so that some may wait; nothing waits for long.
    assert engine.most <= 300


async def test_a_row_at_which_the_engine_fails_is_given_up(tmp_path: Path) -> None:
    engine = Engine(lambda id: 500 if id == "bad" else 200)
    async with running(tmp_path, engine) as bench:
        bench.add("b", row("bad"), row("x"))
        batch = await bench.ended("b")
        errors = bench.lines(batch)[1]
    assert errors["bad"]["response"]["status_code"] == 500
    assert (batch.completed, batch.failed, engine.tries["bad"]) == (1, 1, 3)


async def test_a_fault_of_the_service_is_given_up_if_no_row_succeeds(tmp_path: Path) -> None:
    engine = Engine(lambda _: 500)
    async with running(tmp_path, engine) as bench:
        bench.add("b", row("x"), row("y"))
        batch = await bench.ended("b")
    assert (batch.failed, dict(engine.tries)) == (2, {"x": 3, "y": 3})


@virtual
async def test_a_row_may_take_hours() -> None:
    """The engines tell of their own loss; the time of a row says nothing."""

    class Slow(Served):
        tries = 0

        async def send(self, request: RowRequest) -> RowAnswer:
            """Answer after six hours."""
            self.tries += 1
            await asyncio.sleep(6 * 3600)
            return RowAnswer(200, {})

    def turn() -> None:
        """Let the loop turn while a thread works."""
        asyncio.get_event_loop().call_later(60.0, turn)

    turn()
    engine, limit = Slow(), Fixed(1)
    limit.interval_s = 3600
    one = OpenBatch(batch_of("b", "in"))
    one.rows.append(Row(1, text_of(row("x"))))
    async with Runner(
        engine, lambda results: None, concurrency=lambda: limit, changed=lambda: None
    ) as runner:
        runner.fill(None, [one])
        while runner.in_flight:
            assert engine.tries <= 1
            await asyncio.sleep(60)
    assert (runner.rate.total, runner.failed, engine.tries) == (1, 0, 1)


async def test_an_adapter_that_is_replaced_costs_no_row(tmp_path: Path) -> None:
    """An administrator unloads an adapter, then loads another one with its id."""

    class Replaced(Engine):
        async def send(self, request: RowRequest) -> RowAnswer:
            """Refuse each row until the adapter is there again."""
            answer = await super().send(request)
            if self.tries[custom_id_of(request.body)] > 2:
                return answer
            missing = "The model 'demo' does not exist; served here: none"
            return RowAnswer.of(RequestError(404, "not_found_error", missing, param="model"))

    engine = Replaced()
    async with running(tmp_path, engine) as bench:
        bench.add("b", row("x"), row("y"))
        batch = await bench.ended("b")
    assert (batch.completed, dict(engine.tries)) == (2, {"x": 3, "y": 3})
    # An adapter that stays away doesn't hold up its batch for ever.
    engine = Replaced()
    async with running(tmp_path / "gone", engine, retries=1) as bench:
        bench.add("b", row("x"))
        batch = await bench.ended("b")
        (line,) = bench.lines(batch)[1].values()
    assert (line["response"]["status_code"], dict(engine.tries)) == (404, {"x": 2})


async def test_a_batch_whose_adapter_is_not_known_yet_waits_for_its_model(tmp_path: Path) -> None:
    class Starting(Engine):
        """Engines that have not started at the first looks."""

        looks = 0

        async def refresh(self, wake: bool = False) -> Collection[str]:
            """Return the model until it has started."""
            if self.looks >= left:
                models.add("demo:mine")
                return ()
            self.looks += wake
            return ("demo",)

    left, models = 3.0, {"demo"}
    mine = row("x", body={"model": "demo:mine", "messages": [{"role": "user", "content": "x"}]})
    async with running(tmp_path, Starting(), models=models) as bench:
        bench.add("b", mine)
        assert (await bench.ended("b")).completed == 1
    # A model that never starts keeps no batch open beyond its window.
    left, models = math.inf, {"demo"}
    async with running(tmp_path / "never", Starting(), models=models) as bench:
        bench.add("b", mine, expires_at=NOW)
        batch = await bench.ended("b", state="failed")
    assert [error["code"] for error in batch.errors] == ["model_not_found"]


async def test_an_outage_costs_no_row(tmp_path: Path) -> None:
    engine = Engine(lambda id: 503 if engine.tries.total() < 100 else 200)
    async with running(tmp_path, engine, retries=2) as bench:
        bench.add("b", row("x"), row("y"))
        batch = await bench.ended("b")
    assert (batch.completed, batch.failed) == (2, 0)


async def test_a_row_that_fails_beside_others_is_given_up(tmp_path: Path) -> None:
    engine = Engine(lambda id: 503 if id == "bad" else 200)
    async with running(tmp_path, engine, retries=2, concurrency=Fixed(2)) as bench:
        bench.add("b", row("bad"), *(row(str(number)) for number in range(60)))
        batch = await bench.ended("b")
    assert (batch.completed, batch.failed) == (60, 1)


async def test_rows_without_an_answer_at_the_deadline_are_ended_and_told(tmp_path: Path) -> None:
    engine = Engine()
    engine.go.clear()
    async with running(tmp_path, engine, concurrency=Fixed(2)) as bench:
        bench.add("b", *(row(str(number)) for number in range(5)))
        await engine.until(lambda: engine.running == 2)
        bench.now = NOW + DAY_S
        bench.runner.notice()
        batch = await bench.ended("b", state="expired")
        output, errors = bench.lines(batch)
        assert (engine.running, bench.runner.rows.in_flight) == (0, 0)
    assert (set(output), set(errors)) == (set(), set("01234"))
    assert errors["0"] == errors["3"] | {name: errors["0"][name] for name in ("id", "custom_id")}
    assert errors["3"]["response"] is None
    assert errors["3"]["error"]["code"] == "batch_expired"
    assert (batch.completed, batch.failed, batch.unrun) == (0, 5, 5)
    assert (batch.expired_at, len(engine.sent)) == (NOW + DAY_S, 2)


async def test_a_row_that_is_tried_again_ends_at_the_deadline(tmp_path: Path) -> None:
    engine = Engine(lambda _: 429)
    async with running(tmp_path, engine, backoff=Backoff(3600.0, 3600.0)) as bench:
        bench.add("b", row("x"))
        await engine.until(lambda: engine.tries["x"] == 1)
        bench.now = NOW + DAY_S
        bench.runner.notice()
        batch = await bench.ended("b", state="expired")
    assert batch.unrun == 1


async def test_a_cancelled_batch_ends_what_is_in_flight_and_no_other_batch(tmp_path: Path) -> None:
    engine = Held("2", "3", "other")
    async with running(tmp_path, engine, concurrency=Fixed(4)) as bench:
        bench.add("b", *(row(str(number)) for number in range(9)))
        bench.add("c", row("other"), tenant="ben")
        await engine.until(lambda: set(engine.held) == {"2", "3", "other"} and engine.final.total() >= 2)
        await bench.until(lambda: bench.store.batch("b").completed >= 2)
        bench.store.move("b", "cancelling", NOW)
        bench.runner.notice()
        batch = await bench.ended("b", state="cancelled")
        assert set(engine.held) == {"other"}
        engine.go.set()
        await bench.ended("c")
        output, errors = bench.lines(batch)
    assert set(output) >= {"0", "1"}
    assert not set(output) & set(errors)
    assert set(output) | set(errors) == set("012345678")
    assert {"2", "3"} <= set(errors)
    assert {line["error"]["code"] for line in errors.values()} == {"batch_cancelled"}
    # A row that had its answer is in the output, and no row was sent twice.
    assert set(engine.tries.values()) == {1}
    assert batch.unrun == batch.failed == len(errors)


async def test_a_call_that_serve_cancels_is_tried_again(tmp_path: Path) -> None:
    class Removed(Engine):
        """Its replica is taken away, the first time."""

        async def send(self, request: RowRequest) -> RowAnswer:
            """Answer the second try."""
            answer = await super().send(request)
            if self.tries[custom_id_of(request.body)] == 1:
                raise asyncio.CancelledError
            return answer

    async with running(tmp_path, engine := Removed()) as bench:
        bench.add("b", row("x"))
        assert (await bench.ended("b")).completed == 1
    assert engine.tries["x"] == 2


async def test_a_stopped_runner_records_what_is_in_flight(tmp_path: Path) -> None:
    engine = Engine()
    engine.go.clear()
    async with running(tmp_path, engine, concurrency=Fixed(2)) as bench:
        bench.add("b", *(row(str(number)) for number in range(5)))
        await engine.until(lambda: engine.running == 2)
        bench.runner.stop()
        engine.go.set()
    async with running(tmp_path, engine) as bench:
        assert bench.store.batch("b").completed == 2
        await bench.ended("b")
    assert set(engine.final.values()) == {1}


async def test_results_that_come_soon_after_one_another_are_recorded_together(tmp_path: Path) -> None:
    answered: set[int] = set()

    def count(point: str) -> None:
        if point == "store.commit" and engine.final:
            answered.add(sum(engine.final.values()))

    class Staggered(Engine):
        """Its rows end one after the other."""

        async def send(self, request: RowRequest) -> RowAnswer:
            await asyncio.sleep(0.001 * int(custom_id_of(request.body)))
            return await super().send(request)

    engine = Staggered()
    async with running(tmp_path, engine, concurrency=Fixed(20), gather_s=1.0) as bench:
        bench.at = count
        bench.add("b", *(row(str(number)) for number in range(20)))
        await bench.ended("b")
    # Nothing is written before all have come.
    assert answered == {20}


async def test_a_full_disk_delays_and_loses_nothing(tmp_path: Path) -> None:
    engine = Engine()
    failures = [5]

    def full(point: str) -> None:
        if point == "store.commit" and engine.final and failures[0]:
            failures[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")

    async with running(tmp_path, engine, concurrency=Fixed(3)) as bench:
        bench.at = full
        bench.add("b", *(row(str(number)) for number in range(10)))
        batch = await bench.ended("b")
    assert (failures, batch.completed) == ([0], 10)
    assert set(engine.final.values()) == {1}


async def test_no_more_rows_are_sent_while_results_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine()
    engine.places = 1000
    # Rows that were sent by each try.
    tries: list[int] = []

    def full(point: str) -> None:
        if point == "store.commit" and engine.final and len(tries) < 30:
            tries.append(len(engine.sent))
            if len(tries) == 2:
                # The limit would grow fast from now on; the first error is known, however slow the thread.
                monkeypatch.setattr(pacing, "GROWING_S", 0.001)
                monkeypatch.setattr(pacing, "STEADY_S", 0.001)
            raise OSError(errno.ENOSPC, "No space left on device")

    async with running(tmp_path, engine, concurrency=Auto(most=1000)) as bench:
        bench.at = full
        bench.add("b", *(row(str(number)) for number in range(100)))
        await bench.ended("b")
    assert len(tries) == 30
    # The first rows, and as many as were let in before the first error.
    assert tries[-1] <= 20


async def test_an_input_that_is_gone_fails_the_batch_and_keeps_its_results(tmp_path: Path) -> None:
    engine = Engine()
    engine.go.clear()
    async with running(tmp_path, engine, concurrency=Fixed(1)) as bench:
        bench.add("b", *(row(str(number)) for number in range(300)))
        await engine.until(lambda: engine.running == 1)
        bench.content.path("in-b").unlink()
        engine.go.set()
        batch = await bench.ended("b", state="failed")
        assert "in-b is gone" in batch.errors[0]["message"]
        assert len(bench.lines(batch)[0]) == batch.completed > 0


async def test_bytes_in_flight_are_bounded(tmp_path: Path) -> None:
    engine = Engine()
    rows = [row(f"{number}" + "x" * 500) for number in range(9)]
    async with running(tmp_path, engine, concurrency=Fixed(9), max_bytes=3 * len(text_of(rows[0]))) as bench:
        bench.add("b", *rows)
        await bench.ended("b")
    assert engine.most == 3


@pytest.mark.parametrize("max_bytes", [1, 1 << 20])
async def test_a_tenant_whose_rows_wait_for_another_try_holds_up_nobody(
    max_bytes: int, tmp_path: Path
) -> None:
    engine = Engine(lambda id: 429 if id.startswith("a") else 200)
    pace = Fixed(2)
    waits = Backoff(3600.0, 3600.0)
    async with running(tmp_path, engine, concurrency=pace, backoff=waits, max_bytes=max_bytes) as bench:
        bench.add("anna", *(row(f"a{number}") for number in range(9)))
        await engine.until(lambda: engine.tries.total() == min(2, max_bytes))
        bench.add("ben", *(row(f"b{number}") for number in range(9)), tenant="ben")
        assert (await bench.ended("ben")).completed == 9
        # Rows that wait are bounded too.
        assert bench.runner.rows.in_flight == min(2, max_bytes)
        bench.now = NOW + DAY_S
        bench.runner.notice()
        assert (await bench.ended("anna", state="expired")).unrun == 9
    assert engine.most <= 2


async def test_rows_that_are_due_again_share_places_with_other_tenants(tmp_path: Path) -> None:
    engine = Engine(lambda id: 503 if id.startswith("a") and engine.tries[id] < 4 else 200)
    async with running(tmp_path, engine, concurrency=Fixed(1)) as bench:
        for tenant in ("anna", "ben"):
            bench.add(tenant, *(row(f"{tenant}{number}") for number in range(20)), tenant=tenant)
        for tenant in ("anna", "ben"):
            assert (await bench.ended(tenant)).completed == 20
    assert engine.most == 1
    assert set(engine.final.values()) == {1}


async def test_a_cancelled_runner_ends_after_the_thread_that_writes(tmp_path: Path) -> None:
    store, content = opened(tmp_path)
    engine = Engine()
    loop, reached, go = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def wait(point: str) -> None:
        if point == "store.commit" and engine.final:
            loop.call_soon_threadsafe(reached.set)
            assert go.wait(STILL_S)

    put(store, content, "in", text_of(row("x")))
    store.add_batch(batch_of("b", "in"), 1)
    runner = BatchRunner(store, content, engine, KeyRules({"demo"}, limits_of()), clock=lambda: NOW)
    failpoints.hook = wait
    try:
        async with asyncio.timeout(STILL_S):
            run = asyncio.create_task(runner.run())
            await reached.wait()
            run.cancel()
            for _ in range(20):
                await asyncio.sleep(0)
            # Otherwise the store would be closed, and the next process write the same file.
            assert not run.done()
            go.set()
            await asyncio.wait([run])
    finally:
        go.set()
        failpoints.hook = None
    assert run.cancelled()
    batch = store.batch("b")
    assert batch.completed == 1
    assert len(b"".join(store.results("b", False))) == batch.output_bytes > 0
    store.close()


async def test_a_batch_that_is_deleted_meanwhile_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, Engine()) as bench:
        bench.add("old", row("x"))
        await bench.ended("old")
        earlier = [replace(bench.store.batch("old"), state="finalizing")]
        put(bench.store, bench.content, "in", text_of(row("y")))
        read = bench.store.open_batches

        def open_batches() -> list[Batch]:
            found = [*earlier, *read()]
            earlier.clear()
            return found

        monkeypatch.setattr(bench.store, "open_batches", open_batches)
        bench.store.add_batch(batch_of("new", "in"), 1, 1)
        bench.runner.notice()
        await bench.ended("new")
        assert [batch.id for batch in bench.store.batches("anna").items] == ["new"]


async def test_a_row_that_is_due_goes_before_rows_of_earlier_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the tenant, which has all its rows in flight, would wait for itself."""
    tries = 0

    def status(id: str) -> int:
        nonlocal tries
        tries += id == "y" and bench.store.batch("a").state == "in_progress"
        return 503 if id == "y" and tries < 5 else 200

    engine = Engine(status)
    async with running(tmp_path, engine, concurrency=Fixed(1)) as bench:
        bench.add("a", row("x"))
        bench.add("b", row("y"), row("z"))
        planned, late = bench.store.plan, ["in-a"]

        def plan(id: str) -> Any:
            if id in late:
                raise DatabaseError("no connection")
            return planned(id)

        monkeypatch.setattr(bench.store, "plan", plan)
        await engine.until(lambda: engine.tries["y"] > 0)
        late.clear()
        await bench.ended("a")
        await bench.ended("b")
    assert tries == 5


async def test_valid_rows_are_sent_although_the_limit_on_lines_was_lowered(tmp_path: Path) -> None:
    store, content = opened(tmp_path)
    put(store, content, "in", text_of(row("x"), row("y" * 500)))
    store.add_batch(batch_of("b", "in"), 1)
    store.move("b", "in_progress", NOW, total=2)
    store.close()
    async with running(tmp_path, Engine(), limits=limits_of(max_line_bytes=200)) as bench:
        assert (await bench.ended("b")).completed == 2


async def test_an_input_that_lost_rows_fails_the_batch_with_its_results(tmp_path: Path) -> None:
    async with running(tmp_path, Engine(), concurrency=Fixed(1)) as bench:
        bench.add("b", *(row(str(number)) for number in range(300)))
        await bench.until(lambda: bench.store.batch("b").completed > 0)
        os.truncate(bench.content.path("in-b"), len(text_of(*(row(str(number)) for number in range(200)))))
        batch = await bench.ended("b", state="failed")
        assert batch.errors[0]["code"] == "content_lost"
        assert batch.completed == len(bench.lines(batch)[0]) == 200


async def test_an_output_that_cannot_be_written_holds_up_no_other_batch(tmp_path: Path) -> None:
    engine = Engine()
    async with running(tmp_path, engine, concurrency=Fixed(4)) as bench:
        # A folder is in the way.
        bench.content.path("file-a-out").mkdir()
        for name, tenant in (("a", "anna"), ("b", "ben")):
            bench.add(name, *(row(f"{name}{number}") for number in range(20)), tenant=tenant)
        assert (await bench.ended("b")).completed == 20
        await bench.until(lambda: bench.store.batch("a").state == "finalizing")
        bench.content.path("file-a-out").rmdir()
        assert (await bench.ended("a")).completed == 20
    assert set(engine.final.values()) == {1}

"""The FunctionEngine's own code, without Ray: its class, its answers, its health and its end."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve

from serve_app.api.errors import RequestError
from serve_app.api.scheduling import Scheduling
from serve_app.engine import function
from serve_app.engine.function import FunctionEngine
from serve_app.ledger.rows import LedgerRow
from serve_app.settings.models import FunctionSettings
from serve_app.settings.schema import SettingsError, parse
from serve_app.settings.telemetry import SILENT
from serve_app.settings.usage import Quota, QuotasSettings, UsageSettings
from serve_app.wire import frame
from serve_app.wire.frame import unpack
from serve_app.wire.request import RelayRequest
from serve_app.wire.usage import Tokens
from tests.serve_app.ledger.crashing import ran
from tests.serve_app.quotas.fleet import QuotasHandle


class Upper:
    """Puts texts into capitals.

    Attributes:
        built: How many there have been.
    """

    built = 0

    def __init__(self, suffix: str = "") -> None:
        type(self).built += 1
        self.suffix = suffix
        self.ill = False
        self.threads: set[str] = set()

    def process(self, batch: list[str]) -> list[str]:
        self.threads.add(threading.current_thread().name)
        return [record.upper() + self.suffix for record in batch]

    def estimate_cost(self, record: object) -> int:
        return len(record) if isinstance(record, str) else 1

    def check_health(self) -> None:
        if self.ill:
            raise RuntimeError("the device is gone")


class Vectors:
    async def process(self, batch: list[str]) -> list[list[float]]:
        return [[float(len(text)), 0.0] for text in batch]

    async def check_health(self) -> None:
        raise RuntimeError("asked")


class Array:
    """Stands for an array of numpy's or a tensor of torch's."""

    def tolist(self) -> list[int]:
        return [1, 2]


class Odd:
    """Results of every kind."""

    def process(self, batch: list[str]) -> list[Any]:
        results = {"array": Array(), "set": {1}, "nan": float("nan")}
        return [results[record] for record in batch]


class Names(dict[str, str]):
    """A class without a signature that Python could tell: its constructor is one of C."""

    def process(self, batch: list[str]) -> list[str]:
        return [self.get(record, "?") for record in batch]


class Useless:
    pass


def settings(name: str, **fields: Any) -> FunctionSettings:
    target = name if ":" in name else f"{__name__}:{name}"
    model = {"id": "m", "kind": "function", "target": target} | fields
    (found,) = parse({"models": [model]}).models
    assert isinstance(found, FunctionSettings)
    return found


async def build(name: str, max_records: int = 10, **fields: Any) -> FunctionEngine:
    engine = FunctionEngine.__new__(FunctionEngine)
    await engine.__init__(settings(name, **fields), max_records)  # type: ignore[misc]
    return engine


@pytest.fixture
async def upper() -> AsyncIterator[FunctionEngine]:
    engine = await build("Upper", options={"suffix": "!"})
    yield engine
    await engine._batcher.stop()


async def relay(
    engine: FunctionEngine, path: str, body: object, scheduling: Scheduling | None = None
) -> tuple[int, Any, dict[bytes, bytes]]:
    """Return the status, the JSON and the headers of an answer."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = RelayRequest("POST", path, b"", [], text, scheduling or Scheduling())
    (message,) = [message async for message in engine.relay(request)]
    piece = unpack(message)
    assert piece.head is not None
    return piece.head.status, json.loads(piece.body), dict(piece.head.headers)


# The class


async def test_the_class_is_built_once_with_its_options(upper: FunctionEngine) -> None:
    before = Upper.built
    for _ in range(3):
        assert (await upper.process({"records": ["a"]}))["results"] == ["A!"]
    assert Upper.built == before


@pytest.mark.parametrize(
    ("target", "fields", "message"),
    [
        ("no.such.module:Class", {}, r"models\[m\]\.target: no\.such\.module:Class can't be imported"),
        ("Nothing", {}, r"models\[m\]\.target: .*Nothing can't be imported"),
        ("Upper", {"options": {"prefix": "x"}}, r"models\[m\]\.options: .*'prefix'"),
        ("Useless", {}, r"has no method process\(batch\)"),
    ],
)
async def test_a_class_that_can_not_be_used_is_an_error(target: str, fields: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        await build(target, **fields)


async def test_a_class_whose_constructor_is_native_gets_its_options() -> None:
    engine = await build("Names", options={"a": "Ada"})
    assert (await engine.process({"records": ["a", "b"]}))["results"] == ["Ada", "?"]
    await engine._batcher.stop()


async def test_a_replica_that_was_never_built_ends_quietly() -> None:
    await FunctionEngine.__new__(FunctionEngine).__del__()


async def test_settings_of_the_batcher_reach_it() -> None:
    engine = await build("Upper", batcher={"max_batch_size": 2, "profile": "real_time"})
    await engine.process({"records": ["a"] * 6})
    assert engine._batcher.stats.total_batches >= 3
    assert engine._batcher.stats.total_batch_cost == 6
    await engine._batcher.stop()


async def test_a_function_that_is_not_async_leaves_the_event_loop_alone(upper: FunctionEngine) -> None:
    await upper.process({"records": ["a"]})
    assert threading.current_thread().name not in upper._model.threads


# The handle


async def test_process(upper: FunctionEngine) -> None:
    answer = await upper.process({"records": ["a", "b"], "task_id": "t"})
    assert answer == {"results": ["A!", "B!"], "task_id": "t"}


async def test_partial(upper: FunctionEngine) -> None:
    answer = await upper.process({"records": ["a", 5], "partial": True})
    assert answer["results"] == ["A!", None]
    (error,) = answer["errors"]
    assert (error["index"], error["type"]) == (1, "processing_error")
    assert error["message"].startswith("AttributeError: ")
    assert (await upper.process({"records": ["a"], "partial": True}))["errors"] == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"records": []}, "No records provided"),
        ({"records": ["a"] * 11}, "records: 11 records in one call, at most 10 are allowed"),
        ({}, "records: required, but missing"),
        ({"records": ["a"], "service_tier": "x"}, "service_tier: "),
    ],
)
async def test_a_wrong_request_is_refused(upper: FunctionEngine, body: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        await upper.process(body)
    assert caught.value.status == 400
    assert caught.value.message.startswith(message)
    status, answer, _ = await relay(upper, "/process", body)
    assert (status, answer["error"]["message"]) == (400, caught.value.message)


# The relay


async def test_process_over_the_relay(upper: FunctionEngine) -> None:
    status, answer, headers = await relay(upper, "/process", {"records": ["a"], "task_id": "t"})
    assert (status, answer) == (200, {"results": ["A!"], "task_id": "t"})
    assert headers[b"content-type"] == b"application/json"


async def test_the_scheduling_is_that_of_the_relay_request(
    upper: FunctionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    submit = upper._batcher.submit_nowait

    def spy(record: Any, **scheduling: Any) -> Any:
        seen.append(scheduling)
        return submit(record, **scheduling)

    monkeypatch.setattr(upper._batcher, "submit_nowait", spy)
    # Headers have had their say by now; the body's is not heard again.
    await relay(upper, "/process", {"records": ["a"], "tenant": "body"}, Scheduling(1, "header", 60))
    await upper.process({"records": ["a"], "tenant": "body", "service_tier": "priority"})
    first, second = seen
    assert (first["priority"], first["tenant"]) == (1, "header")
    assert first["deadline"] is not None
    assert second == {"priority": -1, "tenant": "body", "deadline": None}


async def test_a_result_that_is_an_array_is_written_as_a_list() -> None:
    engine = await build("Odd")
    status, answer, _ = await relay(engine, "/process", {"records": ["array"]})
    assert (status, answer["results"]) == (200, [[1, 2]])
    for record in ("set", "nan"):
        status, answer, _ = await relay(engine, "/process", {"records": [record]})
        assert (status, answer["error"]["type"]) == (500, "internal_error")
        assert "JSON" in answer["error"]["message"]
    await engine._batcher.stop()


async def test_embeddings() -> None:
    engine = await build("Vectors", embeddings=True)
    status, answer, _ = await relay(engine, "/v1/embeddings", {"input": ["a", "bcd"]})
    assert status == 200
    assert [item["embedding"] for item in answer["data"]] == [[1.0, 0.0], [3.0, 0.0]]
    assert answer["model"] == "m"
    assert answer["usage"]["total_tokens"] == 2, "a default cost of one each"
    status, answer, _ = await relay(engine, "/v1/embeddings", {"input": "a", "dimensions": 3})
    assert (status, answer["error"]["param"]) == (400, "dimensions")
    await engine._batcher.stop()


async def test_an_answer_that_is_too_large_for_one_message_comes_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frame, "MAX_BODY_BYTES", 50)
    engine = await build("Vectors", embeddings=True)
    body = json.dumps({"input": ["a", "b"]}).encode()
    request = RelayRequest("POST", "/v1/embeddings", b"", [], body)
    pieces = [frame.unpack(message) async for message in engine.relay(request)]
    assert len(pieces) > 2
    assert max(len(piece.body) for piece in pieces) == 50
    assert len(json.loads(b"".join(piece.body for piece in pieces))["data"]) == 2
    await engine._batcher.stop()


class Long:
    """Vectors that take long to write."""

    async def process(self, batch: list[str]) -> list[list[float]]:
        return [[number / 7 for number in range(20)] for _ in batch]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["a"] * 500}),
        ("/v1/embeddings", {"input": ["a"] * 500, "encoding_format": "base64"}),
        ("/process", {"records": ["a"] * 500}),
    ],
)
async def test_the_loop_turns_while_a_large_answer_is_written(
    path: str, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await build("Long", max_records=500, embeddings=True)
    monkeypatch.setattr(function, "RESULTS_PER_TURN", 10)
    turns = 0
    written: list[int] = []
    dump = function._dump

    def counted(value: Any) -> bytes:
        written.append(turns)
        return dump(value)

    monkeypatch.setattr(function, "_dump", counted)

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.ensure_future(turn())
    status, answer, _ = await relay(engine, path, body)
    turning.cancel()
    assert status == 200
    results = answer["data"] if "data" in answer else answer["results"]
    assert len(results) == 500
    # Ten results at most are written in one turn of the loop; the fields beside them in the last one.
    assert len(set(written)) >= 50
    await engine.__del__()


async def test_embeddings_name_the_text_that_failed() -> None:
    engine = await build("Odd")
    status, answer, _ = await relay(engine, "/v1/embeddings", {"input": ["array", "unknown"]})
    assert (status, answer["error"]["param"]) == (422, "input[1]")
    assert answer["error"]["message"] == "input[1]: KeyError: 'unknown'"
    await engine._batcher.stop()


# Statistics, health, the end


async def test_stats(upper: FunctionEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "get_replica_context", lambda: SimpleNamespace(replica_tag="r1"))
    await upper.process({"records": ["a", "bc"]})
    stats = await upper.stats()
    assert stats["replica"] == "r1"
    assert stats["batcher"]["total_completed"] == 2
    assert stats["batcher"]["total_batch_cost"] == 3
    json.dumps(stats)


async def test_the_usage_has_the_largest_tenants_and_the_sum_of_the_others(upper: FunctionEngine) -> None:
    upper._tenants = 1
    assert (await upper.stats())["usage"]["tenants"] == {}
    for tenant, output in (("a", 1), ("b", 30), ("c", 2), ("b", 10), ("", 7)):
        ran(upper._accounts.book, Tokens(3, 1, output), tenant)
    usage = (await upper.stats())["usage"]
    largest, other = usage["tenants"]["b"], usage["tenants"]["other"]
    rate = largest.pop("tokens_per_s")
    assert largest == {"calls": 2, "prompt": 6, "cached": 2, "output": 40, "cost": 0}
    assert (other["calls"], other["output"]) == (2, 3)
    assert other["tokens_per_s"] / rate == pytest.approx(9 / 46)
    # Of the replica itself.
    assert usage["own"]["output"] == 7


async def test_health_is_that_of_the_object_and_of_the_batcher(upper: FunctionEngine) -> None:
    await upper.check_health()
    upper._model.ill = True
    with pytest.raises(RuntimeError, match="the device is gone"):
        await upper.check_health()
    upper._model.ill = False
    await upper._batcher.stop()
    with pytest.raises(RuntimeError, match="the batcher has stopped"):
        await upper.check_health()


async def test_an_object_may_be_asked_asynchronously_and_need_not_know() -> None:
    engine = await build("Vectors")
    with pytest.raises(RuntimeError, match="asked"):
        await engine.check_health()
    await engine._batcher.stop()
    engine = await build("Odd")
    await engine.check_health()
    await engine._batcher.stop()


async def test_the_end_finishes_what_was_taken_in(upper: FunctionEngine) -> None:
    ticket = upper._batcher.submit_nowait("a")
    await upper.__del__()
    assert ticket.result() == "A!"
    with pytest.raises(RequestError) as caught:
        await upper.process({"records": ["a"]})
    assert caught.value.status == 503


# Its calls


def rows(engine: FunctionEngine) -> list[LedgerRow]:
    return [call.row() for call in engine._accounts.book.take()]


async def test_a_call_has_a_row_with_the_cost_of_its_records(upper: FunctionEngine) -> None:
    upper._accounts.book.keep_ended()
    await relay(upper, "/process", {"records": ["a", "b"]}, Scheduling(1, "acme"))
    await upper.process({"records": ["a"], "tenant": "bits"})
    first, second = rows(upper)
    assert (first.tenant, first.tier, first.endpoint, first.source) == ("acme", "flex", "/process", "http")
    assert (first.cost, first.prompt_tokens, first.output_tokens, first.outcome) == (2, 0, 0, "ok")
    assert (second.tenant, second.endpoint, second.source, second.cost) == ("bits", "process", "handle", 1)


async def test_a_refused_call_of_a_function_has_no_row(upper: FunctionEngine) -> None:
    upper._accounts.book.keep_ended()
    status, _, _ = await relay(upper, "/process", {"records": []})
    assert status == 400
    assert rows(upper) == []


async def test_a_call_of_a_function_counts_as_one_request_of_its_tenant(upper: FunctionEngine) -> None:
    quota = Quota(requests_per_minute=2)
    handle = QuotasHandle(QuotasSettings(tenants={"acme": quota}, folder="/nowhere"))
    upper._open("m", SILENT, UsageSettings(quotas=handle.settings), handle)
    acme = Scheduling(1, "acme")
    await upper.process({"records": ["a"], "tenant": "acme"})
    status, _, headers = await relay(upper, "/process", {"records": ["a", "b"]}, acme)
    assert (status, headers[b"x-ratelimit-limit-requests"]) == (200, b"2")
    status, body, headers = await relay(upper, "/process", {"records": ["a"]}, acme)
    assert (status, headers[b"x-saturate-refused-by"]) == (429, b"quota")
    assert body["error"]["message"].startswith("tenant acme: requests_per_minute 2: ")
    status, _, headers = await relay(upper, "/process", {"records": ["a"]}, Scheduling(1, "other"))
    assert (status, [name for name in headers if name.startswith(b"x-ratelimit")]) == (200, [])
    await upper._accounts.stop()

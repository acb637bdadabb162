"""Runs against a service that fails in every way, in one process."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic_core import from_json
from starlette.responses import PlainTextResponse, Response

from serve_app.api.protocol import JSON
from serve_app.client import Backoff
from serve_app.dataset import HTTPClient, InputError, Prompter, run
from serve_app.dataset.formats import numbered
from serve_app.dataset.output import Output
from serve_app.dataset.readers import open_source
from serve_app.dataset.run import Drive
from serve_app.rows.errors import RunError
from serve_app.rows.pacing import Auto
from serve_app.rows.rows import Result
from tests.progress import STILL_S, until
from tests.serve_app.dataset.fake import FakeService, failure, no_route, texts

NOW = Backoff(0.0001, 0.001)
PROMPTS = [f"p{number}" for number in range(23)]


def client(service: FakeService) -> HTTPClient:
    return HTTPClient("http://fake", transport=httpx.ASGITransport(app=service.app))


class Sent:
    """A run over prompts.

    Attributes:
        results: The rows of the output so far.
    """

    def __init__(
        self,
        service: FakeService | HTTPClient,
        prompts: list[str],
        concurrency: int | Literal["auto"] = 3,
        retries: int = 20,
        prompter: Prompter | None = None,
    ) -> None:
        self.results: list[Result] = []
        self.drive = Drive(
            numbered({"prompt": prompt} for prompt in prompts),
            prompter or Prompter(),
            client(service) if isinstance(service, FakeService) else service,
            {},
            self.results.extend,
            concurrency=concurrency,
            retries=retries,
            backoff=NOW,
        )

    @property
    def rows(self) -> list[JSON]:
        """The rows, in the order of the input."""
        return [from_json(result.text) for result in sorted(self.results)]


async def send(service: FakeService, prompts: list[str], **options: Any) -> tuple[list[JSON], Drive]:
    """Return the rows, in the order of the input, and the run."""
    sent = Sent(service, prompts, **options)
    await sent.drive.run()
    return sent.rows, sent.drive


async def test_every_row_comes_back_once() -> None:
    service = FakeService()
    rows, dataset_run = await send(service, PROMPTS)
    assert [row["result"] for row in rows] == [prompt.upper() for prompt in PROMPTS]
    assert [row["row"] for row in rows] == list(range(23))
    assert rows[0] == {
        "row": 0,
        # The output fills in the number.
        "id": None,
        "result": "P0",
        "finish_reason": "stop",
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "attempts": 1,
        "error": None,
    }
    assert [len(body["prompts"]) for body in service.calls] == [1] * 23
    assert {body["service_tier"] for body in service.calls} == {"flex"}
    assert service.calls[0]["task_id"] == "row_0"
    assert dataset_run.stats.rows == 23


async def test_no_more_calls_at_once_than_allowed() -> None:
    service = FakeService()
    service.release.clear()

    sending = asyncio.create_task(send(service, PROMPTS, concurrency=4))
    await until(lambda: service.most_at_once == 4)
    service.release.set()
    await sending
    assert service.most_at_once == 4


async def test_calls_that_fail_are_sent_again() -> None:
    service = FakeService()
    troubles: list[Callable[[], Response]] = [
        lambda: failure(503),
        lambda: failure(429, "rate_limit_error"),
        lambda: failure(500, "internal_error"),
        no_route,
        lambda: PlainTextResponse("Bad gateway", 502),
        lambda: PlainTextResponse("no json"),
        lambda: PlainTextResponse('{"results": []}'),
    ]
    service.trouble = lambda body: troubles.pop()() if troubles else None
    rows, dataset_run = await send(service, PROMPTS)
    assert [row["result"] for row in rows] == [prompt.upper() for prompt in PROMPTS]
    assert dataset_run.stats.retries == 7
    assert sum(row["attempts"] - 1 for row in rows) == 7
    assert set(service.served.values()) == {1}


async def test_an_adapter_that_is_replaced_ends_no_run() -> None:
    service = FakeService()
    missing = 3

    def trouble(body: JSON) -> Response | None:
        nonlocal missing
        if "p9" not in texts(body) or not missing:
            return None
        missing -= 1
        return failure(404, "not_found_error", "model")

    service.trouble = trouble
    rows, _ = await send(service, PROMPTS)
    assert [row["result"] for row in rows] == [prompt.upper() for prompt in PROMPTS]
    assert rows[9]["attempts"] == 4


async def test_errors_of_rows_are_data() -> None:
    service = FakeService()
    service.refuses = {"p3": "the prompt has 9 tokens; this model takes 8 at most"}
    prompter = Prompter(template="{% if prompt == 'p7' %}{{ nothing }}{% endif %}{{ prompt }}")
    rows, _ = await send(service, PROMPTS, prompter=prompter)
    assert [row["row"] for row in rows if row["error"]] == [3, 7]
    assert rows[3]["error"] == {"type": "invalid_request_error", "message": service.refuses["p3"]}
    assert rows[3]["result"] is None
    assert rows[7]["error"]["type"] == "template_error"
    assert rows[7]["attempts"] == 0
    assert not any("p7" in texts(body) for body in service.calls)


@pytest.mark.parametrize(
    "trouble",
    [
        lambda: failure(400, "invalid_request_error", "prompts[0]"),
        lambda: failure(413, "request_too_large"),
        lambda: failure(500, "internal_error"),
        lambda: failure(503),
    ],
)
async def test_a_row_that_makes_calls_fail_is_found(trouble: Callable[[], Response]) -> None:
    service = FakeService()
    service.trouble = lambda body: trouble() if {"p6", "p9"} & set(texts(body)) else None
    rows, _ = await send(service, PROMPTS, retries=3)
    assert [row["row"] for row in rows if row["error"]] == [6, 9]
    assert [row["row"] for row in rows] == list(range(23))
    assert set(service.served.values()) == {1}


async def test_a_service_that_is_gone_ends_the_run() -> None:
    service = FakeService()
    service.trouble = lambda body: failure(503) if len(service.calls) > 3 else None
    sent = Sent(service, PROMPTS, concurrency=1, retries=2)
    with pytest.raises(RunError, match="run the same command again"):
        await sent.drive.run()
    assert [row["row"] for row in sent.rows] == list(range(3))
    assert not any(row["error"] for row in sent.rows)


async def test_an_outage_is_not_taken_for_an_error_of_rows() -> None:
    service = FakeService()
    # The first call fails before the second is served; from then on none is.
    service.trouble = lambda body: None if texts(body) == ["p1"] else failure(503)
    sent = Sent(service, PROMPTS, concurrency=2, retries=10)
    with pytest.raises(RunError, match="gave up after 11 tries of a row"):
        await sent.drive.run()
    assert [row["row"] for row in sent.rows] == [1]
    assert not any(row["error"] for row in sent.rows)


async def test_a_full_queue_is_waited_out_however_long() -> None:
    service = FakeService()
    refused = 0

    def trouble(body: JSON) -> Response | None:
        nonlocal refused
        if "p0" in texts(body) and refused < 50:
            refused += 1
            return failure(429, "rate_limit_error")
        return None

    service.trouble = trouble
    rows, _ = await send(service, PROMPTS, concurrency=2, retries=3)
    assert rows[0]["result"] == "P0"
    assert rows[0]["attempts"] == 51


@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_a_run_that_the_service_refuses_ends_at_once(status: int) -> None:
    service = FakeService()
    service.trouble = lambda body: failure(status, "invalid_request_error", "max_tokens")
    with pytest.raises(RunError, match=f"the service refuses this run: failed with {status}"):
        await send(service, PROMPTS, concurrency=1)
    assert len(service.calls) == 1


async def test_calls_in_flight_are_finished_after_stop() -> None:
    service = FakeService()
    service.release.clear()
    sent = Sent(service, PROMPTS, concurrency=2)
    running = asyncio.create_task(sent.drive.run())
    await until(lambda: service.most_at_once == 2)
    sent.drive.stop()
    service.release.set()
    await asyncio.wait_for(running, STILL_S)
    assert len(sent.rows) == 2
    assert len(service.calls) == 2


async def test_chats() -> None:
    service = FakeService()
    rows, _ = await send(service, PROMPTS, prompter=Prompter(system="shout"))
    assert [row["result"] for row in rows] == [prompt.upper() for prompt in PROMPTS]
    assert service.calls[0]["messages"][0] == [
        {"role": "system", "content": "shout"},
        {"role": "user", "content": "p0"},
    ]
    assert "prompts" not in service.calls[0]


async def test_auto_backs_off_from_429_and_finishes() -> None:
    service = FakeService()
    service.trouble = lambda body: (
        failure(429, "rate_limit_error", retry_after="0") if len(service.calls) <= 5 else None
    )
    rows, drive = await send(service, PROMPTS, concurrency="auto")
    assert all(row["result"] for row in rows)
    assert isinstance(drive.concurrency, Auto)
    assert drive.concurrency.limit < 4


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.integers(0, 12),
    st.integers(1, 4),
    st.lists(st.sampled_from("xyzok"), max_size=20),
)
def test_no_row_is_lost_or_doubled_however_calls_fail(count: int, limit: int, fates: list[str]) -> None:
    troubles = {
        "x": lambda: failure(503),
        "y": lambda: failure(429, "rate_limit_error"),
        "z": lambda: failure(400, "invalid_request_error", "prompts[0]"),
    }
    service = FakeService()

    def trouble(body: JSON) -> Response | None:
        fate = troubles.get(fates.pop()) if fates else None
        return fate() if fate else None

    service.trouble = trouble
    rows, dataset_run = asyncio.run(send(service, PROMPTS[:count], concurrency=limit))
    assert [row["row"] for row in rows] == list(range(count))
    for row in rows:
        assert (row["result"] is None) == (row["error"] is not None)
    assert set(service.served.values()) <= {1}
    assert dataset_run.stats.in_flight == 0


async def test_run_takes_mappings_prompts_and_files(tmp_path: Any) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": "x", "prompt": "a"}\n{"id": "y", "prompt": "b"}\n')
    service = FakeService()

    async def results(rows: AsyncIterator[JSON]) -> list[tuple[Any, str]]:
        return sorted([(row["id"], row["result"]) async for row in rows])

    expected = [("x", "A"), ("y", "B")]
    assert await results(run(str(tmp_path / "a.jsonl"), client(service))) == expected
    dataset = [{"id": "x", "prompt": "a"}, {"id": "y", "prompt": "b"}]
    assert await results(run(dataset, client(service), concurrency="auto")) == expected
    assert await results(run(["a", "b"], client(service), sampling={"max_tokens": 3})) == [(0, "A"), (1, "B")]
    assert service.calls[-1]["max_tokens"] == 3
    numpy = {"max_tokens": np.int64(4), "stop": np.array(["."])}
    row = {"id": np.int64(7), "prompt": np.str_("a")}
    assert await results(run([row], client(service), sampling=numpy, model="demo")) == [(7, "A")]
    call = service.calls[-1]
    assert (call["max_tokens"], call["stop"], call["model"]) == (4, ["."], "demo")


@pytest.mark.parametrize("broken", ["a", "b", "c"])
async def test_a_run_over_a_mended_file_loses_and_doubles_nothing(tmp_path: Path, broken: str) -> None:
    """Three rows are read ahead: rows before the break are sent."""
    service = FakeService()
    folder = tmp_path / "in"
    folder.mkdir()
    files = {name: [f"{name}{number}" for number in range(4)] for name in ("a", "b", "c")}

    def write() -> None:
        for name, prompts in files.items():
            lines = [json.dumps({"prompt": prompt}) if prompt else "{" for prompt in prompts]
            (folder / f"{name}.jsonl").write_text("\n".join(lines))

    async def once(existing: Literal["same", "resume"]) -> None:
        source = open_source(str(folder))
        output = Output(tmp_path / "out.jsonl", {}, source.fingerprint(), existing)
        drive = Drive(
            output.numbered(source.files()),
            Prompter(),
            client(service),
            {},
            output.record,
            done=output.done,
            before=output.before,
            window=(3, 1 << 20),
        )
        try:
            await drive.run()
            output.complete()
        finally:
            output.close()

    files[broken][2] = ""
    write()
    with pytest.raises(InputError, match=f"{broken}.jsonl, line 3: not valid JSON"):
        await once("same")
    files[broken][2:3] = ["mended", "more"]
    write()
    await once("resume")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    prompts = [prompt for one in files.values() for prompt in one]
    assert [(row["row"], row["result"]) for row in rows] == list(enumerate(map(str.upper, prompts)))
    assert set(service.served.values()) == {1}


async def test_closing_a_run_ends_its_calls() -> None:
    service = FakeService()
    rows = run([f"p{n}" for n in range(100)], client(service), concurrency=2)
    async for _ in rows:
        break
    await rows.aclose()  # type: ignore[attr-defined]
    sent = len(service.calls)
    await asyncio.sleep(0.05)
    assert len(service.calls) == sent < 100


async def test_a_connection_that_breaks_is_sent_again() -> None:
    broken = 3

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal broken
        if request.url.path == "/generate" and broken:
            broken -= 1
            raise httpx.RemoteProtocolError("Server disconnected")
        detail = {"finish_reason": "stop", "prompt_tokens": 1, "completion_tokens": 1}
        return httpx.Response(200, json={"results": ["A"], "details": [detail], "errors": []})

    http = HTTPClient("http://fake", transport=httpx.MockTransport(answer))
    sent = Sent(http, ["a"])
    await sent.drive.run()
    (row,) = sent.rows
    assert row["result"] == "A"
    assert row["attempts"] == 4

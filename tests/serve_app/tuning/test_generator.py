"""The load generator, against a tiny service: on virtual time for figures, else on the loopback interface."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from serve_app.tuning.goals import parse_goals
from serve_app.tuning.load import LOOK_S, Generator, LoadLevel, LoadStep, Requests
from serve_app.tuning.service import Service
from serve_app.tuning.workload import TokenLengths
from tests.batcher.virtual import now, virtual
from tests.progress import until
from tests.serve_app.tuning.streaming_server import (
    StreamingServer,
    StreamingTransport,
    streaming_server,
)

GOALS = parse_goals("ttft_p99<5,tpot_p99<5")


async def step(
    server: StreamingServer, load: LoadLevel, seconds: float = 0.6, goals: str = "", **options: Any
) -> LoadStep:
    """Return a step of answers of four tokens; a server without a URL is reached without a network."""
    requests = Requests("m", TokenLengths(5), TokenLengths(4), options.pop("prompts", ()))
    warm_up, seed = options.pop("warm_up", 0.0), options.pop("seed", 1)
    drain = options.pop("drain", 2.0)
    transport = None if server.url else StreamingTransport(server)
    async with (
        Service(server.url or "http://virtual", clock=now, transport=transport) as service,
        Generator(service, requests, parse_goals(goals) if goals else GOALS, **options) as generator,
    ):
        return await generator.step(load, seconds=seconds, warm_up=warm_up, drain=drain, seed=seed)


def looks_after(server: StreamingServer, running: int) -> Callable[[float], Awaitable[None]]:
    """Return a `sleep` whose first look at a step waits until so many requests have come to the server."""

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds)
        if seconds == LOOK_S:
            await until(lambda: server.most >= running)

    return sleep


@virtual
async def test_an_open_loop_has_the_rate_and_the_times_of_the_answers() -> None:
    found = await step(StreamingServer(token_s=0.01), LoadLevel("open", 60.0), seconds=1.0)
    assert found.sent == pytest.approx(60, abs=25)
    assert (found.failed, found.misses, found.cut, found.late_s) == (0, (), False, 0.0)
    # A token comes every 10 ms, the first one too.
    assert found.figure("ttft", 50) == pytest.approx(0.01)
    assert found.figure("tpot", 50) == pytest.approx(0.01)
    assert found.figure("latency", 50) == pytest.approx(0.04)
    # Those of the last answers may come after the step.
    assert 4 * (found.sent - 4) <= found.tokens <= 4 * found.sent


@virtual
async def test_an_open_loop_keeps_its_schedule_whatever_the_service_does() -> None:
    silent = await step(
        StreamingServer(silent=True), LoadLevel("open", 100.0), drain=0.3, goals="ttft_p99<60"
    )
    quick = await step(StreamingServer(), LoadLevel("open", 100.0))
    # The same seed has the same requests, at the same times.
    assert 10 < silent.sent == quick.sent <= 100
    assert silent.late_s == quick.late_s == 0.0
    # Of requests that are cut off below the bound it isn't known whether they hold.
    assert math.isnan(silent.figure("ttft", 50))


async def test_what_runs_at_the_end_of_a_step_is_cut_off() -> None:
    async with streaming_server(silent=True) as server:
        found = await step(
            server, LoadLevel("closed", 3), drain=0.0, goals="ttft_p99<60", sleep=looks_after(server, 3)
        )
        await until(lambda: (server.cut, server.running) == (3, 0))
    assert found.sent == 3


@virtual
async def test_a_closed_loop_has_so_many_requests_in_flight() -> None:
    server = StreamingServer(token_s=0.1)
    found = await step(server, LoadLevel("closed", 4), seconds=1.2, warm_up=0.2, goals="ttft_p99<60")
    assert server.most == 4
    assert found.in_flight == pytest.approx(4)
    assert found.peak == 4
    assert found.holds


@pytest.mark.parametrize("options", [{"status": 429}, {"status": 503}, {"broken": True}])
@virtual
async def test_answers_that_fail_count_as_missed(options: dict[str, Any]) -> None:
    found = await step(StreamingServer(**options), LoadLevel("open", 100.0), seconds=2.0)
    # It ends before its time: the goal is missed for certain. Some may still be on their way then.
    assert found.cut
    assert 0 < found.failed <= found.sent
    assert found.good == found.sent - found.failed
    assert [goal.name for goal in found.misses] == ["ttft_p99", "tpot_p99"]
    assert math.isinf(found.figure("ttft", 50))


@virtual
async def test_the_number_in_flight_is_bounded() -> None:
    server = StreamingServer(silent=True)
    found = await step(server, LoadLevel("open", 200.0), drain=0.0, goals="ttft_p99<60", most=5)
    assert server.most == 5
    assert found.failed == found.sent - 5


async def test_requests_of_a_dataset_are_texts_or_chats() -> None:
    chat = [{"role": "user", "content": "hello"}]
    async with streaming_server() as server:
        await step(server, LoadLevel("closed", 1), seconds=0.3, prompts=["a text", chat])
    assert {"/v1/completions", "/v1/chat/completions"} == set(server.paths)
    assert {body.get("prompt") for body in server.bodies} == {"a text", None}
    assert all("ignore_eos" not in body for body in server.bodies)


async def test_batch_work_runs_until_it_is_ended() -> None:
    async with streaming_server() as server:
        requests = Requests("m", TokenLengths(5), TokenLengths(4), tier="flex")
        async with Service(server.url) as service:
            clock = service.clock
            async with Generator(service, requests, GOALS) as generator:
                generator.start(3, seed=1)
                began = clock()
                await until(lambda: len(server.bodies) >= 60)
                ended = clock()
                tokens = generator.tokens_between(began, ended)
            count = len(server.bodies)
            await until(lambda: not server.running)
    assert {body["service_tier"] for body in server.bodies} == {"flex"}
    assert server.most == 3
    # The three that ran at the end are left out.
    assert 4 * (count - 4) <= tokens + 4 <= 4 * count + 4


async def test_a_task_that_is_cancelled_ends_the_load() -> None:
    async with streaming_server(silent=True) as server:
        task = asyncio.create_task(step(server, LoadLevel("closed", 4), seconds=60, goals="ttft_p99<60"))
        await until(lambda: server.running == 4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not server.running)

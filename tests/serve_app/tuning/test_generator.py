"""The load generator, against a tiny service on the loopback interface."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from serve_app.tuning.generator import LOOK_S, Generator
from serve_app.tuning.goals import parse_goals
from serve_app.tuning.load_step import Load, Step
from serve_app.tuning.requests import Requests
from serve_app.tuning.service import Service
from serve_app.tuning.workload import Lengths
from tests.serve_app.tuning.streaming_server import StreamingServer, streaming_server, until

GOALS = parse_goals("ttft_p99<5,tpot_p99<5")


async def step(
    server: StreamingServer, load: Load, seconds: float = 0.6, goals: str = "", **options: Any
) -> Step:
    """Return a step of answers of four tokens."""
    requests = Requests("m", Lengths(5), Lengths(4), options.pop("prompts", ()))
    warm_up, seed = options.pop("warm_up", 0.0), options.pop("seed", 1)
    drain = options.pop("drain", 2.0)
    async with (
        Service(server.url) as service,
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


async def test_an_open_loop_has_the_rate_and_the_times_of_the_answers() -> None:
    async with streaming_server(token_s=0.01) as server:
        found = await step(server, Load("open", 60.0), seconds=1.0)
    assert found.sent == pytest.approx(60, abs=25)
    assert (found.failed, found.misses, found.cut) == (0, (), False)
    assert 0.01 <= found.figure("ttft", 50) < found.figure("latency", 50)
    # Three tokens follow the first one.
    assert 0.009 <= found.figure("tpot", 50) <= found.figure("latency", 50) / 3
    # Those of the last answers may come after the step.
    assert 0 < found.tokens <= 4 * found.sent


async def test_an_open_loop_keeps_its_schedule_whatever_the_service_does() -> None:
    async with streaming_server(silent=True) as server:
        silent = await step(server, Load("open", 100.0), drain=0.3, goals="ttft_p99<60")
    async with streaming_server() as server:
        quick = await step(server, Load("open", 100.0))
    # The same seed has the same requests, at the same times, if this machine is in time with them.
    least, most = sorted((silent.sent, quick.sent))
    assert 10 < least <= most <= 100
    if not (silent.late_s > 0.05 or quick.late_s > 0.05):
        assert least == pytest.approx(most, abs=2)
    # Of requests that are cut off below the bound it isn't known whether they hold.
    assert math.isnan(silent.figure("ttft", 50))


async def test_what_runs_at_the_end_of_a_step_is_cut_off() -> None:
    async with streaming_server(silent=True) as server:
        found = await step(
            server, Load("closed", 3), drain=0.0, goals="ttft_p99<60", sleep=looks_after(server, 3)
        )
        await until(lambda: (server.cut, server.running) == (3, 0))
    assert found.sent == 3


async def test_a_closed_loop_has_so_many_requests_in_flight() -> None:
    # An answer takes longer by far than the next request of its client, on a busy machine too.
    async with streaming_server(token_s=0.1) as server:
        found = await step(server, Load("closed", 4), seconds=1.2, warm_up=0.2, goals="ttft_p99<60")
    assert server.most == 4
    assert found.in_flight == pytest.approx(4, abs=0.5)
    assert found.peak == 4
    assert found.holds


@pytest.mark.parametrize("options", [{"status": 429}, {"status": 503}, {"broken": True}])
async def test_answers_that_fail_count_as_missed(options: dict[str, Any]) -> None:
    async with streaming_server(**options) as server:
        found = await step(server, Load("open", 100.0), seconds=2.0)
    # It ends before its time: the goal is missed for certain. Some may still be on their way then.
    assert found.cut
    assert 0 < found.failed <= found.sent
    assert found.good == found.sent - found.failed
    assert [goal.name for goal in found.misses] == ["ttft_p99", "tpot_p99"]
    assert math.isinf(found.figure("ttft", 50))


async def test_the_number_in_flight_is_bounded() -> None:
    async with streaming_server(silent=True) as server:
        options: dict[str, Any] = {"most": 5, "sleep": looks_after(server, 5)}
        found = await step(server, Load("open", 200.0), drain=0.0, goals="ttft_p99<60", **options)
        assert server.most == 5
    assert found.failed == found.sent - 5


async def test_requests_of_a_dataset_are_texts_or_chats() -> None:
    chat = [{"role": "user", "content": "hello"}]
    async with streaming_server() as server:
        await step(server, Load("closed", 1), seconds=0.3, prompts=["a text", chat])
    assert {"/v1/completions", "/v1/chat/completions"} == set(server.paths)
    assert {body.get("prompt") for body in server.bodies} == {"a text", None}
    assert all("ignore_eos" not in body for body in server.bodies)


async def test_batch_work_runs_until_it_is_ended() -> None:
    async with streaming_server() as server:
        requests = Requests("m", Lengths(5), Lengths(4), tier="flex")
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
        task = asyncio.create_task(step(server, Load("closed", 4), seconds=60, goals="ttft_p99<60"))
        await until(lambda: server.running == 4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not server.running)

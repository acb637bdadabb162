"""Reservations of several replicas on virtual time: limits hold, little is left, and refusals help."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from serve_app.api.errors import RequestError
from serve_app.quotas.client import QuotaClient
from serve_app.settings.usage import Quota
from tests.batcher.virtual import virtual
from tests.serve_app.quotas.fleet import START, TENANT, Fleet

LIMIT = 100_000


def end(reservation: Any, tokens: int | None = None, *, request: bool = True) -> None:
    """End a call that has used some tokens, or all that it had reserved."""
    assert reservation is not None
    reservation.settle(reservation.tokens if tokens is None else tokens, request=request)


@dataclass
class Load:
    """Clients that always want more, and wait as the refusals tell them."""

    fleet: Fleet
    until: float
    used: Counter[int] = field(default_factory=Counter)
    answered: int = 0
    refused: Counter[int] = field(default_factory=Counter)
    flying: int = 0
    most_flying: int = 0

    async def worker(self, client: QuotaClient, seed: int) -> None:
        draws = random.Random(seed)
        loop = asyncio.get_running_loop()
        while loop.time() < self.until:
            reserved = draws.randrange(400, 1000)
            try:
                reservation = await client.reserve(TENANT, reserved)
            except RequestError as error:
                self.refused[error.status] += 1
                await asyncio.sleep(min(error.retry_after_s or 60.0, max(0.01, self.until - loop.time())))
                continue
            self.flying += 1
            self.most_flying = max(self.most_flying, self.flying)
            used = int(reserved * draws.uniform(0.1, 0.9))
            assert reservation is not None
            minute = reservation.minute
            self.used[minute] += reserved
            await asyncio.sleep(draws.uniform(0.2, 2.0))
            self.used[minute] += used - reserved
            self.flying -= 1
            end(reservation, used)
            self.answered += 1


@virtual
async def test_concurrent_requests_through_three_replicas_use_up_the_limit_exactly() -> None:
    fleet = Fleet(Quota(tokens_per_minute=LIMIT))
    load = Load(fleet, until=58.0)
    workers = [load.worker(fleet.clients[n % 3], n) for n in range(100)]
    await asyncio.gather(*workers)
    first, *_ = sorted(load.used)
    share = load.used[first] / LIMIT
    print(
        f"limit {LIMIT}, used {load.used[first]} ({share:.2%}), answered {load.answered}, "
        f"refused {dict(load.refused)}, most in flight {load.most_flying}, reports {fleet.calls}"
    )
    assert first == START
    assert set(load.refused) == {429}
    assert 0.99 <= share <= 1.0
    assert load.most_flying > 90
    await fleet.settled()
    fleet.stop()


@virtual
async def test_the_rests_of_several_replicas_make_up_one_more_request() -> None:
    fleet = Fleet(Quota(tokens_per_minute=1_000))
    first, second, third = fleet.clients
    held = [await client.reserve(TENANT, 250) for client in (first, second, third)]
    for reservation in held:
        end(reservation, 100)
    # 700 are left, of which each replica may have a part: both ask at once, and one of them has it.
    found = await asyncio.gather(
        *(client.reserve(TENANT, 650) for client in (second, third)), return_exceptions=True
    )
    assert sum(not isinstance(each, BaseException) for each in found) == 1
    fleet.stop()


@virtual
async def test_no_minute_has_more_than_its_limit_over_many_restarts() -> None:
    fleet = Fleet(Quota(tokens_per_minute=20_000, requests_per_minute=60, max_concurrency=20))
    load = Load(fleet, until=100.0)

    async def faults() -> None:
        draws = random.Random(0)
        while asyncio.get_running_loop().time() < load.until:
            await asyncio.sleep(draws.uniform(1, 7))
            fleet.restart()
            fleet.jump_s += draws.choice([0, 0, 30, -30, 3600, -3600])

    await asyncio.gather(faults(), *(load.worker(fleet.clients[n % 3], n) for n in range(30)))
    assert max(load.used.values()) <= 20_000
    assert load.most_flying <= 20
    assert load.answered > 60
    fleet.stop()


@virtual
async def test_a_request_that_is_covered_by_what_was_taken_ahead_awaits_nothing() -> None:
    fleet = Fleet(Quota(tokens_per_minute=LIMIT))
    client = fleet.clients[0]
    for _ in range(50):
        end(await client.reserve(TENANT, 10), 5)
        await asyncio.sleep(0.05)
    calls = fleet.calls
    at = fleet.loop.time()
    for _ in range(5):
        end(await client.reserve(TENANT, 10), 10)
    assert (fleet.calls, fleet.loop.time()) == (calls, at)
    fleet.stop()


async def refused(client: QuotaClient, tokens: int, *key: Any) -> RequestError:
    with pytest.raises(RequestError) as found:
        await client.reserve(TENANT, tokens, *key)
    return found.value


@virtual
async def test_a_refusal_names_its_limit_and_the_end_of_the_window() -> None:
    fleet = Fleet(Quota(tokens_per_minute=100, tokens_per_day=150))
    client = fleet.clients[0]
    await asyncio.sleep(10.0)
    end(await client.reserve(TENANT, 90))
    error = await refused(client, 50)
    assert error.status == 429
    assert error.message.startswith("tenant research: tokens_per_minute 100: this request may take 50 tokens")
    assert error.retry_after_s is not None
    assert 45 < error.retry_after_s <= 50, "the minute ends then"
    await asyncio.sleep(error.retry_after_s)
    end(await client.reserve(TENANT, 50))
    error = await refused(client, 50)
    assert "tokens_per_day 150" in error.message
    assert error.retry_after_s is not None
    assert error.retry_after_s > 3600
    fleet.stop()


@virtual
async def test_a_refusal_waits_for_what_requests_in_flight_give_back() -> None:
    fleet = Fleet(Quota(tokens_per_minute=1000))
    client = fleet.clients[0]
    for _ in range(30):
        reservation = await client.reserve(TENANT, 20)
        await asyncio.sleep(0.5)
        end(reservation, 2)
    held = await client.reserve(TENANT, 900)
    error = await refused(client, 200)
    assert error.retry_after_s is not None
    assert error.retry_after_s < 5
    end(held, 10)
    end(await client.reserve(TENANT, 200))
    fleet.stop()


@virtual
async def test_a_request_that_never_fits_is_a_mistake_of_the_client() -> None:
    fleet = Fleet(Quota(tokens_per_minute=100, tokens_per_day=50))
    error = await refused(fleet.clients[0], 51)
    assert (error.status, error.param) == (400, "max_tokens")
    assert "tenant research: tokens_per_day 50" in error.message
    end(await fleet.clients[0].reserve(TENANT, 50))
    fleet.stop()


@virtual
async def test_a_request_needs_room_in_the_quotas_of_its_key_and_tenant() -> None:
    fleet = Fleet(Quota(tokens_per_minute=100))
    client = fleet.clients[0]
    key = "ada", Quota(requests_per_minute=2)
    for _ in range(2):
        end(await client.reserve(TENANT, 10, *key))
    error = await refused(client, 10, *key)
    assert error.message.startswith("key ada: requests_per_minute 2: ")
    end(await client.reserve(TENANT, 10))
    assert sum(await fleet.used()) <= 100
    await fleet.settled()
    assert await fleet.used() == (30, 0)
    names = dict(client.headers(TENANT, *key))
    assert names[b"x-ratelimit-limit-requests"] == b"2"
    assert names[b"x-ratelimit-remaining-requests"] == b"0"
    assert names[b"x-ratelimit-remaining-tokens"] == b"70"
    assert names[b"x-ratelimit-reset-tokens"].endswith(b"s")
    fleet.stop()


@virtual
async def test_concurrency_is_that_of_all_replicas_together() -> None:
    fleet = Fleet(Quota(max_concurrency=3))
    running = [await client.reserve(TENANT, 0) for client in fleet.clients]
    error = await refused(fleet.clients[0], 0)
    assert "max_concurrency 3" in error.message
    end(running[1])
    await asyncio.sleep(0.5)
    end(await fleet.clients[0].reserve(TENANT, 0))
    fleet.stop()


@virtual
async def test_a_request_after_any_pause_finds_what_is_left() -> None:
    """A client forgets counters without use of late, but no counter that a request waits for."""
    fleet = Fleet(Quota(max_concurrency=10))
    client = fleet.clients[0]
    for pause in range(150, 300):
        end(await client.reserve(TENANT, 10))
        await asyncio.sleep(pause / 100)
    fleet.stop()


@virtual
async def test_a_tenant_without_a_quota_reserves_nothing() -> None:
    fleet = Fleet(Quota(tokens_per_minute=1))
    assert await fleet.clients[0].reserve("other", 1_000_000) is None
    assert fleet.clients[0].headers("other") == []
    fleet.stop()


@virtual
async def test_a_client_that_leaves_while_it_waits_takes_nothing() -> None:
    fleet = Fleet(Quota(tokens_per_minute=100))
    held = await fleet.clients[0].reserve(TENANT, 80)
    task = asyncio.create_task(fleet.clients[1].reserve(TENANT, 50))
    await asyncio.sleep(0.003)
    task.cancel()
    await asyncio.wait([task])
    end(held, 0)
    await fleet.settled()
    assert await fleet.used() == (0, 0)
    fleet.stop()


@virtual
async def test_a_client_that_leaves_as_its_turn_comes_takes_nothing() -> None:
    fleet = Fleet(Quota(tokens_per_minute=100), clients=1)
    held = await fleet.clients[0].reserve(TENANT, 80)
    task = asyncio.create_task(fleet.clients[0].reserve(TENANT, 50))
    await asyncio.sleep(0.003)
    end(held, 0)
    task.cancel()
    await asyncio.wait([task])
    await fleet.settled()
    assert await fleet.used() == (0, 0)
    fleet.stop()


@virtual
async def test_requests_wait_for_an_absent_service_and_are_then_refused() -> None:
    fleet = Fleet(Quota(tokens_per_minute=100), away_s=2.0)
    client = fleet.clients[0]
    end(await client.reserve(TENANT, 1))
    fleet.answering = False
    began = fleet.loop.time()
    error = await refused(client, 90)
    assert (error.status, error.retry_after_s) == (503, 2.0)
    assert 1.9 < fleet.loop.time() - began < 3
    began = fleet.loop.time()
    assert (await refused(client, 90)).status == 503
    assert fleet.loop.time() == began, "the next one doesn't wait"
    fleet.answering = True
    await asyncio.sleep(1)
    end(await client.reserve(TENANT, 90))
    fleet.stop()


@virtual
async def test_a_service_that_comes_back_in_time_is_not_noticed() -> None:
    fleet = Fleet(Quota(tokens_per_minute=100))
    end(await fleet.clients[0].reserve(TENANT, 1))
    fleet.answering = False
    task = asyncio.create_task(fleet.clients[0].reserve(TENANT, 90))
    # A new version of the service restarts it.
    await asyncio.sleep(8)
    assert not task.done()
    fleet.answering = True
    end(await task)
    fleet.stop()


@virtual
async def test_a_service_that_starts_has_longer_for_its_first_answer() -> None:
    fleet = Fleet(Quota(tokens_per_minute=100), away_s=2.0)
    fleet.answering = False
    early = asyncio.create_task(fleet.clients[0].reserve(TENANT, 40))
    await asyncio.sleep(14.0)
    assert not early.done()
    fleet.answering = True
    end(await early)
    fleet.stop()
    fleet = Fleet(Quota(tokens_per_minute=100), away_s=2.0)
    fleet.answering = False
    began = fleet.loop.time()
    assert (await refused(fleet.clients[0], 40)).status == 503
    assert 14.9 < fleet.loop.time() - began < 18.0
    fleet.stop()


@virtual
async def test_calls_run_without_limits_while_the_service_is_away(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet(Quota(tokens_per_minute=300), away_s=2.0, when_away="serve")
    for client in fleet.clients:
        end(await client.reserve(TENANT, 1), 0)
    await asyncio.sleep(0.5)
    fleet.answering = False
    await asyncio.sleep(5)
    for client in fleet.clients:
        for _ in range(10):
            assert await client.reserve(TENANT, 40) is None
    assert [client.unlimited for client in fleet.clients] == [10, 10, 10]
    assert caplog.text.count("run without limits") == 3
    fleet.answering = True
    await asyncio.sleep(5)
    assert await fleet.used() == (0, 0), "nothing of it is charged"
    end(await fleet.clients[0].reserve(TENANT, 300))
    assert (await refused(fleet.clients[0], 1)).status == 429
    fleet.stop()


@virtual
async def test_calls_run_without_limits_before_the_first_answer_too() -> None:
    fleet = Fleet(Quota(tokens_per_minute=300), when_away="serve")
    fleet.answering = False
    assert await fleet.clients[0].reserve(TENANT, 1_000) is None
    assert fleet.loop.time() >= 15.0
    assert fleet.clients[0].unlimited == 1
    fleet.stop()


@virtual
async def test_a_state_that_cannot_be_saved_grants_nothing() -> None:
    fleet = Fleet(Quota(tokens_per_minute=100), away_s=2.0)
    await asyncio.sleep(0.1)
    fleet.state.failing = True
    assert (await refused(fleet.clients[0], 90)).status == 503
    fleet.state.failing = False
    await asyncio.sleep(2)
    end(await fleet.clients[0].reserve(TENANT, 90))
    fleet.stop()


@virtual
async def test_the_tenants_that_a_client_makes_up_are_not_remembered() -> None:
    fleet = Fleet(Quota(tokens_per_minute=LIMIT), clients=1)
    (client,) = fleet.clients
    key = "gateway", Quota(tokens_per_minute=LIMIT)
    end(await client.reserve(TENANT, 1, *key))
    remembered = len(client._holder._subjects)
    for number in range(100):
        end(await client.reserve(f"user {number}", 1, *key))
    assert len(client._holder._subjects) == remembered == 2
    fleet.stop()


@virtual
async def test_keys_that_are_not_used_any_more_are_forgotten() -> None:
    fleet = Fleet(Quota(tokens_per_minute=LIMIT), clients=1)
    (client,) = fleet.clients
    for number in range(100):
        end(await client.reserve("other", 1, f"key {number}", Quota(tokens_per_minute=LIMIT)))
    await asyncio.sleep(200)
    assert not client._holder._subjects
    fleet.stop()


@virtual
async def test_an_engine_that_stops_leaves_nothing_reserved() -> None:
    fleet = Fleet(Quota(tokens_per_minute=LIMIT))
    (first, *_) = fleet.clients
    for _ in range(30):
        end(await first.reserve(TENANT, 100), 10)
        await asyncio.sleep(0.1)
    await first.stop()
    assert await fleet.used() == (300, 0)
    fleet.stop()


@virtual
async def test_a_client_that_was_cut_off_is_charged_later() -> None:
    fleet = Fleet(Quota(tokens_per_minute=LIMIT, tokens_per_day=LIMIT))
    (first, *_) = fleet.clients
    end(await first.reserve(TENANT, 100), 10)
    held = await first.reserve(TENANT, 200)
    await fleet.settled()
    assert await fleet.used("tokens_per_day") == (10, 200)
    fleet.cut_off.add("c0")
    await asyncio.sleep(42.0)
    assert await fleet.used("tokens_per_day") == (10, 0), "what it held is free"
    fleet.cut_off.clear()
    await fleet.settled()
    assert await fleet.used("tokens_per_day") == (10, 200), "its calls still run"
    end(held, 30)
    end(await first.reserve(TENANT, 50_000), 20)
    await fleet.settled()
    assert await fleet.used("tokens_per_day") == (60, 0)
    fleet.stop()


@virtual
async def test_a_client_that_is_cut_off_spends_for_half_a_minute() -> None:
    fleet = Fleet(Quota(tokens_per_day=LIMIT), clients=2)
    (first, _) = fleet.clients
    for _ in range(40):
        end(await first.reserve(TENANT, 100))
        await asyncio.sleep(0.1)
    fleet.cut_off.add("c0")
    end(await first.reserve(TENANT, 100))
    await asyncio.sleep(31.0)
    assert (await refused(first, 100)).status == 503
    fleet.stop()

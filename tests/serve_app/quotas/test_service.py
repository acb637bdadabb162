"""The service of the quotas: a grant is saved before it leaves, and the next process goes on from there."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from serve_app.quotas.service import QuotaService
from serve_app.quotas.state import StoredState
from serve_app.settings.usage import Quota, QuotasSettings
from serve_app.system.database import DatabaseError, FencedError, UnusableError
from tests.progress import STILL_S
from tests.serve_app.quotas.fleet import START, Engine, MemoryState, granted, inline, states_of

QUOTA = Quota(tokens_per_day=1000)
SETTINGS = QuotasSettings(tenants={"t": QUOTA}, folder="/nowhere")
LIMIT_S = STILL_S


def service_of(state: Any, settings: QuotasSettings = SETTINGS, **options: Any) -> QuotaService:
    return QuotaService(settings, state, wall=lambda: START, monotonic=lambda: 0.0, **options)


def engine(name: str = "h") -> Engine:
    return Engine(name, "t", QUOTA)


async def remaining(service: QuotaService) -> int:
    (state,) = (await states_of(service))["tenant t"]
    return int(state.remaining)


async def test_a_grant_is_saved_before_it_leaves() -> None:
    state = MemoryState()
    service = service_of(state, beside=inline)
    service.start()
    one = engine()
    answer = await service.take(one.ask(300))
    assert granted(answer) == 300
    saved = dict(state.texts)
    again = service_of(state)
    assert await remaining(again) == 1000
    await _unsaved(again, one.hold(answer))
    assert state.texts == saved
    assert await remaining(again) == 700
    await service.close()


async def _unsaved(service: QuotaService, report: Any) -> Any:
    """Return the answer of a service that nothing has to be saved for."""
    async with asyncio.timeout(STILL_S):
        return await service.take(report)


async def test_reports_that_come_together_are_saved_together() -> None:
    state, saves = MemoryState(), 0

    async def count(function: Any, *arguments: Any) -> None:
        nonlocal saves
        saves += 1
        await asyncio.sleep(0)
        function(*arguments)

    service = service_of(state, beside=count)
    service.start()
    await asyncio.gather(*(service.take(engine(f"h{n}").ask(10)) for n in range(50)))
    assert saves <= 2
    assert await remaining(service) == 1000
    await service.close()


async def test_a_failed_save_grants_nothing_and_the_next_save_makes_up() -> None:
    state = MemoryState()
    service = service_of(state, beside=inline)
    service.start()
    state.failing = True
    one = engine()
    with pytest.raises(DatabaseError):
        await service.take(one.ask(300))
    state.failing = False
    assert granted(await service.take(one.ask(300))) == 300
    service.check()
    await service.close()


async def test_a_process_that_was_replaced_ends(tmp_path: Path) -> None:
    first = service_of(StoredState(tmp_path / "quotas.db"))
    first.start()
    one = engine()
    await first.take(one.ask(300))
    second = service_of(StoredState(tmp_path / "quotas.db"))
    second.start()
    with pytest.raises(FencedError):
        await first.take(one.ask(600))
    with pytest.raises(FencedError):
        first.check()
    assert granted(await second.take(one.ask(600))) == 600
    await first.close()
    await second.close()


async def test_the_file_that_held_holds_after_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "quotas.yaml"
    file.write_text("t: {tokens_per_day: 70}")
    settings = QuotasSettings(file=str(file), folder="/nowhere")
    state = MemoryState()
    service = service_of(state, settings, beside=inline)
    await service.save()
    file.write_text("t: {tokens_per_day: -70}")
    assert await remaining(service_of(state, settings)) == 70


async def test_it_counts_the_replicas_that_report() -> None:
    service = service_of(MemoryState(), beside=inline)
    service.start()
    await service.take(engine("a").ask(1))
    await service.take(engine("b").ask(1))
    assert service.holders == 2
    await service.close()


async def test_the_end_waits_for_the_save_under_way(tmp_path: Path) -> None:
    state = StoredState(tmp_path / "quotas.db")
    began, goes_on = asyncio.Event(), asyncio.Event()

    async def slow(save: Any, changes: Any) -> None:
        began.set()
        await goes_on.wait()
        await asyncio.to_thread(save, changes)

    service = service_of(state, beside=slow)
    service.start()
    one = engine()
    asked = asyncio.ensure_future(service.take(one.ask(300)))
    await began.wait()
    closing = asyncio.ensure_future(service.close())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not closing.done()
    goes_on.set()
    async with asyncio.timeout(LIMIT_S):
        await closing
        answer = await asked
    assert granted(answer) == 300
    again = service_of(StoredState(tmp_path / "quotas.db"))
    await again.take(one.hold(answer))
    assert await remaining(again) == 700
    await again.close()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("clock", '"noon"'),
        ("clock", "["),
        ('["tenant t", "tokens"]', '[[["day", "x", 1]], []]'),
        ('["tenant t", "tokens"]', '[[["day", 0, "many"]], []]'),
        ('["tenant t", "tokens"]', "7"),
        ('["tenant t", "tokens"]', '[[], [["h", 0, "a", 0, 0]]]'),
        ('["tenant t", "sums"]', "[[], []]"),
        ('"h"', '"seven"'),
        ("7", "7"),
    ],
)
def test_a_state_of_something_else_is_named(key: str, value: str) -> None:
    state = MemoryState()
    state.texts[key] = value
    with pytest.raises(UnusableError, match="memory: this is not the state of quotas"):
        service_of(state)


async def test_a_failure_of_a_followed_file_is_logged_and_mends_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "quotas.yaml"
    file.write_text("t: {tokens_per_day: 70}")
    service = service_of(
        MemoryState(), QuotasSettings(file=str(file), folder="/nowhere"), beside=inline, refresh_s=0.001
    )
    service.start()

    def fail(*_: object, **__: object) -> str:
        raise MemoryError

    async with asyncio.timeout(LIMIT_S):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_text", fail)
            file.write_text("t: {tokens_per_day: 9000}")
            while "MemoryError" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        while await remaining(service) != 9000:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    service.check()
    await service.close()

"""Errors for refused requests, and the admission that each task carries."""

import asyncio

import pytest

from batcher import Aborted, BatcherError, Closed, Expired, Oversize, QueueFull
from serve_app.api.scheduling import Scheduling
from serve_app.engine.admission import (
    Admission,
    AdmissionRequest,
    AdmissionResult,
    current,
    refusal_of,
    set_current,
)
from tests.progress import STILL_S


def test_a_full_queue_says_when_to_come_back() -> None:
    error = refusal_of(QueueFull("max_queue_size", 5000, 2.34))
    assert (error.status, error.type, error.retry_after_s) == (429, "rate_limit_error", 2.34)
    assert "2.3 s" in error.message
    assert error.headers() == {"retry-after": "3"}


def test_a_request_whose_deadline_has_passed() -> None:
    error = refusal_of(Expired())
    assert (error.status, error.type) == (408, "timeout_error")
    # OpenAI's clients would send it again, though its time is over.
    assert error.headers() == {"x-should-retry": "false"}


def test_the_error_of_a_request_that_can_never_fit_has_the_limit() -> None:
    error = refusal_of(Oversize(900, 800))
    assert (error.status, error.type) == (400, "invalid_request_error")
    assert "900" in error.message
    assert "800" in error.message
    assert error.headers() == {}
    error = refusal_of(Oversize(128, 64, "places"))
    assert (error.status, error.param) == (400, "n")
    assert "128 answers" in error.message


@pytest.mark.parametrize("reason", [Closed("stopping"), Aborted("x"), BatcherError("y")])
def test_a_batcher_that_is_closed_sends_clients_to_another_replica(reason: BatcherError) -> None:
    error = refusal_of(reason)
    assert (error.status, error.type) == (503, "service_unavailable")
    assert error.headers() == {"retry-after": "1"}


def test_by_default_a_request_is_refused_rather_than_kept_waiting() -> None:
    request, result = current()
    assert request == AdmissionRequest(Scheduling(0, "default", None), None, wait=False)
    assert result == AdmissionResult(admitted=False, refusal=None)


async def test_each_task_carries_its_own_admission() -> None:
    results = {name: AdmissionResult() for name in "ab"}
    both_set = asyncio.Barrier(2)

    async def request(name: str) -> None:
        set_current(AdmissionRequest(), results[name])
        async with asyncio.timeout(STILL_S):
            await both_set.wait()
        # Code further down, in a task of its own, finds its request's admission and no other.
        assert (await asyncio.create_task(find())).result is results[name]

    async def find() -> Admission:
        return current()

    await asyncio.gather(*(asyncio.create_task(request(name)) for name in "ab"))
    assert not any(current().result is result for result in results.values())

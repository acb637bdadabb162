"""Metrics of requests to the Ingress."""

import asyncio

from serve_app.telemetry import catalogue
from tests.progress import STILL_S
from tests.serve_app.telemetry.front import Front


async def test_an_answer_without_a_stream(front: Front) -> None:
    await front.ask("POST", "/answer")
    assert front.metrics.total(catalogue.REQUESTS, "m", "ok", "200") == 1
    assert len(front.metrics.of(catalogue.REQUEST_SECONDS, "m", "no")) == 1
    assert front.metrics.of(catalogue.FIRST_TOKEN, "m") == []


async def test_a_stream_has_a_first_token_and_a_time_per_token(front: Front) -> None:
    await front.ask("POST", "/stream")
    assert front.metrics.total(catalogue.REQUESTS, "m", "ok", "200") == 1
    assert len(front.metrics.of(catalogue.REQUEST_SECONDS, "m", "yes")) == 1
    assert len(front.metrics.of(catalogue.FIRST_TOKEN, "m")) == 1
    assert len(front.metrics.of(catalogue.PER_TOKEN, "m")) == 1
    assert front.metrics.of(catalogue.PATH_SECONDS, "m") == [0.0]


async def test_a_stream_that_failed_has_no_times(front: Front) -> None:
    await front.ask("POST", "/stream?broken=1")
    assert front.metrics.total(catalogue.REQUESTS, "m", "failed", "200") == 1
    assert front.metrics.of(catalogue.FIRST_TOKEN, "m") == []


async def test_an_error_has_no_times(front: Front) -> None:
    await front.ask("POST", "/answer?status=429")
    assert front.metrics.series(catalogue.REQUESTS) == {("m", "rejected", "429")}
    assert front.metrics.of(catalogue.REQUEST_SECONDS, "m", "no") == []


async def test_requests_without_a_model_share_a_label(front: Front) -> None:
    await front.ask("GET", "/no/such/path")
    await front.ask("GET", "/fail")
    assert front.metrics.series(catalogue.REQUESTS) == {
        ("none", "refused", "404"),
        ("none", "failed", "500"),
    }


async def test_a_probe_is_not_counted(front: Front) -> None:
    await front.ask("GET", "/health")
    assert front.metrics.series(catalogue.REQUESTS) == set()


async def test_a_cancelled_request_is_counted(front: Front) -> None:
    task = asyncio.ensure_future(front.ask("GET", "/hang"))
    await asyncio.wait_for(front.begun.wait(), STILL_S)
    task.cancel()
    await asyncio.wait([task])
    front.tracker()
    assert front.metrics.series(catalogue.REQUESTS) == {("m", "cancelled", "0")}

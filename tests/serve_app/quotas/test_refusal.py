"""Errors of requests that their quotas don't allow, and the times after which to try again."""

import pytest

from serve_app.api.errors import RequestError
from serve_app.quotas.lease import Lease
from serve_app.quotas.messages import Grant, Kind, LeaseID, LimitState
from serve_app.quotas.refusal import LEAST_RETRY_S, away_error, check_fits, refusal
from serve_app.settings.usage import Quota


def lease(*states: LimitState, kind: Kind = "tokens") -> Lease:
    """Return a lease as an answer has left it."""
    quota = Quota(tokens_per_minute=1000, tokens_per_day=5000, requests_per_minute=5, max_concurrency=2)
    lease = Lease(LeaseID("tenant t", kind), quota, 0.0)
    if states:
        lease.apply(Grant(lease.id, "1790000040", 0, 60.0, None, 1, False, states, 1), 0.0)
    return lease


def found(error: RequestError | None) -> RequestError:
    assert error is not None
    assert error.status == 429
    return error


def test_a_request_that_is_larger_than_its_lowest_limit_never_fits() -> None:
    check_fits([lease(), lease(kind="requests")], 1000)
    with pytest.raises(RequestError, match=r"tenant t: tokens_per_minute 1000: .* 1001 tokens, which never"):
        check_fits([lease()], 1001)


def test_the_limit_that_holds_longest_is_named() -> None:
    minute = LimitState("tokens_per_minute", 1000, 10, 0, 30.0)
    day = LimitState("tokens_per_day", 5000, 20, 0, 7000.0)
    error = found(refusal(lease(minute, day), 100, 0.0))
    assert "tokens_per_day 5000: this request may take 100 tokens, and 20 are left" in error.message
    assert error.retry_after_s == 7000.0
    # The day has enough for this one.
    error = found(refusal(lease(minute, day), 15, 0.0))
    assert "tokens_per_minute 1000" in error.message
    assert error.retry_after_s == 30.0


def test_requests_in_flight_give_back_what_they_do_not_use() -> None:
    one = lease(LimitState("tokens_per_minute", 1000, 0, 800, 30.0))
    one.used_share, one.hold_s = 0.5, 4.0
    # 400 come back within 4 s, and 100 are asked for.
    assert found(refusal(one, 100, 0.0)).retry_after_s == 1.0
    one.used_share = 1.0
    assert found(refusal(one, 100, 0.0)).retry_after_s == 30.0


def test_a_slot_is_free_after_a_part_of_the_usual_time() -> None:
    one = lease(LimitState("max_concurrency", 2, 0, 2, 0.0), kind="slots")
    one.hold_s = 6.0
    error = found(refusal(one, 100, 0.0))
    assert error.retry_after_s == 3.0
    assert "this request needs one" in error.message
    one.hold_s = 0.01
    assert found(refusal(one, 100, 0.0)).retry_after_s == LEAST_RETRY_S


def test_limits_that_are_not_known_are_named_by_nothing() -> None:
    assert refusal(lease(), 100, 0.0) is None
    error = away_error(0.5)
    assert (error.status, error.retry_after_s) == (503, 1.0)
    assert "0.5 s" in error.message

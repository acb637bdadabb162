"""Requests that engines are lost with: when they are refused, and when they are forgotten."""

from dataclasses import replace

import pytest

from serve_app.ingress import poison
from serve_app.ingress.poison import MAX_LOST, REMEMBERED_S, LostEngines, PoisonError
from serve_app.relay.request import RelayRequest

REQUEST = RelayRequest("POST", "/v1/completions", b"", [(b"x-request-id", b"1")], b'{"prompt": "x"}')


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_request_that_two_engines_were_lost_with_is_refused_and_not_to_be_sent_again() -> None:
    lost = LostEngines(Clock())
    lost.note(REQUEST, 1)
    lost.check(REQUEST)
    lost.note(REQUEST, MAX_LOST)
    with pytest.raises(PoisonError, match="2 engines failed one after the other") as caught:
        lost.check(replace(REQUEST, headers=[], arrived_at=0.0))
    assert caught.value.status == 500
    assert caught.value.headers() == {"x-should-retry": "false"}


@pytest.mark.parametrize(
    "other", [replace(REQUEST, body=b"{}"), replace(REQUEST, path="/v1/chat/completions")]
)
def test_other_requests_are_not(other: RelayRequest) -> None:
    lost = LostEngines(Clock())
    lost.note(REQUEST, MAX_LOST)
    lost.check(other)


def test_a_request_that_an_engine_answers_is_forgotten() -> None:
    lost = LostEngines(Clock())
    lost.note(REQUEST, MAX_LOST)
    lost.forget(REQUEST)
    lost.check(REQUEST)
    assert len(lost) == 0


def test_a_request_is_forgotten_in_time() -> None:
    clock = Clock()
    lost = LostEngines(clock)
    lost.note(REQUEST, MAX_LOST)
    clock.now += REMEMBERED_S - 1
    assert lost.count(REQUEST) == MAX_LOST
    clock.now += 1
    assert lost.count(REQUEST) == 0
    assert len(lost) == 0, "what is over is dropped"


def test_one_engine_that_many_of_the_same_requests_ran_on_counts_once() -> None:
    lost = LostEngines(Clock())
    for _ in range(30):
        lost.note(REQUEST, 1)
    lost.check(REQUEST)


def test_what_is_remembered_is_bounded_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poison, "MAX_REMEMBERED", 3)
    lost = LostEngines(Clock())
    for number in range(4):
        lost.note(replace(REQUEST, body=b"%d" % number), MAX_LOST)
    assert len(lost) == 3
    assert [lost.count(replace(REQUEST, body=b"%d" % number)) for number in range(4)] == [0, 2, 2, 2]


def test_uploads_are_never_the_same_request() -> None:
    # Their bodies come in pieces that nobody has compared.
    upload = replace(REQUEST, path="/v1/files", body=b"", upload="1")
    lost = LostEngines(Clock())
    lost.note(upload, MAX_LOST)
    assert lost.count(replace(upload, upload="2")) == 0
    assert lost.count(replace(upload, method="GET", upload="")) == 0
    assert lost.count(upload) == MAX_LOST

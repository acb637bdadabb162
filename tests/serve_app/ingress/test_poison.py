"""Requests that engines are lost with: when they are refused, and when they are forgotten."""

import hashlib
from dataclasses import replace

import pytest

from serve_app.api.errors import EngineLostError
from serve_app.ingress import poison
from serve_app.ingress.engine_call import EngineUnreachedError
from serve_app.ingress.poison import MAX_LOST, REMEMBERED_S, Losses, LostEngines, PoisonError
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


def test_an_engine_that_takes_a_request_again_while_it_ends_is_lost_once() -> None:
    losses = Losses()
    for engine in ("a", "a", "a"):
        assert losses.add(EngineLostError(), engine)
        losses.check()
    # Not lost, or before it had the request.
    assert not losses.add(ValueError(), "b")
    assert not losses.add(EngineUnreachedError(), "b")
    losses.check()
    assert losses.add(EngineLostError(), "b")
    with pytest.raises(PoisonError):
        losses.check()


def test_engines_that_are_not_known_are_lost_each_time() -> None:
    losses = Losses()
    for _ in range(2):
        losses.check()
        assert losses.add(EngineLostError())
    with pytest.raises(PoisonError):
        losses.check()


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


def test_a_body_is_read_only_if_one_of_its_size_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = LostEngines(Clock())
    large = replace(REQUEST, body=b"x" * 1000)
    lost.note(REQUEST, MAX_LOST)
    lost.note(large, MAX_LOST)
    lost.forget(large)

    def read(*_: object) -> None:
        raise AssertionError("a body is read")

    monkeypatch.setattr(hashlib, "sha256", read)
    # Bodies of 32 MiB come too, and each is asked for three times on the event loop.
    for size in (0, 1000, 1001):
        other = replace(REQUEST, body=b"y" * size)
        lost.check(other)
        lost.forget(other)


def test_uploads_are_never_the_same_request() -> None:
    # Their bodies come in pieces that nobody has compared.
    upload = replace(REQUEST, path="/v1/files", body=b"", upload="1")
    lost = LostEngines(Clock())
    lost.note(upload, MAX_LOST)
    assert lost.count(replace(upload, upload="2")) == 0
    assert lost.count(replace(upload, method="GET", upload="")) == 0
    assert lost.count(upload) == MAX_LOST

"""How long a relayed request may still wait, and how it travels."""

import pickle
import time
from dataclasses import dataclass

from serve_app.api.facts import UNKNOWN, Facts, PickledByName
from serve_app.api.scheduling import DEFAULT_SCHEDULING, Scheduling
from serve_app.wire.request import RelayRequest


def request(timeout_s: float | None, ago_s: float, *, resumes: bool = False) -> RelayRequest:
    scheduling = Scheduling(queue_timeout_s=timeout_s)
    return RelayRequest("POST", "/x", b"", [], b"", scheduling, time.time() - ago_s, resumes)


def test_the_time_that_it_waited_elsewhere_counts() -> None:
    left = request(30.0, 10.0).scheduling_now().queue_timeout_s
    assert left is not None
    assert 10 < left <= 20


def test_a_deadline_may_have_passed_on_the_way() -> None:
    left = request(5.0, 10.0).scheduling_now().queue_timeout_s
    assert left is not None
    assert left < 0


def test_a_clock_that_is_ahead_gives_no_more_time_than_was_asked_for() -> None:
    assert request(30.0, -100.0).scheduling_now().queue_timeout_s == 30.0


def test_a_request_without_a_timeout_waits_for_ever() -> None:
    assert request(None, 10.0).scheduling_now() == Scheduling()


def test_a_stream_that_goes_on_has_no_deadline_any_more() -> None:
    assert request(5.0, 10.0, resumes=True).scheduling_now().queue_timeout_s is None


@dataclass(frozen=True, slots=True)
class _Other(PickledByName):
    """`RelayRequest` of another version: fields are in another order, one is new, and others have gone."""

    unheard_of: int = 3
    source: str = "http"
    method: str = ""
    path: str = ""
    query: bytes = b""
    headers: tuple[()] = ()
    body: bytes = b""
    facts: Facts = UNKNOWN


def test_replicas_of_two_versions_understand_each_other() -> None:
    sent = RelayRequest("POST", "/x", b"", [], b"{}", facts=Facts(model="demo"), key="ada", source="batch")
    assert pickle.loads(pickle.dumps(sent)) == sent
    rebuild, (_, values) = sent.__reduce__()
    got = rebuild(_Other, values)
    assert (got.method, got.body, got.facts, got.source, got.unheard_of) == (
        "POST",
        b"{}",
        sent.facts,
        "batch",
        3,
    )
    rebuild, (_, values) = got.__reduce__()
    back = rebuild(RelayRequest, values)
    assert (back.method, back.body, back.facts, back.source) == (sent.method, sent.body, sent.facts, "batch")
    assert (back.key, back.scheduling) == ("", DEFAULT_SCHEDULING)

"""The events with which streams end when they fail, each in the protocol of its route."""

import json

import pytest

from serve_app.api.errors import RequestError
from serve_app.wire.frame import error_event

ERROR = RequestError(503, "service_unavailable", "gone\nfor now")

LAST = rb'data: {"delta":"\"sequence_number\":9","sequence_number":6}' + b"\n\n"
LAST += b'data: {"sequence_number": 7}\n\n'


@pytest.mark.parametrize(
    ("path", "name", "body"),
    [
        ("/v1/chat/completions", None, ERROR.body()),
        ("/v1/completions", None, ERROR.body()),
        (
            "/v1/responses",
            "error",
            {
                "type": "error",
                "sequence_number": 8,
                "code": "service_unavailable",
                "message": "gone\nfor now",
                "param": None,
                **ERROR.body(),
            },
        ),
        (
            "/v1/messages",
            "error",
            {"type": "error", "error": {"type": "overloaded_error", "message": "gone\nfor now"}},
        ),
    ],
)
def test_an_error_is_one_event_in_the_protocol_of_its_route(
    path: str, name: str | None, body: object
) -> None:
    event = error_event(ERROR, path, LAST).decode()
    assert event.endswith("\n\n")
    *head, data = event.strip().split("\n")
    assert head == ([f"event: {name}"] if name else [])
    assert json.loads(data.removeprefix("data: ")) == body


def test_an_error_ahead_of_every_event_has_the_first_number() -> None:
    event = error_event(ERROR, "/v1/responses").decode()
    assert json.loads(event.split("data: ")[1])["sequence_number"] == 0

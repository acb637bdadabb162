"""When a failure of vLLM's application is the request's own."""

import json

import pytest

from serve_app.engine.error_mapping import of_the_request
from serve_app.relay.asgi import Head

JSON = [(b"content-type", b"application/json")]


def failed(status: int, body: object) -> bytes:
    return Head(status, JSON).pack(json.dumps(body).encode(), whole=True)


@pytest.mark.parametrize("status", [500, 501])
def test_a_failure_becomes_a_400_with_its_reason(status: int) -> None:
    error = {"message": "'bool' object has no attribute 'get'", "type": "InternalServerError", "code": 500}
    head, body, whole = Head.unpack(of_the_request(failed(status, {"error": error})))
    assert (head.status, whole) == (400, True)
    said = json.loads(body)["error"]
    assert said["type"] == "invalid_request_error"
    assert said["message"] == "vLLM can't process this request: 'bool' object has no attribute 'get'"


@pytest.mark.parametrize("body", [None, [], {}, {"error": 5}, "x"])
def test_one_without_a_reason_too(body: object) -> None:
    head, _, _ = Head.unpack(of_the_request(failed(500, body)))
    assert head.status == 400


def test_one_that_is_no_json_too() -> None:
    head, _, _ = Head.unpack(of_the_request(Head(500, []).pack(b"Internal Server Error", whole=True)))
    assert head.status == 400


@pytest.mark.parametrize("status", [200, 400, 404, 408, 429, 503])
def test_any_other_answer_stays_as_it_is(status: int) -> None:
    message = failed(status, {"error": {"message": "x"}})
    assert of_the_request(message) == message


def test_an_answer_that_goes_on_stays_as_it_is() -> None:
    message = Head(500, JSON).pack(b"{")
    assert of_the_request(message) == message

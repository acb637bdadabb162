"""Failures of vLLM's application that the request has caused."""

import json

import pytest

from serve_app.engine.error_mapping import application_error, blame_request
from serve_app.relay.frame import Head, pack, unpack
from tests.serve_app.answers import complete

JSON = [(b"content-type", b"application/json")]


def failed(status: int, body: object) -> bytes:
    return complete(Head(status, JSON), json.dumps(body).encode())


@pytest.mark.parametrize("status", [500, 501])
def test_a_failure_becomes_a_400_with_its_reason(status: int) -> None:
    error = {"message": "'bool' object has no attribute 'get'", "type": "InternalServerError", "code": 500}
    piece = unpack(blame_request(failed(status, {"error": error})))
    assert piece.head is not None
    assert piece.usage is not None
    assert piece.head.status == 400
    said = json.loads(piece.body)["error"]
    assert said["type"] == "invalid_request_error"
    assert said["message"] == "vLLM can't process this request: 'bool' object has no attribute 'get'"


@pytest.mark.parametrize("body", [None, [], {}, {"error": 5}, "x"])
def test_one_without_a_reason_too(body: object) -> None:
    head = unpack(blame_request(failed(500, body))).head
    assert head is not None
    assert head.status == 400


def test_one_that_is_no_json_too() -> None:
    head = unpack(blame_request(complete(Head(500, []), b"Internal Server Error"))).head
    assert head is not None
    assert head.status == 400


@pytest.mark.parametrize("status", [200, 400, 404, 408, 429, 503])
def test_any_other_answer_stays_as_it_is(status: int) -> None:
    message = failed(status, {"error": {"message": "x"}})
    assert blame_request(message) == message


def test_an_answer_that_goes_on_stays_as_it_is() -> None:
    message = pack(head=Head(500, JSON), body=b"{")
    assert blame_request(message) == message


def test_an_exception_without_a_field_is_told_by_its_kind() -> None:
    error = application_error(OSError("/some/path"))
    assert (error.status, error.message) == (500, "OSError")

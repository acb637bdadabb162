"""Ray Serve's own pages, as a client of this service gets them."""

import httpx
import pytest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from serve_app.ingress.serve_pages import ServePages

NOT_FOUND = "Path '/v1/models' not found. Ping http://.../-/routes for available routes."


async def get(page: Response, path: str = "/v1/models") -> httpx.Response:
    transport = httpx.ASGITransport(ServePages(page))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        return await client.get(path)


@pytest.mark.parametrize(
    ("status", "text", "becomes", "kind"),
    [
        (404, NOT_FOUND, 503, "service_unavailable"),
        (503, "draining", 503, "service_unavailable"),
        (500, "The actor died unexpectedly before finishing this task.", 503, "service_unavailable"),
        (500, "Traceback: secret", 500, "internal_error"),
        (404, "Not Found", 404, "not_found_error"),
        (408, "Request 1 timed out.", 408, "timeout_error"),
        (405, "Method Not Allowed", 405, "invalid_request_error"),
    ],
)
async def test_a_page_in_plain_text_becomes_an_error(status: int, text: str, becomes: int, kind: str) -> None:
    answer = await get(PlainTextResponse(text, status))
    assert answer.status_code == becomes
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == (kind, becomes)
    assert "secret" not in answer.text
    assert ("retry-after" in answer.headers) == (becomes == 503)


async def test_clients_of_anthropic_get_its_shape() -> None:
    answer = await get(PlainTextResponse(NOT_FOUND, 404), "/v1/messages")
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "overloaded_error"


async def test_every_other_answer_stays_as_it_is() -> None:
    for answer, text in (
        (JSONResponse({"error": 1}, 404), '{"error":1}'),
        (PlainTextResponse("fine"), "fine"),
        (StreamingResponse(iter(["a", "b"])), "ab"),
    ):
        assert (await get(answer)).text == text


async def test_the_health_checks_of_ray_serve_stay_as_they_are() -> None:
    answer = await get(PlainTextResponse("DRAINING", 503), "/-/healthz")
    assert (answer.status_code, answer.text) == (503, "DRAINING")


async def test_a_page_in_pieces_is_one_error() -> None:
    pieces = StreamingResponse(iter(["Path '", "/x' not found"]), 404, media_type="text/plain")
    assert (await get(pieces)).status_code == 503

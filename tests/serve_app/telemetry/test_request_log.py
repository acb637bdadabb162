"""The line of a request, in both formats."""

import json
import logging
from logging.handlers import MemoryHandler
from pathlib import Path

import pytest

from serve_app.telemetry.request_log import RequestLog, as_text, log_fields, serve_logs
from tests.serve_app.telemetry.front import SECRET, Front


async def test_a_line_holds_everything_but_content(front: Front, tmp_path: Path) -> None:
    log = RequestLog(tmp_path, "r1", "json")
    headers = {"authorization": f"Bearer {SECRET}", "x-request-id": "id-1"}
    await front.ask("POST", f"/answer?q={SECRET}", content=SECRET, headers=headers)
    await front.ask("GET", "/fail")
    await front.ask("GET", "/health")
    log(front.ended)
    log.close()
    text = (tmp_path / "requests_r1.log").read_text()
    assert SECRET not in text
    first, second = map(json.loads, text.splitlines())
    assert first.pop("time").endswith("+00:00")
    assert first.pop("first_s") <= first.pop("total_s")
    assert first == {
        "request_id": "id-1",
        "method": "POST",
        "path": "/answer",
        "model": "m",
        "tenant": "a",
        "status": 200,
        "outcome": "ok",
        "stream": False,
        "prompt_tokens": 12,
        "output_tokens": 5,
        "wait_s": 0.5,
    }
    assert (second["model"], second["outcome"], second["status"]) == (None, "failed", 500)
    assert len(second["request_id"]) == 32


async def test_a_client_can_not_write_lines_of_its_own(front: Front) -> None:
    await front.ask("POST", "/answer%0Afake", headers={"x-request-id": "a\tb"})
    line = as_text(log_fields(front.ended[0], 0.0))
    assert "\n" not in line
    assert "\t" not in line
    # A path without a route may hold anything, a prompt too.
    assert "POST (no route)" in line
    assert "fake" not in line


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/files/file-1/content", "/files/{id}/content"),
        ("/models/org/name", "/models/{model}"),
        # The method is another one.
        ("/answer", "/answer"),
        ("/files", None),
    ],
)
async def test_a_route_with_an_id_is_named_without_the_id(front: Front, path: str, route: str | None) -> None:
    await front.ask("DELETE" if route == "/answer" else "GET", path)
    assert log_fields(front.ended[0], 0.0)["path"] == route


async def test_the_text_of_a_line(front: Front) -> None:
    await front.ask("POST", "/stream", headers={"x-request-id": "id-1"})
    line = as_text(log_fields(front.ended[0], 0.0))
    assert " 200 ok        m, POST /stream, tenant a, 12 + 5 tokens, waited 0.500 s, first after 0." in line
    assert line.endswith(", id-1")


def test_the_folder_is_that_of_ray_serve_s_log_behind_a_buffer_too(tmp_path: Path) -> None:
    logger = logging.getLogger("ray.serve")
    file = logging.FileHandler(tmp_path / "replica.log")
    handler = MemoryHandler(10, target=file)
    before = logger.handlers
    logger.handlers = []
    try:
        assert serve_logs() is None
        logger.handlers = [logging.StreamHandler(), handler]
        assert serve_logs() == tmp_path
    finally:
        logger.handlers = before
        handler.close()
        file.close()

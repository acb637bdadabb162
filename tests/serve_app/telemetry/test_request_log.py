"""The line of a request, in both formats."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import pytest

from serve_app.telemetry.request_log import RequestLog
from tests.serve_app.telemetry.front import SECRET, Front


def written(front: Front, folder: Path, format: Literal["json", "text"] = "text") -> list[str]:
    """Return the lines of the requests that have ended."""
    log = RequestLog(folder, "r1", format)
    log(front.ended)
    log.close()
    return (folder / "requests_r1.log").read_text().splitlines()


async def test_a_line_holds_everything_but_content(front: Front, tmp_path: Path) -> None:
    headers = {"authorization": f"Bearer {SECRET}", "x-request-id": "id-1"}
    # A line has whole milliseconds.
    began = datetime.now(UTC) - timedelta(milliseconds=1)
    await front.ask("POST", f"/answer?q={SECRET}", content=SECRET, headers=headers)
    await front.ask("GET", "/fail")
    await front.ask("GET", "/health")
    lines = written(front, tmp_path, "json")
    assert not any(SECRET in line for line in lines)
    first, second = map(json.loads, lines)
    assert began <= datetime.fromisoformat(first.pop("time")) <= datetime.now(UTC)
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


async def test_a_client_can_not_write_lines_of_its_own(front: Front, tmp_path: Path) -> None:
    await front.ask("POST", "/answer%0Afake", headers={"x-request-id": "a\tb"})
    (line,) = written(front, tmp_path)
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
async def test_a_route_with_an_id_is_named_without_the_id(
    front: Front, tmp_path: Path, path: str, route: str | None
) -> None:
    await front.ask("DELETE" if route == "/answer" else "GET", path)
    (line,) = written(front, tmp_path, "json")
    assert json.loads(line)["path"] == route


async def test_the_text_of_a_line(front: Front, tmp_path: Path) -> None:
    await front.ask("POST", "/stream", headers={"x-request-id": "id-1"})
    (line,) = written(front, tmp_path)
    assert " 200 ok        m, POST /stream, tenant a, 12 + 5 tokens, waited 0.500 s, first after 0." in line
    assert line.endswith(", id-1")

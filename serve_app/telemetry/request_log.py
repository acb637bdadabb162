"""A line per request that the Ingress has answered, in a file beside Serve's own logs. Never its content."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Literal

from serve_app.telemetry.request_tracker import TrackedRequest

Format = Literal["json", "text"]

FILE_BYTES = 64 * 1024 * 1024
FILES = 4
"""Older files that are kept beside the one that is written."""


def fields(request: TrackedRequest, offset_s: float) -> dict[str, Any]:
    """Return what is told of a request.

    Args:
        request: The request.
        offset_s: What the clock of `time.time` is ahead of that of `time.monotonic`.
    """
    usage = request.usage
    told: dict[str, Any] = {
        "time": datetime.fromtimestamp(request.ended_at + offset_s, UTC).isoformat(timespec="milliseconds"),
        "request_id": request.request_id,
        "method": request.scope["method"],
        "path": _route(request.scope),
        "model": request.model or None,
        "tenant": request.tenant or None,
        "status": request.status,
        "outcome": request.outcome,
        "stream": request.streams,
        "prompt_tokens": usage.prompt_tokens if usage else None,
        "output_tokens": usage.output_tokens if usage else None,
        "wait_s": round(usage.wait_s, 6) if usage else None,
        "first_s": round(request.first_at - request.started_at, 6) if request.first_at else None,
        "total_s": round(request.seconds, 6),
    }
    if request.trace is not None:
        told["trace_id"] = request.trace_id
    return told


def _route(scope: Mapping[str, Any]) -> str | None:
    """Return the path of a request if it is one of ours; what a client made up may hold anything."""
    path: str = scope["path"]
    return path if "endpoint" in scope and not scope.get("path_params") else None


def as_json(told: dict[str, Any]) -> str:
    """Return a line for programs."""
    return json.dumps(told, separators=(",", ":"))


def as_text(told: dict[str, Any]) -> str:
    """Return a line for people."""
    place = told["model"] or "-"
    parts = [f"{told['time'][11:23]} {told['status']} {told['outcome']:<9} {place}"]
    parts.append(f"{told['method']} {told['path'] or '(no route)'}")
    if told["tenant"]:
        parts.append(f"tenant {_plain(told['tenant'])}")
    if told["prompt_tokens"] is not None:
        parts.append(f"{told['prompt_tokens']} + {told['output_tokens']} tokens")
        parts.append(f"waited {told['wait_s']:.3f} s")
    if told["stream"] and told["first_s"] is not None:
        parts.append(f"first after {told['first_s']:.3f} s")
    parts.append(f"{told['total_s']:.3f} s")
    parts.append(_plain(told["request_id"]))
    return ", ".join(parts)


def _plain(text: str) -> str:
    """Return text that can't look like another line."""
    return "".join(char if char.isprintable() else "?" for char in text)


FORMATS: dict[Format, Callable[[dict[str, Any]], str]] = {"json": as_json, "text": as_text}


class RequestLog:
    """Writes a line per request. All that ended since the last time are written at once.

    Args:
        folder: Where the file goes.
        name: What tells this replica's file from those of others.
        format: What a line looks like.
    """

    def __init__(self, folder: Path, name: str, format: Format) -> None:
        self.path = folder / f"requests_{name}.log"
        folder.mkdir(parents=True, exist_ok=True)
        self._file = RotatingFileHandler(
            self.path, maxBytes=FILE_BYTES, backupCount=FILES, encoding="utf-8", delay=True
        )
        self._format = FORMATS[format]

    def __call__(self, ended: list[TrackedRequest]) -> None:
        """Write the lines of requests that have ended."""
        offset = time.time() - time.monotonic()
        lines = [self._format(fields(request, offset)) for request in ended if request.reportable]
        if lines:
            text = "\n".join(lines)
            self._file.emit(logging.LogRecord("requests", logging.INFO, "", 0, text, None, None))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def serve_logs() -> Path | None:
    """Return the folder where Serve writes this replica's log; None where it writes none."""
    for handler in logging.getLogger("ray.serve").handlers:
        # Serve buffers its lines in a handler of its own.
        file = getattr(handler, "target", handler)
        if path := getattr(file, "baseFilename", None):
            return Path(path).parent
    return None

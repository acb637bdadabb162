"""Request log: a line per request, without its content, in a file beside Serve's own logs."""

import json
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Literal

from serve_app.telemetry.request_tracker import TrackedRequest

Format = Literal["json", "text"]

FILE_BYTES = 64 * 1024 * 1024
FILES = 4
"""Number of older files that are kept."""


def log_fields(request: TrackedRequest, offset_s: float) -> dict[str, Any]:
    """Return the fields of a request's line.

    Args:
        request: The request.
        offset_s: Seconds from `time.monotonic` to `time.time`.
    """
    usage = request.usage
    # A function has no tokens.
    tokens = usage.counted if usage and usage.counted.prompt else None
    fields: dict[str, Any] = {
        "time": datetime.fromtimestamp(request.ended_at + offset_s, UTC).isoformat(timespec="milliseconds"),
        "request_id": request.request_id,
        "method": request.scope["method"],
        "path": request.route,
        "model": request.model or None,
        "tenant": request.tenant or None,
        "status": request.status,
        "outcome": request.outcome,
        "stream": request.streams,
        "prompt_tokens": tokens.prompt if tokens else None,
        "output_tokens": tokens.output if tokens else None,
        "wait_s": round(usage.wait_s, 6) if usage else None,
        "first_s": round(request.first_at - request.started_at, 6) if request.first_at else None,
        "total_s": round(request.seconds, 6),
    }
    if request.trace is not None:
        fields["trace_id"] = request.trace_id
    return fields


def as_json(fields: dict[str, Any]) -> str:
    """Return a line for programs."""
    return json.dumps(fields, separators=(",", ":"))


def as_text(fields: dict[str, Any]) -> str:
    """Return a line for people."""
    model = fields["model"] or "-"
    parts = [f"{fields['time'][11:23]} {fields['status']} {fields['outcome']:<9} {model}"]
    parts.append(f"{fields['method']} {fields['path'] or '(no route)'}")
    if fields["tenant"]:
        parts.append(f"tenant {_one_line(fields['tenant'])}")
    if fields["prompt_tokens"] is not None:
        parts.append(f"{fields['prompt_tokens']} + {fields['output_tokens']} tokens")
        parts.append(f"waited {fields['wait_s']:.3f} s")
    if fields["stream"] and fields["first_s"] is not None:
        parts.append(f"first after {fields['first_s']:.3f} s")
    parts.append(f"{fields['total_s']:.3f} s")
    parts.append(_one_line(fields["request_id"]))
    return ", ".join(parts)


def _one_line(text: str) -> str:
    """Return text without characters that could begin another line."""
    return "".join(char if char.isprintable() else "?" for char in text)


FORMATS: dict[Format, Callable[[dict[str, Any]], str]] = {"json": as_json, "text": as_text}


class RequestLog:
    """Writes the lines of requests to a file, many at a time.

    Args:
        folder: Folder of the file; it is made if missing.
        name: Unique part of the file's name.
        format: Format of a line.

    Attributes:
        path: The file.
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
        lines = [self._format(log_fields(request, offset)) for request in ended if request.reportable]
        if lines:
            text = "\n".join(lines)
            self._file.emit(logging.LogRecord("requests", logging.INFO, "", 0, text, None, None))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def serve_logs() -> Path | None:
    """Return the folder of this replica's log; None if Ray Serve writes no log."""
    for handler in logging.getLogger("ray.serve").handlers:
        # Ray Serve may wrap the file's handler in a buffering handler.
        file = getattr(handler, "target", handler)
        if path := getattr(file, "baseFilename", None):
            return Path(path).parent
    return None

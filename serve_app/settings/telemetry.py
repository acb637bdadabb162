"""Settings of metrics, traces and the request log."""

import re
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
)

from serve_app.api.protocol import Flag
from serve_app.settings.fields import Strict


def _endpoint(url: str) -> str:
    if not re.fullmatch(r"(https?|file)://\S+", url):
        raise ValueError(f"must begin with http://, https:// or file://, not {url!r}")
    return url


class TraceSettings(Strict):
    """Export of OpenTelemetry spans."""

    endpoint: Annotated[str, AfterValidator(_endpoint)] = Field(
        description=(
            "A collector's URL for OTLP over HTTP, such as http://collector:4318/v1/traces; or "
            "file:///DIRECTORY, where each process writes a file of JSON lines."
        )
    )
    sample_ratio: Annotated[float, Field(strict=True, ge=0, le=1)] = Field(
        default=1.0,
        description=(
            "Sampled share, 0 to 1, of the requests without a trace context. A trace context decides for its "
            "own request."
        ),
    )


class TelemetrySettings(Strict):
    """Metrics, request log and traces."""

    metrics: Flag = Field(
        default=True, description="Export the service's metrics on Ray's Prometheus endpoint."
    )
    engine_metrics: Flag = Field(default=True, description="Export vLLM's metrics on this endpoint too.")
    tenants: Annotated[int, Field(strict=True, ge=0, le=1_000)] = Field(
        default=20, description="Maximum tenants with their own series; further tenants share one series."
    )
    request_log: Literal["json", "text"] | None = Field(
        default="json",
        description=(
            'Format, "json" or "text", of the line that the Ingress writes per request to a file '
            "beside Serve's logs; null: no log. Prompts and answers are never in it."
        ),
    )
    traces: TraceSettings | None = Field(default=None, description="Export of spans; null: no export.")


SILENT = TelemetrySettings(metrics=False, engine_metrics=False, request_log=None)
"""Telemetry of a replica outside Ray Serve."""

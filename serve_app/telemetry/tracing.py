"""OpenTelemetry spans of requests: a span in the Ingress, and vLLM's own below it."""

import logging
import os
import time
from pathlib import Path
from urllib.parse import unquote, urlsplit

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serve_app.api.headers import TRACE_CONTEXT, Headers, trace_context
from serve_app.settings.schema import SettingsError
from serve_app.settings.telemetry import TraceSettings
from serve_app.system.distribution import extra
from serve_app.telemetry.request_tracker import QUIET, TrackedRequest

W3C = TraceContextTextMapPropagator()

for _name in ("opentelemetry.trace.span", "opentelemetry.trace.propagation.tracecontext"):
    # Their warnings quote invalid trace contexts, which any client may send at any rate.
    logging.getLogger(_name).setLevel(logging.ERROR)


def provider(settings: TraceSettings, exporter: SpanExporter | None = None) -> TracerProvider:
    """Return a provider of tracers, which exports the spans of one process.

    Args:
        settings: Endpoint and sampling ratio.
        exporter: Replaces the endpoint of the settings.

    Raises:
        SettingsError: The exporter's package is missing, or the folder can't be written to.
    """
    made = TracerProvider(
        # A sender's trace context decides about sampling; the ratio is for requests without one.
        sampler=ParentBased(TraceIdRatioBased(settings.sample_ratio)),
        resource=Resource.create({"service.name": "saturate"}),
    )
    made.add_span_processor(BatchSpanProcessor(exporter or _exporter(settings.endpoint)))
    return made


class Tracing:
    """Makes the spans of an Ingress replica.

    Args:
        provider: Exports the spans.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("saturate")
        self.stop = provider.shutdown

    def begin(self, request: TrackedRequest) -> None:
        """Begin the span of a request: a child of the sender's span, if the headers name one."""
        scope = request.scope
        if scope["path"] in QUIET:
            return
        request.trace = self._tracer.start_span(
            scope["method"],
            context=W3C.extract(trace_context(scope["headers"])),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": scope["method"]},
        )

    def end(self, ended: list[TrackedRequest]) -> None:
        """End the spans of requests that have ended."""
        offset = _offset_ns()
        for request in ended:
            span: Span | None = request.trace
            if span is None:
                continue
            if span.is_recording():
                if request.route is not None:
                    span.update_name(f"{request.scope['method']} {request.route}")
                    span.set_attribute("url.path", request.route)
                span.set_attribute("http.response.status_code", request.status)
                span.set_attribute("saturate.outcome", request.outcome)
                if request.model:
                    span.set_attribute("gen_ai.request.model", request.model)
                    span.set_attribute("saturate.tenant", request.tenant)
                if (usage := request.usage) is not None:
                    span.set_attribute("saturate.wait_s", usage.wait_s)
                    span.set_attribute("saturate.engine_s", usage.engine_s)
                    span.set_attribute("gen_ai.usage.input_tokens", usage.counted.prompt)
                    span.set_attribute("gen_ai.usage.output_tokens", usage.counted.output)
                if request.first_at:
                    span.add_event("first piece", timestamp=_ns(request.first_at, offset))
                if request.outcome == "failed":
                    span.set_status(Status(StatusCode.ERROR))
            span.end(_ns(request.ended_at, offset))


def pass_on(request: TrackedRequest, headers: Headers) -> Headers:
    """Return the headers for the engine, with the trace context of the request's span."""
    carrier: dict[str, str] = {}
    W3C.inject(carrier, set_span_in_context(request.trace))
    kept = [(name, value) for name, value in headers if name not in TRACE_CONTEXT]
    return [*kept, *((name.encode(), value.encode("latin-1")) for name, value in carrier.items())]


def _offset_ns() -> int:
    return time.time_ns() - time.monotonic_ns()


def _ns(at: float, offset: int) -> int:
    return int(at * 1e9) + offset


def _exporter(endpoint: str) -> SpanExporter:
    where = urlsplit(endpoint)
    if where.scheme == "file":
        if where.netloc:
            raise SettingsError(
                f"telemetry.traces.endpoint: {endpoint} names a host; a folder has three slashes, as in "
                f"file:///{where.netloc}{where.path}"
            )
        path = Path(unquote(where.path)) / f"spans-{os.getpid()}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a")
        except OSError as error:
            raise SettingsError(f"telemetry.traces.endpoint: {path}: {error.strerror}") from None
        return ConsoleSpanExporter(out=file, formatter=lambda span: f"{span.to_json(indent=None)}\n")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise SettingsError(f"telemetry.traces: sending spans needs {extra('traces')}") from None
    return OTLPSpanExporter(endpoint=endpoint)

"""OpenTelemetry spans of a request: in the Ingress, in the queue and in the engine."""

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

from serve_app.api.headers import Headers
from serve_app.settings.schema import SettingsError
from serve_app.settings.telemetry import TraceSettings
from serve_app.system.extras import extra
from serve_app.telemetry.request_tracker import QUIET, TrackedRequest
from serve_app.wire.request import RelayRequest
from serve_app.wire.usage import RequestUsage, Usage

W3C = TraceContextTextMapPropagator()
CONTEXT = (b"traceparent", b"tracestate")

for _name in ("opentelemetry.trace.span", "opentelemetry.trace.propagation.tracecontext"):
    # Their warnings quote invalid trace contexts, which any client may send at any rate.
    logging.getLogger(_name).setLevel(logging.ERROR)


class Tracing:
    """Makes the spans of one process.

    Args:
        settings: Endpoint and sampling ratio.
        exporter: Replaces the endpoint of the settings.

    Raises:
        SettingsError: The exporter's package is missing, or the folder can't be written to.
    """

    def __init__(self, settings: TraceSettings, exporter: SpanExporter | None = None) -> None:
        self._provider = TracerProvider(
            # A sender's trace context decides about sampling; the ratio is for requests without one.
            sampler=ParentBased(TraceIdRatioBased(settings.sample_ratio)),
            resource=Resource.create({"service.name": "saturate"}),
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter or _exporter(settings.endpoint)))
        self._tracer = self._provider.get_tracer("saturate")

    def begin(self, request: TrackedRequest) -> None:
        """Begin the span of a request: a child of the sender's span, if the headers name one."""
        scope = request.scope
        if scope["path"] in QUIET:
            return
        request.trace = self._tracer.start_span(
            scope["method"],
            context=W3C.extract(_text(scope["headers"])),
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
                if request.first_at:
                    span.add_event("first piece", timestamp=_ns(request.first_at, offset))
                if request.outcome == "failed":
                    span.set_status(Status(StatusCode.ERROR))
            span.end(_ns(request.ended_at, offset))

    def engine(self, request: RelayRequest, model: str, began_at: float, usage: RequestUsage) -> None:
        """Make the spans of a request in an engine.

        `handle` is the request's way from the Ingress, `engine` its time in the engine, and `queue` and
        `generate` are the wait and the run of each prompt.

        Args:
            request: The request, from the Ingress.
            model: The model's id.
            began_at: Time of arrival in the engine, on the clock of `time.monotonic`.
            usage: Tokens and times of the answer.
        """
        offset = _offset_ns()
        parent = W3C.extract(_text(request.headers))
        way = self._tracer.start_span("handle", context=parent, start_time=int(request.arrived_at * 1e9))
        way.end(_ns(began_at, offset))
        whole = self._tracer.start_span(
            "engine",
            context=parent,
            start_time=_ns(began_at, offset),
            attributes={
                "gen_ai.request.model": model,
                "gen_ai.usage.input_tokens": usage.counted.prompt,
                "gen_ai.usage.output_tokens": usage.counted.output,
            },
        )
        if whole.is_recording():
            for prompt in usage.slots:
                self._prompt(whole, prompt, offset)
        whole.end()

    def _prompt(self, whole: Span, prompt: Usage, offset: int) -> None:
        inside = set_span_in_context(whole)
        times = [_ns(at, offset) for at in (prompt.submitted_at, prompt.started_at, prompt.ended_at)]
        self._tracer.start_span("queue", context=inside, start_time=times[0]).end(times[1])
        tokens = {
            "gen_ai.usage.input_tokens": prompt.counted.prompt,
            "gen_ai.usage.output_tokens": prompt.counted.output,
        }
        run = self._tracer.start_span("generate", context=inside, start_time=times[1], attributes=tokens)
        for name, at in prompt.events:
            run.add_event(name, timestamp=_ns(at, offset))
        run.end(times[2])

    def stop(self) -> None:
        """Export the remaining spans, and stop."""
        self._provider.shutdown()


def pass_on(request: TrackedRequest, headers: Headers) -> Headers:
    """Return the headers for the engine, with the trace context of the request's span."""
    carrier: dict[str, str] = {}
    W3C.inject(carrier, set_span_in_context(request.trace))
    kept = [(name, value) for name, value in headers if name not in CONTEXT]
    return [*kept, *((name.encode(), value.encode("latin-1")) for name, value in carrier.items())]


def _text(headers: Headers) -> dict[str, str]:
    return {name.decode(): value.decode("latin-1") for name, value in headers if name in CONTEXT}


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

"""Spans of a request: the request, the engine within it, and each prompt's wait and run within that."""

import time
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from serve_app.api.scheduling import Scheduling
from serve_app.settings.schema import SettingsError
from serve_app.settings.telemetry import TraceSettings
from serve_app.telemetry.request_tracker import TrackedRequest
from serve_app.telemetry.tracing import Tracing, pass_on
from serve_app.wire.request import RelayRequest
from serve_app.wire.usage import RequestUsage, Tokens, Usage

TRACE = "0af7651916cd43dd8448eb211c80319c"
SENDER = "b7ad6b7169203331"
SETTINGS = TraceSettings(endpoint="file:///nowhere")


ROUTES = {"/generate", "/health"}


def tracked(*headers: tuple[bytes, bytes], path: str = "/generate") -> TrackedRequest:
    # The router puts the endpoint into the scope of a path that is a route.
    scope = {"method": "POST", "path": path, "headers": list(headers)}
    return TrackedRequest(scope | ({"endpoint": None} if path in ROUTES else {}))


def traceparent(sampled: bool) -> tuple[bytes, bytes]:
    return b"traceparent", f"00-{TRACE}-{SENDER}-0{int(sampled)}".encode()


def finished(tracing: Tracing, exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    tracing._provider.force_flush()
    return {span.name: span for span in exporter.get_finished_spans()}


def serve(tracing: Tracing, request: TrackedRequest) -> dict[bytes, bytes]:
    """Trace one request in the Ingress and in the engine; return the engine's headers."""
    tracing.begin(request)
    request.assign("m", Scheduling(tenant="a"))
    headers = pass_on(request, [*request.scope["headers"], (b"x", b"y")])
    usage = RequestUsage()
    start = request.started_at
    usage.add(Usage(start + 1, start + 3, start + 7, Tokens(12, 0, 5), events=[("queued", start + 4)]))
    relayed = RelayRequest("POST", "/generate", b"", headers, b"", arrived_at=time.time())
    tracing.engine(relayed, "m", start + 0.5, usage)
    request.complete, request.status, request.usage = True, 200, usage
    request.first_at, request.ended_at = start + 6, start + 8
    tracing.end([request])
    return dict(headers)


def test_the_spans_of_a_request_are_one_trace_of_its_sender() -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(SETTINGS, exporter)
    headers = serve(tracing, tracked(traceparent(True), (b"tracestate", b"vendor=1")))
    spans = finished(tracing, exporter)
    assert set(spans) == {"POST /generate", "handle", "engine", "queue", "generate"}
    whole, engine, queue, run = (spans[name] for name in ("POST /generate", "engine", "queue", "generate"))
    assert {f"{span.context.trace_id:032x}" for span in spans.values() if span.context} == {TRACE}
    assert whole.parent is not None
    assert f"{whole.parent.span_id:016x}" == SENDER
    assert engine.parent is not None
    assert whole.context is not None
    assert engine.parent.span_id == whole.context.span_id
    assert spans["handle"].parent == engine.parent
    assert spans["handle"].end_time == engine.start_time
    assert engine.context is not None
    for part in (queue, run):
        assert part.parent is not None
        assert part.parent.span_id == engine.context.span_id
    assert headers[b"traceparent"].startswith(b"00-" + TRACE.encode())
    assert headers[b"tracestate"] == b"vendor=1"
    assert headers[b"x"] == b"y"
    assert lasts(queue) == pytest.approx(2.0, abs=1e-3)
    assert lasts(run) == pytest.approx(4.0, abs=1e-3)
    assert run.start_time is not None
    (event,) = run.events
    assert event.name == "queued"
    assert event.timestamp - run.start_time == pytest.approx(1e9, abs=1e6)
    assert lasts(whole) == pytest.approx(8.0, abs=0.5)
    assert run.attributes == {"gen_ai.usage.input_tokens": 12, "gen_ai.usage.output_tokens": 5}
    assert whole.attributes is not None
    assert whole.attributes["saturate.outcome"] == "ok"


def lasts(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_a_sender_that_does_not_sample_decides_and_its_trace_is_passed_on() -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(SETTINGS, exporter)
    headers = serve(tracing, tracked(traceparent(False)))
    assert finished(tracing, exporter) == {}
    assert headers[b"traceparent"].startswith(b"00-" + TRACE.encode())
    assert headers[b"traceparent"].endswith(b"-00")


def test_a_ratio_of_zero_samples_only_what_a_sender_samples() -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(TraceSettings(endpoint="file:///nowhere", sample_ratio=0.0), exporter)
    serve(tracing, tracked())
    assert finished(tracing, exporter) == {}
    serve(tracing, tracked(traceparent(True)))
    assert len(finished(tracing, exporter)) == 5


def test_a_probe_has_no_span() -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(SETTINGS, exporter)
    probe = tracked(path="/health")
    tracing.begin(probe)
    tracing.end([probe])
    assert finished(tracing, exporter) == {}


def test_a_path_that_is_no_route_is_not_in_the_span() -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(SETTINGS, exporter)
    serve(tracing, tracked(path="/the prompt"))
    spans = finished(tracing, exporter)
    assert "POST" in spans
    assert "the prompt" not in str([(name, span.attributes) for name, span in spans.items()])


def test_a_folder_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"telemetry.traces.endpoint: .*spans-\d+.jsonl"):
        Tracing(TraceSettings(endpoint=f"file://{tmp_path}/file/below"))


def test_a_folder_with_two_slashes_is_no_folder_of_the_root() -> None:
    with pytest.raises(SettingsError, match=r"telemetry\.traces\.endpoint: .*file:///var/spans"):
        Tracing(TraceSettings(endpoint="file://var/spans"))


@pytest.mark.parametrize("state", [b"what a client writes", b"a=b," * 3_000], ids=["wrong", "long"])
def test_a_client_writes_no_lines_into_the_log(state: bytes, caplog: pytest.LogCaptureFixture) -> None:
    tracing = Tracing(SETTINGS, InMemorySpanExporter())
    headers = serve(tracing, tracked(traceparent(True), (b"tracestate", state)))
    assert headers[b"traceparent"].decode().split("-")[1] == TRACE
    assert caplog.records == []

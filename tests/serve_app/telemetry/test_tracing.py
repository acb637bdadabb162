"""The span of a request in the Ingress, and the trace that goes on in the engine."""

import sys
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from serve_app.api.headers import trace_context
from serve_app.api.scheduling import Scheduling
from serve_app.settings.schema import SettingsError
from serve_app.settings.telemetry import TraceSettings
from serve_app.telemetry.request_tracker import TrackedRequest
from serve_app.telemetry.tracing import Tracing, pass_on, provider
from serve_app.wire.usage import RequestUsage, Tokens

TRACE = "0af7651916cd43dd8448eb211c80319c"
SENDER = "b7ad6b7169203331"

ROUTES = {"/generate", "/health"}


def tracked(*headers: tuple[bytes, bytes], path: str = "/generate") -> TrackedRequest:
    # The router puts the endpoint into the scope of a path that is a route.
    scope = {"method": "POST", "path": path, "headers": list(headers)}
    return TrackedRequest(scope | ({"endpoint": None} if path in ROUTES else {}))


def traceparent(sampled: bool) -> tuple[bytes, bytes]:
    return b"traceparent", f"00-{TRACE}-{SENDER}-0{int(sampled)}".encode()


def made(ratio: float = 1.0) -> tuple[Tracing, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    settings = TraceSettings(endpoint="file:///nowhere", sample_ratio=ratio)
    return Tracing(provider(settings, exporter)), exporter


def finished(tracing: Tracing, exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    tracing.stop()
    return {span.name: span for span in exporter.get_finished_spans()}


def serve(tracing: Tracing, request: TrackedRequest) -> dict[bytes, bytes]:
    """Trace one request in the Ingress; return the engine's headers."""
    tracing.begin(request)
    request.assign("m", Scheduling(tenant="a"))
    headers = pass_on(request, [*request.scope["headers"], (b"x", b"y")])
    usage = RequestUsage(Tokens(12, 0, 5), wait_s=2.0, engine_s=6.0)
    request.complete, request.status, request.usage = True, 200, usage
    request.first_at, request.ended_at = request.started_at + 6, request.started_at + 8
    tracing.end([request])
    return dict(headers)


def test_the_span_of_a_request_is_part_of_its_senders_trace() -> None:
    tracing, exporter = made()
    headers = serve(tracing, tracked(traceparent(True), (b"tracestate", b"vendor=1")))
    ((name, span),) = finished(tracing, exporter).items()
    assert name == "POST /generate"
    assert span.parent is not None
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == SENDER
    assert trace_context(list(headers.items())) == {
        "traceparent": f"00-{TRACE}-{span.context.span_id:016x}-01",
        "tracestate": "vendor=1",
    }
    assert headers[b"x"] == b"y"
    assert span.start_time is not None
    assert span.end_time is not None
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(8.0, abs=0.5)
    assert span.attributes == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.path": "/generate",
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 5,
        "saturate.tenant": "a",
        "saturate.outcome": "ok",
        "saturate.wait_s": 2.0,
        "saturate.engine_s": 6.0,
    }


def test_a_sender_that_does_not_sample_decides_and_its_trace_is_passed_on() -> None:
    tracing, exporter = made()
    headers = serve(tracing, tracked(traceparent(False)))
    assert finished(tracing, exporter) == {}
    assert headers[b"traceparent"].startswith(b"00-" + TRACE.encode())
    assert headers[b"traceparent"].endswith(b"-00")


def test_a_ratio_of_zero_samples_only_what_a_sender_samples() -> None:
    tracing, exporter = made(ratio=0.0)
    serve(tracing, tracked())
    serve(tracing, tracked(traceparent(True)))
    assert set(finished(tracing, exporter)) == {"POST /generate"}


def test_a_probe_has_no_span() -> None:
    tracing, exporter = made()
    probe = tracked(path="/health")
    tracing.begin(probe)
    tracing.end([probe])
    assert finished(tracing, exporter) == {}


def test_a_path_that_is_no_route_is_not_in_the_span() -> None:
    tracing, exporter = made()
    serve(tracing, tracked(path="/the prompt"))
    ((name, span),) = finished(tracing, exporter).items()
    assert name == "POST"
    assert "the prompt" not in str(span.attributes)


def test_a_folder_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"telemetry.traces.endpoint: .*spans-\d+.jsonl"):
        provider(TraceSettings(endpoint=f"file://{tmp_path}/file/below"))


def test_a_folder_with_two_slashes_is_no_folder_of_the_root() -> None:
    with pytest.raises(SettingsError, match=r"telemetry\.traces\.endpoint: .*file:///var/spans"):
        provider(TraceSettings(endpoint="file://var/spans"))


def test_a_package_that_sending_spans_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(SettingsError, match="sending spans needs the extra traces"):
        provider(TraceSettings(endpoint="http://127.0.0.1:4318/v1/traces"))


@pytest.mark.parametrize("state", [b"what a client writes", b"a=b," * 3_000], ids=["wrong", "long"])
def test_a_client_writes_no_lines_into_the_log(state: bytes, caplog: pytest.LogCaptureFixture) -> None:
    tracing, _ = made()
    headers = serve(tracing, tracked(traceparent(True), (b"tracestate", state)))
    assert headers[b"traceparent"].decode().split("-")[1] == TRACE
    assert caplog.records == []

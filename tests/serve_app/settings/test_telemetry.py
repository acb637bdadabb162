import pytest

from serve_app.api.protocol import JSON
from serve_app.settings.schema import parse
from serve_app.settings.telemetry import SILENT, TelemetrySettings
from tests.serve_app.settings.helpers import mistakes, one


@pytest.mark.parametrize(
    ("telemetry", "line"),
    [
        ({"tenants": -1}, "args.telemetry.tenants: "),
        ({"tenants": 1_001}, "args.telemetry.tenants: "),
        ({"metrics": "maybe"}, "args.telemetry.metrics: "),
        ({"request_log": "xml"}, "args.telemetry.request_log: "),
        ({"traces": {}}, "args.telemetry.traces.endpoint: required, but missing"),
        (
            {"traces": {"endpoint": "collector:4318"}},
            "args.telemetry.traces.endpoint: must begin with http://, https:// or file://",
        ),
        (
            {"traces": {"endpoint": "http://c", "sample_ratio": 1.1}},
            "args.telemetry.traces.sample_ratio: ",
        ),
        ({"trace": {}}, "args.telemetry.trace: unknown key; allowed here: metrics, engine_metrics"),
    ],
)
def test_a_mistake_in_telemetry_is_named(telemetry: JSON, line: str) -> None:
    (found,) = mistakes(one() | {"telemetry": telemetry})
    assert found.startswith(line)


@pytest.mark.parametrize("endpoint", ["http://c:4318/v1/traces", "https://c", "file:///spans"])
def test_spans_go_to_a_collector_or_to_files(endpoint: str) -> None:
    traces = parse(one() | {"telemetry": {"traces": {"endpoint": endpoint}}}).telemetry.traces
    assert traces is not None
    assert traces.endpoint == endpoint
    assert traces.sample_ratio == 1.0


def test_a_service_has_metrics_and_a_request_log_but_no_traces_unless_told() -> None:
    telemetry = parse(one()).telemetry
    assert telemetry == TelemetrySettings()
    assert telemetry.metrics
    assert telemetry.request_log == "json"
    assert telemetry.traces is None
    assert SILENT.request_log is None
    assert not SILENT.metrics

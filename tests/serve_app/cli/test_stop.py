"""The command `saturate stop`."""

from collections.abc import Callable

from click.testing import CliRunner, Result

from serve_app.cli.main import saturate
from serve_app.cli.runs import find_runs
from tests.ports import free_port
from tests.serve_app.cli.launching import Service

Start = Callable[..., Service]


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(saturate, ["stop", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_nothing_to_stop_is_no_error() -> None:
    port = free_port()
    result = run("--port", str(port))
    assert (result.exit_code, result.stdout) == (0, f"No service runs on port {port}\n")


def test_a_service_is_stopped_in_order(start: Start) -> None:
    service = start()
    service.hear_ready()
    result = run("--port", str(service.port))
    assert result.exit_code == 0
    assert f"stopping the service on port {service.port} (pid {service.pid})" in result.stderr
    assert result.stderr.endswith(f"Stopped the service on port {service.port}\n")
    service.wait_gone()
    assert service.stopped_in_order
    assert service.wait() == 0


def test_now_cuts_off_requests_in_flight(start: Start) -> None:
    service = start(busy=True)
    service.hear_ready()
    # Without --now the stop takes minutes.
    assert run("--port", str(service.port), "--now").exit_code == 0
    service.wait_gone()
    assert service.wait() == 0


def test_one_of_several_services_is_stopped_by_its_port(start: Start) -> None:
    first, second = start(), start()
    first.hear_ready()
    second.hear_ready()
    result = run()
    assert result.exit_code == 2
    assert "several services run: " in result.stderr
    assert f"port {first.port} (pid {first.pid})" in result.stderr
    run("--port", str(first.port))
    first.wait_gone()
    assert second.child
    assert [each.port for each in find_runs() if each.port in (first.port, second.port)] == [second.port]


def test_leftovers_of_a_killed_service_are_ended(start: Start) -> None:
    service = start()
    service.hear_ready()
    service.kill(service.pid, service.child)
    service.wait()
    (left,) = (each for each in find_runs() if each.port == service.port)
    assert not left.alive
    assert service.processes("sleep")
    result = run("--port", str(service.port))
    assert result.exit_code == 0
    assert f"processes of a killed service on port {service.port}" in result.stderr
    service.wait_gone()

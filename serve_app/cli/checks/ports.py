"""Checks of the ports, and of leftover processes of earlier services."""

from collections.abc import Iterator
from typing import NamedTuple

from serve_app.cli.checks.finding import CheckInput, Finding, combined, ok, problem, warning
from serve_app.cli.machine import MachineFacts
from serve_app.cli.runs import RunningService
from serve_app.ingress.haproxy import STATISTICS_HOST
from serve_app.system.processes import Listener

DASHBOARD = range(8265, 8275)
"""Possible ports of Ray's dashboard, which takes the first free port; `saturate serve` tries them all."""

ENGINE = "VLLM::"
"""Beginning of the name of an engine's process."""


class Port(NamedTuple):
    """A port that a service needs.

    Attributes:
        use: Use of the port.
        host: Address of the interface.
        number: Number of the port.
        setting: The setting that changes the port.
    """

    use: str
    host: str
    number: int
    setting: str


def ports(case: CheckInput) -> Iterator[Port]:
    """Yield the ports that a service of a config needs."""
    needs = case.needs
    yield Port("HTTP", needs.host, needs.port, "http_options.port in the config")
    if needs.haproxy:
        host = needs.variable(STATISTICS_HOST, case.machine.environment) or "127.0.0.1"
        own = "0.0.0.0" if host == "*" else host
        for use, name, default, place in (
            ("HAProxy's statistics", "RAY_SERVE_HAPROXY_STATS_PORT", 8404, own),
            ("HAProxy's metrics", "RAY_SERVE_HAPROXY_METRICS_PORT", 9101, own),
            ("HTTP without replicas", "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT", 8500, "0.0.0.0"),
        ):
            given = needs.variable(name, case.machine.environment)
            yield Port(use, place, int(given) if given.isdigit() else default, name)


def check_ports(case: CheckInput) -> Finding | None:
    """Check that the ports are free, and find the processes on busy ports."""
    machine = case.machine
    runs = [run for run in machine.services() if run.alive]
    needed = list(ports(case))
    found = [finding for port in needed if (finding := _check(machine, port, runs))]
    if all(machine.port_refusal("127.0.0.1", port) for port in DASHBOARD):
        text = f"all ports from {DASHBOARD[0]} to {DASHBOARD[-1]}, for Ray's dashboard, are taken"
        found.append(problem(text, "end a program on one of these ports"))
    return combined(found) or ok(f"{', '.join(str(port.number) for port in needed)} are free")


def _check(machine: MachineFacts, port: Port, runs: list[RunningService]) -> Finding | None:
    reason = machine.port_refusal(port.host, port.number)
    if not reason:
        return None
    holders = machine.listeners(port.number)
    named = ", ".join(f"{one.name} (pid {one.pid})" for one in holders) or "a process of another user"
    if own := _service(machine, holders, runs):
        what = f"port {port.number} ({port.use}; {port.setting})"
        text = f"{what} is in use by the saturate service on port {own.port}"
        return warning(
            text, f"`saturate stop --port {own.port}` before another service starts, or other ports"
        )
    if not holders and "in use" not in reason:
        named = reason
    return problem(
        f"port {port.number} ({port.use}) can't be used: {named}",
        f"end that program, or set {port.setting}",
    )


def _service(
    machine: MachineFacts, holders: list[Listener], runs: list[RunningService]
) -> RunningService | None:
    """Return the service of the first listening process that belongs to a service; None if there is none."""
    for one in holders:
        mark = machine.mark_of(one.pid)
        for run in runs:
            if mark == run.mark or one.pid in run.processes():
                return run
    return None


def check_leftovers(case: CheckInput) -> Finding:
    """Check that no process of a killed service is left."""
    runs = case.machine.services()
    found = [
        warning(
            f"{len(run.processes())} processes of a killed service on port {run.port} are left",
            "`saturate stop`",
        )
        for run in runs
        if not run.alive
    ]
    orphans = [one for one in case.machine.processes() if one.name.startswith(ENGINE) and one.parent == 1]
    if orphans:
        ids = " ".join(str(one.pid) for one in orphans)
        found.append(warning(f"engines without a service are left: pid {ids}", f"kill {ids}"))
    living = [f"a service runs on port {run.port} (pid {run.launcher})" for run in runs if run.alive]
    return combined(found) or ok("; ".join(living) or "none")

"""The command `saturate doctor`."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from serve_app.cli.checks.cluster import check_cluster
from serve_app.cli.checks.config import check_config
from serve_app.cli.checks.finding import Check, CheckInput, Finding, Level, warning
from serve_app.cli.checks.gpus import check_driver, check_gpus
from serve_app.cli.checks.needs import Needs, read_needs
from serve_app.cli.checks.ports import check_leftovers, check_ports
from serve_app.cli.checks.private_files import check_private_files
from serve_app.cli.checks.resources import (
    check_cores,
    check_disk,
    check_memory,
    check_open_files,
    check_shared_memory,
)
from serve_app.cli.checks.software import check_byte_code, check_haproxy, check_packages, check_python
from serve_app.cli.checks.sources import check_sources
from serve_app.cli.machine import MachineFacts

CHECKS: Mapping[str, Check] = {
    "config": check_config,
    "python": check_python,
    "packages": check_packages,
    "byte code": check_byte_code,
    "driver": check_driver,
    "gpus": check_gpus,
    "cores": check_cores,
    "memory": check_memory,
    "shared memory": check_shared_memory,
    "disk": check_disk,
    "open files": check_open_files,
    "haproxy": check_haproxy,
    "ports": check_ports,
    "private files": check_private_files,
    "leftovers": check_leftovers,
    "sources": check_sources,
    "cluster": check_cluster,
}
"""The checks, in display order."""

COLOURS: Mapping[Level, str] = {"ok": "green", "warning": "yellow", "problem": "red"}


@click.command()
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option(
    "--address",
    metavar="ADDRESS",
    help="Ray cluster for the service: HOST:6379, ray://HOST:10001, or http://HOST:8265 of its dashboard.  "
    "[default: RAY_ADDRESS of the environment; without it, the service starts its own Ray]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for programs.")
def doctor(config: Path | None, address: str | None, as_json: bool) -> int:
    """Check this machine, and suggest fixes.

    With CONFIG, the checks cover the needs of that config: its ports, GPUs, cores, memory and models.
    Nothing is started or changed. For a model of Hugging Face's hub the command looks up its name on the hub,
    unless HF_HUB_OFFLINE is 1.

    \b
    ok       nothing to do
    warning  a service starts, but is slower, or fails in some case
    problem  a service can't start, or fails

    Exit codes: 0 no problem, perhaps warnings; 1 a problem; 2 there is no such CONFIG.

    \b
    Examples:
      saturate doctor
      saturate doctor configs/qwen2.5-7b-l4.yaml
      saturate doctor --json | jq '.findings[] | select(.level != "ok")'
    """
    if config is not None and not config.is_file():
        raise click.UsageError(f"{config}: there is no such file")
    return report(check_input(config, address, MachineFacts()), CHECKS, as_json=as_json)


def check_input(config: Path | None, address: str | None, machine: MachineFacts) -> CheckInput:
    """Return the input of the checks.

    Args:
        config: The config; None: no config.
        address: Ray cluster for the service; None: the cluster in RAY_ADDRESS of the environment.
        machine: The machine.
    """
    address = address or machine.environment.get("RAY_ADDRESS")
    needs = Needs() if config is None else read_needs(config)
    return CheckInput(machine, needs, None if address == "local" else address)


def report(case: CheckInput, checks: Mapping[str, Check], *, as_json: bool) -> int:
    """Print the findings of checks; return the exit code.

    Args:
        case: Input of the checks.
        checks: The checks by name.
        as_json: Whether to print one JSON object.
    """
    found = []
    for name, finding in examine(case, checks):
        found.append((name, finding))
        if not as_json:
            _show(name, finding)
    problems = sum(finding.level == "problem" for _, finding in found)
    warnings = sum(finding.level == "warning" for _, finding in found)
    if as_json:
        body = {
            "ok": not problems,
            "findings": [
                {"check": name, "level": finding.level, "text": finding.text, "fix": finding.fix}
                for name, finding in found
            ],
        }
        print(json.dumps(body, indent=1, ensure_ascii=False))
    else:
        print(f"{_number(problems, 'problem')}, {_number(warnings, 'warning')}")
    return 1 if problems else 0


def examine(case: CheckInput, checks: Mapping[str, Check]) -> Iterator[tuple[str, Finding]]:
    """Yield the finding of each check that applies; a failed check yields a warning."""
    for name, check in checks.items():
        try:
            finding = check(case)
        except Exception as error:
            # The finding is for a user: it names the exception, and asks for a report.
            said = str(error).strip().splitlines()
            reason = said[0] if said else type(error).__name__
            text = f"the check could not run: {type(error).__name__}: {reason}"
            finding = warning(text, "check this by hand, and report it as an error of saturate")
        if finding is not None:
            yield name, finding


def _show(name: str, finding: Finding) -> None:
    level = click.style(f"{finding.level:<8}", fg=COLOURS[finding.level], bold=finding.level == "problem")
    first, *more = finding.text.splitlines()
    click.echo(f"{level} {name:<14} {first}")
    for line in more:
        click.echo(f"{'':24}{line.strip()}")
    for line in finding.fix.splitlines():
        click.echo(f"{'':24}-> {line}")


def _number(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"

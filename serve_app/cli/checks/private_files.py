"""Check of sockets, tokens and keys that other users of this machine or network could take over."""

from collections.abc import Iterator
from pathlib import Path

from serve_app.cli.checks.finding import CheckInput, Finding, combined, ok, problem, warning
from serve_app.ingress.haproxy import FILES, FOLDER, SOCKETS, STATISTICS_HOST
from serve_app.settings.addresses import is_loopback
from serve_app.settings.environment import CONTROLLER
from serve_app.system.private_files import OTHERS, token_file

WRITING = 0o022
"""The write permission bits of group and others."""


def check_private_files(case: CheckInput) -> Finding:
    """Check that no other user can reach HAProxy's sockets, Ray's token, or write to the file of API keys."""
    found = [*_token(case), *_sessions(case), *_keys(case)]
    if case.needs.haproxy:
        found += [*_sockets(case), *_statistics(case)]
    return combined(found) or ok("sockets, token and keys are closed to others")


def _sockets(case: CheckInput) -> Iterator[Finding]:
    for name in SOCKETS:
        given = case.needs.variable(name, case.machine.environment)
        folder = (Path(given) if given else FILES[name]).parent
        owned = case.machine.owned(folder)
        if owned is None:
            continue
        if not owned.mine:
            text = f"{folder}, for HAProxy's sockets, belongs to another user"
            yield problem(text, f"remove {folder}, or set {name} to a file in a folder of your own")
        elif owned.mode & OTHERS and folder != FOLDER:
            # The start of a service closes the default folder.
            text = f"{folder} is open to other users, who can take the service's port over by {name}"
            yield problem(text, f"chmod 700 {folder}")


def _statistics(case: CheckInput) -> Iterator[Finding]:
    host = case.needs.variable(STATISTICS_HOST, case.machine.environment) or "127.0.0.1"
    if not case.needs.limited:
        text = "HAProxy's statistics and metrics listen on all interfaces, and its connections have no limits"
        yield warning(text, f"{CONTROLLER.name}: {CONTROLLER.value} for the controller")
    elif not is_loopback(host):
        text = f"HAProxy's statistics and metrics listen on {host}, without a key"
        yield warning(text, f"leave {STATISTICS_HOST} out, unless a firewall blocks other machines")


def _token(case: CheckInput) -> Iterator[Finding]:
    file = token_file(case.machine.environment)
    owned = case.machine.owned(file)
    if owned is not None and owned.mode & OTHERS:
        text = f"{file} is open to other users, who can run code as this user on a Ray with its token"
        yield problem(text, f"chmod 600 {file}; if others had access, remove it, and restart Ray")


def _sessions(case: CheckInput) -> Iterator[Finding]:
    folder = Path(case.machine.environment.get("RAY_TMPDIR", "/tmp"), "ray")
    owned = case.machine.owned(folder)
    if owned is not None and not owned.mine:
        text = f"{folder} belongs to another user, who can replace the folders of Ray's sessions in it"
        yield warning(text, "set RAY_TMPDIR to a folder of your own")


def _keys(case: CheckInput) -> Iterator[Finding]:
    for file in case.needs.keys_files:
        owned = case.machine.owned(file)
        if owned is not None and owned.mode & WRITING:
            yield problem(
                f"{file} may be written by other users, who can add an API key", f"chmod go-w {file}"
            )

"""Check of the config itself."""

from serve_app.cli.checks.finding import CheckInput, Finding, ok, problem
from serve_app.cli.errors import LaunchError


def check_config(case: CheckInput) -> Finding | None:
    """Check the config as `saturate serve` does; None without a config."""
    if case.needs.path is None:
        return None
    # This imports Ray.
    from serve_app.cli.serve_config import read_config

    try:
        read_config(case.needs.path)
    except LaunchError as error:
        return problem(error.message, "correct the config; `saturate schema` explains every setting")
    return ok(str(case.needs.path))

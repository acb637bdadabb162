"""Runs `saturate batch` in the process of a test."""

import pytest

from serve_app.cli.main import saturate
from serve_app.system.command_line import run


def batch(*arguments: object) -> int:
    """Run the command and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        run(saturate, ["batch", *map(str, arguments)])
    return int(ended.value.code or 0)

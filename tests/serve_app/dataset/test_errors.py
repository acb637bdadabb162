"""Errors of runs and rows."""

import pickle

import pytest

from serve_app.dataset.errors import CommandError, InputError, OutputError, RowError
from serve_app.rows.errors import RunError


@pytest.mark.parametrize("kind", [CommandError, InputError, OutputError])
def test_all_errors_that_end_a_run_are_driver_errors(kind: type[RunError]) -> None:
    assert issubclass(kind, RunError)


def test_the_error_of_a_row_is_its_message_and_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(RowError("invalid_row", "prompt: must be text")))
    assert (error.type, str(error)) == ("invalid_row", "prompt: must be text")
    assert not isinstance(error, RunError)

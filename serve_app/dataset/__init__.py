"""Datasets: sends every row through a service, and writes a row for each."""

from serve_app.dataset.errors import InputError, OutputError, RowError
from serve_app.dataset.prompts import Prompter
from serve_app.dataset.run import run
from serve_app.rows.errors import RunError
from serve_app.rows.http import HTTPClient

__all__ = [
    "HTTPClient",
    "InputError",
    "OutputError",
    "Prompter",
    "RowError",
    "RunError",
    "run",
]

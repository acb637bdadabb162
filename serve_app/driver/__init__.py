"""Batch driver: sends a dataset through a service and writes each row's result exactly once."""

from serve_app.dataset.errors import DriverError, InputError, OutputError, RowError
from serve_app.dataset.prompts import Prompter
from serve_app.driver.clients import Client, HandleClient, HTTPClient
from serve_app.driver.running import run

__all__ = [
    "Client",
    "DriverError",
    "HTTPClient",
    "HandleClient",
    "InputError",
    "OutputError",
    "Prompter",
    "RowError",
    "run",
]

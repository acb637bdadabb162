import dataclasses

import pytest

from serve_app.jobs.limits import Limits
from serve_app.settings.batches import BatchesSettings

SET = [
    "max_file_bytes",
    "max_tenant_bytes",
    "max_files",
    "max_lines",
    "max_line_bytes",
    "max_open_batches",
    "max_batches",
    "retention_s",
    "max_result_bytes",
]


def test_the_defaults_are_those_of_the_config() -> None:
    assert Limits.of(BatchesSettings(folder="/batches")) == Limits()


@pytest.mark.parametrize("name", SET)
def test_a_limit_of_the_config_replaces_its_default_and_no_other(name: str) -> None:
    value = getattr(Limits(), name) - 1
    settings = BatchesSettings.model_validate({"folder": "/batches", name: value})
    assert Limits.of(settings) == dataclasses.replace(Limits(), **{name: value})

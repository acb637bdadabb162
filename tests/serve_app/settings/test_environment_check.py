"""The check of the environment in which an application is built."""

import logging

import pytest

from serve_app.settings.environment_check import NEEDED, check_environment
from serve_app.settings.schema import SettingsError, parse

DEMO = {"models": [{"id": "demo", "source": "saturate://demo"}]}
KEYS = {"access": {"keys_env": "KEYS"}}
WHOLE = dict.fromkeys(NEEDED, "any")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_complete_environment_needs_no_word(caplog: pytest.LogCaptureFixture) -> None:
    check_environment(parse(DEMO | KEYS), WHOLE)
    assert caplog.records == []


def test_variables_that_are_missing_are_one_warning_with_the_command(
    caplog: pytest.LogCaptureFixture,
) -> None:
    check_environment(parse(DEMO), {})
    (said,) = warnings(caplog)
    assert all(name in said for name in NEEDED)
    assert "`saturate serve CONFIG --print-config > complete.yaml`" in said


def test_a_value_of_one_s_own_is_not_missing(caplog: pytest.LogCaptureFixture) -> None:
    check_environment(parse(DEMO), {**WHOLE, "RAY_SERVE_ENABLE_HA_PROXY": "0"})
    assert caplog.records == []


def test_api_keys_are_refused_where_a_client_could_claim_any_address() -> None:
    environment = {name: value for name, value in WHOLE.items() if "CALLBACK" not in name}
    with pytest.raises(SettingsError, match=r"^access: .*CALLBACK_IMPORT_PATH.*--print-config"):
        check_environment(parse(DEMO | KEYS), environment)


def test_api_keys_are_served_without_haproxy(caplog: pytest.LogCaptureFixture) -> None:
    environment = {name: value for name, value in WHOLE.items() if name != "RAY_SERVE_ENABLE_HA_PROXY"}
    check_environment(parse(DEMO | KEYS), environment)
    (said,) = warnings(caplog)
    assert "lacks RAY_SERVE_ENABLE_HA_PROXY. " in said

"""The `user_config` of a running Engine."""

import pytest

from serve_app.settings.schema import SettingsError
from serve_app.settings.user_config import BatcherUserConfig, UserConfig, parse_user_config


def test_fields_default_to_none() -> None:
    assert parse_user_config({}) == UserConfig(batcher=BatcherUserConfig())


def test_limits_and_weights() -> None:
    given = {
        "capacity_tokens": 4096,
        "max_running": 8,
        "max_queue_size": 50,
        "goals": {"ttft_p99_s": 0.5, "tpot_p99_s": None},
        "tenant_weights": {"a": 2.0},
    }
    assert parse_user_config({"batcher": given}).batcher.model_dump() == given


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batchr": {}}, "user_config.batchr: unknown key; allowed here: batcher, adapters"),
        (
            {"batcher": {"policy": "max_utilization"}},
            "user_config.batcher.policy: unknown key; allowed here: cap",
        ),
        (
            {"batcher": {"max_running": 0}},
            "user_config.batcher.max_running: Input should be greater than or equal",
        ),
        (
            {"batcher": {"goals": {"ttft_p99_s": 0}}},
            "user_config.batcher.goals.ttft_p99_s: Input should be greater",
        ),
        (
            {"batcher": {"tenant_weights": {"a": -1}}},
            "user_config.batcher.tenant_weights.a: Input should be greater",
        ),
    ],
)
def test_an_error_has_its_path(given: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_user_config(given)
    head, line = str(caught.value).split("\n  ")
    assert head == "the config's user_config has 1 mistake:"
    assert line.startswith(message)


def test_adapters() -> None:
    config = parse_user_config({"adapters": [{"source": "org/words", "pinned": True}]})
    assert config.adapters is not None
    assert config.adapters[0].pinned
    with pytest.raises(SettingsError, match=r"user_config\.adapters\[0\]\.source: must be an absolute path"):
        parse_user_config({"adapters": [{"source": "words"}]})

"""The `user_config` of a running Engine."""

import pytest

from serve_app.api.protocol import JSON
from serve_app.settings.schema import SettingsError
from serve_app.settings.user_config import parse_user_config


def test_limits_weights_and_adapters_are_read_and_left_out_fields_are_none() -> None:
    batcher = {
        "capacity_tokens": 4096,
        "max_running": 8,
        "max_queue_size": 50,
        "goals": {"ttft_p99_s": 0.5, "tpot_p99_s": None},
        "tenant_weights": {"a": 2.0},
    }
    adapters = ({"source": "org/words", "id": None},)
    given = {"batcher": batcher, "adapters": adapters}
    assert parse_user_config(given).model_dump() == given
    assert parse_user_config({}).model_dump() == {"batcher": dict.fromkeys(batcher), "adapters": None}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batchr": {}}, "batchr: unknown key; allowed here: batcher, adapters"),
        ({"batcher": {"policy": "max_utilization"}}, "batcher.policy: unknown key; allowed here: cap"),
        ({"batcher": {"max_running": 0}}, "batcher.max_running: Input should be greater than or equal"),
        ({"batcher": {"capacity_tokens": 0}}, "batcher.capacity_tokens: Input should be greater than or"),
        ({"batcher": {"max_queue_size": 0}}, "batcher.max_queue_size: Input should be greater than or"),
        ({"batcher": {"goals": {"ttft_p99_s": 0}}}, "batcher.goals.ttft_p99_s: Input should be greater"),
        ({"batcher": {"tenant_weights": {"a": -1}}}, "batcher.tenant_weights.a: Input should be greater"),
        ({"adapters": [{"source": "words"}]}, "adapters[0].source: must be an absolute path"),
        ({"adapters": [{"sauce": "/x", "source": "/x"}]}, "adapters[0].sauce: unknown key"),
    ],
)
def test_a_mistake_has_its_path(given: JSON, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_user_config(given)
    head, line = str(caught.value).split("\n  ")
    assert head == "the config's user_config has 1 mistake:"
    assert line.startswith(f"user_config.{message}")

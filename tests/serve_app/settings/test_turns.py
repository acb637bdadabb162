import pytest

from serve_app.api.protocol import JSON
from serve_app.settings.schema import SettingsError, parse


def sharing(*models: JSON, **group: object) -> JSON:
    """Return args of models that share a device, two simulated ones unless they are given."""
    given = models or ({"simulate": "h100-8b"}, {"simulate": "h100-8b"})
    made = [{"id": f"m{n}", "source": "s", "share": "g", **model} for n, model in enumerate(given)]
    return {"models": made, **({"share_groups": {"g": group}} if group else {})}


def test_models_of_a_group_share_its_settings() -> None:
    settings = parse(sharing(sleep_level=2, min_turn_s=1, max_wait_s=10, self_check=True))
    assert [model.id for model in settings.sharing()["g"]] == ["m0", "m1"]
    assert settings.share_groups["g"].sleep_level == 2
    assert parse(sharing()).share_groups == {}
    assert parse({"models": [{"id": "a", "source": "s"}]}).sharing() == {}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (sharing(sleep_level=3), "share_groups.g.sleep_level"),
        (sharing(min_turn_s=0), "share_groups.g.min_turn_s"),
        ({**sharing(), "share_groups": {"other": {}}}, "share_groups.other: no model has share: other"),
        (sharing({"share": "a b"}), "models[0].share"),
        (
            sharing({}, {}, {}, min_turn_s=6, max_wait_s=10),
            "share_groups.g.max_wait_s: with min_turn_s 6 each of 3 models may wait 12 s",
        ),
        (sharing({"simulate": "h100-8b"}, {}), "on simulated devices and on real ones"),
        (
            sharing(*[{"engine": {"gpu_memory_utilization": 0.95}}] * 4),
            "m0 takes 0.95 awake, and 3 others 0.06 asleep; that is 1.01 of 1",
        ),
        (sharing(*[{}] * 6), "m0 takes 0.92 awake, and 5 others 0.1 asleep; that is 1.02 of 1"),
        (
            sharing(*[{"simulate": "h100-8b"}] * 7),
            "m0 takes 72 GB awake, and 6 others 9.6 GB asleep; that is 81.6 of 80 GB",
        ),
    ],
)
def test_a_group_that_can_not_work_is_refused(args: JSON, message: str) -> None:
    with pytest.raises(SettingsError) as error:
        parse(args)
    assert message in str(error.value)

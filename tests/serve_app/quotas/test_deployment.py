"""The place of the quotas' state, by the config."""

from pathlib import Path
from typing import Any

import pytest

from serve_app.quotas.service import place_of
from serve_app.settings.batches import BatchesSettings
from serve_app.settings.schema import SettingsError
from serve_app.settings.usage import QuotasSettings

POSTGRES = "postgresql://user:secret@db/quotas"


@pytest.mark.parametrize(
    ("quotas", "batches", "place"),
    [
        ({"folder": "{}/own"}, {}, "{}/own/quotas.db"),
        ({}, {}, "{}/batches/quotas/quotas.db"),
        ({}, {"database": POSTGRES}, POSTGRES),
        ({}, {"database_env": "QUOTAS_TEST"}, POSTGRES),
        ({"database_env": "QUOTAS_TEST"}, {}, POSTGRES),
        ({"database": POSTGRES}, {"database": "postgresql://other/x"}, POSTGRES),
    ],
)
def test_the_state_has_its_own_place_or_that_of_the_batches(
    quotas: dict[str, Any],
    batches: dict[str, Any],
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QUOTAS_TEST", POSTGRES)
    own = {name: value.format(tmp_path) for name, value in quotas.items()}
    settings = BatchesSettings(folder=str(tmp_path / "batches"), **batches)
    assert str(place_of(QuotasSettings(**own), settings)) == place.format(tmp_path)


def test_a_variable_that_is_missing_is_named() -> None:
    with pytest.raises(SettingsError, match=r"usage\.quotas\.database_env: .* no variable NO_SUCH"):
        place_of(QuotasSettings(database_env="NO_SUCH"), None)

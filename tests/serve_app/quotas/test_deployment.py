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
        ({}, {"database": POSTGRES}, "postgresql://db/quotas"),
        ({}, {"database_env": "QUOTAS_TEST"}, "postgresql://db/quotas"),
        ({"database_env": "QUOTAS_TEST"}, {}, "postgresql://db/quotas"),
        ({"database": POSTGRES}, {"database": "postgresql://other/x"}, "postgresql://db/quotas"),
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
    state = place_of(QuotasSettings(**own), settings)
    assert state.place == place.format(tmp_path)
    state.close()


def test_a_variable_that_is_missing_is_named() -> None:
    with pytest.raises(SettingsError, match=r"usage\.quotas\.database_env: .* no variable NO_SUCH"):
        place_of(QuotasSettings(database_env="NO_SUCH"), None)

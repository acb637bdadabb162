import sqlite3
from pathlib import Path

import pytest

from serve_app.jobs.errors import StoreError
from serve_app.jobs.forecast import Hour
from serve_app.jobs.store import Store
from tests.serve_app.jobs.conftest import Place, database_at
from tests.serve_app.jobs.helpers import batch_of, file_of


def test_a_database_of_another_version_is_refused(tmp_path: Path) -> None:
    Store(tmp_path).close()
    db = sqlite3.connect(tmp_path / "batches.db")
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StoreError, match="99"):
        Store(tmp_path)


def test_a_database_of_an_earlier_version_is_brought_to_this_one(place: Place) -> None:
    database = database_at(place)
    store = Store(database)
    store.add_file(file_of("in"))
    store.add_batch(batch_of("b", "in"), 1)
    added = (
        "weight",
        "input_tokens",
        "cached_tokens",
        "output_tokens",
        "reasoning_tokens",
        "api_key",
        "rights",
        "work",
        "promised",
    )
    columns = [f"ALTER TABLE batches DROP COLUMN {name}" for name in added]
    made = [
        "DROP INDEX batches_by_expiry",
        "DROP TABLE contents_without_file",
        "DROP TABLE capacity",
        "DROP TABLE owner",
    ]
    database.change_schema([*made, *columns], 1)
    store.close()
    store = Store(place())
    assert store.batch("b") == batch_of("b", "in")
    rights = {"models": ["demo"], "max_lines": 7}
    store.add_batch(batch_of("c", "in", weight=2.5, api_key="ada", rights=rights, work=2.5, promised=True), 2)
    store.close()
    store = Store(place())
    batch = store.batch("c")
    assert (batch.weight, batch.api_key, batch.rights) == (2.5, "ada", rights)
    assert (batch.work, batch.promised) == (2.5, True)
    store.keep_capacity("demo", [Hour(7, 1.0, 2.0, 3.0)])
    store.keep_capacity("demo", [Hour(7, 4.0, 5.0, 6.0, 0.5), Hour(8)])
    assert store.capacity() == {"demo": [Hour(7, 4.0, 5.0, 6.0, 0.5), Hour(8)]}
    store.close()

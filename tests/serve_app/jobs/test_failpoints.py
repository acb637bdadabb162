"""Each write of the batches has failpoints before and after it; there the kill schedules end the process."""

from pathlib import Path

import pytest

from serve_app.jobs import failpoints
from tests.serve_app.jobs.helpers import file_of, opened


def test_a_point_is_passed_where_there_is_no_hook() -> None:
    assert failpoints.hook is None
    failpoints.reach("anything")


def test_each_write_has_a_point_before_it_and_one_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached: list[str] = []
    store, content = opened(tmp_path)
    monkeypatch.setattr(failpoints, "hook", reached.append)
    store.add_file(file_of("a"))
    assert reached == ["store.commit", "store.committed"]
    reached.clear()
    content.keep(content.draft(), "a")
    assert (reached[0], reached[-1]) == ("content.sync", "content.kept")
    store.close()

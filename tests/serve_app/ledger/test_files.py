from pathlib import Path

import pytest

from serve_app.ledger.files import (
    day_of,
    lock_path,
    lost_path,
    open_path,
    segment_path,
    unique_name,
    writer_of,
)

FOLDER = Path("/ledger")


@pytest.mark.parametrize(
    ("replica", "name"),
    [
        ("llm#Engine:demo#abc1", "llm-Engine-demo-abc1-00ff"),
        ("a.b/c d", "a-b-c-d-00ff"),
        ("#", "engine-00ff"),
        ("", "engine-00ff"),
    ],
)
def test_the_name_of_a_process_is_that_of_a_file(replica: str, name: str) -> None:
    assert unique_name(replica, "00ff") == name


def test_each_file_tells_its_process() -> None:
    name = unique_name("llm#Engine:demo#abc1", "00ff")
    day = "2026-11-23"
    paths = [
        segment_path(FOLDER, day, name, 1),
        lost_path(FOLDER, day, name),
        open_path(FOLDER, name),
        lock_path(FOLDER, name),
    ]
    assert {writer_of(path) for path in paths} == {name}
    assert len({*paths}) == len(paths)
    assert [day_of(path) for path in paths[:2]] == [day, day]


def test_segments_sort_by_their_number() -> None:
    paths = [segment_path(FOLDER, "2026-11-23", "a", number) for number in (0, 9, 10, 99_999)]
    assert sorted(paths) == paths

from pathlib import Path

import pytest
from pydantic_core import from_json

from serve_app.batches import failpoints
from serve_app.batches.limits import Limits
from serve_app.batches.lines import Position
from serve_app.batches.recording import close, record, unfinished
from serve_app.batches.rows import Row, answered
from tests.serve_app.batches.helpers import NOW, batch_of, opened, put, row, text_of

ROWS = [Row(number, text_of(row(f"r{number}"))) for number in (1, 2, 3)]


def test_results_are_written_once_whatever_the_commit_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, content = opened(tmp_path)
    put(store, content, "in", b"".join(row.text for row in ROWS))
    store.add_batch(batch_of("b", "in"), 1)
    store.move("b", "in_progress", NOW, total=3)
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    results = [answered("b", ROWS[0], 200, {"usage": usage}), answered("b", ROWS[1], 404, {})]

    def fail(point: str) -> None:
        if point in failing:
            raise OSError("the disk fails")

    failing: list[str] = []
    monkeypatch.setattr(failpoints, "hook", fail)
    for point in ("content.appended", "store.commit", "store.committed"):
        failing[:] = [point]
        with pytest.raises(OSError, match="the disk fails"):
            record(store, content, "b", results)
    failing.clear()
    record(store, content, "b", results)
    batch = store.batch("b")
    assert (batch.completed, batch.failed, batch.unrun) == (1, 1, 0)
    assert (batch.input_tokens, batch.output_tokens) == (5, 2)
    assert content.path(batch.output_file).read_bytes() == results[0].text
    assert content.path(batch.error_file).read_bytes() == results[1].text
    assert unfinished(store, content, batch, Position(), Limits())[0] == [
        Row(ROWS[2].line, ROWS[2].text.strip())
    ]

    close(store, content, store.move("b", "cancelling", NOW), Limits(), NOW)
    batch = store.batch("b")
    assert (batch.state, batch.completed, batch.failed, batch.unrun) == ("cancelled", 1, 2, 1)
    last = from_json(content.path(batch.error_file).read_bytes().splitlines()[1])
    assert (last["custom_id"], last["error"]["code"]) == ("r3", "batch_cancelled")
    store.close()

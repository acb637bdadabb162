from dataclasses import replace
from pathlib import Path

from serve_app.batches.retention import remove_expired, remove_orphans
from tests.serve_app.batches.helpers import NOW, batch_of, file_of, opened, put


def test_files_are_deleted_when_their_time_is_over(tmp_path: Path) -> None:
    store, content = opened(tmp_path)
    for id in ("old", "read"):
        content.append(id, 0, b"x")
        store.add_file(replace(file_of(id), expires_at=NOW))
    store.add_batch(batch_of("b", "read"), 1)
    assert remove_expired(store, content, NOW - 1, 10**9) == 0
    assert remove_expired(store, content, NOW, 10**9) == 1
    assert content.ids() == {"read"}
    store.end("b", "failed", NOW)
    assert remove_expired(store, content, NOW, 10**9) == 1
    assert content.ids() == set()
    store.close()


def test_contents_without_a_file_are_deleted(tmp_path: Path) -> None:
    store, content = opened(tmp_path)
    put(store, content, "in", b"x")
    batch = batch_of("b", "in")
    store.add_batch(batch, 1)
    for id in ("orphan", batch.output_file):
        content.append(id, 0, b"x")
    assert remove_orphans(store, content) == 1
    assert content.ids() == {"in", batch.output_file}
    store.close()


def test_the_oldest_results_go_when_a_tenant_has_too_many_bytes(tmp_path: Path) -> None:
    store, content = opened(tmp_path)
    for number in range(4):
        draft = content.draft()
        draft.write(b"x" * 10)
        content.keep(draft, f"out-{number}")
        store.add_file(file_of(f"out-{number}", size=10, purpose="batch_output"))
    put(store, content, "in", b"x" * 100)
    store.add_file(file_of("other", "ben", size=25, purpose="batch_output"))
    assert remove_expired(store, content, NOW, 25) == 2
    assert content.ids() == {"out-2", "out-3", "in"}
    assert remove_expired(store, content, NOW, 25) == 0
    store.close()

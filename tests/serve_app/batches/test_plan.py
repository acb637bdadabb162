"""The plan of a batch: the places of its rows, and the order in which they are sent."""

from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import pytest
from pydantic_core import from_json, to_json

from serve_app.api.protocol import JSON
from serve_app.batches.content import Content, Contents
from serve_app.batches.limits import Limits
from serve_app.batches.plan import Plan, plan_id, plan_of, unsent
from serve_app.batches.recording import close, give_up, record
from serve_app.batches.rows import Row, answered
from serve_app.batches.store import Store
from serve_app.batches.stored import Batch
from serve_app.batches.validate import validate
from tests.serve_app.batches.helpers import CHAT, NOW, batch_of, opened, put, row, text_of


def asked(name: str, *parts: str, model: str = "demo") -> JSON:
    """Return a row whose prompt has these parts, the first one as its system prompt."""
    messages = [
        {"role": "system" if not number else "user", "content": part} for number, part in enumerate(parts)
    ]
    return row(name, body={"model": model, "messages": messages})


def text(random: Random, size: int) -> str:
    """Return a text that no other one begins like."""
    return random.randbytes(size // 2).hex()


class Site:
    """A batch whose rows are planned.

    Attributes:
        store: The state.
        content: The contents.
        batch: The batch.
    """

    def __init__(self, folder: Path, *rows: JSON | bytes, storage: bool = False, start: bytes = b"") -> None:
        self.store: Store = opened(folder)[0]
        self.content: Contents = Content(folder)
        if storage:
            from serve_app.batches.object_storage import ObjectContent

            self.content = ObjectContent(f"memory://{uuid4().hex}", folder)
        put(self.store, self.content, "in", start + text_of(*rows))
        self.store.add_batch(batch_of("b", "in"), 1)
        found = validate(self.content.path("in"), CHAT, {"demo", "other"}, Limits())
        assert found.plan is not None, found.errors
        found.plan.keep(self.content, "b")
        self.batch: Batch = self.store.move("b", "in_progress", NOW, total=found.total)

    def taken(self, most: int = 3, **options: bool) -> list[Row]:
        """Return all rows that have no result."""
        left = unsent(self.store, self.content, self.batch, **options)
        rows: list[Row] = []
        while left:
            rows += left.take(self.content, most)
        return rows


@pytest.mark.parametrize("storage", [False, True])
def test_rows_are_read_by_their_places(tmp_path: Path, storage: bool) -> None:
    if storage:
        pytest.importorskip("fsspec")
    random = Random(6)
    prefixes = [text(random, 3000) for _ in range(3)]
    rows = [asked(f"ü{number}", prefixes[number % 3], text(random, 6000)) for number in range(30)]
    lines = [b"  " + to_json(one) + b" \r" for one in rows]
    site = Site(tmp_path, *lines[:5], b"", b" ", *lines[5:], storage=storage, start=b"\xef\xbb\xbf")
    taken = site.taken()
    for one in taken:
        index = one.line - 1 if one.line <= 5 else one.line - 3
        assert (from_json(one.text), one.model) == (rows[index], "demo")
    assert sorted(taken) == site.taken(by_line=True)
    assert len(taken) == 30
    site.store.close()


def test_rows_that_have_a_result_are_left_out(tmp_path: Path) -> None:
    random = Random(7)
    prefixes = [text(random, 3000) for _ in range(3)]
    site = Site(tmp_path, *(asked(str(number), prefixes[number % 3], "?") for number in range(30)))
    taken = site.taken()
    done = random.sample(taken, 12)
    record(site.store, site.content, "b", [answered("b", one, 200, {}) for one in done])
    assert site.taken() == [one for one in taken if one not in done]
    site.store.close()


@pytest.mark.parametrize("damage", ["missing", "cut", "changed", "another version"])
def test_a_plan_that_is_not_there_is_made_again(tmp_path: Path, damage: str) -> None:
    random = Random(8)
    prefixes = [text(random, 3000) for _ in range(3)]
    site = Site(tmp_path, *(asked(str(number), prefixes[number % 3], "?") for number in range(30)))
    taken = site.taken()
    path = tmp_path / "files" / plan_id("b")
    stored = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(stored[:-1])
    elif damage == "changed":
        path.write_bytes(stored[:-1] + bytes([stored[-1] ^ 1]))
    else:
        path.write_bytes(stored.replace(b"plan-1", b"plan-0"))
    assert site.taken() == taken
    assert path.read_bytes() == stored
    site.store.close()


def test_rows_that_the_input_has_lost_are_not_sent(tmp_path: Path) -> None:
    site = Site(tmp_path, *(row(str(number)) for number in range(5)))
    path = tmp_path / "files" / "in"
    changed = path.read_bytes().replace(b'"content":"1"', b'"content":"7"')
    path.write_bytes(changed[: changed.index(b'{"custom_id":"4"')])
    assert [one.line for one in site.taken()] == [1, 3, 4]
    site.store.close()


def test_a_plan_takes_32_bytes_for_a_row(tmp_path: Path) -> None:
    site = Site(tmp_path, *(row(str(number)) for number in range(1000)))
    plan = plan_of(site.content, site.batch)
    assert len(plan) == 1000
    assert len(plan.to_bytes()) < 32 * 1000 + 200
    entry = plan[999]
    assert (entry.line, entry.turn, plan.models[entry.model]) == (1000, 999, "demo")
    site.store.close()


def test_what_is_stored_is_read(tmp_path: Path) -> None:
    entries: Any = [*range(3)]
    site = Site(tmp_path, *(row(str(number)) for number in entries))
    plan = plan_of(site.content, site.batch)
    found = Plan.of_bytes(plan.to_bytes())
    assert found is not None
    assert ([*found], found.models) == ([*plan], plan.models)
    site.store.close()


@pytest.mark.parametrize("lost", [False, True])
def test_a_batch_that_has_ended_has_no_plan(tmp_path: Path, lost: bool) -> None:
    site = Site(tmp_path, *(row(str(number)) for number in range(5)))
    assert site.content.size(plan_id("b"))
    if lost:
        give_up(site.store, site.content, "b", "it is gone", NOW)
    else:
        close(site.store, site.content, site.store.move("b", "cancelling", NOW), NOW)
    assert site.content.size(plan_id("b")) is None
    site.store.close()

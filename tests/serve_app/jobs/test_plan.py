"""Lines of an input, and the plan of its rows."""

from collections.abc import Callable
from io import BytesIO
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import pytest
from pydantic_core import from_json, to_json

from serve_app.api.facts import prefix_of
from serve_app.api.protocol import JSON
from serve_app.jobs.content import Content
from serve_app.jobs.intake import check, read_rows
from serve_app.jobs.models import Batch
from serve_app.jobs.plan import InputLine, read_lines
from serve_app.jobs.storage import unsent
from serve_app.rows.errors import RunError
from serve_app.rows.rows import Row
from serve_app.settings.ingress import IngressSettings
from tests.serve_app.inspected import inspect
from tests.serve_app.jobs.helpers import CHAT, NOW, batch_of, limits_of, opened, put, result_of, row, text_of


def asked(name: str, *parts: str, model: str = "demo") -> JSON:
    """Return a row whose prompt has these parts, the first one as its system prompt."""
    messages = [
        {"role": "system" if not number else "user", "content": part} for number, part in enumerate(parts)
    ]
    return row(name, body={"model": model, "messages": messages})


def text(random: Random, size: int) -> str:
    """Return a text that no other one begins like."""
    return random.randbytes(size // 2).hex()


def lines_in_turn(*rows: JSON | bytes, endpoint: str = CHAT) -> list[int]:
    """Return the numbers of the lines of a valid input, in the order in which they are sent."""
    plan = read_rows(BytesIO(text_of(*rows)), limits_of())
    assert check(plan, endpoint, {"demo", "other"}, len(rows)) == []
    return [entry.line for entry in sorted(plan, key=lambda entry: entry.turn)]


class Site:
    """A batch whose rows are planned.

    Attributes:
        store: The state.
        content: The contents.
        batch: The batch.
    """

    def __init__(self, folder: Path, *rows: JSON | bytes, storage: bool = False, start: bytes = b"") -> None:
        self.content: Content[Any]
        self.store, self.content = opened(folder)
        if storage:
            from serve_app.jobs.object_storage import Objects

            self.content = Content(folder, self.store.epoch, Objects(f"memory://{uuid4().hex}"))
        put(self.store, self.content, "in", start + text_of(*rows))
        self.store.add_batch(batch_of("b", "in"), 1)
        plan = self.store.plan("in")
        assert check(plan, CHAT, {"demo", "other"}, len(rows)) == []
        self.batch: Batch = self.store.move("b", "in_progress", NOW, total=len(plan))

    def taken(self, most: int = 3, groups: int = 1, **options: bool) -> list[Row]:
        """Return all rows that have no result."""
        left = unsent(self.store, self.batch, **options)
        rows: list[Row] = []
        while left:
            rows += left.take(self.content, groups, most)
        return rows


def test_rows_that_share_a_prefix_are_sent_together() -> None:
    random = Random(1)
    prefixes = [text(random, 4000) for _ in range(20)]
    kinds = [random.randrange(20) for _ in range(300)]
    rows = [asked(str(number), prefixes[kind], text(random, 256)) for number, kind in enumerate(kinds)]
    turns = lines_in_turn(*rows)
    assert sorted(turns) == list(range(1, 301))
    runs = [(kind, [*lines]) for kind, lines in groupby(turns, key=lambda line: kinds[line - 1])]
    assert len(runs) == len(set(kinds))
    # Within a group, and between groups by their first rows, it is the order of the input.
    assert all(lines == sorted(lines) for _, lines in runs)
    assert [lines[0] for _, lines in runs] == sorted(lines[0] for _, lines in runs)


def test_the_longest_beginning_counts() -> None:
    random = Random(2)
    rules, manuals = text(random, 2000), [text(random, 6000) for _ in range(3)]
    kinds = [0, 1, 2] * 10
    rows = [asked(str(number), rules, manuals[kind], text(random, 300)) for number, kind in enumerate(kinds)]
    alone = asked("alone", rules, text(random, 300))
    turns = lines_in_turn(*rows[:2], alone, *rows[2:])
    order = [{1: 0, 2: 1, 3: "alone"}.get(line, kinds[line - 2]) for line in turns]
    assert len([*groupby(order)]) == 4


def test_groups_that_are_open_take_turns(tmp_path: Path) -> None:
    random = Random(9)
    kinds = [*range(6)] * 5
    prefixes = [text(random, 3000) for _ in range(6)]
    rows = [asked(str(number), prefixes[kind], "?") for number, kind in enumerate(kinds)]
    site = Site(tmp_path, row("first"), *rows[:10], row("middle"), *rows[10:], row("last"))
    expected = ["first", *[0, 1, 2] * 5, *[3, 4, 5] * 5, "middle", "last"]
    for most in (1, 4, 100):
        firsts = [from_json(one.text)["body"]["messages"][0]["content"] for one in site.taken(most, groups=3)]
        assert [prefixes.index(first) if first in prefixes else first for first in firsts] == expected
    site.store.close()


def test_rows_without_a_shared_prefix_keep_their_order() -> None:
    random = Random(3)
    rows = [asked(str(number), text(random, 100 + 200 * (number % 9))) for number in range(100)]
    assert lines_in_turn(*rows) == list(range(1, 101))


def test_a_template_that_is_a_small_part_of_the_prompts_changes_nothing() -> None:
    random = Random(4)
    rules = text(random, 1024)
    rows = [asked(str(number), rules, text(random, 6000 - 50 * number)) for number in range(40)]
    assert lines_in_turn(*rows) == list(range(1, 41))


def test_prefixes_are_apart_by_models() -> None:
    random = Random(5)
    rules = text(random, 4000)
    models = [random.choice(("demo", "other")) for _ in range(40)]
    rows = [asked(str(number), rules, str(number), model=model) for number, model in enumerate(models)]
    order = [models[line - 1] for line in lines_in_turn(*rows)]
    assert len([*groupby(order)]) == 2


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (
            CHAT,
            {
                "messages": [{"role": "user", "content": "ü\n\u2028" + "x" * 3000}],
                "tools": [{"type": "function"}],
            },
        ),
        ("/v1/completions", {"prompt": "x" * 3000, "max_tokens": 3}),
        ("/v1/responses", {"instructions": "y" * 2000, "input": "x" * 3000}),
        ("/v1/embeddings", {"input": ["x" * 3000, "y"]}),
        ("/generate", {"prompts": ["x" * 3000]}),
    ],
)
def test_order_and_routing_see_the_same_prefix(endpoint: str, body: JSON) -> None:
    body = {"model": "demo"} | body
    prefix = prefix_of(body)
    assert prefix
    # The clients of the runner write the body like this.
    assert inspect(to_json(body), endpoint, IngressSettings()).prefix == prefix


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
    assert [one.line for one in taken] != sorted(one.line for one in taken)
    for one in taken:
        index = one.line - 1 if one.line <= 5 else one.line - 3
        assert (from_json(one.text), one.model) == (rows[index], "demo")
    assert sorted(taken) == site.taken(by_line=True)
    assert len(taken) == 30
    site.store.close()


def test_object_storage_is_asked_for_little_more_than_the_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = pytest.importorskip("fsspec.implementations.memory")
    read = 0

    def counting(method: Callable[..., bytes]) -> Callable[..., bytes]:
        def counted(*args: Any, **options: Any) -> bytes:
            nonlocal read
            found = method(*args, **options)
            read += len(found)
            return found

        return counted

    monkeypatch.setattr(memory.MemoryFile, "read", counting(memory.MemoryFile.read))
    monkeypatch.setattr(memory.MemoryFileSystem, "cat_file", counting(memory.MemoryFileSystem.cat_file))
    random = Random(10)
    prefixes = [text(random, 6000) for _ in range(7)]
    rows = [asked(str(number), random.choice(prefixes), text(random, 4000)) for number in range(400)]
    site = Site(tmp_path, *rows, storage=True)
    assert len(site.taken(most=64, groups=3)) == 400
    size = len(text_of(*rows))
    assert 0.9 * size < read < 1.2 * size
    site.store.close()


def test_rows_that_have_a_result_are_left_out(tmp_path: Path) -> None:
    random = Random(7)
    prefixes = [text(random, 3000) for _ in range(3)]
    site = Site(tmp_path, *(asked(str(number), prefixes[number % 3], "?") for number in range(30)))
    taken = site.taken()
    done = random.sample(taken, 12)
    site.store.record({"b": [result_of(one) for one in done]})
    assert site.taken() == [one for one in taken if one not in done]
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
    plan = site.store.plan("in")
    assert len(plan) == 1000
    assert len(plan.entries) == 32 * 1000
    entry = plan[999]
    assert (entry.line, entry.turn, plan.targets[entry.target]) == (1000, 999, (CHAT, "demo"))
    site.store.close()


def test_a_file_that_is_gone_has_no_plan(tmp_path: Path) -> None:
    site = Site(tmp_path, row("x"))
    site.store.end("b", "failed", NOW)
    site.store.remove_file("anna", "in")
    with pytest.raises(RunError, match="in is gone"):
        site.store.plan("in")
    site.store.close()


def lines(text: bytes, most: int = 100) -> list[InputLine]:
    return [*read_lines(BytesIO(text), most)]


def test_lines_have_their_numbers_and_places() -> None:
    text = b"\xef\xbb\xbfone\n\n  \r\ntwo\r\n  three"
    found = lines(text)
    assert found == [InputLine(1, b"one", 3), InputLine(4, b"two", 12), InputLine(5, b"three", 19)]
    assert all(text[line.offset :].startswith(line.text or b"?") for line in found)


def test_a_long_line_is_not_kept() -> None:
    found = lines(b"x" * 35 + b"\n" + b"y" * 10 + b"\n" + b"z" * 11, 10)
    assert found == [InputLine(1, None, 0), InputLine(2, b"y" * 10, 36), InputLine(3, None, 47)]


def test_a_long_line_that_begins_with_spaces_is_one() -> None:
    found = lines(b" " * 20 + b"{}\n{}\n", 10)
    assert [(line.number, line.text) for line in found] == [(1, None), (2, b"{}")]

"""Rights that API keys give to their batches, and the end of the batches with their keys."""

import json
from pathlib import Path
from typing import Any

import pytest

from serve_app.api.errors import RequestError
from serve_app.auth.key_store import KeyStore
from serve_app.auth.keys import hash_key
from serve_app.jobs.key_rules import KeyRules
from serve_app.rows.pacing import Fixed
from serve_app.settings.ingress import AccessSettings
from tests.serve_app.jobs.engine import Engine
from tests.serve_app.jobs.helpers import NOW, limits_of, row
from tests.serve_app.jobs.test_batches import Held, rows_of, running

SERVED = {"demo", "large"}
ADAPTER = row("adapter", body={"model": "large", "messages": [{"role": "user", "content": "adapter"}]})


class Keys:
    """A keys file with the key `ada`, and the keys that the batches have read.

    Attributes:
        now: Seconds since the epoch at which keys expire.
        store: The keys.
    """

    def __init__(self, folder: Path, **fields: Any) -> None:
        self._path = folder / "keys.json"
        self._ada = {"name": "ada", "sha256": hash_key(b"x"), "tenant": "anna"} | fields
        self.now = float(NOW)
        self.write(self._ada)
        self.store = KeyStore(AccessSettings(keys_file=str(self._path)), now=lambda: self.now)

    def write(self, *entries: Any) -> None:
        """Write other keys into the file."""
        self._path.write_text(json.dumps(entries))

    def change(self, **fields: Any) -> None:
        """Change the key `ada`, and read the file again."""
        self.write(self._ada | fields)
        self.store.refresh()

    def remove(self) -> None:
        """Remove the key, and read the file again."""
        self.write()
        self.store.refresh()


def rules(keys: Keys) -> KeyRules:
    return KeyRules(SERVED, limits_of(max_lines=100), keys.store)


def test_a_batch_has_the_models_and_rows_of_its_key(tmp_path: Path) -> None:
    found = rules(Keys(tmp_path, models=["demo", "other"], batches={"max_lines": 7}))
    rights = found.rights("ada")
    assert (set(found.models(rights)), rights["max_lines"]) == ({"demo"}, 7)
    assert found.rights("") == {"models": None, "max_lines": 100}
    assert set(found.models(found.rights(""))) == SERVED
    assert KeyRules(SERVED, limits_of()).rights("ada") == {"models": None, "max_lines": limits_of().max_lines}


def test_the_limits_of_a_key_go_before_those_of_the_config(tmp_path: Path) -> None:
    found = rules(Keys(tmp_path, batches={"max_lines": 7, "max_open_batches": 1}))
    assert found.limits("ada") == limits_of(max_lines=7, max_open_batches=1)
    assert found.limits("") == found.common == limits_of(max_lines=100)
    assert rules(Keys(tmp_path)).limits("ada") == limits_of(max_lines=100)
    assert KeyRules(SERVED, limits_of()).limits("ada") == limits_of()


def test_a_key_that_is_not_known_has_the_rights_of_nobody(tmp_path: Path) -> None:
    # The Ingress may have read the file before this process.
    found = rules(Keys(tmp_path))
    for call in (found.rights, found.limits):
        with pytest.raises(RequestError, match="'new' is not known to the batches yet") as refused:
            call("new")
        assert (refused.value.status, bool(refused.value.retry_after_s)) == (503, True)


@pytest.mark.parametrize("change", [{}, {"models": None}, {"batches": {"max_lines": 50}}])
async def test_a_batch_keeps_the_rights_that_it_was_made_with(tmp_path: Path, change: Any) -> None:
    keys = Keys(tmp_path, models=["demo"], batches={"max_lines": 1})
    rights = rules(keys).rights("ada")
    keys.change(**change)
    async with running(tmp_path, engine := Engine(), models=SERVED, keys=keys.store, key_gone_s=0.0) as bench:
        bench.add("adapter", ADAPTER, api_key="ada", rights=rights)
        bench.add("long", row("a"), row("b"), api_key="ada", rights=rights)
        batch = await bench.ended("adapter", state="failed")
        assert [error["code"] for error in batch.errors] == ["model_not_found"]
        batch = await bench.ended("long", state="failed")
        assert [error["code"] for error in batch.errors] == ["too_many_rows"]
    assert engine.sent == []


async def test_a_batch_keeps_its_rights_when_its_key_changes(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    rights = rules(keys).rights("ada")
    keys.change(sha256=hash_key(b"y"), models=["large"], tenant="ben")
    async with running(tmp_path, engine := Engine(), models=SERVED, keys=keys.store, key_gone_s=0.0) as bench:
        bench.add("b", row("x"), api_key="ada", rights=rights)
        await bench.ended("b")
    assert engine.sent == [("anna", "x")]


async def test_a_key_that_is_removed_before_the_validation_runs_no_row(tmp_path: Path) -> None:
    keys = Keys(tmp_path, models=["demo"])
    rights = rules(keys).rights("ada")
    keys.remove()
    async with running(tmp_path, engine := Engine(), models=SERVED, keys=keys.store, key_gone_s=0.0) as bench:
        bench.add("b", ADAPTER, api_key="ada", rights=rights)
        bench.add("other", row("x"), tenant="ben")
        await bench.ended("other")
        batch = await bench.ended("b", state="cancelled")
    assert [(error["code"], error["message"]) for error in batch.errors] == [
        ("api_key_removed", "The API key 'ada', which created this batch, was removed")
    ]
    assert engine.sent == [("ben", "x")]


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (Keys.remove, "api_key_removed"),
        (lambda keys: keys.change(disabled=True), "api_key_disabled"),
        (lambda keys: setattr(keys, "now", NOW + 3600.0), "api_key_expired"),
    ],
)
async def test_the_end_of_a_key_ends_its_batches_and_running_rows(
    tmp_path: Path, end: Any, code: str
) -> None:
    keys = Keys(tmp_path, expires="2027-01-15T09:00:00Z")
    rights = rules(keys).rights("ada")
    engine = Held("2", "3", "ben")
    async with running(tmp_path, engine, keys=keys.store, key_gone_s=0.0, concurrency=Fixed(4)) as bench:
        bench.add("b", *(row(str(number)) for number in range(9)), api_key="ada", rights=rights)
        bench.add("other", row("ben"), tenant="ben")
        await engine.until(lambda: set(engine.held) == {"2", "3", "ben"})
        await bench.until(lambda: bench.store.batch("b").completed >= 2)
        end(keys)
        batch = await bench.ended("b", state="cancelled")
        assert engine.held == ["ben"]
        output, errors = bench.lines(batch)
        engine.go.set()
        await bench.ended("other")
    assert [error["code"] for error in batch.errors] == [code]
    assert {"0", "1"} <= set(output)
    assert set(output) | set(errors) == set("012345678")
    assert batch.completed + batch.failed == batch.total == 9
    assert {line["error"]["code"] for line in errors.values()} == {"batch_cancelled"}


async def test_a_key_that_comes_back_at_once_ends_nothing(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    rights = rules(keys).rights("ada")
    engine = Held("0")
    async with running(tmp_path, engine, keys=keys.store) as bench:

        async def looked(id: str) -> None:
            """Wait until the runner has looked at its batches: it has run another one."""
            bench.add(id, row(id), tenant="ben")
            await bench.ended(id)

        bench.add("b", row("0"), row("1"), api_key="ada", rights=rights)
        await engine.until(lambda: engine.held == ["0"])
        keys.remove()
        bench.add("c", row("2"), api_key="ada", rights=rights)
        await looked("first")
        bench.now += 4.0
        await looked("second")
        assert (bench.store.batch("b").state, bench.store.batch("c").state) == ("in_progress", "validating")
        keys.change()
        await looked("third")
        # The seconds count from the next time at which the key is gone.
        bench.now += 5.0
        keys.remove()
        await looked("fourth")
        assert bench.store.batch("b").state == "in_progress"
        keys.change()
        engine.go.set()
        await bench.ended("b")
        await bench.ended("c")
    assert engine.tries["2"] == 1


async def test_a_key_that_is_gone_sends_no_more_rows(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    rights = rules(keys).rights("ada")
    engine = Held("0")
    async with running(tmp_path, engine, keys=keys.store, concurrency=Fixed(1)) as bench:
        bench.add("b", row("0"), row("1"), api_key="ada", rights=rights)
        await engine.until(lambda: engine.held == ["0"])
        keys.remove()
        engine.go.set()
        for id in ("first", "second", "third"):
            bench.add(id, row(id), tenant="ben")
            await bench.ended(id)
        assert (bench.store.batch("b").completed, engine.tries["1"]) == (1, 0)
        keys.change()
        await bench.ended("b")


async def test_keys_that_cannot_be_read_end_nothing(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    rights = rules(keys).rights("ada")
    async with running(tmp_path, Engine(), keys=keys.store, key_gone_s=0.0) as bench:
        for text in ("- name: [", "", None):
            path = tmp_path / "keys.json"
            path.unlink() if text is None else path.write_text(text)
            keys.store.refresh()
            bench.add(f"b{text}", row("x"), api_key="ada", rights=rights)
            await bench.ended(f"b{text}")


async def test_a_start_ends_the_batches_of_a_key_that_is_gone(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    rights = rules(keys).rights("ada")
    engine = Engine()
    engine.go.clear()
    async with running(tmp_path, engine, keys=keys.store, key_gone_s=0.0, concurrency=Fixed(2)) as bench:
        bench.add("b", *(row(str(number)) for number in range(5)), api_key="ada", rights=rights)
        await engine.until(lambda: engine.running == 2)
        bench.runner.stop()
        engine.go.set()
    keys.remove()
    async with running(tmp_path, engine, keys=keys.store, key_gone_s=0.0) as bench:
        batch = await bench.ended("b", state="cancelled")
    assert (batch.completed, batch.failed, len(engine.sent)) == (2, 3, 2)


async def test_without_keys_no_batch_ends(tmp_path: Path) -> None:
    async with running(tmp_path, Engine(), key_gone_s=0.0) as bench:
        bench.add("b", row("x"), api_key="ada", rights={"models": ["demo"], "max_lines": 1})
        await bench.ended("b")


async def test_a_batch_of_an_earlier_version_has_the_rights_of_its_key(tmp_path: Path) -> None:
    keys = Keys(tmp_path, models=["demo"])
    async with running(tmp_path, Engine(), models=SERVED, keys=keys.store, key_gone_s=0.0) as bench:
        bench.add("b", ADAPTER, api_key="ada")
        bench.add("c", row("x"), api_key="ada")
        batch = await bench.ended("b", state="failed")
        assert batch.errors[0]["code"] == "model_not_found"
        await bench.ended("c")


async def test_the_models_of_a_batch_go_to_the_engines_with_its_rows(tmp_path: Path) -> None:
    engine = Engine()
    async with running(tmp_path, engine, models={"slow", "quick"}) as bench:
        bench.add("b", *rows_of("quick", 1), rights={"models": ["quick"], "max_lines": 1})
        bench.add("c", *rows_of("slow", 1), rights={"models": None, "max_lines": 1})
        await bench.ended("b")
        await bench.ended("c")
    assert engine.models == {"quick0": ["quick"], "slow0": None}

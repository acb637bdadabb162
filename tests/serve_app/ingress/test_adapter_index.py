"""Replicas by the adapters that they hold."""

from serve_app.ingress.adapter_index import AdapterIndex


def test_what_is_reported_and_what_was_sent_both_count() -> None:
    index = AdapterIndex()
    index.update("a", ["x"], 2)
    index.update("b", [], 2)
    assert index.holders("x") == ["a"]
    assert index.holders("y") == []
    index.record("b", "y")
    index.record("gone", "y")
    assert index.holders("y") == ["b"]
    index.update("a", [], 2)
    assert index.holders("x") == []


def test_no_more_is_remembered_than_a_replica_holds() -> None:
    index = AdapterIndex()
    index.update("a", [], 2)
    for adapter in ("x", "y", "x", "z"):
        index.record("a", adapter)
    assert [name for name in "xyz" if index.holders(name)] == ["x", "z"]


def test_a_removed_replica_holds_nothing() -> None:
    index = AdapterIndex()
    index.update("a", ["x"], None)
    index.remove("a")
    index.remove("a")
    assert index.holders("x") == []

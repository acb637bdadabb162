"""Findings, alone and together."""

from serve_app.cli.checks.finding import GIB, combined, gib, ok, problem, warning


def test_several_findings_are_those_of_the_worst_level() -> None:
    found = combined([ok("a"), problem("b", "fix b"), warning("c", "fix c"), problem("d", "fix b")])
    assert found == problem("b\nd", "fix b")
    assert combined([ok("a"), warning("c", "fix c")]) == warning("c", "fix c")
    assert combined([ok("a"), ok("b")]) == ok("a; b")
    assert combined([]) is None


def test_bytes_have_a_unit() -> None:
    assert gib(64 << 20) == "64 MiB"
    assert gib(1.5 * GIB) == "1.5 GiB"

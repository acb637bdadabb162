"""The page "From one GPU to a cluster"; tests/test_docs.py checks its commands, options and links."""

import re

from k8s.dashboard.__main__ import dashboard
from tests.pages import anchors, read

PAGE = "k8s/from-one-gpu.md"


def test_the_table_has_every_step_in_order() -> None:
    text = read(PAGE)
    headings = re.findall(r"^## (\d+)\. (.+)$", text, re.M)
    rows = re.findall(r"^\| \[(\d+)\. ([^\]]+)\]\(#([\w-]+)\)", text, re.M)
    assert [(number, title) for number, title, _ in rows] == headings
    assert [int(number) for number, _ in headings] == list(range(1, len(headings) + 1))
    assert {anchor for _, _, anchor in rows} <= anchors(text)


def test_every_step_has_a_command_and_what_to_look_at() -> None:
    text = read(PAGE)
    for part in text.split("\n## ")[1:]:
        assert "```bash" in part, part.splitlines()[0]
        assert "**Look at**" in part, part.splitlines()[0]


def test_the_panels_are_on_the_dashboard() -> None:
    titles = {panel["title"] for panel in dashboard()["panels"]}
    _, _, table = read(PAGE).partition("| panel | what it tells |\n")
    named = re.findall(r"`([^`]+)`", "".join(line.partition(" | ")[0] for line in table.splitlines()))
    assert len(named) > 5
    assert set(named) <= titles


def test_kubernetes_has_the_page() -> None:
    assert "(from-one-gpu.md)" in read("k8s/README.md")
    assert "(k8s/from-one-gpu.md)" in read("README.md")

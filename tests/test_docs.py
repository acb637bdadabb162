"""The pages: every code block is run, checked or skipped with a reason, and every link has a target."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from ray.serve.schema import DeploymentSchema

from serve_app.auth.keys import read_keys
from serve_app.cli.serve_config import read_config
from serve_app.settings.fields import Strict
from serve_app.settings.schema import parse
from serve_app.settings.user_config import parse_user_config
from tests import commands, compose, progress
from tests.commands import CommandError, command
from tests.index_page import absolute
from tests.pages import (
    ROOT,
    Block,
    anchors,
    blocks,
    inline_commands,
    links,
    pages,
    parse_blocks,
    prose,
    read,
    select,
)

SHELL = {"bash", "console"}
KINDS = {
    ("run", "service"): {"bash", "python"},
    ("run", "script"): {"bash", "python"},
    ("check", "commands"): SHELL,
    ("check", "config"): {"yaml"},
    ("check", "models"): {"yaml"},
    ("check", "args"): {"yaml"},
    ("check", "deployments"): {"yaml"},
    ("check", "environment"): {"yaml"},
    ("check", "compose"): {"yaml"},
    ("check", "keys"): {"yaml"},
    ("output", ""): {"json", "text"},
}
"""Comments above a block, beside `skip: REASON`, and the languages that each is for."""


every_page = pytest.mark.parametrize("page", pages())


def each(*chosen: Block) -> pytest.MarkDecorator:
    """Return the mark of a test that takes each of some blocks."""
    return pytest.mark.parametrize("block", chosen, ids=str)


def test_there_are_pages() -> None:
    assert {"README.md", "serve_app/README.md", "k8s/README.md"} <= set(pages())


def test_the_landing_page_is_short() -> None:
    assert len(read("README.md").splitlines()) <= 150


@each(*blocks())
def test_every_block_is_run_or_checked_or_skipped_with_a_reason(block: Block) -> None:
    if block.kind == "skip":
        assert len(block.detail.split()) >= 2, f"{block}: say why, as in <!-- skip: needs a cluster -->"
        return
    kind = block.kind, block.detail
    assert kind in KINDS, f"{block}: {kind}: put a comment above it, one of {list(KINDS)} or skip"
    assert block.language in KINDS[kind], f"{block}: nothing does that with {block.language or 'no language'}"


def test_a_block_without_a_comment_is_found() -> None:
    text = "# Page\n\n```bash\nls\n```\n\n```python\nprint(1)\n```\n<!-- output -->\n```text\n1\n```\n"
    bash, python, output = parse_blocks("page.md", text)
    assert (bash.kind, bash.line) == ("", 3)
    assert (python.kind, python.detail, python.output) == ("run", "script", "1\n")
    assert output.kind == "output"


# Links


def broken(page: str, text: str) -> list[str]:
    """Return the links of a page whose file or heading doesn't exist."""
    found = []
    for target in links(text):
        if re.match(r"(https?|mailto):", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.exists():
            found.append(target)
            continue
        there = anchors(text if not path else file.read_text()) if file.suffix == ".md" else set()
        if anchor and anchor not in there:
            found.append(target)
    return found


@every_page
def test_links_have_targets(page: str) -> None:
    assert broken(page, read(page)) == []


def test_a_broken_link_is_found() -> None:
    text = "# One: `two`\n[a](#one-two) [b](#three) [c](configs) [d](nowhere.md) [e](https://example.org)"
    assert broken("README.md", text) == ["#three", "nowhere.md"]


def misnamed(page: str, text: str) -> list[str]:
    """Return the links of a page that lead to the page itself, or to another page than their text names.

    A link to a heading of its own page is right; its text must not be the name of a file.
    """
    found = []
    for name, target in re.findall(r"\[`?([^]`]+)`?\]\(([^\s)]+)\)", prose(text)):
        path, _, anchor = target.partition("#")
        there = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
        if (there == page and not anchor) or (name.endswith(".md") and not there.endswith(name)):
            found.append(target)
    return found


@every_page
def test_links_lead_to_the_page_that_their_text_names(page: str) -> None:
    assert misnamed(page, read(page)) == []


def test_a_misnamed_link_is_found() -> None:
    text = "[here](README.md) [configs/README.md](#start) [fine](#start) [LICENSE.md](docs/LICENSE.md)"
    assert misnamed("README.md", text) == ["README.md", "#start"]


def test_links_on_the_package_index_lead_to_the_files_of_the_version() -> None:
    text = read("README.md")
    made = list(links(absolute(text, "https://host/saturate", "1.2.3")))
    expected = [
        target if re.match(r"https?:", target) else f"https://host/saturate/KIND/v1.2.3/{target}"
        for target in links(text)
    ]
    assert [re.sub(r"/(blob|raw)/", "/KIND/", target) for target in made] == expected
    (picture,) = re.findall(r"!\[[^\]]*\]\((\S+)\)", absolute(text, "https://host/saturate", "1.2.3"))
    assert picture.startswith("https://host/saturate/raw/")


def test_the_plot_of_the_h100_has_the_figures_of_its_table() -> None:
    table = re.findall(
        r"^\| (\d+) \| ([\d,]+) / ([\d,]+) \| ([\d.]+) \|", read("tests/benchmarks/README.md"), re.M
    )
    drawn = re.findall(r">([\d,.]+)(?: streams?| times)?<", read("tests/benchmarks/results/h100.svg"))
    assert len(table) == 4
    assert {figure for row in table for figure in row} <= set(drawn)


def test_every_page_is_two_clicks_from_the_landing_page() -> None:
    reached = {"README.md"}
    for _ in range(2):
        reached |= {
            os.path.normpath(os.path.join(os.path.dirname(page), target.partition("#")[0]))
            for page in reached
            if page.endswith(".md") and (ROOT / page).exists()
            for target in links(read(page))
            if not re.match(r"(https?|mailto):", target)
        }
    assert set(pages()) - reached == set()


@pytest.mark.parametrize("page", [page for page in pages() if "/docs/howto/" in page])
def test_a_how_to_begins_with_what_does_it_and_is_short(page: str) -> None:
    text = read(page)
    first = next(iter(parse_blocks(page, text)))
    assert first.line <= 20
    assert len(text.splitlines()) <= 100


# Scripts


@each(*(block for block in select("run", "script") if block.language == "python"))
def test_python_examples_print_what_the_page_says(block: Block, tmp_path: Path) -> None:
    done = progress.run(
        [sys.executable, "-c", block.text],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )
    assert done.returncode == 0, f"{block}\n{done.stderr}"
    if block.output:
        assert done.stdout.strip() == block.output.strip(), str(block)
    elif said := re.findall(r"^ *print\(.*\)  # (.+)$", block.text, re.M):
        assert done.stdout.splitlines()[-1] == said[-1], str(block)


# Commands


@each(*(block for block in blocks() if block.language in SHELL and block.kind != "skip"))
def test_commands_exist(block: Block) -> None:
    for line in commands.lines(block.text):
        commands.check(line)


@every_page
def test_commands_in_the_prose_exist(page: str) -> None:
    for line in inline_commands(read(page)):
        commands.check(line)


@pytest.mark.parametrize(
    "line",
    [
        "make nothing",
        "python -m serve_app.nothing",
        "kubectl apply -k k8s/overlays",
        "pip install -e '.[nothing]'",
        "docker build -f k8s/Dockerfile --target cpu -t saturate-cpu:0.0.1 .",
        "docker run --rm saturate-cpu:0.1.0 nothing",
        "A=1 nothing | true",
        "serve run configs/nothing.yaml",
        "saturate keys new --nothing 1",
    ],
)
def test_a_command_that_does_not_exist_is_found(line: str) -> None:
    with pytest.raises(CommandError):
        commands.check(line)


# YAML

MODEL = {"id": "demo", "source": "saturate://demo"}


@each(*(block for block in blocks() if block.language == "yaml" and block.kind != "skip"))
def test_yaml_is_what_the_service_takes(block: Block, tmp_path: Path) -> None:
    content: Any = yaml.safe_load(block.text)
    match block.detail:
        case "config":
            path = tmp_path / "config.yaml"
            path.write_text(block.text)
            assert len(read_config(path).applications) == len(content["applications"])
        case "models":
            assert len(parse({"models": content}).models) == len(content)
        case "args":
            parse({"models": [MODEL], **content})
        case "compose":
            compose.check(content)
        case "keys":
            assert len(read_keys(block.text, str(block))) == len(content)
        case "deployments":
            for deployment in content:
                taken = DeploymentSchema.model_validate(deployment)
                assert set(deployment) <= set(DeploymentSchema.model_fields), str(block)
                if isinstance(taken.user_config, dict):
                    parse_user_config(taken.user_config)
        case _:
            pytest.fail(f"{block}: say what it is, as in <!-- check: config -->")


@pytest.mark.parametrize(
    ("name", "value"),
    [("restarts", "always"), ("command", ["serves", "demo"]), ("volumes", ["caches:/cache"])],
)
def test_a_mistake_in_a_compose_file_is_found(name: str, value: object) -> None:
    (block,) = select("check", "compose")
    content = yaml.safe_load(block.text)
    content["services"]["llm"][name] = value
    with pytest.raises((ValueError, CommandError)):
        compose.check(content)


def test_a_config_of_one_s_own_has_about_twenty_lines() -> None:
    (block,) = select("check", "config")
    assert block.page == "configs/README.md"
    assert 10 < len(block.text.splitlines()) <= 25
    content = yaml.safe_load(block.text)
    named = [one["name"] for one in content["applications"][0]["deployments"]]
    assert named == [f"Engine:{model['id']}" for model in content["applications"][0]["args"]["models"]]


# Completeness


def settings_of(section: type[BaseModel]) -> set[str]:
    """Return the names of a section's settings."""
    return set(section.model_fields)


@pytest.mark.parametrize(
    "section",
    [section for section in Strict.__subclasses__() if section.__module__.startswith("serve_app.settings.")],
    ids=lambda section: section.__name__,
)
def test_every_setting_is_documented(section: type[BaseModel]) -> None:
    page = read("configs/reference.md")
    assert {name for name in settings_of(section) if not re.search(rf"\b{name}\b", page)} == set()


def test_every_option_of_the_driver_is_documented() -> None:
    page = read("serve_app/dataset/README.md")
    options = {option for parameter in command("batch").params for option in parameter.opts if "--" in option}
    assert {option for option in options if not re.search(rf"{option}\b", page)} == set()
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page))
    assert named <= options | {"--help"}


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_config_is_in_the_tables(path: Path) -> None:
    assert f"configs/{path.name}" in read("README.md")
    assert f"({path.name})" in read("configs/README.md")

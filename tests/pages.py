"""The Markdown pages of the repository: their code blocks, links and headings."""

import re
import subprocess
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCAL_URL = "http://127.0.0.1:8000"
"""The address of the service in the pages."""

FENCE = re.compile(r"^(?P<fence>`{3,})(?P<language>[\w-]*)[^\n]*\n(?P<text>.*?)^(?P=fence)\s*$", re.M | re.S)
COMMENT = re.compile(r"<!--((?:(?!-->).)*)-->\s*\Z", re.S)


@dataclass(frozen=True)
class Block:
    """A fenced code block.

    Attributes:
        page: Path of the page, relative to the repository.
        line: Line of the opening fence.
        language: Language of the fence; empty if it has none.
        kind: Word of the comment above the fence: "run", "check", "output", "skip"; by default "run" for
            Python, and empty for every other language.
        detail: What follows the word: "service", "commands", or the reason of a skip.
        text: The code.
        output: The text of the block with `<!-- output -->` behind this one; empty if there is none.
    """

    page: str
    line: int
    language: str
    kind: str
    detail: str
    text: str
    output: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def pages() -> tuple[str, ...]:
    """Return the paths of all Markdown pages that git tracks or would add, relative to the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return tuple(sorted({path for path in listed if (ROOT / path).exists()}))


def read(page: str) -> str:
    """Return the text of a page."""
    return (ROOT / page).read_text()


def parse_blocks(page: str, text: str) -> Iterator[Block]:
    """Yield the code blocks of a page, each with the output that the page shows for it.

    Args:
        page: Path of the page.
        text: Its text.
    """
    found = list(FENCE.finditer(text))
    made: list[Block] = []
    for match in found:
        comment = COMMENT.search(text[: match.start()])
        kind, _, detail = comment[1].strip().partition(":") if comment else ("", "", "")
        if not kind and match["language"] == "python":
            kind, detail = "run", "script"
        block = Block(
            page,
            text.count("\n", 0, match.start()) + 1,
            match["language"],
            kind.strip(),
            detail.strip(),
            match["text"],
        )
        if block.kind == "output" and made:
            last = made.pop()
            made.append(Block(**{**vars(last), "output": block.text}))
        made.append(block)
    yield from made


@cache
def blocks() -> tuple[Block, ...]:
    """Return the code blocks of all pages."""
    return tuple(block for page in pages() for block in parse_blocks(page, read(page)))


def select(kind: str, *details: str) -> list[Block]:
    """Return the blocks of a kind, and of one of some details if any is given."""
    return [block for block in blocks() if block.kind == kind and (not details or block.detail in details)]


def prose(text: str) -> str:
    """Return a page without its code blocks."""
    return FENCE.sub("", text)


def links(text: str) -> list[str]:
    """Return the targets of the links and images of a page."""
    return re.findall(r"\]\(\s*<?([^\s)>]+)>?\s*\)", prose(text))


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    made: dict[str, int] = {}
    found = set()
    for heading in re.findall(r"^#{1,6}\s+(.+?)\s*#*$", prose(text), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        kept = (char for char in plain.lower() if char in " -_" or unicodedata.category(char)[0] in "LN")
        slug = "".join(kept).replace(" ", "-")
        count = made.get(slug, 0)
        made[slug] = count + 1
        found.add(f"{slug}-{count}" if count else slug)
    return found


def inline_commands(text: str) -> list[str]:
    """Return the commands that a page's prose shows in backquotes."""
    code = re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(text))
    joined = (" ".join(item.split()) for item in code)
    programs = r"(saturate (?!/)|make [a-z]|serve run|python -m|kubectl kustomize|kubectl apply)"
    return [item for item in joined if re.match(programs, item) and "..." not in item]

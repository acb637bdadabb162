"""Makes README.md the page of the package index, with absolute links: python -m tests.index_page

A release runs it before it builds the wheel; the file of the repository keeps its relative links.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?\[[^\]]*\])\((?!https?:|mailto:|#)([^)\s]+)\)")


def absolute(text: str, source: str, version: str) -> str:
    """Return a page whose links to files lead to the files of a version.

    Args:
        text: The page, at the root of the repository.
        source: URL of the repository, of the form that GitHub has.
        version: The version, whose tag begins with v.
    """

    def lead(link: re.Match[str]) -> str:
        kind = "raw" if link[1].startswith("!") else "blob"
        return f"{link[1]}({source}/{kind}/v{version}/{link[2]})"

    return LINK.sub(lead, text)


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = ROOT / "README.md"
    page.write_text(absolute(page.read_text(), project["urls"]["Source"], project["version"]))

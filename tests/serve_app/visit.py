"""A tab of the page in Chromium, and what went wrong in it."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.progress import STILL_S

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LIMIT_MS = 1000 * STILL_S
WIDE = {"width": 1280, "height": 900}

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no browser (Debian's package `chromium` is one)"
)

api = pytest.importorskip("playwright.sync_api", reason="the package `playwright` is missing")


@contextmanager
def chromium() -> Iterator[Any]:
    """Run the browser."""
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """A tab of the page, and what went wrong in it.

    Attributes:
        page: The tab.
        wrong: Violations of the policy, exceptions, and requests to other hosts.
        requests: The requests: path, and bytes of the answer once it has ended.
    """

    def __init__(self, browser: Any, url: str, **context: Any) -> None:
        self.url = url
        self.wrong: list[str] = []
        self.requests: list[Any] = []
        self.context = browser.new_context(**{"viewport": WIDE, "accept_downloads": True} | context)
        self.context.grant_permissions(["clipboard-read", "clipboard-write"])
        self.context.set_default_timeout(LIMIT_MS)
        self.page = self.tab()

    def tab(self) -> Any:
        """Return a new tab of the same browser."""
        page = self.context.new_page()
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("request", self._asked)
        return page

    def open(self, view: str = "try") -> Any:
        """Open a view in the first tab; return the tab."""
        self.page.goto(f"{self.url}#{view}")
        return self.page

    def _said(self, message: Any) -> None:
        # Chromium itself logs each answer that is an error.
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            self.wrong.append(message.text)

    def _asked(self, request: Any) -> None:
        self.requests.append(request)
        if not request.url.startswith((self.url, "data:", f"blob:{self.url}")):
            self.wrong.append(f"request to {request.url}")


def expect(found: Any) -> Any:
    """Return playwright's expectations, which wait."""
    api.expect.set_options(timeout=LIMIT_MS)
    return api.expect(found)


def rows(count: int, **changes: Any) -> str:
    """Return lines of a file for a batch."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
    row = {"method": "POST", "url": "/v1/chat/completions", "body": body} | changes
    return "".join(json.dumps({"custom_id": str(number)} | row) + "\n" for number in range(count))


def choose(page: Any, text: str | bytes, name: str = "in.jsonl") -> None:
    """Choose a file."""
    content = text.encode() if isinstance(text, str) else text
    page.get_by_label("Choose a file").set_input_files({"name": name, "mimeType": "", "buffer": content})

"""Chromium for tests of the page at /, and steps that several tests take."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Route, expect, sync_playwright

from tests.server.live import LiveServer, raw_request

CHROMIUM = shutil.which("chromium")
expect.set_options(timeout=30_000)  # milliseconds: other work may hold the cores
LONG: dict[str, Any] = {
    "prompt": "def get_name(",
    "max_tokens": 1000,
    "ignore_eos": True,
    "stream": True,
}
Open = Callable[..., Page]


@contextmanager
def launched_chromium() -> Iterator[Browser]:
    """Run Chromium, or skip the test where there is none."""
    if CHROMIUM is None:
        pytest.skip("there is no chromium; scripts/install_chromium.sh installs it")
    # Chromium's sandbox refuses to run as root, as containers do.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@contextmanager
def page_opener(chromium: Browser) -> Iterator[Open]:
    """Yield a function that opens a server's page.

    Close the pages at the end, and fail on errors that they logged.
    """
    problems: list[str] = []
    with ExitStack() as stack:

        def open_page(server: LiveServer, *, expected: str = "$^", **options: Any) -> Page:
            """Open the page of a server.

            expected: pattern of console messages that the test provokes; Chromium logs refused
            requests there.
            """

            def note(message: ConsoleMessage) -> None:
                if message.type in ("error", "warning") and not re.search(expected, message.text):
                    problems.append(message.text)

            context = chromium.new_context(**options)
            stack.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(30_000)
            page.add_init_script(
                "addEventListener('securitypolicyviolation',"
                " e => console.error(e.violatedDirective))"
            )
            page.on("console", note)
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.goto(server.url)
            return page

        yield open_page
    assert problems == []


@contextmanager
def streams(server: LiveServer, count: int) -> Iterator[None]:
    """Send `count` long requests, and wait until the engine has all of them."""
    with ExitStack() as stack:
        before = server.load()
        for _ in range(count):
            # Do not wait for the answers: requests in the queue have none yet.
            stack.enter_context(server.connect()).sendall(
                raw_request("/v1/completions", json.dumps(LONG).encode())
            )
        server.until(
            lambda load: (
                load["num_running"] + load["num_waiting"]
                == before["num_running"] + before["num_waiting"] + count
            )
        )
        yield


def endless(page: Page, max_tokens: int | None = 1500) -> None:
    """Let the page's chats ignore the end of sequence, so that each answer has this many tokens.

    max_tokens: None for as many as the page asks for.
    """

    def go_on(route: Route) -> None:
        body: Any = route.request.post_data_json
        asked = body["max_tokens"] if max_tokens is None else max_tokens
        route.continue_(post_data={**body, "max_tokens": asked, "ignore_eos": True})

    page.route("**/v1/chat/completions", go_on)


def live(page: Page) -> None:
    """Wait until the page watches the engine."""
    expect(page.get_by_role("status")).to_have_text("live", timeout=30_000)


def ask(page: Page, text: str) -> None:
    """Send a message in the chat."""
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")

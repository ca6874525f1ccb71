"""The chat on the page at /, in a real Chromium."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.server.live import LiveServer
from tests.server.page.browser import Open, ask, endless, streams

FENCED = (
    "See `one`:\n```python\nif a < b:\n    print('<b>')\n```\nand\n~~~\n```\n~~~~\n``two`` and\n"
    "```js title\nlast()"
)
"""The second block contains a fence of the other kind; the last block has no end."""


def answers(page: Page, text: str, size: int = 3) -> None:
    """Answer the page's chats with this text, in pieces of `size` characters."""
    pieces = [
        {"choices": [{"delta": {"content": text[i : i + size]}}]} for i in range(0, len(text), size)
    ]
    events = [
        *map(json.dumps, pieces),
        json.dumps({"choices": [], "usage": {"completion_tokens": 9}}),
        "[DONE]",
    ]
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            content_type="text/event-stream", body="".join(f"data: {event}\n\n" for event in events)
        ),
    )


def test_a_chat_streams_and_says_how_fast_it_came(open_page: Open, tiny: LiveServer) -> None:
    page = open_page(tiny)
    endless(page, None)
    # Record every length of the answer's text while it grows.
    page.evaluate("""() => {
      window.seen = [];
      const words = () => document.querySelector('.assistant .words');
      const note = () => window.seen.push(words()?.textContent.length ?? 0);
      new MutationObserver(note).observe(document.getElementById('log'),
                                         {subtree: true, childList: true, characterData: true});
    }""")
    page.get_by_label("Message").fill("def read_file(path):")
    page.get_by_label("Most tokens").fill("40")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".meter")).to_have_text(
        re.compile(r"^TTFT \d+ ms · 40 tokens · \d+ tokens/s · length$")
    )
    seen = page.evaluate("window.seen")
    assert seen == sorted(seen) and len(set(seen)) >= 5
    assert page.locator(".user .words").inner_text() == "def read_file(path):"
    expect(page.get_by_label("Message")).to_have_value("")


def test_a_chat_remembers_until_a_new_one_begins(open_page: Open, tiny: LiveServer) -> None:
    page = open_page(tiny)

    def ask(text: str) -> list[dict[str, str]]:
        done = page.locator(".meter").count() + 1
        with page.expect_request("**/v1/chat/completions") as sent:
            page.get_by_label("Message").fill(text)
            page.get_by_label("Message").press("Enter")
        expect(page.locator(".meter")).to_have_count(done)
        body: Any = sent.value.post_data_json
        messages: list[dict[str, str]] = body["messages"]
        return messages

    endless(page, None)
    page.get_by_label("Most tokens").fill("8")
    ask("first")
    answer = page.locator(".assistant .words").first.text_content()
    assert [(m["role"], m["content"]) for m in ask("second")] == [
        ("user", "first"),
        ("assistant", answer),
        ("user", "second"),
    ]
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("article")).to_have_count(0)
    assert len(ask("third")) == 1


def test_stop_ends_the_answer_and_its_request(
    open_page: Open, make_server: Callable[..., LiveServer]
) -> None:
    server = make_server(step_ms=5)
    page = open_page(server)
    endless(page)
    page.get_by_label("Message").fill("hello")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".assistant .words")).not_to_be_empty()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".meter")).to_have_text(re.compile(r"stopped$"))
    server.until_idle()
    expect(page.get_by_role("button", name="Stop")).to_be_disabled()
    expect(page.get_by_label("Message")).to_be_focused()


def test_the_log_tells_a_screen_reader_of_whole_answers(open_page: Open, tiny: LiveServer) -> None:
    page = open_page(tiny)
    log = page.get_by_role("log", name="Conversation")
    assert log.get_attribute("aria-live") == "polite"
    page.evaluate("""() => {
      window.busy = [];
      const log = document.getElementById('log');
      new MutationObserver(() => window.busy.push(log.getAttribute('aria-busy')))
        .observe(log, {attributeFilter: ['aria-busy']});
    }""")
    page.get_by_label("Most tokens").fill("8")
    page.get_by_label("Message").fill("class Stack:")
    page.get_by_label("Message").press("Enter")
    expect(page.locator(".meter")).to_have_count(1)
    expect(log).to_have_attribute("aria-busy", "false")
    assert page.evaluate("window.busy") == ["true", "false"]


def test_text_is_never_taken_for_the_page(open_page: Open, fake: LiveServer) -> None:
    page = open_page(fake, expected="TrustedHTML|require-trusted-types-for")
    page.get_by_label("Most tokens").fill("4")
    page.get_by_label("Message").fill("<img src=x onerror=alert(1)><script>alert(1)</script>")
    page.get_by_label("Message").press("Enter")
    expect(page.locator(".meter")).to_have_count(1)
    assert page.locator("#log img, #log script").count() == 0
    with pytest.raises(Exception, match="TrustedHTML"):
        page.evaluate("document.getElementById('log').innerHTML = '<b>x</b>'")


def test_what_the_server_refuses_is_said_and_nothing_need_be_typed_twice(
    open_page: Open, fake: LiveServer
) -> None:
    page = open_page(fake, expected="status of 40")
    text = "x" * 3000  # more than the model's length
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")
    expect(page.locator("#log").get_by_role("alert")).to_contain_text("your messages resulted in 3")
    expect(page.get_by_label("Message")).to_have_value(text)


def test_an_answer_that_breaks_off_keeps_its_text_and_says_so(
    open_page: Open, make_server: Callable[..., LiveServer]
) -> None:
    server = make_server(step_ms=5)
    page = open_page(server, expected="net::ERR_")
    endless(page)
    page.get_by_label("Message").fill("hello")
    page.get_by_label("Message").press("Enter")
    expect(page.locator(".assistant .words")).not_to_be_empty()
    server.process.kill()
    expect(page.locator("#log").get_by_role("alert")).to_have_text("the server cannot be reached")
    expect(page.locator(".assistant .words")).not_to_be_empty()
    expect(page.get_by_label("Message")).to_have_value("hello")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


# Code, copies and the system prompt.


def test_code_between_fences_is_a_block_however_its_text_is_cut(
    open_page: Open, fake: LiveServer
) -> None:
    page = open_page(fake)
    shown = page.evaluate(
        """async text => {
      const { Renderer } = await import("/page/render.js");
      const render = size => {
        const root = document.createElement("div"), renderer = new Renderer(root);
        for (let i = 0; i < text.length; i += size) renderer.add(text.slice(i, i + size));
        renderer.end();
        const kind = node => node.nodeType === Node.TEXT_NODE ? node.data
          : [node.querySelector("span").textContent, node.querySelector("code").textContent];
        return JSON.stringify([...root.childNodes].map(kind).filter(shown => shown !== ""));
      };
      return [...new Set(Array.from(text, (_, i) => render(i + 1)))].map(JSON.parse);
    }""",
        FENCED,
    )
    assert shown == [
        [
            "See `one`:\n",
            ["python", "if a < b:\n    print('<b>')\n"],
            "and\n",
            ["code", "```\n"],
            "``two`` and\n",
            ["js", "last()"],
        ]
    ]


def test_code_and_answers_can_be_copied(open_page: Open, fake: LiveServer) -> None:
    page = open_page(fake, permissions=["clipboard-read", "clipboard-write"])
    answers(page, FENCED)
    ask(page, "show me ```x```")
    expect(page.locator(".assistant .code")).to_have_count(3)
    assert page.locator(".user .words").inner_text() == "show me ```x```"
    for button, text in (
        (page.get_by_role("button", name="Copy code").first, "if a < b:\n    print('<b>')\n"),
        (page.get_by_role("button", name="Copy", exact=True), FENCED),
    ):
        button.click()
        expect(page.get_by_role("button", name="Copied").last).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == text


def test_the_system_prompt_goes_first(open_page: Open, fake: LiveServer) -> None:
    page = open_page(fake)
    answers(page, "yes")
    page.get_by_text("System prompt").click()
    page.get_by_label("System prompt").fill(" Be brief.\n")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "hi")
    body: Any = sent.value.post_data_json
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]


def test_a_chat_that_waits_says_how_many_are_before_it_and_the_queue_fits_a_telephone(
    open_page: Open, make_server: Callable[..., LiveServer]
) -> None:
    server = make_server("--max-num-seqs", "2", step_ms=5)
    page = open_page(server, viewport={"width": 390, "height": 800})
    endless(page)  # an answer whose first token is the end of sequence has no words
    with streams(server, 9):
        ask(page, "hello")
        expect(page.locator(".waits")).to_have_text("Waiting, 7 before you.")
        groups = page.locator("#queue tr.waiting")
        expect(groups).to_have_count(2)  # the first of the queue, and the others
        expect(groups.nth(1).locator("th")).to_have_text("7 requests")
        assert page.locator("#queue").evaluate("e => e.scrollWidth <= e.parentElement.clientWidth")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    expect(page.locator(".assistant .words")).not_to_be_empty()
    expect(page.locator(".waits")).to_have_count(0)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".meter")).to_have_text(re.compile(r"stopped$"))

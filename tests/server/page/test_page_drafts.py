"""The page's drawing of drafts: the accepted and rejected ones of each step."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.server.live import LiveServer
from tests.server.page.browser import Open, live, streams

SPECULATION = {
    "method": "synthetic",
    "num_speculative_tokens": 3,
    "synthetic_acceptance_rate": 0.5,
    "adaptive": False,
}
BARS = """kind => [...document.querySelectorAll(`#timeline rect.${kind}`)].map(bar => ({
  step: Number(bar.dataset.step), drafts: Number(bar.dataset.drafts),
  top: Number(bar.getAttribute("y")), height: Number(bar.getAttribute("height")),
  words: bar.textContent}))"""
STOP_AT_FOUR = """() => {
  const found = document.querySelectorAll("#timeline rect.rejected").length >= 4;
  if (found && document.querySelector("#live").checked) document.querySelector("#live").click();
  return found;
}"""
"""Stops the page while it shows four steps. A call from outside may come when it has drawn anew."""


def bars(page: Page, kind: str) -> dict[int, dict[str, Any]]:
    """Return the bars of a kind by their step."""
    return {bar["step"]: bar for bar in page.evaluate(BARS, kind)}


def test_each_step_has_a_bar_of_its_accepted_and_rejected_drafts(
    open_page: Open, make_server: Callable[..., LiveServer]
) -> None:
    server = make_server("--speculative-config", json.dumps(SPECULATION), step_ms=5)
    page = open_page(server)
    with streams(server, 1):
        page.wait_for_function(STOP_AT_FOUR)
        expect(page.get_by_label("Live")).not_to_be_checked()
        accepted, rejected = bars(page, "accepted"), bars(page, "rejected")
        expect(page.locator("#timeline text", has_text="drafts")).to_be_visible()
        expect(page.locator(".legend .accepted")).to_be_visible()
        note = page.locator("#timeline-note").text_content() or ""
        page.get_by_text("The last steps as a table").click()
        cell = page.locator("#steps tbody tr").first.locator("td").nth(3)
        expect(cell).to_have_text(re.compile(r"^[0-3] of [1-3] drafts? accepted$"))
    assert accepted.keys() == rejected.keys() and len(accepted) >= 4
    first, over = next(iter(accepted.values())), next(iter(rejected.values()))
    unit = (first["height"] + over["height"]) / (first["drafts"] + over["drafts"])
    floor = first["top"] + first["height"]
    for step, right in accepted.items():
        wrong = rejected[step]
        drafted = right["drafts"] + wrong["drafts"]
        assert right["words"] == wrong["words"]
        assert f"step {step}: {right['drafts']} of {drafted} draft" in right["words"]
        # A draft has the same height in each bar, and the rejected ones stand on the accepted ones.
        assert right["height"] == pytest.approx(unit * right["drafts"])
        assert wrong["height"] == pytest.approx(unit * wrong["drafts"])
        assert right["top"] + right["height"] == pytest.approx(floor)
        assert wrong["top"] + wrong["height"] == pytest.approx(right["top"])
    assert re.search(r"Step \d+ \(decode, 1 request, 1 token, \d of \d drafts? accepted\)", note)


def test_without_drafts_there_is_no_lane_for_them(open_page: Open, fake: LiveServer) -> None:
    page = open_page(fake)
    live(page)
    with streams(fake, 1):
        expect(page.locator("#timeline rect.decode").nth(3)).to_be_visible()
        expect(page.locator("#timeline text", has_text="device")).to_be_visible()
        expect(page.locator("#timeline text", has_text="drafts")).to_have_count(0)
        expect(page.locator(".legend .accepted")).to_be_hidden()
    fake.until_idle()

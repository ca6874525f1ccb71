"""The page at / in a real Chromium: its files, its look, its keys and its view of the engine."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from playwright.sync_api import expect

from sidestep.frontend.server.transport.page import FILES, PATHS
from tests.processes import cores
from tests.server.live import ROOT, LiveServer
from tests.server.page.browser import Open, endless, live, streams

WEB = ROOT / "frontend" / "server" / "web"
CONTRAST = """selector => {
  const numbers = color => color.match(/[\\d.]+/g).map(Number);
  const linear = value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) =>
    0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const element = document.querySelector(selector);
  let ground = element;
  while (ground && numbers(getComputedStyle(ground).backgroundColor)[3] === 0)
    ground = ground.parentElement;
  const a = light(numbers(getComputedStyle(element).color));
  const b = light(numbers(getComputedStyle(ground).backgroundColor));
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}"""


# The files.


def test_the_page_is_made_of_the_files_that_are_there_and_allows_no_others(
    fake: LiveServer,
) -> None:
    assert set(FILES) == {file.name for file in WEB.iterdir()}
    for path, name in zip(PATHS, FILES, strict=True):
        answer = fake.http.get(path)
        assert answer.content == (WEB / name).read_bytes()
        policy = answer.headers["content-security-policy"]
        assert (
            "default-src 'none'; script-src 'self'; style-src 'self';" in policy
            and "unsafe" not in policy
        )
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert (
        fake.http.get("/page/../app.py").status_code
        == fake.http.get("/page/app.py").status_code
        == 404
    )


def test_every_file_that_the_page_asks_for_is_its_own() -> None:
    for name in FILES:
        asked = re.findall(
            r"""(?:src|href|from|url)[=( ]+["'](?!http://www.w3.org)([^"']+)["']""",
            (WEB / name).read_text(),
        )
        assert set(asked) <= set(PATHS), name


def test_no_key_is_needed_for_the_page_itself(make_server: Callable[..., LiveServer]) -> None:
    server = make_server(environment={"SIDESTEP_API_KEYS": "right-key"}, key="right-key")
    with httpx2.Client(base_url=server.url) as http:
        assert [http.get(path).status_code for path in PATHS] == [200] * len(PATHS)
        assert http.get("/v1/flight").status_code == 401


# The whole page.


def test_everything_can_be_done_with_the_keyboard(
    open_page: Open, make_server: Callable[..., LiveServer]
) -> None:
    server = make_server(step_ms=5)
    page = open_page(server)
    endless(page)
    live(page)
    order = []
    for _ in range(12):
        page.keyboard.press("Tab")
        order.append(
            page.evaluate(
                "document.activeElement.id || document.activeElement.tagName.toLowerCase()"
            )
        )
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
        if order[-1] == "live":
            break
    assert order == [
        "new-chat",
        "summary",
        "log",
        "question",
        "max-tokens",
        "temperature",
        "send",
        "live",
    ]
    for _ in range(4):
        page.keyboard.press("Shift+Tab")
    page.keyboard.type("first line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second line")
    page.keyboard.press("Tab")
    page.keyboard.press("Control+A")
    page.keyboard.type("64")
    expect(page.get_by_label("Most tokens")).to_have_value("64")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".user .words")).to_have_text("first line\nsecond line")
    expect(page.locator(".assistant .words")).not_to_be_empty()
    page.keyboard.press("Escape")
    expect(page.locator(".meter")).to_have_text(re.compile("stopped$"))
    server.until_idle()
    page.locator("#live").focus()
    page.keyboard.press("Space")
    expect(page.get_by_role("status")).to_have_text("paused")
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#zoom")).to_have_value("16")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("region", name="The last steps")).to_be_visible()


def test_a_wrong_key_is_told_and_a_right_one_stays_in_the_tab(
    open_page: Open, make_server: Callable[..., LiveServer]
) -> None:
    server = make_server(environment={"SIDESTEP_API_KEYS": "right-key"}, key="right-key")
    page = open_page(server, expected="status of 40")
    field = page.get_by_label("API key")
    expect(page.get_by_role("alert")).to_have_text("This server wants an API key.")
    expect(field).to_be_focused()
    field.fill("wrong-key")
    field.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("The server refused the key")
    expect(field).to_be_focused()
    expect(page.get_by_role("status")).to_have_text("key needed")
    field.fill("right-key")
    field.press("Enter")
    live(page)
    expect(field).to_be_hidden()
    page.get_by_label("Most tokens").fill("4")
    page.get_by_label("Message").fill("hello")
    page.get_by_label("Message").press("Enter")
    expect(page.locator(".meter")).to_have_count(1)
    assert "right-key" not in page.content() + page.url
    assert page.evaluate("[localStorage.length, document.cookie, sessionStorage.length]") == [
        0,
        "",
        1,
    ]
    page.reload()
    live(page)
    page.get_by_role("button", name="Forget the API key").click()
    expect(page.get_by_role("alert")).to_have_text("This server wants an API key.")
    assert page.evaluate("sessionStorage.length") == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_can_be_read_in_light_and_in_dark(
    scheme: Any, open_page: Open, tiny: LiveServer
) -> None:
    page = open_page(tiny, color_scheme=scheme)
    page.get_by_label("Most tokens").fill("8")
    page.get_by_label("Message").fill("def f(")
    page.get_by_label("Message").press("Enter")
    expect(page.locator(".meter")).to_have_count(1)
    live(page)
    for selector in (
        "h1",
        "#served",
        "#state",
        "#new-chat",
        ".user .words",
        ".assistant .words",
        ".meter",
        "textarea",
        "#chat-hint",
        "#send",
        "dt",
        "dd",
        "figcaption",
        "summary",
        "caption",
        "th",
        "td",
        ".legend li",
    ):
        assert page.evaluate(CONTRAST, selector) >= 4.5, selector
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) > 384) == (scheme == "light")


@pytest.mark.parametrize("width", [320, 390, 800, 1280])
def test_the_page_fits_narrow_screens(width: int, open_page: Open, fake: LiveServer) -> None:
    page = open_page(fake, viewport={"width": width, "height": 700})
    live(page)
    page.get_by_label("Live").uncheck()
    # The page looks as after a long load, whatever the server has served before.
    page.evaluate("""() => {
      for (const cell of document.querySelectorAll('#latency tbody td'))
        cell.textContent = '999 ms';
      for (const cell of document.querySelectorAll('#latency td:last-child'))
        cell.textContent = '1234567 requests';
      for (const value of document.querySelectorAll('#tiles dd')) value.textContent = '123456';
    }""")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for name in ("Send", "New chat"):
        box = page.get_by_role("button", name=name).bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= width


# The view of the engine.


def test_the_live_view_shows_the_steps_and_what_a_request_waits_for(
    open_page: Open, make_server: Callable[..., LiveServer]
) -> None:
    server = make_server("--max-num-seqs", "1", step_ms=5)
    page = open_page(server)
    with streams(server, 3):
        waiting = page.locator("#queue tr.waiting")
        expect(waiting).to_have_count(2)
        assert waiting.nth(0).get_attribute("data-waiting-for") == "max_num_seqs"
        expect(waiting.nth(0)).to_contain_text("as many run as may (max_num_seqs)")
        expect(waiting.nth(1)).to_contain_text("its turn")
        expect(page.locator("#queue tr.running")).to_have_count(1)
        expect(page.locator("#tile-running")).to_have_text("1")
        expect(page.locator("#tile-waiting")).to_have_text("2")
        # The view draws the overlap: a step was prepared before the one before it had ended.
        expect(page.locator("#timeline rect.decode").nth(3)).to_be_visible()
        assert page.locator("#timeline rect.schedule").count() >= 3
        expect(page.locator("#timeline-note")).to_contain_text(
            re.compile(r"packed and queued .* ms before step \d+")
        )
        expect(page.locator("#batch rect.decode").first).to_be_visible()
        expect(page.locator("#batch polyline.waiting")).to_be_visible()
        expect(page.locator("#kv rect").first).to_be_visible()
        page.get_by_text("The last steps as a table").click()
        expect(page.locator("#steps tbody tr")).to_have_count(12)
        expect(page.locator("#ttft td").first).to_have_text(re.compile(r"\d m?s$"))
        expect(page.locator("#itl td").first).to_have_text(re.compile(r"\d m?s$"))
    server.until_idle()
    expect(page.locator("#queue-note")).to_have_text("No requests.")


def test_the_view_shows_the_replica_that_is_chosen(
    open_page: Open, make_server: Callable[..., LiveServer]
) -> None:
    server = make_server("-dp", "2", "--routing", "round_robin", step_ms=5)
    page = open_page(server)
    live(page)
    with streams(server, 3):
        choice, tile = page.get_by_label("Replica"), page.locator("#tile-running")
        expect(tile).to_have_text("2")
        choice.select_option("1")
        expect(tile).to_have_text("1")
        expect(choice).to_have_value("1")


def test_the_view_asks_for_what_is_new_and_not_at_all_while_nobody_looks(
    open_page: Open, fake: LiveServer
) -> None:
    page = open_page(fake)
    live(page)
    page.clock.install()
    page.reload()
    live(page)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))

    def polls_within(milliseconds: int) -> int:
        asked.clear()
        page.clock.run_for(milliseconds)
        page.evaluate(
            "fetch('/version')"
        )  # comes after the requests that the page has sent by then
        return sum("/v1/flight" in url for url in asked)

    with page.expect_response(re.compile(r"/v1/flight\?since=\d+&replica=0$")) as answer:
        page.clock.run_for(600)
    assert answer.value.json()["steps"] == []
    hide = """hidden => {
               Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});
                          document.dispatchEvent(new Event('visibilitychange')); }"""
    page.evaluate(hide, True)
    assert polls_within(60_000) == 0
    with page.expect_response("**/v1/flight*"):
        page.evaluate(hide, False)
    page.get_by_label("Live").uncheck()
    assert polls_within(60_000) == 0


def test_a_server_that_goes_and_comes_again_is_told(open_page: Open, fake: LiveServer) -> None:
    page = open_page(fake, expected="net::ERR_FAILED")
    live(page)
    page.route("**/v1/flight*", lambda route: route.abort())
    expect(page.get_by_role("status")).to_have_text("the server cannot be reached")
    page.unroute("**/v1/flight*")
    live(page)


def test_what_is_dead_is_not_shown_as_if_it_ran(
    open_page: Open, make_server: Callable[..., LiveServer]
) -> None:
    server = make_server("-dp", "2", "--restart-limit", "0", step_ms=5)
    page = open_page(server, expected="status of 50|net::ERR_")
    live(page)
    cores(server.process.pid)[0].kill()
    # The page shows the other replica, because the user has not chosen the dead one.
    expect(page.get_by_role("status")).to_have_text("live, without 1 of 2 replicas")
    expect(page.get_by_label("Replica")).to_have_value("1")
    expect(page.locator("#replicas li")).to_have_text(re.compile(r"^Replica 0: .*(killed|ended)"))
    page.get_by_label("Replica").select_option("0")
    expect(page.locator("#engine-note")).to_contain_text(
        re.compile(r"^Replica 0: .*(killed|ended)")
    )
    expect(page.locator("#tile-running")).to_have_text("–")
    page.get_by_label("Replica").select_option("1")
    expect(page.locator("#engine-note")).to_be_hidden()
    with streams(server, 2):
        expect(page.locator("#tile-running")).to_have_text("2")
        server.process.kill()
        expect(page.get_by_role("status")).to_have_text("the server cannot be reached")
    expect(page.locator("#engine-note")).to_contain_text(
        "The server cannot be reached. The charts end"
    )
    expect(page.locator("#tile-running")).to_have_text("–")
    expect(page.locator("#queue tbody tr")).to_have_count(0)
    expect(page.locator("#queue-note")).to_have_text("Not known now.")


# The docs' pictures.


@pytest.fixture
def pictures(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the folder of the pictures: a temporary one, unless --screenshots names one."""
    folder = request.config.getoption("--screenshots")
    return tmp_path if folder is None else Path(folder)


def test_the_docs_pictures_can_be_made(
    pictures: Path, open_page: Open, tiny: LiveServer, make_server: Callable[..., LiveServer]
) -> None:
    size = {"width": 1200, "height": 720}
    page = open_page(tiny, viewport=size)
    page.get_by_label("Message").fill("def read_file(path):")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Message").press("Enter")
    expect(page.locator(".meter")).to_have_count(1)
    live(page)
    page.screenshot(path=pictures / "page-light.png", full_page=True)

    server = make_server("--max-num-seqs", "4", step_ms=10)
    page = open_page(server, viewport=size, color_scheme="dark")
    with streams(server, 7):
        expect(page.locator("#queue tr.waiting")).to_have_count(2)
        expect(page.locator("#timeline rect.decode").nth(7)).to_be_visible()
        expect(page.locator("#timeline-note")).to_contain_text("packed and queued")
        page.locator("#engine").screenshot(path=pictures / "page-engine-dark.png")

    for name in ("page-light", "page-engine-dark"):
        assert (pictures / f"{name}.png").read_bytes().startswith(b"\x89PNG")

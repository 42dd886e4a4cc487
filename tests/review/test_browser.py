"""The page in a real Chromium: Debian's, where it is installed. Nothing is ever downloaded."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from review_server import Server

from csda.data.decisions import read_decisions
from csda.report import write_report
from csda.runs import Run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
KILLS = int(os.environ.get("CSDA_REVIEW_KILLS", "20"))
"""SIGKILLs of the server in the middle; 200 in the long attack."""

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="Chromium is not installed: the page is not tried in a browser"
)
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture
def run_copy(tiny_run: Run, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_run.folder, tmp_path / "run"))


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def begin(folder: Path, out: Path | None = None, classes: tuple[str, ...] = ()) -> Server:
        servers.append(Server(folder, out, classes))
        return servers[-1]

    yield begin
    for server in servers:
        server.end()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Pages that may neither complain on the console nor ask another host for anything."""
    contexts, complaints = [], []

    def begin(server: Server, *, quiet: bool = True, **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        if quiet:
            page.on("console", lambda each: complaints.append(each.text) if each.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda each: None if _is_own(each.url, server) else complaints.append(each.url))
        page.goto(server.address)
        page.wait_for_selector(".card.here")
        return page

    yield begin
    for context in contexts:
        context.close()
    assert complaints == []


def _is_own(url: str, server: Server) -> bool:
    return url.startswith((server.address.partition("?")[0], "data:", "blob:"))


def until(page: Any, condition: str, argument: Any = None) -> None:
    """Waits; Playwright's own way would need the page to allow eval."""
    end = time.monotonic() + 15
    while not page.evaluate(condition, argument):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(30)


def _settled(page: Any, decisions: int) -> None:
    """Everything that was pressed is confirmed."""
    until(page, "!document.querySelector('.card.pending')")
    until(page, "async (count) => (await (await fetch('/api/summary')).json()).decisions >= count", decisions)


def test_ten_images_by_keyboard(serve: Any, open_page: Any, run_copy: Path) -> None:
    """Labels, accepts, skips, flags, selects several, undoes and reloads without touching the mouse; then trains on."""
    server = serve(run_copy)
    page = open_page(server, viewport={"width": 1280, "height": 800})
    shown = page.eval_on_selector_all(".card", "cards => cards.map(card => card.getAttribute('aria-label'))")
    suggested = [re.findall(r"predicted (\w+)", text)[0] for text in shown]
    for key in ("1", "2", "3", "Enter", "1", "2", "Enter", "3", "s", "f"):
        page.keyboard.press(key)
    _settled(page, 10)
    labels = ["common", "label", "rare", suggested[3], "common", "label", suggested[6], "rare"]
    kept = read_decisions(run_copy).decisions
    assert [each.label for each in kept] == [*labels, "", ""]
    assert [each.action for each in kept] == ["label"] * 8 + ["skip", "flag"]
    assert [each.said for each in kept] == suggested[:10]
    # Three at once: they are beside each other.
    for key in ("Shift+ArrowRight", "Shift+ArrowRight", "2"):
        page.keyboard.press(key)
    _settled(page, 13)
    assert [each.batch for each in read_decisions(run_copy).decisions[10:]] == [11, 11, 11]
    page.keyboard.press("u")
    page.keyboard.press("u")
    _settled(page, 17)
    current = read_decisions(run_copy).all_current()
    assert len(current) == 9
    assert not any(each.action == "flag" for each in current.values())
    page.reload()
    page.wait_for_selector(".card.here")
    assert page.inner_text("#progress").startswith("8 labeled, 1 skipped")
    page.keyboard.press("u")  # what was done before the page was opened anew
    until(page, "/^8 labeled, [0-9]+ open/.test(document.querySelector('#progress').textContent)")
    page.select_option("select[name=state]", "labeled")
    until(page, "document.querySelectorAll('.card').length === 8")
    page.close()
    server.end()
    from csda.training import train

    run = train(labels_from=run_copy, out=run_copy.parent / "next")
    before = sum(row.split == "labeled" for row in Run(run_copy).split)
    assert sum(row.split == "labeled" for row in run.split) == before + 8


def test_several_at_once(serve: Any, open_page: Any, run_copy: Path) -> None:
    """A click and two more with Ctrl select three; what is accepted together is undone together."""
    page = open_page(serve(run_copy), viewport={"width": 1280, "height": 800})
    page.click(".card >> nth=1")
    for place in (3, 6):
        page.click(f".card >> nth={place}", modifiers=["Control"])
    chosen = page.eval_on_selector_all(".card", "all => all.map(each => each.ariaSelected)")
    assert [place for place, value in enumerate(chosen) if value == "true"] == [1, 3, 6]
    page.click(".class >> nth=2")
    _settled(page, 3)
    assert [each.label for each in read_decisions(run_copy).decisions] == ["rare"] * 3
    page.keyboard.press("l")
    until(page, "document.querySelector('.card')?.title.includes('given')")
    for key in ("a", "Enter"):
        page.keyboard.press(key)
    _settled(page, 4)
    kept = read_decisions(run_copy)
    accepted = kept.decisions[3:]
    given = {row.id: row.label for row in Run(run_copy).split}
    assert len({each.label for each in accepted}) > 1
    assert all(each.label == given[each.image] and each.batch == 4 for each in accepted)
    page.keyboard.press("u")
    _settled(page, len(kept.decisions) + 1)
    assert read_decisions(run_copy).tally() == {"rare": 3}


def test_the_image_in_focus_stays_when_features_arrive(serve: Any, open_page: Any, tmp_path: Path) -> None:
    for number in range(5):
        path = tmp_path / "images" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (60, 40), (50 * number, 90, 90)).save(path)
    page = open_page(serve(tmp_path / "images", tmp_path / "review", ("a", "b")))
    page.keyboard.press("ArrowRight")
    shown = page.inner_text("#name")
    answer = json.dumps({"last": 0, "items": [], "progress": 1.0, "problem": None})
    page.route("**/api/changes?*", lambda route: route.fulfill(body=answer, content_type="application/json"))
    until(page, "document.querySelector('#status').textContent.startsWith('Features are complete')")
    assert page.inner_text("#name") == shown


def test_a_window_and_a_picture_that_stays_in_sight(serve: Any, open_page: Any, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    values = np.arange(1000, 1000 + 64 * 32, dtype=np.uint16).reshape(32, 64)
    for name in "ab":
        Image.fromarray(values).save(tmp_path / "images" / f"{name}.png")
    page = open_page(serve(tmp_path / "images", tmp_path / "review", ("a", "b")))
    until(page, "!document.querySelector('#window').hidden")
    page.keyboard.press("b")
    assert (page.input_value("#low"), page.input_value("#high")) == ("0", "4095")
    page.focus("#low")
    page.keyboard.press("End")  # it stops before the other end
    assert float(page.input_value("#low")) < 4095
    until(page, "document.querySelector('#picture').src.includes('&low=4')")
    assert page.inner_text("#low-value") == str(round(float(page.input_value("#low"))))
    page.click("#plain")
    assert page.input_value("#low") == "0"
    box = page.locator("#view").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.wheel(0, -100)
    until(page, "document.querySelector('#view').classList.contains('zoomed')")
    page.mouse.down()
    page.mouse.move(x + 3000, y + 3000)
    page.mouse.up()
    picture = page.locator("#picture").bounding_box()
    assert abs(picture["x"] - box["x"]) < 1
    assert abs(picture["y"] - box["y"]) < 1


def test_what_went_wrong_stays_on_the_page(serve: Any, open_page: Any, tmp_path: Path) -> None:
    """A folder has no model to predict a dropped image; the sentence is there after the next poll, too."""
    (tmp_path / "images").mkdir()
    Image.new("RGB", (60, 40)).save(tmp_path / "images" / "a.png")
    page = open_page(serve(tmp_path / "images", tmp_path / "review", ("a", "b")))
    dropped = page.evaluate_handle(
        "(() => { const all = new DataTransfer(); all.items.add(new File(['x'], 'x.png')); return all; })()"
    )
    page.dispatch_event("body", "drop", {"dataTransfer": dropped})
    until(page, "document.querySelector('#problem').textContent.includes('no model')")
    with page.expect_response("**/api/changes?*"):
        pass
    page.wait_for_timeout(100)
    assert page.is_visible("#problem")
    page.keyboard.press("1")  # until something succeeds
    _settled(page, 1)
    until(page, "document.querySelector('#problem').hidden")


def test_given_labels_have_counts_of_their_own(serve: Any, open_page: Any, run_copy: Path) -> None:
    page = open_page(serve(run_copy))
    page.keyboard.press("l")
    until(page, "/^0 labeled again, [1-9][0-9]* as given$/.test(document.querySelector('#progress').textContent)")
    page.keyboard.press("1")
    until(page, "document.querySelector('#progress').textContent.startsWith('1 labeled again')")


def test_two_tabs(serve: Any, open_page: Any, run_copy: Path) -> None:
    """The later decision counts, both are kept, and each tab learns of the other's."""
    server = serve(run_copy)
    first, second = open_page(server), open_page(server)
    first.keyboard.press("1")
    _settled(first, 1)
    second.keyboard.press("3")
    _settled(second, 2)
    kept = read_decisions(run_copy)
    assert [each.label for each in kept.decisions] == ["common", "rare"]
    assert kept.tally() == {"rare": 1}
    until(first, "document.querySelector('.card .text b')?.textContent === 'rare'")


def test_several_labels_an_image(serve: Any, open_page: Any, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(5):
        Image.new("RGB", (60, 40), (50 * number, 90, 90)).save(folder / f"{number}.png")
    (folder / "labels.csv").write_text("image,label\n0.png,cold|warm\n1.png,(none)\n")
    server = serve(folder, tmp_path / "review")
    page = open_page(server)
    for key in ("1", "2", "1", "Enter", "1", "2", "Enter", "0"):
        page.keyboard.press(key)
    _settled(page, 3)
    assert [each.label for each in read_decisions(tmp_path / "review").decisions] == ["warm", "cold|warm", "(none)"]


def test_names_are_shown_and_not_run(serve: Any, open_page: Any, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    Image.new("RGB", (30, 30)).save(folder / "<img src=x onerror=document.title='run'>.png")
    server = serve(folder, tmp_path / "review", ("<script>document.title='run'</script>", "b"))
    page = open_page(server)
    page.keyboard.press("1")
    _settled(page, 1)
    assert page.inner_text(".card .text").endswith("<script>document.title='run'</script>")
    assert page.title() == "Review: images"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone(serve: Any, open_page: Any, run_copy: Path, scheme: str) -> None:
    """Nothing is off-screen, an image opens at a touch, its label is a touch, and it goes on with the next."""
    server = serve(run_copy)
    page = open_page(
        server, viewport={"width": 390, "height": 844}, color_scheme=scheme, has_touch=True, is_mobile=True
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.tap(".card >> nth=1")
    page.wait_for_selector("#focus", state="visible")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for name in ("rare", "common"):
        page.tap(f".class:has-text('{name}')")
    _settled(page, 2)
    assert [each.label for each in read_decisions(run_copy).decisions] == ["rare", "common"]
    assert _serious(page) == []
    page.tap("#close")
    page.wait_for_selector("#focus", state="hidden")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", background)[:3])) / 3
    assert (brightness < 60) == (scheme == "dark")


def test_a_report_fits_a_phone(browser: Any, run_copy: Path) -> None:
    """Nothing of it is wider than the window, however long the names are that a remark speaks of."""
    path = run_copy / "environment.json"
    name = "colon_polyps/ba615bcd-2f99-4a12-884d-d9cd2c04c2a1.jpg"
    remarks = [f"duplicates in different parts of the split: 1, {name} = {name} for one"]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"remarks": remarks}))
    (run_copy / "manifest.json").unlink()  # which knows the file as it was
    context = browser.new_context(viewport={"width": 390, "height": 844})
    page = context.new_page()
    page.goto(write_report(run_copy).as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate(
        "[...document.querySelectorAll('.scroll')].every(each => each.scrollWidth <= each.clientWidth)"
    )
    assert _serious(page) == []
    context.close()


def _serious(page: Any) -> list[str]:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    found = axe.Axe().run(page).response["violations"]
    return [f"{each['id']}: {each['nodes'][0]['html']}" for each in found if each["impact"] in ("serious", "critical")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_screen_reader_finds_its_way(serve: Any, open_page: Any, run_copy: Path, scheme: str) -> None:
    server = serve(run_copy)
    # axe is put into the page as a script, which its policy would refuse.
    page = open_page(server, viewport={"width": 1280, "height": 800}, color_scheme=scheme, bypass_csp=True)
    page.wait_for_load_state("networkidle")
    page.keyboard.press("1")
    _settled(page, 1)
    until(page, "document.querySelector('#status').textContent.endsWith('Kept.')")
    assert _serious(page) == []
    page.keyboard.press("?")
    assert _serious(page) == []
    page.keyboard.press("Escape")
    page.keyboard.press("z")
    page.keyboard.press("+")
    assert "scale(1.25)" in page.get_attribute("#picture", "style")
    page.keyboard.press("Escape")
    for _ in range(40):  # all of the page can be reached by Tab
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "accept":
            break
    else:
        pytest.fail("the button that accepts is not reached")


def test_nothing_that_was_confirmed_is_lost(serve: Any, open_page: Any, run_copy: Path) -> None:
    """The server is killed at random moments while labels are pressed; the page says which of them are kept."""
    generator = random.Random(0)
    server = serve(run_copy)
    page = open_page(server, quiet=False)
    page.evaluate(
        """() => {
            window.confirmed = [];
            const ask = window.fetch;
            window.fetch = async (path, options) => {
                const answer = await ask(path, options);
                if (options?.method === 'POST' && answer.ok) window.confirmed.push((await answer.clone().json()).last);
                return answer;
            };
        }"""
    )
    pressed = 0
    for _ in range(KILLS):
        end = time.monotonic() + generator.uniform(0.02, 0.3)
        while time.monotonic() < end:
            page.keyboard.press(generator.choice("123123sfu"))
            pressed += 1
        server.end(signal.SIGKILL)
        server.start()
    page.keyboard.press("1")
    page.wait_for_timeout(300)
    confirmed = page.evaluate("window.confirmed")
    kept = read_decisions(run_copy).decisions
    assert pressed > KILLS
    assert confirmed
    assert max(confirmed) <= len(kept)
    assert [each.number for each in kept] == list(range(1, len(kept) + 1))
    page.reload()
    page.wait_for_selector("#progress b")
    labeled = sum(each.action == "label" for each in read_decisions(run_copy).all_current().values())
    until(page, "(text) => document.querySelector('#progress').textContent.startsWith(text)", f"{labeled} labeled")


def test_an_unanswering_server_is_said(serve: Any, open_page: Any, run_copy: Path) -> None:
    server = serve(run_copy)
    page = open_page(server, quiet=False)
    server.end(signal.SIGKILL)
    page.keyboard.press("1")
    until(page, "document.querySelector('#problem').textContent.startsWith('Not kept: the server')")
    assert page.inner_text(".card >> nth=0").find("✓") < 0
    server.start()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("1")
    _settled(page, 1)
    assert len(read_decisions(run_copy).decisions) == 1

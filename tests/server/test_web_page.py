"""The page at /, in a real browser: conversations, live figures, keys, and nothing from anywhere else."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from devtools import Page, browser
from running_server import ENGINE, RunningServer, ScriptedEngine, running

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.server.app import build_app
from compiled_engine.server.options import ServerOptions
from compiled_engine.server.web_page import FOLDER, page_files

MARKUP = "<img src=x onerror=\"document.title='broken in'\"><script>document.title='broken in'</script>&amp;"
IDLE = "!document.getElementById('send').disabled"
LAST = "[...document.querySelectorAll('article')].at(-1)"


@pytest.fixture(scope="module")
def scripted() -> ScriptedEngine:
    return ScriptedEngine(AsyncLLM(**ENGINE, core="in_process"), ["Good ", "day"])


@pytest.fixture(scope="module")
def keyed(scripted: ScriptedEngine) -> Iterator[RunningServer]:
    with running(scripted, api_key=("a key",)) as server:
        yield server


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as page:
        page.show_as(1280, 860)
        yield page


def say(page: Page, text: str) -> None:
    page.run("document.getElementById('prompt').focus()")
    page.type(text)
    page.press("Enter")


def test_no_other_place_is_needed(server: RunningServer) -> None:
    """Whatever is loaded comes from the server, and its policy allows nothing else."""
    for path, file in page_files().items():
        response = httpx.get(server.url + path, timeout=60)
        assert response.status_code == 200
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert "http://" not in file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in file.read_text()
        assert "innerHTML" not in file.read_text()
    assert {file.name for file in page_files().values()} == {file.name for file in Path(FOLDER).iterdir()}


def test_it_can_be_left_out(scripted: ScriptedEngine) -> None:
    app: Any = build_app(scripted, ServerOptions(web_page=False), "small")
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here", timeout=60)

    async def statuses() -> list[int]:
        return [(await client.get(path)).status_code for path in page_files()]

    assert set(asyncio.run(statuses())) == {404}


@pytest.mark.browser
def test_a_conversation_and_what_the_engine_does(server: RunningServer, page: Page) -> None:
    page.open(server.url)
    page.wait("document.getElementById('state').textContent === 'live'")
    page.run("document.getElementById('max-tokens').value = 64")
    say(page, "x = 1")
    page.wait(f"{IDLE} && document.querySelectorAll('article').length === 2")
    assert page.run(f"{LAST}.querySelector('.text').textContent.length") > 10
    assert re.search(r"\b\d\d tokens", page.run(f"{LAST}.querySelector('.figures').textContent"))
    page.wait("document.getElementById('rate').textContent !== '–'")
    page.run("document.getElementById('mode').value = 'completion'; document.getElementById('max-tokens').value = 200")
    say(page, "def f(x):")
    page.wait("document.getElementById('graph').textContent === 'none: eager'")
    page.wait("Number(document.getElementById('rate').textContent) > 0")
    page.press("Escape")
    page.wait(IDLE)
    assert "stopped" in page.run(f"{LAST}.querySelector('.figures').textContent")
    page.wait("document.getElementById('running').textContent === '0'")
    assert page.console == []
    assert {url.removeprefix(server.url) for url in page.requested if not url.startswith(server.url)} <= {"about:blank"}


@pytest.mark.browser
def test_what_a_model_writes_is_text(keyed: RunningServer, scripted: ScriptedEngine, page: Page) -> None:
    """Here with a key, which the page asks for, and keeps in its tab."""
    scripted.chunks = [MARKUP[:9], MARKUP[9:]]
    page.open(keyed.url)
    page.wait("!document.getElementById('key-form').hidden")
    page.run("document.getElementById('key').focus()")
    page.type("a key")
    page.press("Enter")
    page.wait("document.getElementById('state').textContent === 'live'")
    say(page, MARKUP)
    page.wait(f"{IDLE} && document.querySelectorAll('article').length === 2")
    texts = page.run("[...document.querySelectorAll('article .text')].map(each => each.textContent)")
    assert texts == [MARKUP, MARKUP]
    assert page.run("document.querySelectorAll('article img, article script').length") == 0
    assert page.run("document.title") == "compiled_engine"
    scripted.error = RuntimeError("injected")
    say(page, "again")
    page.wait("!document.getElementById('error').hidden")
    assert page.run("document.getElementById('error').textContent") == "the server failed; its log has the reason"
    scripted.error = None


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [500, 1280])
def test_it_fits_and_can_be_read(server: RunningServer, page: Page, width: int, dark: bool) -> None:
    page.show_as(width, 860, dark=dark)
    page.open(server.url)
    page.wait("document.getElementById('state').textContent === 'live'")
    assert page.run("document.documentElement.scrollWidth") <= width
    ratios = page.run("""(() => {
        const linear = (part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
        const channel = (each) => linear(each / 255);
        const light = (colour) => {
            const [red, green, blue] = colour.match(/[0-9.]+/g).map(Number).map(channel);
            return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
        };
        const behind = (each) => {
            const colour = getComputedStyle(each).backgroundColor;
            return colour === 'rgba(0, 0, 0, 0)' && each.parentElement ? behind(each.parentElement) : colour;
        };
        return [...document.querySelectorAll('h1, h2, h2 span, p, dt, dd, label, button:enabled, textarea, select')]
            .filter((each) => each.offsetParent && each.textContent)
            .map((each) => [light(getComputedStyle(each).color), light(behind(each))].sort((one, other) => other - one))
            .map(([lighter, darker]) => (lighter + 0.05) / (darker + 0.05));
    })()""")
    assert min(ratios) >= 4.5


@pytest.mark.browser
def test_every_control_is_reached_by_the_keyboard(server: RunningServer, page: Page) -> None:
    page.show_as(1280, 860)
    page.open(server.url)
    reached = set()
    for _ in range(12):
        page.press("Tab")
        reached.add(page.run("document.activeElement.id"))
    assert {"clear", "log", "prompt", "mode", "temperature", "max-tokens", "send"} <= reached
    unnamed = "[...document.querySelectorAll('input, select, textarea, button')]"
    unnamed += ".filter(each => !each.labels?.length && !each.textContent.trim()).map(each => each.id)"
    assert page.run(unnamed) == []


CHOOSE = """
(async () => {
  const pixels = Uint8Array.from(atob("%s"), (each) => each.charCodeAt(0));
  const chosen = new DataTransfer();
  chosen.items.add(new File([pixels], "a.png", { type: "image/png" }));
  if (%s) {
    const event = new ClipboardEvent("paste", { clipboardData: chosen, cancelable: true, bubbles: true });
    document.getElementById("prompt").dispatchEvent(event);
  } else {
    document.getElementById("images").files = chosen.files;
  }
})()
"""


class SeeingEngine(ScriptedEngine):
    """Says that its model sees, and leaves images as they are."""

    @property
    def features(self) -> Any:
        placeholder = min(self.tokenizer.special_ids)
        return SimpleNamespace(
            images=SimpleNamespace(why_none=None, placeholder=placeholder, most_bytes=lambda num_images: num_images)
        )

    async def attach(self, prompt: Any, sampling_params: Any = None) -> dict[str, Any]:
        self.attached = prompt["multi_modal_data"]["image"]
        return {"prompt": prompt["prompt"], "prompt_token_ids": prompt["prompt_token_ids"]}


@pytest.mark.browser
@pytest.mark.parametrize("pasted", [False, True])
def test_images_are_chosen_or_pasted(scripted: ScriptedEngine, page: Page, pasted: bool) -> None:
    engine = SeeingEngine(scripted._engine, ["An image"])
    with running(engine) as server:
        page.open(server.url)
        page.wait("!document.getElementById('images-field').hidden")
        page.run(CHOOSE % ("aW1hZ2U=", "true" if pasted else "false"))
        page.wait("document.getElementById('images').files.length === 1")
        say(page, "What is it?")
        page.wait(f"{IDLE} && {LAST}?.querySelector('.figures') !== undefined")
        assert [image.url for image in engine.attached] == ["data:image/png;base64,aW1hZ2U="]
        assert "[a.png]" in page.run("document.querySelector('article.user').textContent")
        assert page.run("document.getElementById('images').files.length") == 0


@pytest.mark.browser
def test_a_model_of_texts_is_offered_no_images(server: RunningServer, page: Page) -> None:
    page.open(server.url)
    page.wait("document.getElementById('model').textContent")
    assert page.run("document.getElementById('images-field').hidden")

"""The inspector's page, looked at in a browser."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from browser import WIDTH, Visit
from inspect_cases import COMPILED, EAGER, RANGES, inspect

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("one_thread")]

SECTIONS = [
    *("start-up", "model", "passes", "graphs", "pieces", "kernels", "guards", "configuration", "cache"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    for _ in range(2):  # the second time from the cache
        inspect(*COMPILED, "-o", str(path))
    return path


@pytest.fixture(scope="module")
def seen(page: Path) -> Visit:
    return Visit(page)


def with_script(page: Path, script: str) -> Path:
    """A copy of the page with one more script at its end."""
    copy = page.with_name("scripted.html")
    copy.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    return copy


def elements(dom: str, opening: str) -> list[str]:
    """The opening tags that match."""
    return re.findall(f"<{opening}[^>]*>", dom)


def test_the_page_is_drawn(seen: Visit) -> None:
    assert seen.pixels.shape[1] == WIDTH
    colours = np.unique(seen.pixels.reshape(-1, 3), axis=0)
    assert len(colours) > 50
    paper = (seen.pixels == seen.pixels[0, 0]).all(axis=2).mean()
    assert 0.3 < paper < 0.97  # text and bars on paper, neither blank nor covered


def test_nothing_is_reported_on_the_console(seen: Visit) -> None:
    assert seen.console == []


def test_all_sections_are_there_and_in_the_contents(seen: Visit) -> None:
    assert [re.findall(r'id="([\w-]+)"', tag)[0] for tag in elements(seen.dom, "section")] == SECTIONS
    contents = seen.dom[seen.dom.index('<ol id="contents">') : seen.dom.index("</ol>")]
    assert re.findall(r'href="#([\w-]+)"', contents) == SECTIONS


def test_the_compilers_work_is_on_the_page(seen: Visit) -> None:
    text = re.sub(r"<[^>]*>", "", seen.dom)
    for words in ("merge_linears", "residual_rms_norm", "compiled_engine.residual_rms_norm.default", "def forward("):
        assert words in text
    for words in ("q_proj", "extern_kernels.mm(", "def traced(", "SHAPE_ENV", "config.model.num_layers"):
        assert words in text
    assert '<b class="keyword">' in seen.dom
    assert '<span class="added">' in seen.dom


def test_a_link_to_a_piece_opens_it(page: Path, seen: Visit) -> None:
    piece = re.findall(r'<details[^>]* id="(piece-\w+)"', seen.dom)[0]
    (closed,) = elements(seen.dom, f'details[^>]* id="{piece}"')
    (opened,) = elements(Visit(page, piece).dom, f'details[^>]* id="{piece}"')
    assert (" open" in closed, " open" in opened) == (False, True)


def test_the_filter_hides_the_rest(page: Path, seen: Visit) -> None:
    def hidden(dom: str, name: str) -> list[bool]:
        rows = re.findall(r'<details([^>]*)>\s*<summary>\s*<span class="title">' + name, dom)
        return ["hidden" in row for row in rows]

    filtered = Visit(page, "filter=silu_mul").dom
    assert hidden(seen.dom, "merge_linears") == [False] * len(RANGES)
    assert hidden(filtered, "merge_linears") == [True] * len(RANGES)
    assert hidden(filtered, "silu_mul") == [False] * len(RANGES)


def test_keys_reach_the_filter_and_open_a_pass(page: Path) -> None:
    script = """
      document.dispatchEvent(new KeyboardEvent("keydown", {key: "/"}));
      document.body.dataset.focus = document.activeElement.id;
      const summary = document.querySelector("#passes summary");
      summary.focus();
      document.body.dataset.reached = document.activeElement === summary;
      document.querySelector('[data-open="true"]').click();
      document.body.dataset.closed = document.querySelectorAll("details:not([open])").length;
    """
    (body,) = elements(Visit(with_script(page, script)).dom, "body")
    assert 'data-focus="filter"' in body
    assert 'data-reached="true"' in body
    assert 'data-closed="0"' in body


def test_long_code_scrolls_inside_and_the_page_does_not(page: Path) -> None:
    script = """
      for (const item of document.querySelectorAll("details")) item.open = true;
      const overflow = (element) => element.scrollWidth - element.clientWidth;
      document.body.dataset.overflow = overflow(document.documentElement);
      document.body.dataset.inside = [...document.querySelectorAll("pre")].some((pre) => overflow(pre) > 0);
    """
    (body,) = elements(Visit(with_script(page, script)).dom, "body")
    assert 'data-overflow="0"' in body
    assert 'data-inside="true"' in body


def test_a_narrow_window_shows_everything_without_scrolling_sideways(page: Path) -> None:
    """At 500 pixels: with all closed and with all open nothing but code reaches beyond the window."""
    script = """
      const beyond = () => [...document.querySelectorAll("main *")].filter(
        (element) => !element.closest("pre, .conditions") && element.getClientRects().length > 0
          && element.getBoundingClientRect().right > innerWidth + 1
      ).map((element) => element.outerHTML.slice(0, 80).replaceAll('"', "'"));
      const sideways = () => document.documentElement.scrollWidth - document.documentElement.clientWidth;
      const closed = [...beyond(), sideways()];
      for (const item of document.querySelectorAll("details")) item.open = true;
      document.body.dataset.beyond = [...closed, ...beyond(), sideways()].join(" | ");
      const cut = (bar) => bar.scrollWidth > bar.clientWidth;
      document.body.dataset.cut = [...document.querySelectorAll(".bar .name")].filter(cut).length;
      document.body.dataset.figures = [...document.querySelectorAll(".passes .figure:not(:empty)")].filter(
        (figure) => getComputedStyle(figure, "::before").content === "normal"
      ).length;
    """
    (body,) = elements(Visit(with_script(page, script), width=500).dom, "body")
    assert 'data-beyond="0 | 0"' in body
    assert 'data-cut="0"' in body
    assert 'data-figures="0"' in body  # each says what it counts, as the line of headings is gone


def test_nothing_is_said_of_cuda_graphs_on_a_cpu(seen: Visit) -> None:
    text = re.sub(r"<(style|script).*?</\1>|<[^>]*>", "", seen.dom, flags=re.DOTALL)
    assert "CUDA graph" not in text
    assert "graph.mode" not in text


def test_the_start_that_found_the_entry_has_a_bar_called_load(seen: Visit) -> None:
    process, build = re.findall(r"<figure.*?</figure>", seen.dom, flags=re.DOTALL)
    bars = [re.findall(r'<span class="name"[^>]*>([^<]*)<', figure) for figure in (process, build)]
    assert bars[0] == ["before the look-up", "load", "cache key", "load pieces"]
    assert "compile pieces" in bars[1]


def test_it_is_dark_where_the_reader_wants_it(page: Path, seen: Visit) -> None:
    assert seen.pixels.mean() > 180
    assert Visit(page, dark=True).pixels.mean() < 80


def test_a_request_would_be_an_error_on_the_console(page: Path) -> None:
    """That the console is empty means something: the page's own policy reports whatever it would load."""
    script = 'document.body.appendChild(new Image()).src = "http://127.0.0.1:9/picture.png"'
    assert any("Content Security Policy" in line for line in Visit(with_script(page, script)).console)


def test_a_report_without_a_compiler_is_drawn_too(tmp_path: Path) -> None:
    path = tmp_path / "eager.html"
    inspect(*EAGER, "-o", str(path))
    seen = Visit(path)
    assert seen.console == []
    assert [re.findall(r'id="([\w-]+)"', tag)[0] for tag in elements(seen.dom, "section")] == SECTIONS
    assert "nothing was traced or compiled" in seen.dom

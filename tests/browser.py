"""A headless Chromium for tests of pages, which reports all that a page must not do.

Screenshots are kept in the folder that the environment variable TEST_ARTEFACTS names, or else in pytest's own.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

CONTRAST = """
([ids, background]) => {
  const parse = (color) => color.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => [r, g, b]
    .map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color.length < 4 || color[3] === 1) return color;
    }
    throw new Error("no background");
  };
  const probe = document.createElement("span");
  probe.style.color = `var(${background})`;
  document.body.append(probe);
  const fixed = background ? parse(getComputedStyle(probe).color) : null;
  probe.remove();
  return ids.flatMap((selector) => [...document.querySelectorAll(selector)].map((element) => {
    const [one, other] = [luminance(parse(getComputedStyle(element).color)), luminance(fixed ?? behind(element))];
    return [selector, (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05)];
  }));
}
"""


@dataclass(slots=True)
class WatchedPage:
    """A page of one origin."""

    page: Page
    origin: str
    left: list[str] = field(default_factory=list)
    """Requests to other origins. None of them is let through."""
    complaints: list[str] = field(default_factory=list)
    """Errors and warnings of the console, which names what a content policy forbids."""

    def run(self, **values: object) -> None:
        """Fills fields, runs, and waits for the end."""
        self.start(**values)
        self.wait()

    def start(self, **values: object) -> None:
        """Fills fields and runs."""
        for name, value in values.items():
            if isinstance(value, bool):
                self.page.set_checked(f"#{name}", value)
            elif name == "rejection_sample_method":
                self.page.select_option(f"#{name}", str(value))
            else:
                self.page.fill(f"#{name}", str(value))
        self.page.click("#run")

    def wait(self, state: str = "done") -> None:
        """Waits for a run to end."""
        ended = "body[data-state=done], body[data-state=failed], body[data-state=stopped]"
        self.page.wait_for_selector(ended, timeout=120_000)
        assert self.page.get_attribute("body", "data-state") == state, self.page.inner_text("#error")

    def text_of(self, selector: str) -> str:
        """Returns a text as it stands in the page."""
        return self.page.locator(selector).text_content() or ""

    def tokens(self, pane: str = "speculative") -> list[dict[str, Any]]:
        """Returns text and source of each token of a pane."""
        script = """(root) => [...root.querySelectorAll(".token")].map((token) => (
            {text: token.textContent, source: token.classList[1]}))"""
        tokens: list[dict[str, Any]] = self.page.locator(f"#{pane}").evaluate(script)
        return tokens

    def contrasts(self, selectors: list[str], background: str = "") -> dict[str, float]:
        """Returns the least contrast of elements to what is behind them, or to the colour of a CSS variable."""
        least: dict[str, float] = {}
        for selector, contrast in self.page.evaluate(CONTRAST, [selectors, background]):
            least[selector] = min(contrast, least.get(selector, 21.0))
        assert set(least) == set(selectors), "all of them are there"
        return least

    def overflows(self) -> bool:
        """Whether the page has to be scrolled sideways."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth > innerWidth"))

    def check_clean(self) -> None:
        """Makes sure that nothing left the origin and nothing was complained about."""
        assert self.left == []
        assert self.complaints == []


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser; where there is none, the test is skipped."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no chromium on PATH")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def watched_page(browser: Browser, origin: str, **options: Any) -> Iterator[WatchedPage]:
    """An empty page of a browser, with `options` of its context."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **options})
    watched = WatchedPage(context.new_page(), origin)
    page = watched.page

    def block(route: Any) -> None:
        watched.left.append(route.request.url)
        route.abort()

    page.route(lambda url: not url.startswith((f"{origin}/", "data:", "blob:")), block)
    page.on(
        "console",
        lambda message: (
            watched.complaints.append(message.text)
            # The browser itself reports every status above 399, which some tests want.
            if message.type in ("error", "warning") and "the server responded with a status" not in message.text
            else None
        ),
    )
    page.on("pageerror", lambda error: watched.complaints.append(str(error)))
    yield watched
    context.close()


def keep_screenshot(watched: WatchedPage, name: str, folder: Path) -> None:
    """Writes a picture of what is seen."""
    kept = Path(os.environ.get("TEST_ARTEFACTS", folder))
    kept.mkdir(parents=True, exist_ok=True)
    watched.page.screenshot(path=kept / f"{name}.png")

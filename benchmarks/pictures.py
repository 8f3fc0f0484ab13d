"""Creates the pictures of the documentation from a real run with the chat model.

    python -m benchmarks.pictures

writes `docs/pictures/playground-light.png` and `-dark.png`, those of a narrow page, `playground-narrow-light.png` and
`-dark.png`, and `docs/pictures/generate.svg`. Needs chromium on PATH, and the model: `draftwire fetch smollm2`.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Literal

from playwright.sync_api import ViewportSize, sync_playwright
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from draftwire.cli.local_stack import LocalStack
from draftwire.cli.named_models import CHAT_MODEL
from draftwire.cli.stack_options import stack_options
from draftwire.cli.up_command import CHAT_PAGE
from draftwire.client import Client

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
QUESTION = "Write a Python function that returns the largest number of a list, and explain it line by line."
SIZES: dict[str, ViewportSize] = {
    "playground": {"width": 1280, "height": 860},
    "playground-narrow": {"width": 375, "height": 812},
}
COLUMNS = 100
Scheme = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")


def main() -> None:
    """Creates all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder to write to")
    folder: Path = parser.parse_args().output
    chromium = shutil.which("chromium")
    if chromium is None:
        parser.error("there is no chromium on PATH")
    folder.mkdir(parents=True, exist_ok=True)
    options = stack_options(CHAT_MODEL, None, None)
    options["gateway"]["http_port"] = 0
    with LocalStack(options) as stack:
        with Client(stack.address) as client:
            client.generate("Hello", max_tokens=8)  # the first request pays for lazy initialisation
        for (name, size), scheme in product(SIZES.items(), SCHEMES):
            draw_playground(chromium, stack.http_address, size, scheme, folder / f"{name}-{scheme}.png")
    draw_demo(folder / "generate.svg")
    for path in sorted(folder.iterdir()):
        print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


def draw_playground(chromium: str, address: str, size: ViewportSize, scheme: Scheme, path: Path) -> None:
    """Runs the playground and takes a screenshot while hovering over a token."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        context = browser.new_context(
            viewport=size,
            color_scheme=scheme,
            reduced_motion="reduce",
        )
        page = context.new_page()
        page.goto(f"{address}/{CHAT_PAGE}")
        for name, value in {"prompt": QUESTION, "temperature": "0"}.items():
            page.fill(f"#{name}", value)
        page.click("#run")
        page.wait_for_selector("body[data-state=done]", timeout=120_000)
        page.locator(".text").evaluate_all("(texts) => texts.forEach((text) => { text.scrollTop = 0; })")
        page.hover("#speculative .accepted >> nth=1")
        page.evaluate("scrollTo(0, 0)")
        page.wait_for_timeout(300)
        page.screenshot(path=path)
        browser.close()


def draw_demo(path: Path) -> None:
    """Renders the output of `draftwire demo` in its terminal colours."""
    command = [sys.executable, "-m", "draftwire.cli", "demo", "--color", "always"]
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "FORCE_COLOR": "1"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True, env=environment, timeout=120
    )
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(Text("$ draftwire demo"))
    console.print(Text.from_ansi(done.stdout))
    without_fonts = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)  # of other servers
    path.write_text(console.export_svg(title="draftwire demo", code_format=without_fonts, theme=MONOKAI))


if __name__ == "__main__":
    main()

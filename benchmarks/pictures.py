"""Creates the pictures of the documentation from a real run with the embedded pair.

    python -m benchmarks.pictures

writes `docs/pictures/playground-light.png` and `-dark.png`, those of a narrow page, `playground-narrow-light.png` and
`-dark.png`, and `docs/pictures/generate.svg`. Needs chromium on PATH.
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
from draftwire.cli.named_models import EMBEDDED
from draftwire.cli.stack_options import stack_options
from draftwire.client import Client

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
PROMPT = "def merge_sorted(a, b):"
SEED = 7
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
    options = stack_options(EMBEDDED, None, 4)
    options["gateway"]["http_port"] = 0
    with LocalStack(options) as stack:
        with Client(stack.address) as client:
            client.generate(PROMPT, max_tokens=8)  # the first request pays for lazy initialisation
        draw_generate(stack.address, folder / "generate.svg")
        for (name, size), scheme in product(SIZES.items(), SCHEMES):
            draw_playground(chromium, stack.http_address, size, scheme, folder / f"{name}-{scheme}.png")
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
        page.goto(address)
        for name, value in {"prompt": PROMPT, "temperature": "0", "seed": str(SEED)}.items():
            page.fill(f"#{name}", value)
        page.click("#run")
        page.wait_for_selector("body[data-state=done]", timeout=120_000)
        page.locator(".text").evaluate_all("(texts) => texts.forEach((text) => { text.scrollTop = 0; })")
        page.hover("#speculative .recovered >> nth=1")
        page.wait_for_timeout(300)
        page.screenshot(path=path)
        browser.close()


def draw_generate(address: str, path: Path) -> None:
    """Renders the output of `draftwire generate` in its terminal colours."""
    typed = f'draftwire generate "{PROMPT}" --temperature 0.7 --seed {SEED}'
    arguments = ["generate", PROMPT, "--temperature", "0.7", "--seed", str(SEED)]
    command = [sys.executable, "-m", "draftwire.cli", *arguments, "--color", "always", "--address", address]
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "FORCE_COLOR": "1"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True, env=environment, timeout=120
    )
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(Text(f"$ {typed}"))
    console.print(Text.from_ansi(done.stdout))
    without_fonts = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)  # of other servers
    path.write_text(console.export_svg(title="draftwire generate", code_format=without_fonts, theme=MONOKAI))


if __name__ == "__main__":
    main()

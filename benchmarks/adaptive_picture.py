"""Draws the results of `benchmarks.adaptive`, and prints them as a table in Markdown.

python -m benchmarks.adaptive_picture --results benchmarks/results/adaptive.json --output docs/pictures/adaptive.svg
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

LEFT, WIDTH, ROW, TOP = 470, 940, 22, 56
FIRST, LAST = 0.7, 1.3
"""Ratios at the ends of the axis. What is beyond is drawn at its end."""
MARKS = (0.7, 0.8, 0.9, 0.95, 1.0, 1.1, 1.2, 1.3)
CHOSEN, ITSELF, GRID, TEXT = "#1f6feb", "#8b949e", "#d0d7de", "#1f2328"


def main() -> None:
    """Draws and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/adaptive.json"))
    parser.add_argument("--output", type=Path, default=Path("docs/pictures/adaptive.svg"))
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text())["results"]
    arguments.output.write_text("\n".join(picture(results)) + "\n")
    print("\n".join(table(results)))


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    """Yields the lines of a table."""
    yield "| pair, sessions | best | best / plain | chosen / best | A/A | chosen / plain |"
    yield "|---|---|---|---|---|---|"
    for cell in results:
        ratios = (_written(cell[name]) for name in ("ratio", "a_over_a", "over_plain"))
        yield f"| {cell['name']} | {cell['best']} | {cell['gain']:.2f} | {' | '.join(ratios)} |"


def picture(results: list[dict[str, Any]]) -> Iterator[str]:
    """Yields the lines of an SVG: a row for each cell, with the interval of its ratio above that of A/A."""
    height = TOP + ROW * len(results) + 16
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12" fill="{TEXT}">'
    )
    yield f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    yield f'<text x="{LEFT}" y="16" fill="{CHOSEN}">chosen lengths / best fixed length</text>'
    yield f'<text x="{LEFT + 220}" y="16" fill="{ITSELF}">best fixed length / itself</text>'
    for mark in MARKS:
        x = _x(mark)
        yield f'<line x1="{x:.1f}" y1="{TOP - 14}" x2="{x:.1f}" y2="{height - 12}" stroke="{GRID}"/>'
        yield f'<text x="{x:.1f}" y="{TOP - 20}" text-anchor="middle">{mark:g}</text>'
    for index, cell in enumerate(results):
        y = TOP + ROW * index
        yield f'<text x="{LEFT - 12}" y="{y + 4}" text-anchor="end">{escape(cell["name"])}</text>'
        yield from _interval(cell["ratio"], y - 3, CHOSEN)
        yield from _interval(cell["a_over_a"], y + 4, ITSELF)
    yield "</svg>"


def _interval(ratio: dict[str, float], y: float, colour: str) -> Iterator[str]:
    low, high = _x(ratio["low"]), _x(ratio["high"])
    yield f'<line x1="{low:.1f}" y1="{y}" x2="{high:.1f}" y2="{y}" stroke="{colour}" stroke-width="2"/>'
    yield f'<circle cx="{_x(ratio["median"]):.1f}" cy="{y}" r="3.5" fill="{colour}"/>'


def _x(ratio: float) -> float:
    share = (min(LAST, max(FIRST, ratio)) - FIRST) / (LAST - FIRST)
    return LEFT + share * (WIDTH - LEFT - 24)


def _written(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.3f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"


if __name__ == "__main__":
    main()

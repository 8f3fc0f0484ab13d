"""Static files of the playground."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "playground"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class Page:
    """Content and type of a static file."""

    content: bytes
    content_type: str


def read_pages(folder: Path = FOLDER) -> Mapping[str, Page]:
    """Returns the files of a folder by URL path; index.html is `/`."""
    files = [path for path in sorted(folder.glob("*")) if path.suffix in TYPES]
    return {
        "/" if path.name == "index.html" else f"/{path.name}": Page(path.read_bytes(), TYPES[path.suffix])
        for path in files
    }

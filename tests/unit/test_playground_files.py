"""The playground's files fit each other and the policy that they are served under; no browser is needed."""

import re
from pathlib import Path

import pytest

from draftwire_gateway.http.playground_pages import FOLDER, HEADERS

SCRIPTS = sorted(FOLDER.glob("*.js"))
PAGE = (FOLDER / "index.html").read_text()


def test_folder_is_the_playground() -> None:
    assert FOLDER.name == "playground"
    assert SCRIPTS


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_ask_for_elements_that_the_page_has(script: Path) -> None:
    wanted = re.findall(r'\belement\("([^"]+)"\)', script.read_text())
    assert [name for name in wanted if f'id="{name}"' not in PAGE] == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_import_what_other_scripts_export(script: Path) -> None:
    for names, file in re.findall(r'^import \{([^}]*)\} from "\./([^"]+)";', script.read_text(), re.MULTILINE):
        assert (FOLDER / file).exists()
        other = (FOLDER / file).read_text()
        for name in filter(None, (part.split(" as ")[0].strip() for part in names.split(","))):
            assert re.search(rf"^export (?:async )?(?:function\*?|const|let|class) {name}\b", other, re.MULTILINE), name


def test_page_keeps_to_its_own_policy() -> None:
    assert "default-src 'self'" in HEADERS["content-security-policy"]
    assert re.findall(r"<script(?![^>]*\bsrc=)[^>]*>|<style|\sstyle=|\son\w+=", PAGE) == []
    sources = re.findall(r'<(?:script|img|link)\b[^>]*\b(?:src|href)="([^"]+)"', PAGE)
    assert sources
    assert [name for name in sources if "//" in name or not (FOLDER / name.lstrip("./")).exists()] == []

"""The Python examples of the documentation, run against the embedded pair; those with certificates, a gateway that has
some.
"""

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import trustme
from certificates import NAME, write_identity
from chat_templates import QWEN
from transformers import AutoTokenizer

import draftwire
from draftwire.cli.named_models import EMBEDDED
from draftwire.cli.stack_options import stack_options
from draftwire.client import AsyncClient, Client
from draftwire.client.client_channels import DEFAULT_ADDRESS, addresses_of
from draftwire_gateway.auth.tokens import TokenEntry, digest_of
from tests.in_process import InProcessStack

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
NO_EXAMPLES = {("docs/exactness.md", 0)}
"""A rule to be imported from elsewhere."""

PRINTED = {
    ("README.md", 0): r".+",
    ("docs/chat.md", 0): r".+",
    ("docs/choices.md", 0): r"0 .+1 .+2 .+3 .+",
    ("docs/client.md", 0): r".+",
    ("docs/client.md", 1): r"('.*' (accepted|recovered|bonus|plain)\n|\".*\" \w+\n)+(length|stop)",
    ("docs/client.md", 2): r".+\[(['\"]).+\1, (['\"]).+\2\]",
    ("docs/client.md", 3): r"(\d{10,20} ['\"].*['\"]\n?){4}",
    ("docs/client.md", 4): r".+InvalidRequestError: the prompt is empty",
    ("docs/client.md", 5): r".+",
    ("docs/client.md", 6): r"0",
    ("docs/client.md", 7): r"[a-z]{5,}",
    ("docs/client.md", 8): r"not like this: temperature must be .+",
    (
        "docs/client.md",
        9,
    ): r"\d+ tokens/s, block efficiency \d\.\d\d\n\d+ of \d+ draft tokens accepted\n\[.+\] \d+ us .+",
    ("docs/clients.md", 0): r".+",
    ("docs/failures.md", 0): r"0",
    ("docs/http.md", 0): r".+ \d\.\d+\n.+",
    ("docs/logprobs.md", 0): r"(\d+ -?\d\S* \[\(\d+, -?\d\S*\), \(\d+, -?\d\S*\)\]\n?){16}",
    ("docs/logprobs.md", 1): r"('.*' +\w+ +target [01]\.\d{3} drafter ([01]\.\d{3}|nan)\n?|\".+\n?){1,16}",
    ("docs/tools.md", 0): r'(weather \{\s*"city"\s*:\s*"(Bonn|Rome)"\s*,\s*"days"\s*:\s*[1-9]\s*\}\n?)+',
    ("docs/structured-output.md", 0): r"\{'name': '(Rex|Tom)', 'legs': -?\d+\}",
    ("docs/trees.md", 0): r"\[[\d, ]*\] \d",
}
"""What each prints, all of it."""


@dataclass(frozen=True)
class Example:
    page: str
    number: int
    """Among those of the page."""
    line: int
    code: str


def examples() -> list[Example]:
    return [
        Example(page, number, text[: block.start(1)].count("\n"), block[1])
        for page, text in ((page, (ROOT / page).read_text()) for page in PAGES)
        for number, block in enumerate(re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
        if (page, number) not in NO_EXAMPLES
    ]


EXAMPLES = examples()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessStack]:
    """The embedded pair, whose target has a chat template."""
    target = tmp_path_factory.mktemp("models") / "target"
    shutil.copytree(ROOT / "models" / "target", target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = QWEN
    tokenizer.save_pretrained(target)
    with InProcessStack(stack_options(str(target), EMBEDDED, 4)) as running:
        yield running


@pytest.fixture(scope="module")
def secure_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[InProcessStack, Path]]:
    """A stack of its own with certificates, and the file of their issuer."""
    folder, ca = tmp_path_factory.mktemp("secure"), trustme.CA()
    (folder / "tokens.toml").write_text(TokenEntry("reader", digest_of("secret")).to_toml())
    files: dict[str, dict[str, Any]] = {
        service: write_identity(folder / service, ca) for service in ("verifier", "drafter", "gateway")
    }
    named = {"tls_target_name": NAME}
    options = {
        "verifier": {"model": "scripted:acceptance=1", **files["verifier"]},
        "drafter": {"model": "scripted:acceptance=1", **files["drafter"], **named},
        "gateway": {"tokens_file": folder / "tokens.toml", **files["gateway"], **named},
    }
    with InProcessStack(options) as running:
        yield running, files["gateway"]["tls_ca"]


REPEATABLE: dict[str, Any] = {"seed": 3, "rejection_sample_method": "coupled"}
"""Of examples that do not say how they draw: the text is the same each time."""


def dial(monkeypatch: pytest.MonkeyPatch, address: str, said: dict[str, Any], **security: Any) -> None:
    """Makes clients reach one gateway, by whatever names they ask for it, and say something with each request."""

    def here(kind: type) -> type:
        class Here(kind):  # type: ignore[misc]
            def __init__(self, named: Any = DEFAULT_ADDRESS, **own: Any) -> None:
                super().__init__([address] * len(addresses_of(named)), **own, **security)

            def stream(self, prompt: Any, **own: Any) -> Any:
                return super().stream(prompt, **(said | own))

        return Here

    for kind in (Client, AsyncClient):
        for module in (draftwire, draftwire.client):
            monkeypatch.setattr(module, kind.__name__, here(kind))


def dial_over_http(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Makes the client of OpenAI's package reach one gateway."""

    class Here(openai.OpenAI):
        def __init__(self, *, base_url: str, **own: Any) -> None:
            assert base_url == "http://127.0.0.1:8000/v1"
            super().__init__(base_url=f"{address}/v1", **own)

    monkeypatch.setattr(openai, "OpenAI", Here)


def test_every_example_is_checked() -> None:
    assert {(example.page, example.number) for example in EXAMPLES} == set(PRINTED)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"{example.page}-{example.number}")
def test_example_runs_and_prints_what_it_should(
    example: Example,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    namespace: dict[str, Any] = {"__name__": "example"}
    if "tls_ca" in example.code:
        secure, ca = request.getfixturevalue("secure_stack")
        monkeypatch.setenv("DRAFTWIRE_TOKEN", "secret")
        monkeypatch.chdir(tmp_path)
        shutil.copy(ca, "ca.pem")
        dial(monkeypatch, secure.address, REPEATABLE, tls_target_name=NAME)
    else:
        running: InProcessStack = request.getfixturevalue("stack")
        # What a drafter gave tokens is shown under other rules alone.
        dial(monkeypatch, running.address, {} if "token_details" in example.code else REPEATABLE)
        dial_over_http(monkeypatch, running.http_address)
        if "client = " not in example.code and "as client" not in example.code:  # it goes on from one with a client
            namespace["client"] = Client(running.address)
    # With its own file and lines in tracebacks.
    exec(compile("\n" * example.line + example.code, example.page, "exec"), namespace)
    printed = capsys.readouterr().out.strip()
    print(printed)
    assert re.fullmatch(PRINTED[example.page, example.number], printed, re.DOTALL), printed

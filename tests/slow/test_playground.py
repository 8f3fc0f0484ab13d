"""The playground at `/` of a real gateway, in a headless browser, with the embedded pair."""

import json
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import WatchedPage, chromium, keep_screenshot, watched_page
from observing import wait_until
from playwright.sync_api import expect

from benchmarks.report import read_metric
from draftwire.cli.named_models import EMBEDDED
from draftwire.cli.stack_options import stack_options
from tests.in_process import InProcessStack

PROMPT = "def merge_sorted(a, b):"
NUM_TOKENS = 60
FIELDS: dict[str, Any] = {"prompt": PROMPT, "temperature": 0.7, "max_tokens": NUM_TOKENS, "seed": 11}
SOURCES = ("accepted", "recovered", "bonus", "plain")
LEAST_CONTRAST = 4.5


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def stack(browser: Any) -> Iterator[InProcessStack]:
    """After the browser, so that nothing is started where there is none."""
    options = stack_options(EMBEDDED, None, 4)
    options["gateway"]["http_port"] = 0
    with InProcessStack(options) as running:
        yield running


@pytest.fixture
def watched(browser: Any, stack: InProcessStack) -> Iterator[WatchedPage]:
    with watched_page(browser, stack.http_address) as page:
        page.page.goto(stack.http_address)
        expect(page.page.locator("body[data-models]")).to_be_attached()
        yield page
        page.check_clean()


def complete(stack: InProcessStack, **values: object) -> dict[str, Any]:
    """Returns what the API answers when nothing is streamed."""
    body = json.dumps({"model": "target", "token_details": True, **values}).encode()
    request = urllib.request.Request(
        f"{stack.http_address}/v1/completions", body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def open_sessions(stack: InProcessStack) -> float:
    ports = [stack.services[name].metrics_port for name in ("verifier", "drafter")]
    return sum(read_metric(port, "num_sessions") for port in ports)


def test_page_shows_the_tokens_and_the_numbers_of_the_completion(watched: WatchedPage, stack: InProcessStack) -> None:
    """Under `coupled` the text for a seed is the same in every run, however its blocks were timed."""
    answers: list[str] = []

    def listen(route: Any) -> None:
        response = route.fetch()
        answers.append(response.text())
        route.fulfill(response=response)

    watched.page.route("**/v1/completions", listen)
    watched.run(**FIELDS, rejection_sample_method="coupled", compare=False)
    events = [line[6:] for line in answers[0].splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    metrics = chunks[-1]["metrics"]["speculative_decoding"]
    sent = [token for chunk in chunks for choice in chunk["choices"] for token in choice["draftwire"]["tokens"]]
    tokens = watched.tokens()
    assert tokens == [{"text": token["text"], "source": token["source"]} for token in sent]
    assert len(tokens) == NUM_TOKENS

    text = "".join(token["text"] for token in tokens)
    assert watched.text_of("#speculative") == PROMPT + text
    values = {**FIELDS, "rejection_sample_method": "coupled", "num_speculative_tokens": 4}
    assert complete(stack, **values)["choices"][0]["text"] == text

    counts = Counter(token["source"] for token in tokens)
    expected = {f"[data-count={source}]": str(counts[source]) for source in SOURCES} | {
        "#rounds": str(metrics["num_rounds"]),
        "#tokens": str(NUM_TOKENS),
        "#block_efficiency": f"{metrics['block_efficiency']:.2f}",
        "#acceptance_rate": f"{metrics['draft_acceptance_rate']:.3f}",
    }
    assert {selector: watched.text_of(selector) for selector in expected} == expected
    hidden = metrics["num_accepted_draft_tokens"] - counts["accepted"]
    assert 0 <= hidden <= 4, "what the last block accepted beyond the end"
    bars = "(list) => [...list.children].map((bar) => Number(bar.dataset.accepted))"
    assert watched.page.locator("#chart").evaluate(bars) == metrics["num_accepted_tokens_per_pos"]
    assert sum(metrics["num_accepted_tokens_per_pos"]) == metrics["num_accepted_draft_tokens"] > 0


def test_hovering_and_arrow_keys_show_what_is_known_of_a_token(watched: WatchedPage) -> None:
    watched.run(**FIELDS, rejection_sample_method="token", compare=False)
    page = watched.page
    accepted = page.locator("#speculative .accepted").filter(has_text="e").first
    accepted.hover()
    expect(page.locator("#token_source")).to_have_text("accepted")
    assert json.loads(watched.text_of("#token_text")) == accepted.text_content()
    for whose in ("draft", "target"):
        assert 0.0 < float(watched.text_of(f"#{whose}_probability").removeprefix("< ")) <= 1.0
    assert int(watched.text_of("#token_id")) >= 0
    page.locator("#prompt").hover()
    expect(page.locator("#token_source")).to_have_text("")

    page.locator("#speculative .token").first.focus()
    expect(page.locator("#token_place")).to_have_text("round 1")
    for key, number in (("ArrowRight", 2), ("ArrowDown", 3), ("ArrowUp", 2)):
        page.keyboard.press(key)
        assert watched.text_of("#token_place").split(",")[0] == f"round {number}"
    last = int(watched.text_of("#tokens")) - 1
    for key, index in (("End", last), ("ArrowLeft", last - 1), ("Home", 0)):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.dataset.index") == str(index)
    assert page.locator("#speculative [tabindex='0']").count() == 1, "one stop of the tab key"


@pytest.mark.parametrize("values", [{"temperature": 0}, {"rejection_sample_method": "coupled"}])
def test_plain_run_beside_has_the_same_text_where_it_must(watched: WatchedPage, values: dict[str, Any]) -> None:
    watched.run(**{**FIELDS, **values})
    assert {token["source"] for token in watched.tokens("plain")} == {"plain"}
    assert watched.text_of("#plain") == watched.text_of("#speculative")
    assert watched.text_of("#equality") == "The texts are equal, character by character."
    speeds = [float(watched.text_of(f"#{run}_speed").split()[0]) for run in ("speculative", "plain")]
    assert float(watched.text_of("#ratio")[:-1]) == pytest.approx(speeds[0] / speeds[1], rel=0.02)


def test_stop_ends_the_completion_at_the_services_too(watched: WatchedPage, stack: InProcessStack) -> None:
    watched.start(**{**FIELDS, "max_tokens": 1900, "rejection_sample_method": "coupled"})  # always as long
    watched.page.locator("#speculative .token").nth(5).wait_for()
    assert open_sessions(stack) > 0
    watched.page.keyboard.press("Escape")
    watched.wait("stopped")
    shown = len(watched.tokens())
    assert 5 < shown < 1900
    assert watched.text_of("#status") == f"Stopped after {shown} tokens."
    assert watched.tokens("plain") == []
    wait_until(lambda: open_sessions(stack) == 0, "no session is left")


def test_conversation_is_answered_and_stops_where_it_is_told(watched: WatchedPage) -> None:
    watched.run(**{**FIELDS, "prompt": "What does `basename` do?", "temperature": 0, "compare": False}, chat=True)
    answer = watched.text_of("#speculative").removeprefix("What does `basename` do?\n\n")
    assert len(answer) > 10
    assert "".join(token["text"] for token in watched.tokens()) == answer
    watched.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    watched.page.click("#copy_answer")
    expect(watched.page.locator("#status")).to_have_text("Copied.")
    assert watched.page.evaluate("navigator.clipboard.readText()") == answer
    word = answer.split()[2]
    watched.page.click("#new_conversation")
    watched.run(prompt="What does `basename` do?", stop_text=word)
    assert watched.text_of("#speculative").removeprefix("What does `basename` do?\n\n") == answer.partition(word)[0]


def test_request_is_copied_as_a_program_that_runs(watched: WatchedPage, stack: InProcessStack, tmp_path: Path) -> None:
    watched.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    prompt = 'it\'s = "a"\n'
    fields = {**FIELDS, "prompt": prompt, "num_speculative_tokens": 3, "rejection_sample_method": "coupled"}
    watched.run(**fields, stop_text="\\n\\n", compare=False)
    shown = watched.text_of("#speculative").removeprefix(prompt)
    for button, command in (("#copy_curl", ["sh", "copied"]), ("#copy_python", [sys.executable, "copied"])):
        watched.page.click(button)
        expect(watched.page.locator("#status")).to_have_text("Copied.")
        (tmp_path / "copied").write_text(watched.page.evaluate("navigator.clipboard.readText()"))
        printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True).stdout
        text = json.loads(printed)["choices"][0]["text"] if "curl" in button else printed.removesuffix("\n")
        assert text == shown


def test_rounds_are_shown_as_they_were_drafted(watched: WatchedPage, stack: InProcessStack) -> None:
    expect(watched.page.locator("#hint")).to_be_visible()
    watched.run(**FIELDS, num_speculative_tokens=3, compare=False)
    bars = "(strip) => [...strip.children].map((bar) => [Number(bar.dataset.drafted), Number(bar.dataset.accepted)])"
    rounds = watched.page.locator("#strip").evaluate(bars)
    counts = Counter(str(drafted) for drafted, _ in rounds)
    assert watched.text_of("#lengths") == ", ".join(f"{length}: {counts[length]}" for length in sorted(counts))
    assert sum(accepted for _, accepted in rounds) == int(watched.text_of("[data-count=accepted]"))
    watched.page.locator("#speculative .token").first.hover()
    expect(watched.page.locator("#hint")).to_be_hidden()


def test_no_button_wraps_its_words(watched: WatchedPage) -> None:
    lines = """(buttons) => buttons.map((one) => {
        const style = getComputedStyle(one);
        return (one.clientHeight - parseFloat(style.paddingTop) * 2) / parseFloat(style.lineHeight);
    })"""
    assert max(watched.page.locator("button").evaluate_all(lines)) < 1.5
    assert not watched.overflows()


def test_gateways_message_is_shown(watched: WatchedPage) -> None:
    watched.start(**{**FIELDS, "max_tokens": 99999})
    watched.wait("failed")
    assert "max_tokens must be in" in watched.text_of("#error")


def test_everything_can_be_done_with_the_keyboard(watched: WatchedPage) -> None:
    page = watched.page
    seen = []
    for _ in range(15):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
    fields = ["prompt", "num_speculative_tokens", "rejection_sample_method", "temperature", "max_tokens", "top_p"]
    last = ["seed", "stop_text", "chat", "compare", "run", "copy_curl", "copy_python"]
    assert seen == ["skip", "theme", *fields, *last]
    for field, value in (("temperature", "0"), ("max_tokens", "24")):  # a sampled text may end before
        page.focus(f"#{field}")
        page.keyboard.press("Control+A")
        page.keyboard.type(value)
    page.keyboard.press("Control+Enter")
    watched.wait()
    assert len(watched.tokens()) == len(watched.tokens("plain")) == 24
    page.focus("#copy_python")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('#speculative') !== null")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "the focus can be seen"


def test_every_field_has_a_label_and_every_region_a_name(watched: WatchedPage) -> None:
    unlabelled = """() => [...document.querySelectorAll("input, select, textarea")]
        .filter((field) => field.labels.length === 0 || !field.labels[0].textContent.trim()).map((field) => field.id)"""
    assert watched.page.evaluate(unlabelled) == []
    unnamed = """() => [...document.querySelectorAll("section, nav, form, [role=group]")]
        .filter((region) => !region.ariaLabel && !document.getElementById(region.getAttribute("aria-labelledby")))
        .map((region) => region.id)"""
    assert watched.page.evaluate(unnamed) == []
    assert watched.page.get_attribute("html", "lang") == "en"
    assert watched.page.locator("h1").count() == 1
    repeated = "() => { const ids = [...document.querySelectorAll('[id]')].map((one) => one.id);"
    assert watched.page.evaluate(repeated + " return ids.length - new Set(ids).size; }") == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 375])
def test_page_can_be_read_in_any_light_and_on_a_phone(
    browser: Any, stack: InProcessStack, tmp_path: Path, scheme: str, width: int
) -> None:
    size = {"width": width, "height": 860}
    with watched_page(browser, stack.http_address, color_scheme=scheme, viewport=size) as watched:
        watched.page.goto(stack.http_address)
        watched.run(**FIELDS, num_speculative_tokens=12)
        keep_screenshot(watched, f"playground-{scheme}-{width}", tmp_path)
        assert not watched.overflows()
        tokens = [f".{source}" for source in ("accepted", "recovered", "plain", "prompt")]
        ordinary = ["label", "dt", "dd", ".note", "#status", "h1 span", "footer a", "#run", ".chart .counts"]
        contrasts = {**watched.contrasts(tokens + ordinary), **watched.contrasts([".bonus"])}
        raised = {f"{name} when hovered": least for name, least in watched.contrasts(tokens, "--raised").items()}
        bad = {name: least for name, least in {**contrasts, **raised}.items() if least < LEAST_CONTRAST}
        assert bad == {}
        watched.check_clean()


def test_theme_that_was_chosen_is_kept(watched: WatchedPage) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light = watched.page.evaluate(background)
    watched.page.select_option("#theme", "dark")
    dark = watched.page.evaluate(background)
    assert dark != light
    watched.page.reload()
    expect(watched.page.locator("#theme")).to_have_value("dark")
    assert watched.page.evaluate(background) == dark


def test_links_of_the_page_are_served(watched: WatchedPage, stack: InProcessStack) -> None:
    links = watched.page.locator("footer a").evaluate_all("(links) => links.map((link) => link.href)")
    assert [link.removeprefix(stack.http_address) for link in links] == ["/v1/models", "/metrics", "/health"]
    for link in links:
        with urllib.request.urlopen(link, timeout=10) as response:
            assert response.status == 200
    assert watched.text_of("#target") == "target"
    assert watched.text_of("#drafter") == "drafter"

"""The playground's page against a scripted gateway: what real ones send seldom."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from browser import WatchedPage, chromium, watched_page
from playwright.sync_api import expect

from draftwire_gateway.http.playground_pages import HEADERS, read_pages

ORIGIN = "http://playground.test"
MODELS = {"data": [{"id": "large", "draftwire": {"drafters": ["small"], "max_speculative_tokens": 16}}]}


class ScriptedGateway:
    """Answers a page with what the test says."""

    def __init__(self, watched: WatchedPage) -> None:
        self.watched = watched
        self.bodies: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.answers: list[Callable[[Any], None]] = []
        """One for each completion; the last one goes on."""
        self.needs_token = ""
        self._pages = read_pages()
        watched.page.route(f"{ORIGIN}/**", self._answer)

    def open(self, end: str = "") -> WatchedPage:
        self.watched.page.goto(f"{ORIGIN}/{end}")
        expect(self.watched.page.locator("body[data-models]")).to_be_attached()
        return self.watched

    def fail(self, message: str, **fields: Any) -> WatchedPage:
        """Opens the page and runs, which has to fail with a message."""
        watched = self.open()
        watched.start(**fields)
        watched.wait("failed")
        assert watched.text_of("#error") == message
        return watched

    def _answer(self, route: Any) -> None:
        path = route.request.url.removeprefix(ORIGIN)
        if path in self._pages:
            page = self._pages[path]
            route.fulfill(body=page.content, headers={**HEADERS, "content-type": page.content_type})
            return
        shown = route.request.headers.get("authorization")
        if self.needs_token and shown != f"Bearer {self.needs_token}":
            refuse(401, "show a bearer token")(route)
        elif path == "/v1/models":
            route.fulfill(json=MODELS)
        else:
            self.tokens.append(shown)
            self.bodies.append(route.request.post_data_json)
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            answer(route)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture
def gateway(browser: Any) -> Iterator[ScriptedGateway]:
    with watched_page(browser, ORIGIN) as watched:
        yield ScriptedGateway(watched)


def token(text: str, source: str = "accepted", **values: object) -> dict[str, Any]:
    return {"id": 7, "text": text, "source": source, "logprob": -0.5, "draft_logprob": None, **values}


def chunk(num_draft_positions: int, *tokens: dict[str, Any], width: int = 1) -> str:
    """Returns a chunk of a round that judged a chain, or a token tree of several at each depth."""
    text = "".join(one["text"] for one in tokens)
    num_draft_tokens = width * num_draft_positions
    draftwire = {"num_draft_tokens": num_draft_tokens, "num_draft_positions": num_draft_positions, "tokens": tokens}
    return data({"choices": [{"index": 0, "text": text, "finish_reason": None, "draftwire": draftwire}]})


def data(value: object) -> str:
    return f"data: {json.dumps(value)}\n\n"


def last(**values: object) -> str:
    metrics = {
        "num_rounds": 1,
        "num_draft_tokens": 4,
        "num_draft_positions": 4,
        "num_accepted_draft_tokens": 2,
        "num_accepted_tokens_per_pos": [1, 1, 0, 0],
        "draft_length_histogram": [0, 0, 0, 0, 1],
        "block_efficiency": 3.0,
        "rejection_sample_method": "block",
        "is_lossy": False,
        "time_to_first_token_ms": 12.0,
        "duration_ms": 500.0,
        **values,
    }
    usage = data({"choices": [], "usage": {"completion_tokens": 1}, "metrics": {"speculative_decoding": metrics}})
    return usage + "data: [DONE]\n\n"


def stream(*parts: str) -> Callable[[Any], None]:
    return lambda route: route.fulfill(body="".join(parts), content_type="text/event-stream")


def refuse(status: int, message: str, **headers: str) -> Callable[[Any], None]:
    body = {"error": {"message": message, "type": "x", "param": None, "code": None}}
    return lambda route: route.fulfill(status=status, json=body, headers=headers)


HOSTILE = ["<script>window.hacked = 1</script>", '<img src="x" onerror="window.hacked = 1">', "</span>&lt;b&gt;\u202e"]


def test_markup_in_a_text_is_text(gateway: ScriptedGateway) -> None:
    gateway.answers = [stream(chunk(4, *map(token, HOSTILE)), last())]
    watched = gateway.open()
    watched.run(compare=False, prompt="<b>prompt</b>")
    assert [one["text"] for one in watched.tokens()] == HOSTILE
    assert watched.text_of("#speculative") == "<b>prompt</b>" + "".join(HOSTILE)
    assert watched.page.evaluate("window.hacked === undefined")
    assert watched.page.locator("#speculative :is(script, img, b)").count() == 0
    watched.check_clean()


def test_markup_in_messages_and_names_is_text(gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS["data"][0], "id", HOSTILE[0])
    gateway.answers = [refuse(400, HOSTILE[1])]
    watched = gateway.fail(HOSTILE[1])
    assert watched.text_of("#target") == HOSTILE[0]
    assert watched.page.evaluate("window.hacked === undefined")
    watched.check_clean()


def test_conversation_is_sent_with_all_its_turns_until_it_begins_anew(gateway: ScriptedGateway) -> None:
    markdown = "# So\n- **one** `x < 1`\n- two\n\n```python\nif a:\n    <b>\n```\nmore"
    gateway.answers = [stream(chunk(4, token(markdown)), last()), stream(chunk(4, token("yes")), last())]
    watched = gateway.open("#chat")
    assert watched.page.is_checked("#chat")
    assert watched.page.input_value("#prompt").startswith("Write a Python function")
    watched.run(compare=False, prompt="why?")
    assert watched.page.is_hidden("#conversation"), "the answer is shown with its tokens"
    watched.run(prompt="<i>really?</i>")
    asked = {"role": "user", "content": "why?"}
    answered = {"role": "assistant", "content": markdown}
    assert [body["messages"] for body in gateway.bodies] == [
        [asked],
        [asked, answered, {"role": "user", "content": "<i>really?</i>"}],
    ]
    assert watched.page.locator("#turns > li").all_text_contents()[0] == "why?"
    shown = watched.page.locator("#turns > .assistant")
    assert shown.locator("> *").evaluate_all("(all) => all.map((one) => [one.tagName, one.textContent])") == [
        ["P", "So"],
        ["UL", "one x < 1two"],
        ["PRE", "if a:\n    <b>"],
        ["P", "more"],
    ]
    assert shown.locator("li > strong").text_content() == "one"
    assert shown.locator("b").count() == 0
    watched.page.click("#new_conversation")
    assert watched.page.is_hidden("#conversation")
    watched.run(prompt="again?")
    assert gateway.bodies[-1]["messages"] == [{"role": "user", "content": "again?"}]
    watched.check_clean()


def test_error_in_the_middle_keeps_the_text_and_says_why(gateway: ScriptedGateway) -> None:
    error = data({"error": {"message": "no verifier is left"}})
    gateway.answers = [stream(chunk(4, token("so "), token("far", "recovered")), error)]
    watched = gateway.fail("no verifier is left")
    assert [one["text"] for one in watched.tokens()] == ["so ", "far"]
    assert watched.text_of("#status") == "Ended after 2 tokens."
    assert len(gateway.bodies) == 1, "nothing is compared with a run that failed"
    assert watched.page.is_enabled("#run")


@pytest.mark.parametrize("end", ["", 'data: {"choices": [{"te'])
def test_cut_stream_is_no_completion(gateway: ScriptedGateway, end: str) -> None:
    gateway.answers = [stream(chunk(4, token("cut")), end)]
    watched = gateway.fail("The connection ended before the completion did.")
    assert watched.text_of("#speculative .round") == "cut"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (refuse(400, "temperature must be in 0..100"), "temperature must be in 0..100"),
        (refuse(429, "no room", **{"retry-after": "3"}), "no room (try again in 3 s)"),
        (lambda route: route.fulfill(status=502, body="<html>bad gateway"), "The gateway answered 502."),
        (lambda route: route.abort(), "The gateway cannot be reached."),
    ],
)
def test_refusal_is_shown_in_the_gateways_words(
    gateway: ScriptedGateway, answer: Callable[[Any], None], message: str
) -> None:
    gateway.answers = [answer, stream(chunk(4, token("again")), last())]
    watched = gateway.fail(message, compare=False)
    assert watched.page.get_attribute("#error", "role") == "alert"
    watched.page.click("#run")
    watched.page.wait_for_selector("body[data-state=done]")
    assert not watched.page.is_visible("#error"), "the next run forgets it"


def test_gateway_that_wants_a_token_gets_it(gateway: ScriptedGateway) -> None:
    gateway.needs_token = "secret"
    gateway.answers = [stream(chunk(4, token("hello")), last())]
    watched = gateway.open()
    page = watched.page
    assert page.evaluate("document.activeElement.id") == "token"
    page.keyboard.type("secret")
    page.keyboard.press("Control+Enter")
    watched.wait()
    assert gateway.tokens == ["Bearer secret"] * 2
    page.click("#prompt")
    expect(page.locator("#target")).to_have_text("large")
    assert page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])") == '[{},{},""]'


def test_events_are_read_however_they_are_written(gateway: ScriptedGateway) -> None:
    events = chunk(4, token("ä€𝄞\r"), token("\n2")) + last()
    odd = ": a comment\r\n\r\n" + "event: x\r\n" + events.replace("\n", "\r\n").replace("data: ", "data:", 1)
    gateway.answers = [stream(odd)]
    watched = gateway.open()
    watched.run(compare=False)
    assert [one["text"] for one in watched.tokens()] == ["ä€𝄞\r", "\n2"]


def test_numbers_count_what_the_chunks_say_and_end_with_the_gateways(gateway: ScriptedGateway) -> None:
    """The second round accepted more than is shown: only the gateway knows. The first one judged a token tree."""
    first = chunk(4, token("a"), token("b", "recovered"), width=8)
    second = chunk(3, token("c"))
    ends = data({"error": {"message": "stopped here"}})
    told = {
        "num_rounds": 2,
        "num_draft_tokens": 35,
        "num_draft_positions": 7,
        "num_accepted_draft_tokens": 4,
        "block_efficiency": 2.5,
    }
    told |= {"num_draft_tokens": 35, "num_accepted_tokens_per_pos": [2, 1, 1, 0]}
    gateway.answers = [stream(first, second, ends), stream(first, second, last(**told))]
    watched = gateway.fail("stopped here", compare=False)
    expect(watched.page.locator("#rounds")).to_have_text("2")
    counts = "[...document.querySelectorAll('#chart .counts')].map((one) => one.textContent)"
    assert watched.page.evaluate(counts) == ["2/2", "0/2", "0/2", "0/1"]
    assert watched.text_of("#acceptance_rate") == "0.286"
    watched.page.click("#run")
    watched.page.wait_for_selector("body[data-state=done]")
    expect(watched.page.locator("#block_efficiency")).to_have_text("2.50")
    assert watched.page.evaluate(counts) == ["2/2", "1/2", "1/2", "0/1"]
    assert watched.text_of("#acceptance_rate") == "0.571"
    assert watched.text_of("#first_token") == "12"
    assert watched.text_of("#tokens_per_second") == "6.0"


@pytest.mark.parametrize(
    ("fields", "plain", "expected"),
    [
        ({"temperature": 0}, "same", "The texts are equal"),
        ({"temperature": 0}, "sale", "The texts part after 2 characters"),
        ({"rejection_sample_method": "coupled"}, "same", "The texts are equal"),
        ({}, "same", "Two draws from the same law"),
    ],
)
def test_plain_run_comes_after_with_the_same_parameters_and_is_compared(
    gateway: ScriptedGateway, fields: dict[str, Any], plain: str, expected: str
) -> None:
    gateway.answers = [
        stream(chunk(4, token("same")), last(duration_ms=100.0)),
        stream(chunk(0, token(plain, "plain")), last(duration_ms=250.0)),
    ]
    watched = gateway.open()
    watched.run(**{"num_speculative_tokens": 4} | fields)
    first, second = gateway.bodies
    assert (first["num_speculative_tokens"], second["num_speculative_tokens"]) == (4, 0)
    assert first["cache_salt"] != second["cache_salt"], "both read the prompt themselves"
    differ = ("num_speculative_tokens", "cache_salt")
    assert {key: first[key] for key in first if key not in differ} == {
        key: second[key] for key in second if key not in differ
    }
    assert ("seed" in first) is (fields.get("rejection_sample_method") == "coupled"), "the gateway draws the others"
    assert first["model"] == "large"
    assert watched.text_of("#ratio")[:-1] == "2.50"
    assert watched.text_of("#equality").startswith(expected)


def test_blocks_that_were_drafted_ahead_are_shown_where_there_may_be_some(gateway: ScriptedGateway) -> None:
    counts = {"num_ahead_hits": 7, "num_ahead_late": 2, "num_ahead_misses": 3}
    told = {**counts, "num_ahead_wasted_tokens": 130, "max_held_bytes": 2345}
    gateway.answers = [stream(chunk(4, token("x")), last(**told)), stream(chunk(4, token("x")), last())]
    watched = gateway.open()
    watched.run(compare=False)
    assert watched.text_of("#ahead") == "7 of 12, 2 late"
    assert watched.text_of("#ahead_wasted") == "130, 2.3 kB"
    watched.run(compare=False)
    expect(watched.page.locator("#ahead_figure")).to_be_hidden()
    expect(watched.page.locator("#ahead_wasted_figure")).to_be_hidden()


def test_lengths_are_the_gateways_to_choose_without_a_number_and_shown(gateway: ScriptedGateway) -> None:
    gateway.answers = [
        stream(chunk(4, token("x")), chunk(0, token("y", "plain")), last(draft_length_histogram=[7, 0, 0, 0, 12]))
    ]
    watched = gateway.open()
    watched.run(compare=False)
    (body,) = gateway.bodies
    assert "num_speculative_tokens" not in body
    assert "seed" not in body
    assert watched.text_of("#lengths") == "0: 7, 4: 12"
    gateway.answers.append(stream(chunk(4, token("x")), last()))
    watched.run(compare=False, seed=5)
    assert gateway.bodies[1]["seed"] == 5
    assert "has_random_seed" not in gateway.bodies[1], "it has no effect"


@pytest.mark.parametrize("fields", [{"compare": False}, {"num_speculative_tokens": 0}])
def test_nothing_is_compared_where_nothing_can_or_shall_be(gateway: ScriptedGateway, fields: dict[str, Any]) -> None:
    gateway.answers = [stream(chunk(0, token("x", "plain")), last())]
    watched = gateway.open()
    watched.run(**fields)
    assert len(gateway.bodies) == 1
    assert not watched.page.is_visible("#comparison")


def test_values_that_cannot_be_meant_are_not_sent(gateway: ScriptedGateway) -> None:
    gateway.answers = [stream(chunk(4, token("x")), last())]
    watched = gateway.open()
    for name, value in {"num_speculative_tokens": "17", "temperature": "-1", "seed": "0.5", "prompt": ""}.items():
        usual = watched.page.input_value(f"#{name}")
        watched.start(**{name: value})
        assert watched.page.evaluate(f"document.getElementById('{name}').matches(':invalid')"), name
        watched.page.fill(f"#{name}", usual)
    assert gateway.bodies == []


def test_thousands_of_tokens_do_not_freeze_the_page(gateway: ScriptedGateway) -> None:
    rounds = [chunk(4, *(token(f"word{index} ") for _ in range(4)), token("end\n", "bonus")) for index in range(1000)]
    gateway.answers = [stream(*rounds, last())]
    watched = gateway.open()
    watched.page.evaluate("""() => {
      window.longest = 0;
      let before = performance.now();
      setInterval(() => {
        const now = performance.now();
        window.longest = Math.max(window.longest, now - before);
        before = now;
      }, 5);
      window.most = 0;
      new MutationObserver((records) => {
        const added = records.reduce((sum, record) => sum + record.addedNodes.length, 0);
        window.most = Math.max(window.most, added);
      }).observe(document.getElementById("speculative"), {childList: true, subtree: true});
    }""")
    watched.run(compare=False)
    assert len(watched.tokens()) == 5000
    root = "document.getElementById('speculative')"
    assert watched.page.evaluate(f"{root}.scrollHeight - {root}.scrollTop - {root}.clientHeight") < 10
    assert 0 < watched.page.evaluate("window.most") <= 200, "rounds at once"
    longest_ms = watched.page.evaluate("window.longest")
    print(f"5,000 tokens at once: nothing else ran for {longest_ms:.0f} ms at most")
    assert longest_ms < 1500, "on a machine that does other things too"

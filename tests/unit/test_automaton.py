"""The masks of a form say exactly which tokens can go on, whatever was asked before."""

import json
import random
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import every
from numpy.typing import NDArray
from tiny_models import tiny_compiler
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from draftwire.errors import InvalidRequestError
from draftwire.options.structured_output.grammar_automaton import (
    MAX_TEXT_MASKS_PER_TOKEN_S,
    TEXT_MASKS_CREDIT_S,
    TRIAL_TOKENS,
    FormCompiler,
    FormVocabulary,
    GrammarAutomaton,
    check_mask_costs,
    num_alike,
)
from draftwire.options.trees.tree_decider import masks_along_paths
from draftwire.requests.structured_output import MASKS_PER_TOKEN_S, Form, StructuredOutput

EMBEDDED = Path(__file__).parents[2] / "models" / "target"
STOP = 0
PET = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["dog", "cat", "d"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,4}$"}, "maxItems": 3},
    },
    "required": ["name", "kind", "age", "tags"],
    "additionalProperties": False,
}
EXPRESSION = """
start: sum
sum: product (("+" | "-") product)*
product: atom ("*" atom)*
atom: NUMBER | NAME | "(" sum ")"
NUMBER: /[0-9]{1,3}/
NAME: /[a-z]{1,4}/
"""
FORMS = {
    "schema": StructuredOutput.json(PET),
    "any JSON": StructuredOutput.json("{}"),
    "regex": StructuredOutput.regex(r"(one|two|three|on)( and (one|two))*\.?"),
    "choices": StructuredOutput.choice(["yes", "yes, but", "no", "nothing", 'a "b"\n\\ c', "\t<é>/"]),
    "grammar": StructuredOutput.grammar(EXPRESSION),
}


@pytest.fixture(scope="module")
def compiler() -> FormCompiler:
    return FormCompiler(FormVocabulary.of(AutoTokenizer.from_pretrained(EMBEDDED), 4096, [STOP]))


def ids_of(mask: NDArray[np.uint8]) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()


def texts_of(automaton: GrammarAutomaton, tokens: list[str], stops: list[int]) -> set[str]:
    """Returns all texts that the masks lead to."""
    texts: set[str] = set()
    growing: list[list[int]] = [[]]
    while growing:
        ids = growing.pop()
        assert len(ids) < 10, "no form of these tests is endless"
        for token in ids_of(automaton.masks(ids)[0]):
            if token in stops:
                texts.add("".join(tokens[one] for one in ids))
            else:
                growing.append([*ids, token])
    return texts


def random_text(automaton: GrammarAutomaton, generator: random.Random, length: int) -> list[int]:
    """Returns a text of the form, or a beginning of one."""
    ids: list[int] = []
    while len(ids) < length and STOP not in ids:
        ids.append(generator.choice(ids_of(automaton.masks(ids)[0])))
    return ids


@every("name", FORMS)
def test_masks_along_a_draft_are_those_of_committing_it_token_by_token(compiler: FormCompiler, name: str) -> None:
    """Drafts go on as the form allows, break it, or go beyond its end; the same automaton goes back and forth."""
    generator = random.Random(1)
    automaton, num_broken, num_ended = compiler.compile(FORMS[name]), 0, 0
    for _ in range(30):
        text = random_text(compiler.compile(FORMS[name]), generator, 24)
        start = generator.randrange(len(text))
        draft = text[start : start + generator.randint(1, 6)]
        if generator.random() < 0.4:
            draft[generator.randrange(len(draft))] = generator.randrange(4096)
        if generator.random() < 0.3:
            draft.append(generator.choice([STOP, 77]))
        committed = [token for token in text[:start] if token != STOP]
        masks = automaton.masks(committed, draft)
        assert masks.shape == (len(draft) + 1, 512)
        is_over = False
        for place, mask in enumerate(masks):
            if is_over:
                assert mask.min() == 255, "every token is allowed where nothing can be meant"
                continue
            alone = compiler.compile(FORMS[name], [*committed, *draft[:place]]).masks([*committed, *draft[:place]])
            assert ids_of(alone[0]) == ids_of(mask)
            assert (automaton.last_mask(committed, draft[:place]) == alone).all()
            if place < len(draft):
                is_broken, is_ended = draft[place] not in ids_of(mask), draft[place] == STOP
                num_broken, num_ended = num_broken + is_broken, num_ended + is_ended
                is_over = is_broken or is_ended
    assert num_broken > 3
    assert num_ended > 0 or name == "any JSON"


def test_tree_without_nodes_has_the_mask_of_the_first_place(compiler: FormCompiler) -> None:
    name = next(iter(FORMS))
    automaton = compiler.compile(FORMS[name])
    committed = random_text(compiler.compile(FORMS[name]), random.Random(2), 5)
    of_tree = masks_along_paths(automaton, committed, [], [])
    assert of_tree.rows.tolist() == automaton.masks(committed).tolist()
    assert not of_tree.faults


def test_each_mask_of_a_tree_is_computed_once(compiler: FormCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a spine on which a leaf hangs at every depth, whose paths share almost everything."""
    name, size = next(iter(FORMS)), 8
    text = random_text(compiler.compile(FORMS[name]), random.Random(2), size + 3)
    committed, spine = text[:3], [token for token in text[3:] if token != STOP]
    tokens, paths = [*spine, *spine], [tuple(range(len(spine)))]
    paths += [(*range(depth), len(spine) + depth) for depth in reversed(range(len(spine)))]
    filled, fill = [], GrammarAutomaton._fill
    monkeypatch.setattr(GrammarAutomaton, "_fill", lambda self, row: (filled.append(0), fill(self, row))[1])
    automaton = compiler.compile(FORMS[name], committed)
    filled.clear()
    of_tree = masks_along_paths(automaton, committed, tokens, paths)
    assert len(filled) == 1 + len(tokens)
    expected = compiler.compile(FORMS[name]).masks(committed, spine)
    assert (of_tree.rows[: len(spine) + 1] == expected).all()
    assert (of_tree.rows[len(spine) + 1 :] == expected[1:]).all()


TOKENS = ["a", "b", "ab", "c", "<one>", "<two>"]


def test_all_stop_tokens_end_a_text_and_nothing_before_its_end() -> None:
    stops = [4, 5]
    automaton = tiny_compiler(TOKENS, 6, stops).compile(StructuredOutput.regex("[ab]{2}c?"))
    assert ids_of(automaton.masks([0])[0]) == [0, 1]
    assert ids_of(automaton.masks([2])[0]) == [3, *stops]
    assert ids_of(automaton.masks([2, 3])[0]) == stops
    assert texts_of(automaton, TOKENS, stops) == {x + y + z for x in "ab" for y in "ab" for z in ("", "c")}
    for stop in stops:
        assert automaton.masks([2, 3, stop]).min() == 255
        assert ids_of(automaton.masks([2])[0]) == [3, *stops]
        with pytest.raises(InvalidRequestError, match="do not have this form"):
            automaton.masks([0, stop])


@every("vocab_size", [5, 6, 9, 40])
def test_ids_beyond_the_tokenizer_or_the_model_are_never_allowed(vocab_size: int) -> None:
    automaton = tiny_compiler([*TOKENS[:4], "<e>", "d"], vocab_size, [4]).compile(StructuredOutput.regex("[a-z]+"))
    masks = automaton.masks([0], [0, 0])
    assert masks.shape == (3, 8 if vocab_size > 32 else 4)
    for mask in masks:
        assert ids_of(mask) == [0, 1, 2, 3, 4, *([5] if vocab_size > 5 else [])]
    for beyond in (vocab_size, 39, 1000):
        assert automaton.masks([0], [beyond])[1].min() == 255
        assert ids_of(automaton.masks([0])[0]) == ids_of(masks[0])


SIGNS = ["a", "b", ".", "*", "<end>", "|", "(", ")"]


@every(
    ("tokens", "form", "texts"),
    [
        (TOKENS, StructuredOutput.choice(["a", "ab", "abc", "cab"]), {"a", "ab", "abc", "cab"}),
        (TOKENS, StructuredOutput.regex("^(ab|b)$"), {"ab", "b"}),
        (TOKENS, StructuredOutput.grammar('start: x "c"? \nx: "a" | "b" "a"'), {"a", "ac", "ba", "bac"}),
        (SIGNS, StructuredOutput.choice(["a.b", "a*", "b|a", "(b)"]), {"a.b", "a*", "b|a", "(b)"}),
    ],
)
def test_the_texts_of_a_form_are_all_reached_and_no_others(
    tokens: list[str], form: StructuredOutput, texts: set[str]
) -> None:
    """Choices are texts, also where they look like expressions."""
    assert texts_of(tiny_compiler(tokens, len(tokens), [4]).compile(form), tokens, [4]) == texts


TIGHT, WIDE = {"whitespace_flexible": False}, {"whitespace_pattern": " {3}"}
SAID_NOTHING = {"title": "T", "description": "d", "examples": [1], "default": 3, "x-mine": {"not": {}}}
NAMED_AS_KEYWORDS = {"type": "object", "properties": {"not": {"type": "integer"}, "uniqueItems": {"type": "null"}}}


@every(
    ("schema", "text", "is_accepted"),
    [
        # ordinary layouts, and endless whitespace
        *(
            ({"properties": {"a": {"type": "array"}}}, text, True)
            for text in ('{"a":[1,2]}', '{"a": [1, 2]}', '{\n  "a": [\n    1,\n\t\t2\r\n  ]\n}')
        ),
        *(
            ({"type": "object"}, text, False)
            for text in ('{"a":  1}', '{\n\n"a":1}', "{\n" + 33 * " " + '"a":1}', ' {"a":1}', '{"a":1}\n')
        ),
        # a schema sets its own whitespace
        ({"type": "object", "x-guidance": TIGHT}, '{"a":1}', True),
        ({"type": "object", "x-guidance": TIGHT}, '{"a": 1}', False),
        ({"type": "object", "x-guidance": WIDE}, '{"a":   1}', True),
        # keywords that say nothing of the value
        (SAID_NOTHING | {"type": "integer"}, "12", True),
        (NAMED_AS_KEYWORDS, '{"not":1,"uniqueItems":null}', True),
    ],
)
def test_schema_allows_ordinary_layouts_and_what_it_says_itself(
    compiler: FormCompiler, schema: dict[str, Any], text: str, is_accepted: bool
) -> None:
    """Whether a text has the form, and may end."""
    ids = AutoTokenizer.from_pretrained(EMBEDDED).encode(text)
    form = StructuredOutput.json(schema)
    with nullcontext() if is_accepted else suppress(InvalidRequestError):
        assert (STOP in ids_of(compiler.compile(form, ids).masks(ids)[0])) == is_accepted


MEETING = json.dumps({"allOf": [{"type": "string", "pattern": f".*{one:03}.*"} for one in range(12)]})
BAD_FORMS = {
    "broken JSON": ('{"a":', Form.JSON_SCHEMA, "is not JSON"),
    "no schema": ("3", Form.JSON_SCHEMA, "not a JSON object"),
    "false": ("false", Form.JSON_SCHEMA, "not a JSON object"),
    "depth": ('{"items":' * 5_000 + "{}" + "}" * 5_000, Form.JSON_SCHEMA, "too deeply"),
    "a keyword that is not supported": ('{"type":"array","uniqueItems":true}', Form.JSON_SCHEMA, "uniqueItems"),
    "one deep inside": ('{"properties":{"a":{"anyOf":[{"not":{}}]}}}', Form.JSON_SCHEMA, "'not'"),
    "a misspelt keyword": ('{"type":"object","requierd":["a"]}', Form.JSON_SCHEMA, "requierd"),
    "several that fit at once": ('{"oneOf":[{"type":"integer"},{"type":"number"}]}', Form.JSON_SCHEMA, "oneOf"),
    "a format that is not known": ('{"type":"string","format":"poem"}', Form.JSON_SCHEMA, "format"),
    "lenience": ('{"type":"object","x-guidance":{"lenient":true}}', Form.JSON_SCHEMA, "lenient"),
    "approximation": ('{"x-guidance":{"coerce_one_of":true}}', Form.JSON_SCHEMA, "coerce_one_of"),
    "inner options": ('{"items":{"x-guidance":{"whitespace_flexible":true}}}', Form.JSON_SCHEMA, "x-guidance"),
    "a reference to elsewhere": ('{"$ref":"http://example.com/s"}', Form.JSON_SCHEMA, "not present"),
    "no value at all": ('{"enum":[]}', Form.JSON_SCHEMA, "anyOf is empty"),
    "endless nesting": ('{"$ref":"#"}', Form.JSON_SCHEMA, "no token"),
    "broken regex": ("(secret", Form.REGEX, "unclosed group"),
    "look-ahead": ("(?=secret)", Form.REGEX, "look-around"),
    "word border": ("secret\\b", Form.REGEX, "lookarounds"),
    "a back reference": ("(secret)\\1", Form.REGEX, "backreferences"),
    "no text": ("a[a&&b]", Form.REGEX, "no token"),
    "no start": ('secret: "a"', Form.GRAMMAR, "start"),
    "an unknown rule": ("start: secret", Form.GRAMMAR, "unknown name"),
    "an attribute": ("start[max_tokens=3]: /a*/", Form.GRAMMAR, "max_tokens"),
    "one of a rule that may be inlined": ("?start[max_tokens=3]: /a*/", Form.GRAMMAR, "max_tokens"),
    "one behind a priority": ("!start.2 [max_tokens=3] : /a*/", Form.GRAMMAR, "max_tokens"),
    "one behind an expression of two lines": ('start: T\nT: /a\n"/\nother[lazy]: /"/', Form.GRAMMAR, "lazy"),
    "intersection": ("start: T\nT: /a+/ & /b+/", Form.GRAMMAR, "&"),
    "complement": ("start: T\nT: ~/b+/", Form.GRAMMAR, "~"),
    "parameters": ('start: one::0x0\none::_: "a"', Form.GRAMMAR, "::"),
    "a long number": ('{"maximum":' + "9" * 5_000 + "}", Form.JSON_SCHEMA, "too many digits"),
    "patterns that meet": (MEETING, Form.JSON_SCHEMA, "exceed"),
    "a special token": ("start: <|endoftext|>", Form.GRAMMAR, "endoftext"),
    "JSON in a grammar": ('start: %json {"not": {}}', Form.GRAMMAR, "%json"),
    "the library's notation": ('{"grammars":[]}', Form.GRAMMAR, "rules are expected"),
}


@every("name", BAD_FORMS)
def test_bad_forms_are_refused_with_a_short_reason(compiler: FormCompiler, name: str) -> None:
    text, form, reason = BAD_FORMS[name]
    with pytest.raises(InvalidRequestError, match=reason) as raised:
        compiler.compile(StructuredOutput(form, (text,)))
    message = str(raised.value)
    assert message.startswith("structured_output")
    assert "\n" not in message
    assert len(message) < 250
    assert form is not Form.REGEX or "secret" not in message, "what the user wrote is not quoted"


def test_form_that_takes_longer_at_its_first_place_than_one_may_is_refused(
    compiler: FormCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of CPU time, of which this form takes a quarter of a second, and a hundredth on any machine."""
    monkeypatch.setattr("draftwire.options.structured_output.grammar_automaton.MAX_PLACE_S", 0.01)
    with pytest.raises(InvalidRequestError, match="costs too much to follow"):
        compiler.compile(StructuredOutput(Form.REGEX, ("(a{1000}){1000}",)))


def test_a_form_of_which_the_model_lacks_the_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no token"):
        tiny_compiler(TOKENS, 6, [4]).compile(StructuredOutput.regex("x"))
    automaton = tiny_compiler(TOKENS, 6, [4]).compile(StructuredOutput.regex("ax|b"))
    with pytest.raises(InvalidRequestError, match="no token"):
        automaton.masks([0])


def test_models_without_stop_tokens_or_readable_tokenizers_refuse_forms() -> None:
    with pytest.raises(InvalidRequestError, match="no stop token"):
        tiny_compiler(TOKENS, 6, []).compile(FORMS["regex"])
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        FormCompiler(FormVocabulary.of(PreTrainedTokenizerFast(tokenizer_object=words), 2, [1])).compile(FORMS["regex"])


def test_generated_tokens_that_do_not_fit_are_refused(compiler: FormCompiler) -> None:
    with pytest.raises(InvalidRequestError, match="do not have this form"):
        compiler.compile(FORMS["choices"], [77])


def test_a_form_that_becomes_too_costly_ends_alone(compiler: FormCompiler) -> None:
    """The rules are so ambiguous that a text costs the more the longer it is."""
    automaton = compiler.compile(StructuredOutput.grammar('start: s\ns: s s | s s s | "a"'))
    letter = AutoTokenizer.from_pretrained(EMBEDDED).convert_tokens_to_ids("a")
    with pytest.raises(InvalidRequestError, match=r"costs too much|max is"):
        automaton.masks([letter] * 300)


ITEM = {"properties": {"value": {"type": "integer"}}, "required": ["kind", "value"], "additionalProperties": False}
KINDS = [ITEM | {"properties": {"kind": {"const": f"k{kind}"}, **ITEM["properties"]}} for kind in range(100)]
LARGE_FORMS = {
    "a hundred optional properties": StructuredOutput.json(
        {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(100)}}
    ),
    "a hundred kinds": StructuredOutput.json({"type": "array", "items": {"anyOf": KINDS}}),
    "three hundred words": StructuredOutput.grammar(
        'start: w (" " w)* "."\nw: ' + " | ".join(f'"word{number}"' for number in range(300))
    ),
}
AMBIGUOUS_FORMS = {
    "both sides": StructuredOutput.grammar('start: e\ne: e e | "a" | "b"'),
    "right": StructuredOutput.grammar('start: s\ns: "a" s s | "a" | '),
    "nullable": StructuredOutput.grammar('start: e\ne: e f e | "a" | "b" | \nf: e e | "a" | '),
}


@every("name", [*FORMS, *LARGE_FORMS])
def test_honest_forms_are_followed_for_a_fraction_of_what_they_may_cost(
    compiler: FormCompiler, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of CPU time. The large ones need thousands of the parser's items at a place, and would need none of the time."""
    monkeypatch.setattr("draftwire.options.structured_output.grammar_automaton.TRIAL_S", 0.1)
    automaton = compiler.compile({**FORMS, **LARGE_FORMS}[name])
    check_mask_costs(automaton)
    assert len(random_text(automaton, random.Random(3), 40)) > 0


@every("name", AMBIGUOUS_FORMS)
def test_forms_whose_masks_cost_too_much_are_refused_after_a_bounded_time(compiler: FormCompiler, name: str) -> None:
    automaton = compiler.compile(AMBIGUOUS_FORMS[name])
    started = time.thread_time()
    with pytest.raises(InvalidRequestError, match="costs too much to follow"):
        check_mask_costs(automaton)
    assert time.thread_time() - started < 1.0


def test_trial_texts_of_a_form_are_the_same_each_time_and_some_end_early(
    compiler: FormCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[list[list[int]]] = []
    masks = GrammarAutomaton.masks

    def recorded(self: GrammarAutomaton, ids: list[int]) -> NDArray[np.uint8]:
        tried[-1].append(list(ids))
        return masks(self, ids)

    for _ in range(2):
        automaton = compiler.compile(FORMS["any JSON"])
        tried.append([])
        with monkeypatch.context() as patched:
            patched.setattr(GrammarAutomaton, "masks", recorded)
            check_mask_costs(automaton)
    assert tried[0] == tried[1]
    assert len(tried[0]) == TRIAL_TOKENS
    assert max(map(len, tried[0])) >= TRIAL_TOKENS // 4, "texts go on where they might end"
    assert not any(STOP in ids for ids in tried[0])


class Ticking:
    """CPU time in which each thing that is measured takes a tick."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.tick_s = 0.0, 0.0
        monkeypatch.setattr("draftwire.options.structured_output.grammar_automaton.time", self)

    def thread_time(self) -> float:
        self.now += self.tick_s
        return self.now


def test_text_ends_if_its_masks_cost_too_much_whatever_was_rejected(
    compiler: FormCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token and its mask take two ticks. No call takes longer than its places may."""
    cpu = Ticking(monkeypatch)
    rejected, accepted = (AutoTokenizer.from_pretrained(EMBEDDED).convert_tokens_to_ids(one) for one in "ba")

    def length_of_text(tick_s: float, draft: list[int]) -> int:
        """Returns after how many tokens a text ends, at most 300, if so much is drafted and rejected at each."""
        cpu.tick_s = tick_s
        automaton = compiler.compile(StructuredOutput.regex("[ab]*"))
        for length in range(300):
            try:
                masks = automaton.along([accepted] * length, draft)
            except InvalidRequestError:
                return length
            if draft == [accepted] and masks.faults:
                assert set(masks.faults) == {1}
                return length + 1
        return 300

    slow_s = 0.8 * MAX_TEXT_MASKS_PER_TOKEN_S
    length = length_of_text(slow_s, [])
    assert length == pytest.approx(TEXT_MASKS_CREDIT_S / (2 * slow_s - MAX_TEXT_MASKS_PER_TOKEN_S), abs=2)
    assert length_of_text(slow_s, [rejected] * 4) == length
    assert length_of_text(slow_s, [accepted]) == length, "as a draft, too, and only if it is accepted"
    assert length_of_text(slow_s / 2, [rejected] * 4) == 300


def test_cpu_time_of_masks_is_taken_once_and_a_moved_texts_is_nobodys(
    compiler: FormCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    letter = next(token for token in ids_of(compiler.compile(FORMS["any JSON"]).masks(())[0]) if token != STOP)
    cpu = Ticking(monkeypatch)
    cpu.tick_s = 1e-4
    automaton = compiler.compile(FORMS["any JSON"], [letter])
    assert automaton.take_cpu_s() == 0.0
    automaton.along([letter], [])
    assert 0.0 < automaton.take_cpu_s() < 0.01
    assert automaton.take_cpu_s() == 0.0
    with pytest.raises(InvalidRequestError):
        automaton.masks([STOP])
    assert automaton.take_cpu_s() > 0.0, "failing takes time, too"


def test_masks_are_slow_from_one_that_was_until_several_were_not(
    compiler: FormCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    letter = next(token for token in ids_of(compiler.compile(FORMS["any JSON"]).masks(())[0]) if token != STOP)
    cpu = Ticking(monkeypatch)
    automaton = compiler.compile(FORMS["any JSON"])

    def are_slow_after(tick_s: float) -> bool:
        cpu.tick_s = tick_s
        automaton.along([], [letter])
        return automaton.has_slow_masks

    assert not are_slow_after(0.02 * MASKS_PER_TOKEN_S)
    assert are_slow_after(MASKS_PER_TOKEN_S)
    assert are_slow_after(0.0)
    assert not all(are_slow_after(0.0) for _ in range(50))


@pytest.mark.slow
def test_draft_into_a_costly_form_is_no_fault_before_that_place(
    compiler: FormCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the parser's own limits, which do not depend on the machine."""
    monkeypatch.setattr("draftwire.options.structured_output.grammar_automaton.TEXT_MASKS_CREDIT_S", 100.0)
    automaton = compiler.compile(StructuredOutput.grammar('start: s\ns: "a" s s | "a" | '))
    letter = next(token for token in ids_of(automaton.masks(())[0]) if token != STOP)
    for length in range(400):
        masks = automaton.along([letter] * length, [letter, letter])
        assert letter in ids_of(masks.rows[0])
        if masks.faults:
            break
        assert all(len(ids_of(row)) < 100 for row in masks.rows)
    assert set(masks.faults) == {2}, "the last place alone cannot be followed"
    assert masks.rows[2].min() == 255
    assert len(ids_of(automaton.masks([letter] * length)[0])) < 100, "it is of use after that"
    with pytest.raises(InvalidRequestError, match="structured_output"):
        automaton.along([letter] * (length + 2), [letter])


@every(("draft", "faulty"), [([1], {1}), ([2], set()), ([1, 2], {1, 2})])
def test_draft_into_a_dead_end_of_the_form_is_a_fault_from_there_on(draft: list[int], faulty: set[int]) -> None:
    automaton = tiny_compiler(["<stop>", "a", "b"], 3, [0]).compile(StructuredOutput.regex("ax|b"))
    for _ in range(2):
        masks = automaton.along((), draft)
        assert set(masks.faults) == faulty
        assert ids_of(masks.rows[0]) == [1, 2]


class Counted(list[int]):
    """A text that counts the tokens that are read one by one."""

    num_read = 0

    def __iter__(self) -> Iterator[int]:
        for one in super().__iter__():
            self.num_read += 1
            yield one


def test_texts_are_compared_as_a_whole_up_to_their_first_difference() -> None:
    for length, other, difference in product(range(9), range(9), range(9)):
        known, ids = Counted(range(length)), Counted(range(other))
        if difference < other:
            ids[difference] = -1
        assert num_alike(known, ids) == min(length, other, difference if difference < other else other)
        assert known.num_read == ids.num_read == 0

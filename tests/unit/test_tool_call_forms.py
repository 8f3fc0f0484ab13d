"""The form of tool calls lets exactly those texts through whose calls fit their tools."""

import json
import random
from typing import Any

import numpy as np
import pytest
from cases import every
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from draftwire.errors import InvalidRequestError
from draftwire.options.structured_output.grammar_automaton import FormCompiler, FormVocabulary
from draftwire.requests.automaton import Automaton
from draftwire.requests.structured_output import Form, StructuredOutput
from draftwire.requests.tool_calls import SYNTAXES, ToolCallForm
from draftwire_gateway.text.tool_call_reader import ToolCallReader

POINT = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["x"]}
POINT |= {"additionalProperties": False}
NAMED = {"$defs": {"name": {"enum": ["a", "b"]}}, "properties": {"name": {"$ref": "#/$defs/name"}}}
NAMED |= {"required": ["name"], "additionalProperties": False}
TOOLS = {"point": json.dumps(POINT), "no-arguments": "", "named.1": json.dumps(NAMED)}
MARKERS = {
    "hermes": ["<tool_call>", "</tool_call>"],
    "llama3_json": ["<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]"],
    "json": [],
}


def tokenizer_with(added: list[str], *, are_special: bool) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of bytes with some added tokens, and a stop token at the end."""
    alphabet = sorted(ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({sign: index for index, sign in enumerate(alphabet)}, []))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, special=are_special, normalized=False) for text in added])
    backend.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def compiled(tokenizer: PreTrainedTokenizerFast, form: StructuredOutput) -> Automaton:
    size = len(tokenizer)
    return FormCompiler(FormVocabulary.of(tokenizer, size, [size - 1])).compile(form)


def follows(automaton: Automaton, ids: list[int], stop: int) -> bool:
    """Whether a text is possible token by token, and may end where it does."""
    masks = np.unpackbits(automaton.masks((), ids), axis=-1, bitorder="little")
    return all(mask[token] for mask, token in zip(masks, [*ids, stop], strict=True))


def calls_in(syntax: str, text: str) -> list[tuple[str, Any]]:
    reader = ToolCallReader(SYNTAXES[syntax], TOOLS, lambda: "id", is_certain=False)
    calls = [*reader.push(text).calls, *reader.finish().calls]
    return [(call.name, json.loads(call.arguments)) for call in calls]


CALL = {"name": "point", "arguments": {"x": 7}}
HERMES = f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
LLAMA = '{"name": "point", "parameters": {"x": 7}}'
LIST = f"[{json.dumps(CALL)}]"
BAD = str.maketrans("7", "-")

TEXTS = {
    # syntax, fewest and most calls, and texts that are possible or not
    "calls alone": (
        "hermes",
        1,
        16,
        [HERMES, f"{HERMES}\n{HERMES}"],
        ["", "text", f"{HERMES}.", HERMES.translate(BAD)],
    ),
    "one call": ("hermes", 1, 1, [HERMES], [f"{HERMES}\n{HERMES}"]),
    "text and calls": (
        "hermes",
        0,
        16,
        ["", "text <tool_ca {", HERMES, f"so\n{HERMES} {HERMES}\n then"],
        ["<tool_call>", f"so {HERMES.translate(BAD)}", HERMES.replace("point", "points")],
    ),
    "text and at most a call": ("hermes", 0, 1, ["text", f"so {HERMES}."], [HERMES * 2]),
    "llama": ("llama3_json", 1, 16, [LLAMA, f"{LLAMA}; {LLAMA}"], ["", "text", LIST, LLAMA.translate(BAD)]),
    "llama, text or calls": (
        "llama3_json",
        0,
        2,
        ["", " ", "text {", "<a", LLAMA, f"{LLAMA}; {LLAMA}"],
        [f" {LLAMA.translate(BAD)}", "{", "<|x", f"{LLAMA} text", "; ".join([LLAMA] * 3)],
    ),
    "mistral": ("mistral", 1, 16, [f"[TOOL_CALLS]{LIST}"], [LIST, "", "text", f"[TOOL_CALLS]{LIST}".translate(BAD)]),
    "mistral, text or calls": (
        "mistral",
        0,
        16,
        ["text [TOOL", f"so [TOOL_CALLS]{LIST}", f"[TOOL_CALLS][{json.dumps(CALL)}, {json.dumps(CALL)}]"],
        ["[TOOL_CALLS]", "[TOOL_CALLS][]", f"[TOOL_CALLS]{LIST}".translate(BAD)],
    ),
    "list": ("json", 1, 16, [LIST, f"[{json.dumps(CALL)}, {json.dumps(CALL)}]"], ["", "[]", json.dumps(CALL)]),
}


@pytest.mark.parametrize("added", ["spelt", "added", "special"])
@every(("syntax", "at_least", "at_most", "possible", "impossible"), TEXTS.values())
def test_texts_are_possible_whose_calls_are_valid(
    syntax: str, at_least: int, at_most: int, possible: list[str], impossible: list[str], added: str
) -> None:
    tokenizer = tokenizer_with([] if added == "spelt" else MARKERS[syntax], are_special=added == "special")
    form = StructuredOutput.tool_calls(syntax, TOOLS, at_least=at_least, at_most=at_most)
    automaton, stop = compiled(tokenizer, form), len(tokenizer) - 1
    for text in possible:
        assert follows(automaton, tokenizer.encode(text, add_special_tokens=False), stop), text
    for text in impossible:
        assert not follows(automaton, tokenizer.encode(text, add_special_tokens=False), stop), text


def test_marker_that_is_a_token_cannot_be_spelt() -> None:
    """A reader would take the spelt one for the token, and what follows it is free."""
    tokenizer = tokenizer_with(MARKERS["hermes"], are_special=False)
    automaton = compiled(tokenizer, StructuredOutput.tool_calls("hermes", TOOLS, at_least=0))
    spelt = [tokenizer.encode(sign, add_special_tokens=False)[0] for sign in HERMES.translate(BAD)]
    assert not follows(automaton, spelt, len(tokenizer) - 1)


@pytest.mark.parametrize("at_least", [0, 1])
@pytest.mark.parametrize("syntax", ["hermes", "llama3_json", "mistral"])
def test_every_call_of_random_texts_is_valid(syntax: str, at_least: int) -> None:
    """Texts of tokens that are drawn evenly from the masks, but for those that would go on for ever."""
    tokenizer = tokenizer_with(MARKERS[syntax], are_special=True)
    stop = len(tokenizer) - 1
    automaton = compiled(tokenizer, StructuredOutput.tool_calls(syntax, TOOLS, at_least=at_least, at_most=3))
    draw, num_calls = random.Random(at_least), 0
    likely = set(range(256, stop + 1)) | set(tokenizer.encode("{", add_special_tokens=False))
    for _ in range(40):
        ids: list[int] = []
        while len(ids) < 400:
            possible = np.flatnonzero(np.unpackbits(automaton.masks(ids)[0], bitorder="little")).tolist()
            wanted = [token for token in possible if token in likely]
            ids.append(draw.choice(wanted if wanted and draw.random() < 0.3 else possible))
            if ids[-1] == stop:
                break
        text = tokenizer.decode(ids[:-1] if ids[-1] == stop else ids)
        for name, arguments in calls_in(syntax, text):
            num_calls += 1
            if name == "point":
                assert arguments.keys() == {"x"}
                assert 0 <= arguments["x"] <= 99
            elif name == "named.1":
                assert arguments in ({"name": "a"}, {"name": "b"})
            else:
                assert arguments == {}
        if at_least and ids[-1] == stop:
            assert calls_in(syntax, text)
    assert num_calls >= 10


REFUSED = {
    "no tool": (lambda: StructuredOutput.tool_calls("hermes", {}), "there is no tool to call"),
    "another syntax": (lambda: StructuredOutput.tool_calls("xml", TOOLS), "the syntax is one of hermes, llama3_json"),
    "a name": (lambda: StructuredOutput.tool_calls("hermes", {'a"b': ""}), "the name of a function has 1 to 64"),
    "numbers": (lambda: StructuredOutput.tool_calls("hermes", TOOLS, at_most=17), "at_most 1 to 16"),
    "text in a list": (lambda: StructuredOutput.tool_calls("json", TOOLS, at_least=0), "has no text beside calls"),
    "keyword": (lambda: StructuredOutput.tool_calls("hermes", {"f": '{"not": {}}'}), "'not' is not supported"),
    "no object": (lambda: StructuredOutput.tool_calls("hermes", {"f": '{"type": "string"}'}), "those of an object"),
    "no JSON": (lambda: StructuredOutput(Form.TOOL_CALLS, ("x",)), "made by StructuredOutput.tool_calls"),
    "JSON of something else": (
        lambda: StructuredOutput(Form.TOOL_CALLS, ("[1]",)),
        "made by StructuredOutput.tool_calls",
    ),
    "a field": (
        lambda: StructuredOutput(Form.TOOL_CALLS, (_with("at_least", "x"),)),
        "made by StructuredOutput.tool_calls",
    ),
    "a tool": (lambda: StructuredOutput(Form.TOOL_CALLS, (_with("tools", [{"name": 1}]),)), "made by StructuredOutput"),
    "parameters": (
        lambda: StructuredOutput(Form.TOOL_CALLS, (_with("tools", [{"name": "f", "parameters": 1}]),)),
        "have to be texts",
    ),
}


def _with(name: str, value: Any) -> str:
    fields = json.loads(StructuredOutput.tool_calls("hermes", TOOLS).texts[0])
    return json.dumps({**fields, name: value})


@every(("make", "message"), REFUSED.values())
def test_forms_that_say_nothing_are_refused(make: Any, message: str) -> None:
    tokenizer = tokenizer_with([], are_special=False)
    with pytest.raises(InvalidRequestError, match=message):
        compiled(tokenizer, make())


def test_form_survives_its_json() -> None:
    text = StructuredOutput.tool_calls("llama3_json", TOOLS, at_least=0, at_most=2).texts[0]
    form = ToolCallForm.from_json(text)
    assert form.to_json() == text
    assert (form.syntax.name, form.at_least, form.at_most, [tool.name for tool in form.tools]) == (
        "llama3_json",
        0,
        2,
        list(TOOLS),
    )

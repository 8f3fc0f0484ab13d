"""What is made of a form: says, at each place of a text, with which tokens it can still become one of that form.

The only module that knows the library that reads schemas, expressions and grammars. The masks depend on the form, on
the tokenizer and on the generated tokens before the place, and on nothing else.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from draftwire.errors import InvalidRequestError
from draftwire.requests.structured_output import Form, StructuredOutput

WHITESPACE = r" ?|\r?\n[ \t]{0,32}"
"""What may stand between two parts of a JSON text, unless its schema's `x-guidance` says otherwise: what people and
pretty-printers write, but no endless whitespace, which small models fall into."""

LAYOUT_OPTIONS = frozenset({"whitespace_flexible", "whitespace_pattern"})
"""What a schema's `x-guidance` may set. The library's other options make texts that the schema does not allow."""

_ANNOTATIONS = frozenset(
    [
        "$anchor",
        "$comment",
        "$id",
        "$schema",
        "contentEncoding",
        "contentMediaType",
        "default",
        "deprecated",
        "description",
        "examples",
        "id",
        "readOnly",
        "title",
        "writeOnly",
    ]
)
_OF_NAMES = frozenset({"$defs", "definitions", "patternProperties", "properties"})
"""Keywords whose values hold schemas by name."""
_OF_SCHEMAS = frozenset({"additionalItems", "additionalProperties", "allOf", "anyOf", "items", "oneOf", "prefixItems"})
"""Keywords whose values are schemas, or lists of them."""
_OF_VALUES = frozenset(
    [
        "$ref",
        "const",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "multipleOf",
        "pattern",
        "required",
        "type",
    ]
)
SCHEMA_KEYWORDS = _ANNOTATIONS | _OF_NAMES | _OF_SCHEMAS | _OF_VALUES
"""What a schema may say. The library refuses what it knows and cannot do; what it does not know it would ignore."""

_LARK_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/[a-z]*|//[^\n]*')
_LARK_EXTENSION = re.compile(r"%(?:json|regex|lark|llguidance)\b|<[^>\n]*>|^\s*[\w-]+\s*\[[^\]\n]*\]\s*:", re.MULTILINE)

MAX_REASON = 160
"""Characters of the library's reasons that are shown: they may quote the form."""

NO_TOKEN = "no token of the model continues a text of this form"

MAX_PLACE_S = 0.25
"""CPU time that one place may take, seconds. Usual ones take 20 µs; a form that takes longer than this loses its
session, because all sessions of its steps wait."""


def _limits() -> LLParserLimits:
    """Returns what a form may cost; a tenth to a half of the library's own limits."""
    return LLParserLimits(
        max_items_in_row=500,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=50_000,
        step_max_items=5_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


@dataclass(frozen=True, slots=True)
class BlockMasks:
    """Which tokens are possible along a draft block."""

    rows: NDArray[np.uint8]
    """`[draft_len + 1, bytes]`, as of `Automaton.masks`."""
    num_places: int
    """At how many of the places the form can be followed; at the others every token is possible."""
    fault: InvalidRequestError | None = None
    """Why it cannot at the rest, where a text that gets there has to fail. None if nothing is wrong."""


class Automaton:
    """Follows one text. Not shared; used on one thread at a time."""

    def __init__(
        self, make: Callable[[], LLMatcher], possible: NDArray[np.uint8], stop_token_ids: frozenset[int]
    ) -> None:
        """Starts a text; `FormCompiler.compile` calls it.

        Args:
            make: returns a matcher at the start of the text. One that has failed is of no more use.
            possible: `[bytes]`, the ids that the model has, as bits.
            stop_token_ids: what the form's end allows.
        """
        self._make = make
        self._matcher = make()
        self._possible = possible
        self._vocab_size = int(np.unpackbits(possible).sum())
        self._stop_token_ids = stop_token_ids
        self._consumed: list[int] = []

    def masks(self, generated_ids: Sequence[int], draft_tokens: Sequence[int] = ()) -> NDArray[np.uint8]:
        """Returns which tokens are possible before each draft token and after the last.

        After a stop token, and after a draft token that is not possible, every token is: what the law is there reaches
        nobody, but it has to be one.

        Args:
            generated_ids: what was generated, without the prompt. It need not continue what was asked before.
            draft_tokens: what may come next.

        Returns:
            `[len(draft_tokens) + 1, bytes]`, one bit for each token, the lowest first.

        Raises:
            InvalidRequestError: what was generated does not have the form, no token is possible, or the form costs too
                much.
        """
        return self._masks(generated_ids, draft_tokens, first_place=0)

    def along(self, generated_ids: Sequence[int], draft_tokens: Sequence[int]) -> BlockMasks:
        """Returns the masks of a draft block. One that leads to where the form cannot be followed fails nothing yet: it
        may be rejected.

        Raises:
            InvalidRequestError: as `masks`, of what was generated.
        """
        try:
            return BlockMasks(self.masks(generated_ids, draft_tokens), len(draft_tokens) + 1)
        except InvalidRequestError as error:
            rows = np.full((len(draft_tokens) + 1, len(self._possible)), 255, dtype=np.uint8)
            rows[0] = self.masks(generated_ids)[0]
            for place, token in enumerate(draft_tokens, 1):
                is_possible = token < self._vocab_size and rows[place - 1][token // 8] >> token % 8 & 1
                if not is_possible or token in self._stop_token_ids:
                    return BlockMasks(rows, len(rows))
                try:
                    rows[place] = self.masks([*generated_ids, *draft_tokens[:place]])[0]
                except InvalidRequestError:
                    return BlockMasks(rows, place, error)
            return BlockMasks(rows, len(rows))

    def last_mask(self, generated_ids: Sequence[int], draft_tokens: Sequence[int]) -> NDArray[np.uint8]:
        """Returns the last row of `masks`, `[1, bytes]`, without computing the others."""
        return self._masks(generated_ids, draft_tokens, first_place=len(draft_tokens))[-1:]

    def _masks(self, generated_ids: Sequence[int], draft_tokens: Sequence[int], first_place: int) -> NDArray[np.uint8]:
        try:
            return self._followed(generated_ids, draft_tokens, first_place)
        except InvalidRequestError:
            if self._matcher.is_error():
                self._matcher, self._consumed = self._make(), []
            raise

    def _followed(
        self, generated_ids: Sequence[int], draft_tokens: Sequence[int], first_place: int
    ) -> NDArray[np.uint8]:
        masks = np.full((len(draft_tokens) + 1, len(self._possible)), 255, dtype=np.uint8)
        started = time.thread_time()
        num_new = len(generated_ids) - len(self._consumed)
        if self._follow(generated_ids):
            for place, row in enumerate(masks):
                if place >= first_place:
                    self._fill(row)
                if place == len(draft_tokens):
                    break
                if not self._consume(draft_tokens[place]):
                    self._check()  # that it is not possible is no error, but what costs too much is not known to be so
                    break
        if time.thread_time() - started > MAX_PLACE_S * (max(0, num_new) + len(masks)):
            raise InvalidRequestError("structured_output: the form costs too much to follow")
        return masks

    def _follow(self, generated_ids: Sequence[int]) -> bool:
        """Comes to the end of a text; returns whether the text can go on.

        Raises:
            InvalidRequestError: it does not have the form.
        """
        ids = list(generated_ids)
        if self._consumed != ids[: len(self._consumed)]:
            pairs = enumerate(zip(self._consumed, ids, strict=False))
            kept = next(
                (place for place, (known, token) in pairs if known != token), min(len(self._consumed), len(ids))
            )
            self._matcher.rollback(len(self._consumed) - kept)
            del self._consumed[kept:]
        for token in ids[len(self._consumed) :]:
            if token in self._stop_token_ids and self._matcher.is_accepting():
                return False
            if not self._consume(token):
                self._check()
                raise InvalidRequestError("structured_output: the generated tokens do not have this form")
        return True

    def _consume(self, token: int) -> bool:
        """Takes a token, if it is possible and does not end the text."""
        # The matcher counts some stop tokens and others not, and never gets over an id that it does not know.
        if token in self._stop_token_ids or token >= self._vocab_size:
            return False
        is_taken = self._matcher.try_consume_tokens([token]) == 1
        if is_taken:
            self._consumed.append(token)
        return is_taken

    def _fill(self, row: NDArray[np.uint8]) -> None:
        """Writes the mask of the place that was come to."""
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._check()
        row &= self._possible
        if not row.any():
            raise InvalidRequestError(f"structured_output: {NO_TOKEN}")

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidRequestError(f"structured_output: {_reason(self._matcher.get_error())}")


class FormCompiler:
    """Makes automata for one tokenizer. May be used by several threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, stop_token_ids: Iterable[int]) -> None:
        """Reads the tokenizer, which takes a second for the largest. One that cannot be read makes no automata.

        Args:
            tokenizer: whose tokens the texts are made of.
            vocab_size: of the model, whose ids beyond the tokenizer are never possible.
            stop_token_ids: of the model; they end a text that has the form.
        """
        self._stop_token_ids = frozenset(stop_token_ids)
        self._refusal = "" if self._stop_token_ids else "the target has no stop token, which has to end the text"
        self._tokenizer: LLTokenizer
        num_ids = max(vocab_size, len(tokenizer))
        try:
            # Stubs say what is right, transformers says less.
            self._tokenizer = from_tokenizer(tokenizer, num_ids, sorted(self._stop_token_ids) or None)  # type: ignore[arg-type]
        except ValueError as error:
            self._refusal = f"the target's tokenizer cannot be read for it: {_reason(str(error))}"
        bits = np.arange(-(-num_ids // 32) * 32) < vocab_size
        self._possible = np.packbits(bits, bitorder="little")

    def compile(self, wanted: StructuredOutput, generated_ids: Sequence[int] = ()) -> Automaton:
        """Makes an automaton that has followed what was generated. Takes milliseconds; bad forms up to a second.

        Raises:
            InvalidRequestError: the form cannot be read, says what is not supported, costs too much or fits no text;
                what was generated does not have it; or there is no stop token, or no tokenizer that can be read.
        """
        if self._refusal:
            raise InvalidRequestError(f"structured_output: {self._refusal}")
        grammar = _grammar(wanted)

        def make() -> LLMatcher:
            return LLMatcher(self._tokenizer, grammar, log_level=0, limits=_limits())

        matcher = make()
        faults = [matcher.get_error()] if matcher.is_error() else matcher.get_grammar_warnings()
        if faults:
            raise InvalidRequestError(f"structured_output: {wanted.form.value}: {_reason(faults[0])}")
        automaton = Automaton(make, self._possible, self._stop_token_ids)
        automaton.masks(())  # some forms show only here that they cost too much, or that there is no such text
        automaton.masks(generated_ids)
        return automaton


def _grammar(wanted: StructuredOutput) -> str:
    """Returns a form as the library reads it."""
    match wanted.form:
        case Form.JSON_SCHEMA:
            schema = _schema(wanted.texts[0])
            has_layout = bool(schema.get("x-guidance"))
            return LLMatcher.grammar_from_json_schema(
                json.dumps(schema), defaults=None if has_layout else {"whitespace_pattern": WHITESPACE}
            )
        case Form.REGEX:
            return LLMatcher.grammar_from_regex(wanted.texts[0])
        case Form.CHOICES:
            return LLMatcher.grammar_from_regex("|".join(_literal(text) for text in wanted.texts))
        case Form.GRAMMAR:
            if wanted.texts[0].lstrip().startswith("{"):  # would be read as the library's own notation
                raise InvalidRequestError("structured_output: grammar: rules are expected, not JSON")
            extension = _LARK_EXTENSION.search(_LARK_LITERAL.sub("", wanted.texts[0]))
            if extension is not None:
                written = _shortened(extension.group().strip())
                raise InvalidRequestError(f"structured_output: grammar: {written} is not supported")
            return LLMatcher.grammar_from_lark(wanted.texts[0])


def _literal(text: str) -> str:
    """Returns the regular expression of one text."""
    return "".join(one if one.isascii() and one.isalnum() else f"\\x{{{ord(one):x}}}" for one in text)


def _schema(text: str) -> dict[str, Any]:
    """Reads a JSON schema and refuses keywords that would have no effect."""
    try:
        schema = json.loads(text)
        for keyword in _unsupported(schema, is_root=True):
            raise InvalidRequestError(f"structured_output: json_schema: {_shortened(keyword)!r} is not supported")
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise InvalidRequestError(f"structured_output: json_schema is not JSON: {error.msg} at {where}") from None
    except RecursionError:
        raise InvalidRequestError("structured_output: json_schema is nested too deeply") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidRequestError("structured_output: json_schema is not a JSON object")
    return schema


def _unsupported(schema: Any, is_root: bool = False) -> Iterator[str]:
    """Yields keywords of a schema, and of those in it, that would have no effect. Other mistakes are left to others."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        if keyword == "x-guidance":
            options = value if isinstance(value, dict) and is_root else {"": None}
            yield from (f"x-guidance {name}".rstrip() for name in options if name not in LAYOUT_OPTIONS)
        elif keyword not in SCHEMA_KEYWORDS and not keyword.startswith("x-"):
            yield keyword
        elif keyword in _OF_NAMES and isinstance(value, dict):
            for one in value.values():
                yield from _unsupported(one)
        elif keyword in _OF_SCHEMAS:
            for one in value if isinstance(value, list) else [value]:
                yield from _unsupported(one)


def _reason(message: str) -> str:
    """Returns why the library refuses something, without what it quotes of it at length."""
    if message.startswith("NoExtension"):
        return NO_TOKEN
    causes = re.findall(r"^error: (.*)", message, re.MULTILINE)
    line = causes[-1] if causes else message.partition("\n")[0]
    line = line.rpartition("(in regex): ")[2].partition(" in regex /")[0].partition(". Enable ")[0]
    return _shortened(re.sub(r"^at \d+\(\d+\): ", "", line))


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_REASON else text[:MAX_REASON] + "..."

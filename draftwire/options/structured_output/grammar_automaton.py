"""Automata of grammars, and the compiler that makes them of forms.

The only module that uses the library (llguidance) that parses schemas, expressions and grammars.
"""

import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray
from typing_extensions import override

from draftwire.errors import InvalidRequestError
from draftwire.options.structured_output.lark_extensions import find_extension
from draftwire.options.structured_output.schema_intersections import MAX_INTERSECTION, intersection_size
from draftwire.requests.automaton import Automaton, BlockMasks
from draftwire.requests.structured_output import MASKS_PER_TOKEN_S, MAX_PLACE_S, Form, StructuredOutput
from draftwire.requests.tool_calls import ToolCallForm, grammar_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WHITESPACE = r" ?|\r?\n[ \t]{0,32}"
"""Whitespace allowed between two parts of a JSON text, unless the schema's `x-guidance` overrides it: enough for
pretty-printers, but not endless whitespace, which small models tend to generate."""

LAYOUT_OPTIONS = frozenset({"whitespace_flexible", "whitespace_pattern"})
"""Options that a schema's `x-guidance` may set. The library's others allow texts that the schema does not."""

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
"""Keywords whose values map names to schemas."""
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
"""Keywords allowed in a schema. The library refuses keywords that it recognises and does not support, but would ignore
unknown ones."""

MAX_REASON = 160
"""Limit on the characters of the library's error messages that are shown: they may quote the form."""

TOO_COSTLY = "the form costs too much to follow"
TOO_COSTLY_MASKS = f"{TOO_COSTLY}: its masks take more than a millisecond of CPU time on average"
NO_TOKEN = "no token of the model continues a text of this form"
TOO_MANY_MEET = (
    "the lengths of the patterns and formats that one string has to match at once (by allOf, $ref or a format), "
    f"multiplied, exceed {MAX_INTERSECTION}"
)

MAX_TEXT_S = 5.0
"""Limit on the CPU time of following a text of any length, seconds: one that is resumed, moved, or begun anew after a
failure. Usual forms take a second for 30,000 tokens."""
MAX_TEXT_MASKS_PER_TOKEN_S = 3 * MASKS_PER_TOKEN_S
"""CPU time that the masks of a text may take for each of its tokens, seconds, drafts that were rejected not counted."""
TEXT_MASKS_CREDIT_S = MAX_PLACE_S
"""CPU time that they may take beside, so that no text ends for a few slow masks: one may take so long by itself, and on
a machine shared with others any may, whatever its form."""
SLOW_DECAY = 0.9
"""Share of the time of a mask that is remembered for the next call, unless that takes longer."""
TRIAL_TOKENS = 200
"""Tokens of the random texts along which a form is tried."""
TRIAL_S = 0.2
"""Limit on the CPU time of the masks of a trial, seconds: a millisecond for each. Usual ones take 20 µs, the costliest
of honest forms 500 with a vocabulary of 65,000 tokens; those of ambiguous grammars take 3,000 to 9,000."""


LIMITS = LLParserLimits(
    max_items_in_row=500,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=50_000,
    step_max_items=5_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
"""Resource limits of a form: a tenth to a half of the library's defaults.

Items per step say little of what a mask costs. Objects with 100 optional properties need 4,000 of them for masks of
50 µs, and ambiguous grammars take 3 ms with 3,000: time tells them apart, see `check_mask_costs`."""


class GrammarAutomaton(Automaton):
    """Matcher of one text against its form. Not shared; used on one thread at a time."""

    def __init__(
        self, make: Callable[[], LLMatcher], possible: NDArray[np.uint8], stop_token_ids: frozenset[int]
    ) -> None:
        """Starts a text; `FormCompiler.compile` calls it.

        Args:
            make: returns a matcher at the start of the text. Called again after a failure: a matcher that has failed
                cannot be reset.
            possible: `[bytes]`, the model's ids as bits.
            stop_token_ids: allowed where the form is complete.
        """
        self._make = make
        self._matcher = make()
        self._possible = possible
        self._vocab_size = int(np.unpackbits(possible).sum())
        self._stop_token_ids = stop_token_ids
        self._stops = np.zeros_like(possible)
        for token in stop_token_ids:
            if token < 8 * len(possible):
                self._stops[token >> 3] |= 1 << (token & 7)
        self._consumed: list[int] = []
        self._reached_s = [0.0]
        """CPU time of the text up to each place, without the mask there: after none of the tokens, the first, ..."""
        self._spent_s = [0.0]
        """The same with the mask there, if there was one."""
        self._untaken_s = 0.0
        self._place_s = 0.0
        """CPU time of a mask of late, with the token before it."""

    @property
    @override
    def has_slow_masks(self) -> bool:
        return self._place_s > MASKS_PER_TOKEN_S

    @override
    def take_cpu_s(self) -> float:
        untaken_s, self._untaken_s = self._untaken_s, 0.0
        return untaken_s

    @override
    def masks(self, generated_ids: Sequence[int], draft_tokens: Sequence[int] = ()) -> NDArray[np.uint8]:
        return self._masks(generated_ids, draft_tokens, first_place=0)

    @override
    def along(self, generated_ids: Sequence[int], draft_tokens: Sequence[int], first_place: int = 0) -> BlockMasks:
        try:
            return BlockMasks(self._masks(generated_ids, draft_tokens, first_place))
        except InvalidRequestError as error:
            if not draft_tokens:  # what has failed costs the most: it is not computed again
                raise
            rows = np.full((len(draft_tokens) + 1, len(self._possible)), 255, dtype=np.uint8)
            rows[0] = self.masks(generated_ids)[0]
            for place, token in enumerate(draft_tokens, 1):
                is_possible = token < self._vocab_size and rows[place - 1][token // 8] >> token % 8 & 1
                if not is_possible or token in self._stop_token_ids:
                    return BlockMasks(rows)
                try:
                    rows[place] = self.masks([*generated_ids, *draft_tokens[:place]])[0]
                except InvalidRequestError:
                    return BlockMasks(rows, dict.fromkeys(range(place, len(rows)), error))
            return BlockMasks(rows)

    @override
    def last_mask(self, generated_ids: Sequence[int], draft_tokens: Sequence[int]) -> NDArray[np.uint8]:
        return self._masks(generated_ids, draft_tokens, first_place=len(draft_tokens))[-1:]

    def random_token(self, mask: NDArray[np.uint8], generator: random.Random, *, avoids_end: bool) -> int | None:
        """Returns a random token of a mask, or None for the end of the text.

        Args:
            mask: `[bytes]`, one of `masks`.
            generator: draws the token: first a byte of the mask, which takes no time with large vocabularies.
            avoids_end: whether the text ends only where nothing else is possible.
        """
        mask = mask & ~self._stops if avoids_end else mask
        occupied = np.flatnonzero(mask)
        if not len(occupied):
            return None
        byte = int(occupied[generator.randrange(len(occupied))])
        token = 8 * byte + generator.choice([bit for bit in range(8) if mask[byte] >> bit & 1])
        return None if token in self._stop_token_ids else token

    def _masks(self, generated_ids: Sequence[int], draft_tokens: Sequence[int], first_place: int) -> NDArray[np.uint8]:
        started = time.thread_time()
        num_places = max(0, len(generated_ids) - len(self._consumed)) + len(draft_tokens) + 1
        try:
            return self._followed(generated_ids, draft_tokens, first_place)
        except InvalidRequestError:
            if self._matcher.is_error():
                self._matcher = self._make()
                self._forget_after(0)
            raise
        finally:
            spent_s = time.thread_time() - started
            self._untaken_s += spent_s
            self._place_s = max(SLOW_DECAY * self._place_s, spent_s / num_places)

    def _followed(
        self, generated_ids: Sequence[int], draft_tokens: Sequence[int], first_place: int
    ) -> NDArray[np.uint8]:
        masks = np.full((len(draft_tokens) + 1, len(self._possible)), 255, dtype=np.uint8)
        num_new = len(generated_ids) - len(self._consumed)
        until = time.thread_time() + min(MAX_TEXT_S, MAX_PLACE_S * (max(0, num_new) + len(masks)))
        if self._follow(generated_ids, until):
            for place, row in enumerate(masks):
                if place >= first_place:
                    self._fill(row)
                if place == len(draft_tokens):
                    break
                if not self._consume(draft_tokens[place]):
                    self._check()  # an impossible token is no error, but an exceeded limit is
                    break
        _check_time(until)
        return masks

    def _follow(self, generated_ids: Sequence[int], until: float) -> bool:
        """Advances the matcher to the end of a text; returns whether the text can continue.

        Raises:
            InvalidRequestError: the text does not match the form, or takes longer than `until`, in `time.thread_time`.
        """
        ids = generated_ids if isinstance(generated_ids, list) else list(generated_ids)
        kept = num_alike(self._consumed, ids)
        if kept < len(self._consumed):
            self._matcher.rollback(len(self._consumed) - kept)
            self._forget_after(kept)
        for token in ids[len(self._consumed) :]:
            if token in self._stop_token_ids and self._matcher.is_accepting():
                return False
            if not self._consume(token):
                self._check()
                raise InvalidRequestError("structured_output: the generated tokens do not have this form")
            _check_time(until)
        return True

    def _consume(self, token: int) -> bool:
        """Advances by a token, if it is possible and does not end the text; returns whether it did."""
        # The matcher handles only some stop tokens, and an unknown id puts it in a permanent error state.
        if token in self._stop_token_ids or token >= self._vocab_size:
            return False
        started = time.thread_time()
        is_taken = self._matcher.try_consume_tokens([token]) == 1
        if is_taken:
            self._consumed.append(token)
            reached_s = self._spent_s[-1] + time.thread_time() - started
            self._reached_s.append(reached_s)
            self._spent_s.append(reached_s)
        return is_taken

    def _forget_after(self, num_tokens: int) -> None:
        """Drops what is known of the text after so many tokens."""
        del self._consumed[num_tokens:], self._reached_s[num_tokens + 1 :], self._spent_s[num_tokens + 1 :]

    def _fill(self, row: NDArray[np.uint8]) -> None:
        """Writes the mask of the current position. The text fails here if its masks have cost too much up to here: a
        property of this text, as in plain decoding, whatever else was drafted and rejected.
        """
        started = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._check()
        self._spent_s[-1] = max(self._spent_s[-1], self._reached_s[-1] + time.thread_time() - started)
        if self._spent_s[-1] > TEXT_MASKS_CREDIT_S + MAX_TEXT_MASKS_PER_TOKEN_S * len(self._consumed):
            raise InvalidRequestError(f"structured_output: {TOO_COSTLY}")
        row &= self._possible
        if not row.any():
            raise InvalidRequestError(f"structured_output: {NO_TOKEN}")

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidRequestError(f"structured_output: {_reason(self._matcher.get_error())}")


@dataclass(frozen=True, slots=True)
class FormVocabulary:
    """Tokenizer that forms are compiled for, and the ids of its model. Plain data, which another process can get."""

    tokenizer: str
    """JSON of the tokenizers library; empty if no form can be compiled."""
    num_ids: int
    """Ids of the tokenizer and the model together."""
    vocab_size: int
    """Ids of the model; others are never possible."""
    stop_token_ids: tuple[int, ...]
    """They end a text that matches its form."""
    refusal: str = ""
    """Reason why no form can be compiled for this model."""

    @classmethod
    def of(
        cls, tokenizer: "PreTrainedTokenizerBase", vocab_size: int, stop_token_ids: Iterable[int]
    ) -> "FormVocabulary":
        """Returns the vocabulary of a model. Takes a tenth of a second for the largest."""
        stops = tuple(sorted(set(stop_token_ids)))
        num_ids = max(vocab_size, len(tokenizer))
        refusal = "" if stops else "the target has no stop token, which has to end the text"
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            refusal = "the target's tokenizer cannot be read for it: it is not one of the tokenizers library"
        if refusal:
            return cls("", num_ids, vocab_size, stops, refusal)
        backend = copy(backend)
        backend.no_padding()
        backend.no_truncation()
        return cls(backend.to_str(), num_ids, vocab_size, stops)


class _CompiledForm:
    """A form that is compiled once, for all texts that have it at the same time. Thread-safe."""

    def __init__(self, compile_form: Callable[[], LLMatcher]) -> None:
        self._compile = compile_form
        self._lock = threading.Lock()
        self._matcher: LLMatcher | None = None

    def matcher(self) -> LLMatcher:
        """Returns a matcher at the start of a text; compiles the form if that has not been done."""
        with self._lock:
            if self._matcher is None:
                self._matcher = self._compile()
            return self._matcher.deep_copy()


class FormCompiler:
    """Compiles forms to automata for one vocabulary. Thread-safe."""

    def __init__(self, vocabulary: FormVocabulary) -> None:
        """Reads the tokenizer, which takes a second for the largest. With an unsupported one, `compile` raises."""
        self._stop_token_ids = frozenset(vocabulary.stop_token_ids)
        self._refusal = vocabulary.refusal
        self._tokenizer: LLTokenizer
        if not self._refusal:
            try:
                self._tokenizer = LLTokenizer(vocabulary.tokenizer, vocabulary.num_ids, list(vocabulary.stop_token_ids))
            except ValueError as error:
                self._refusal = f"the target's tokenizer cannot be read for it: {_reason(str(error))}"
        bits = np.arange(-(-vocabulary.num_ids // 32) * 32) < vocabulary.vocab_size
        self._possible = np.packbits(bits, bitorder="little")
        self._lock = threading.Lock()
        self._forms = WeakValueDictionary[StructuredOutput, _CompiledForm]()

    def compile(self, wanted: StructuredOutput, generated_ids: Sequence[int] = ()) -> GrammarAutomaton:
        """Returns an automaton positioned after the generated tokens. Usually takes milliseconds.

        Some forms never end, in calls that nothing can interrupt: those of users are compiled in a process of their own
        first, see `draftwire.options.structured_output.form_sandbox`.

        Raises:
            InvalidRequestError: the form is malformed, unsupported, exceeds its limits or matches no text; the
                generated text does not match it; or the model has no stop token or an unsupported tokenizer.
        """
        if self._refusal:
            raise InvalidRequestError(f"structured_output: {self._refusal}")
        with self._lock:
            form = self._forms.get(wanted)
            if form is None:
                form = self._forms[wanted] = _CompiledForm(lambda: self._compiled(wanted))
        automaton = self._automaton(form.matcher)
        if generated_ids:
            automaton.masks(generated_ids)
            automaton.take_cpu_s()  # nobody has to pay for a text that is moved
        return automaton

    def _automaton(self, make: Callable[[], LLMatcher]) -> GrammarAutomaton:
        return GrammarAutomaton(make, self._possible, self._stop_token_ids)

    def _compiled(self, wanted: StructuredOutput) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, self._grammar(wanted), log_level=0, limits=LIMITS)
        faults = [matcher.get_error()] if matcher.is_error() else matcher.get_grammar_warnings()
        if faults:
            raise InvalidRequestError(f"structured_output: {wanted.form.value}: {_reason(faults[0])}")
        self._automaton(lambda: matcher).masks(())  # some forms fail only here: limits exceeded, or no text matches
        return matcher

    def _grammar(self, wanted: StructuredOutput) -> str:
        """Converts a form to the library's grammar."""
        text = wanted.texts[0]
        match wanted.form:
            case Form.JSON_SCHEMA:
                schema = _schema(text)
                has_layout = bool(schema.get("x-guidance"))
                return LLMatcher.grammar_from_json_schema(
                    json.dumps(schema), defaults=None if has_layout else {"whitespace_pattern": WHITESPACE}
                )
            case Form.REGEX:
                return LLMatcher.grammar_from_regex(text)
            case Form.CHOICES:
                return LLMatcher.grammar_from_regex("|".join(_literal(text) for text in wanted.texts))
            case Form.GRAMMAR:
                if text.lstrip().startswith("{"):  # would be read as the library's own notation
                    raise InvalidRequestError("structured_output: grammar: rules are expected, not JSON")
                extension = find_extension(text)
                if extension is not None:
                    raise InvalidRequestError(f"structured_output: grammar: {_shortened(extension)} is not supported")
                return LLMatcher.grammar_from_lark(text)
            case Form.TOOL_CALLS:
                return LLMatcher.grammar_from_lark(
                    grammar_of(ToolCallForm.from_json(text), _schema_with_layout, self._added_token)
                )

    def _added_token(self, text: str) -> int | None:
        """Returns the added token of a text, which the library never makes of other text; None if it is no such."""
        tokens = self._tokenizer.tokenize_str(text, parse_special=True)
        return tokens[0] if len(tokens) == 1 and self._tokenizer.is_special_token(tokens[0]) else None


def check_mask_costs(automaton: GrammarAutomaton) -> None:
    """Follows random texts of a form, and refuses it if their masks cost too much. The texts are the same each time.

    Three texts of four end only where the form ends them, or after half of the tokens: users choose texts, and long
    ones are the costly ones. One that cannot be followed any further is no reason to refuse a form: it would end its
    own completion alone.

    Raises:
        InvalidRequestError: the masks take more than `TRIAL_S`.
    """
    generator = random.Random(TRIAL_TOKENS)
    ids: list[int] = []
    num_texts, spent_s = 0, 0.0
    for _ in range(TRIAL_TOKENS):
        started = time.thread_time()
        try:
            mask = automaton.masks(ids)[0]
        except InvalidRequestError:
            mask = None
        spent_s += time.thread_time() - started
        if spent_s > TRIAL_S:
            raise InvalidRequestError(f"structured_output: {TOO_COSTLY_MASKS}")
        token = None if mask is None else automaton.random_token(mask, generator, avoids_end=num_texts % 4 < 3)
        if token is None or len(ids) >= TRIAL_TOKENS // 2:
            ids, num_texts = [], num_texts + 1
        else:
            ids.append(token)


def num_alike(known: list[int], ids: list[int]) -> int:
    """Returns how many leading tokens of two texts are the same, by comparing parts as a whole."""
    low, high = 0, min(len(known), len(ids))
    if known[:high] == ids[:high]:
        return high
    while high - low > 1:  # the first difference is in low..high
        middle = (low + high) // 2
        if known[low:middle] == ids[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _check_time(until: float) -> None:
    if time.thread_time() > until:
        raise InvalidRequestError(f"structured_output: {TOO_COSTLY}")


def _literal(text: str) -> str:
    """Returns a regular expression that matches exactly one text."""
    return "".join(one if one.isascii() and one.isalnum() else f"\\x{{{ord(one):x}}}" for one in text)


def _schema(text: str) -> dict[str, Any]:
    """Parses a JSON schema and refuses keywords that would have no effect."""
    try:
        schema = json.loads(text)
        for keyword in _unsupported(schema, is_root=True):
            raise InvalidRequestError(f"structured_output: json_schema: {_shortened(keyword)!r} is not supported")
        if intersection_size(schema) > MAX_INTERSECTION:
            raise InvalidRequestError(f"structured_output: json_schema: {TOO_MANY_MEET}")
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise InvalidRequestError(f"structured_output: json_schema is not JSON: {error.msg} at {where}") from None
    except ValueError:  # the message would be about Python
        raise InvalidRequestError("structured_output: json_schema holds a number with too many digits") from None
    except RecursionError:
        raise InvalidRequestError("structured_output: json_schema is nested too deeply") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidRequestError("structured_output: json_schema is not a JSON object")
    return schema


def _schema_with_layout(text: str) -> dict[str, Any]:
    """Parses a JSON schema, and adds the whitespace that its texts may have unless it says so itself."""
    schema = _schema(text)
    return schema if schema.get("x-guidance") else {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}


def _unsupported(schema: Any, is_root: bool = False) -> Iterator[str]:
    """Yields keywords of a schema and its subschemas that would have no effect. The library reports other mistakes."""
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
    """Returns the library's error message without long quotes of the form."""
    if message.startswith("NoExtension"):
        return NO_TOKEN
    causes = re.findall(r"^error: (.*)", message, re.MULTILINE)
    line = causes[-1] if causes else message.partition("\n")[0]
    line = line.rpartition("(in regex): ")[2].partition(" in regex /")[0].partition(". Enable ")[0]
    return _shortened(re.sub(r"^at \d+\(\d+\): ", "", line))


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_REASON else text[:MAX_REASON] + "..."

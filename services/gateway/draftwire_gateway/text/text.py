"""Incremental detokenisation and stop strings: text is emitted only when later tokens cannot change it."""

from collections.abc import Callable, Collection
from functools import lru_cache, partial
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

REPLACEMENT = "\ufffd"
MAX_HELD = 16
"""Most trailing replacement characters (U+FFFD) that are held back after bytes that are known to be invalid."""
MAX_OPEN = 3
"""Most tokens that can be the beginning of one character: UTF-8 has at most 3 bytes before a character's last one. A
tokenizer with byte fallback decodes each byte of a run as U+FFFD until the whole run is valid."""
MAX_AT_ONCE = 64
"""Tokens that are decoded at once; bounds the decoding window."""
MAX_INVALID, KEPT_INVALID = 128, 3 * MAX_HELD + MAX_OPEN
"""Most tokens of invalid bytes in the decoding window, and how many of the last are kept beyond that. A decoder that
starts anywhere agrees with one that began earlier from the fourth byte on; the characters that are held back have at
most 3 bytes each."""
PROMPT_TOKENS = range(4, 17)
"""Numbers of trailing prompt tokens to decode as context, because some tokenizers decode the start of a text
differently: the fewest that do not begin inside a character are used."""
PROMPT_TAIL = 64
"""Tokens at the end of the prompt among which context is looked for: the last ones may have no text."""


def decoded(tokenizer: PreTrainedTokenizerBase, token_ids: list[int], *, with_special: bool = False) -> str:
    """Decodes token ids, by default without special tokens."""
    return str(tokenizer.decode(token_ids, skip_special_tokens=not with_special, clean_up_tokenization_spaces=False))


def _decoder(tokenizer: PreTrainedTokenizerBase, *, with_special: bool) -> Callable[[list[int]], str]:
    """Returns `decoded` for a tokenizer: where that adds nothing to its backend, the latter, in a third of the time."""
    kind = type(tokenizer)
    if kind.decode is PreTrainedTokenizerFast.decode and kind._decode is PreTrainedTokenizerFast._decode:
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=not with_special)
    return partial(decoded, tokenizer, with_special=with_special)


@lru_cache(maxsize=4)
def _ids_with_text(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Returns the ids that may have text; the others, such as special tokens, are as if they were not there."""
    silent = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    silent |= set(tokenizer.all_special_ids)
    return frozenset(token_id for token, token_id in tokenizer.get_vocab().items() if token and token_id not in silent)


class IncrementalDetokenizer:
    """Decodes a growing list of ids; the joined pieces equal the decoding of the whole list.

    Each token is decoded a bounded number of times. The window holds the tokens of the last piece, which are context,
    and those since: if text is incomplete, at most `MAX_OPEN` of them; if bytes are invalid, at most `MAX_INVALID`.

    One exception, which no decoder without hindsight avoids: where bytes of a byte-fallback tokenizer turn out to be
    invalid, decoding the whole list would replace the valid characters of the same run too, which were emitted.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: list[int], shown: Collection[str] = ()) -> None:
        """Starts after a prompt, whose text is not emitted. `shown` are special tokens that have text here."""
        self._ids_with_text = _ids_with_text(tokenizer)
        ids = {tokenizer.get_added_vocab().get(token) for token in shown}
        self._shown_ids = frozenset(token for token in ids if token is not None) - self._ids_with_text
        self._decode = _decoder(tokenizer, with_special=bool(self._shown_ids))
        context = self._visible(prompt_ids[-PROMPT_TAIL:])
        tails = [context[-length:] for length in PROMPT_TOKENS]
        self._window = next((tail for tail in tails if REPLACEMENT not in self._decode(tail)), tails[0])
        self._settled = len(self._window)  # tokens of the window up to the last complete text
        self._shown = len(self._decode(self._window))  # characters of the window that were emitted, or of the prompt

    def push(self, token_ids: list[int]) -> str:
        """Adds tokens and returns the text that they make final."""
        visible = self._visible(token_ids)
        parts = [visible[start : start + MAX_AT_ONCE] for start in range(0, len(visible), MAX_AT_ONCE)]
        return "".join(self._push_part(part) for part in parts)

    def finish(self) -> str:
        """Returns the text that was held back because its last character could have been incomplete."""
        text = self._decode(self._window)
        piece, self._shown = text[self._shown :], len(text)
        return piece

    def _push_part(self, token_ids: list[int]) -> str:
        text = self._decode(self._window + token_ids)
        if not text.endswith(REPLACEMENT):
            self._window += token_ids
            return self._settle(text)
        return "".join(self._push_one(token_id) for token_id in token_ids)

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            return self._settle(text)
        num_open = len(self._window) - self._settled
        first_held = self._shown if num_open <= MAX_OPEN else max(self._shown, len(text) - MAX_HELD)
        certain = len(text)
        while certain > first_held and text[certain - 1] == REPLACEMENT:
            certain -= 1
        piece = text[self._shown : certain]
        self._shown = max(self._shown, certain)
        if num_open > MAX_INVALID:
            self._shorten(len(text) - self._shown)
        return piece

    def _settle(self, text: str) -> str:
        """Returns the rest of a text without an incomplete character. Tokens before its last piece are dropped."""
        piece, self._shown = text[self._shown :], len(text)
        if piece:
            self._window = self._window[self._settled :]
            self._shown = len(self._decode(self._window))
        self._settled = len(self._window)
        return piece

    def _shorten(self, num_held: int) -> None:
        """Drops tokens of invalid bytes, but for the first ones, which make a run of byte tokens invalid as a whole."""
        first = self._settled + MAX_OPEN + 1
        self._window = self._window[:first] + self._window[-KEPT_INVALID:]
        self._shown = len(self._decode(self._window)) - num_held

    def _visible(self, token_ids: list[int]) -> list[int]:
        has_text, shown = self._ids_with_text, self._shown_ids
        return [token_id for token_id in token_ids if token_id in has_text or token_id in shown]


class StopStrings:
    """Cuts a growing text before the stop string that is completed first. Holds back a possible start of one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        """The stop strings must not be empty."""
        self._stops = stops
        self._held = ""
        self.stopped = False
        """Whether a stop string was found; no text is emitted after it."""

    def push(self, text: str) -> str:
        """Adds text and returns the part that is final."""
        if self.stopped:
            return ""
        text = self._held + text
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stops if stop in text]
        if found:
            self.stopped, self._held = True, ""
            _, start = min(found)
            return text[:start]
        held = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """Returns the text that was held back, since it did not become a stop string."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of a stop string."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0


class Shown(NamedTuple):
    """Text that tokens made final."""

    text: str
    num_tokens: int
    """How many of the tokens belong to the text: tokens after one that completes a stop string do not."""
    lengths: list[int]
    """Characters that became final with each token; empty unless requested with `per_token`."""


class TextStream:
    """The text of one completion, from its committed tokens."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_ids: list[int],
        stops: tuple[str, ...],
        per_token: bool = False,
        shown: Collection[str] = (),
    ) -> None:
        """Starts after a prompt. `per_token` reports text lengths per token, which decodes tokens one by one; special
        tokens have no text but for those in `shown`.
        """
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, shown)
        self._stops = StopStrings(stops)
        self._per_token = per_token
        self._pushes_each = per_token or bool(stops)
        """Whether tokens are pushed one by one."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self._stops.stopped

    def skip(self, token_ids: list[int], stop_token_ids: frozenset[int]) -> None:
        """Adds tokens whose final text was emitted before an interruption. A stop token at their end has no text."""
        visible = token_ids[:-1] if token_ids and token_ids[-1] in stop_token_ids else token_ids
        if visible:
            self.push(visible)

    def push(self, token_ids: list[int]) -> Shown:
        """Adds tokens up to the one that completes a stop string, and returns their final text."""
        if not self._pushes_each:
            return Shown(self._detokenizer.push(token_ids), len(token_ids), [])
        pieces: list[str] = []
        for token in token_ids:
            pieces.append(self._stops.push(self._detokenizer.push([token])))
            if self.stopped:
                break
        return Shown("".join(pieces), len(pieces), list(map(len, pieces)) if self._per_token else [])

    def finish(self) -> str:
        """Returns the text that is still held back, after the last token."""
        return self._stops.push(self._detokenizer.finish()) + self._stops.finish()

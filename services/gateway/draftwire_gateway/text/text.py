"""Incremental detokenisation and stop strings: text is emitted only when later tokens cannot change it."""

from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
MAX_HELD = 16
"""Most trailing replacement characters (U+FFFD) that are held back because further bytes may complete them. A tokenizer
with byte fallback decodes each byte of a run as one until the whole run is valid."""
MAX_SILENT, KEPT_SILENT = 64, 4
"""Most tokens without text, such as special tokens, in the decoding window, and how many are kept beyond that."""
PROMPT_TOKENS = range(4, 17)
"""Numbers of trailing prompt tokens to decode as context, because some tokenizers decode the start of a text
differently: the fewest that do not begin inside a character are used."""


def decoded(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    """Decodes token ids, without special tokens."""
    return str(tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class IncrementalDetokenizer:
    """Decodes a growing list of ids; the joined pieces equal the decoding of the whole list."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: list[int]) -> None:
        """Starts after a prompt, whose text is not emitted."""
        self._tokenizer = tokenizer
        tails = [prompt_ids[-length:] for length in PROMPT_TOKENS]
        self._window = next((tail for tail in tails if REPLACEMENT not in self._decode(tail)), tails[0])
        self._settled = len(self._window)  # tokens of the window before those of the last piece
        self._shown = len(self._decode(self._window))  # characters of the window that were emitted, or of the prompt

    def push(self, token_ids: list[int]) -> str:
        """Adds tokens and returns the text that they make final."""
        self._window += token_ids
        text = self._decode(self._window)
        certain = len(text)
        while certain > max(self._shown, len(text) - MAX_HELD) and text[certain - 1] == REPLACEMENT:
            certain -= 1
        piece = text[self._shown : certain]
        self._shown = max(self._shown, certain)
        if certain == len(text):  # no character is incomplete
            if piece:  # tokens before the last piece are no longer needed
                self._window = self._window[self._settled :]
                self._settled = len(self._window)
                self._shown = len(self._decode(self._window))
            elif len(self._window) - self._settled > MAX_SILENT:
                self._drop_silent(text)
        return piece

    def finish(self) -> str:
        """Returns the text that was held back because its last character could have been incomplete."""
        text = self._decode(self._window)
        piece, self._shown = text[self._shown :], len(text)
        return piece

    def _drop_silent(self, text: str) -> None:
        """Drops most of the last tokens if they have no text, as special tokens: each round would decode them again."""
        shorter = self._window[: self._settled] + self._window[-KEPT_SILENT:]
        if self._decode(shorter) == text:
            self._window = shorter

    def _decode(self, ids: list[int]) -> str:
        return decoded(self._tokenizer, ids)


class StopStrings:
    """Cuts a growing text before the stop string that is completed first. Holds back a possible start of one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        """The stop strings must not be empty."""
        self.any = bool(stops)
        """Whether there are stop strings."""
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
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """Returns the text that was held back, since it did not become a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `stop`."""
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
    ) -> None:
        """Starts after a prompt.

        Args:
            tokenizer: the target's tokenizer.
            prompt_ids: the prompt.
            stops: stop strings.
            per_token: whether to report text lengths per token, which decodes tokens one by one.
        """
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids)
        self._stops = StopStrings(stops)
        self._per_token = per_token

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self._stops.stopped

    @property
    def may_stop(self) -> bool:
        """Whether there are stop strings."""
        return self._stops.any

    def skip(self, token_ids: list[int], stop_token_ids: frozenset[int]) -> None:
        """Adds tokens whose final text was emitted before an interruption. A stop token at their end has no text."""
        visible = token_ids[:-1] if token_ids and token_ids[-1] in stop_token_ids else token_ids
        if visible:
            self.push(visible)

    def push(self, token_ids: list[int]) -> Shown:
        """Adds tokens up to the one that completes a stop string, and returns their final text."""
        if not self.may_stop and not self._per_token:
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

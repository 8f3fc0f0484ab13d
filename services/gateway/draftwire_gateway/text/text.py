"""Tokens to text, such that nothing is ever shown that would have to be taken back."""

from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
MAX_HELD = 16
"""Replacement characters that are held back because they may still become others. A tokenizer that falls back to bytes
shows every byte of a run as one until the whole run is valid."""
MAX_SILENT, KEPT_SILENT = 64, 4
"""Tokens without text that are kept, such as special ones, and how many are left of them when they are more."""
PROMPT_TOKENS = range(4, 17)
"""Tokens of the prompt that are decoded along, because some tokenizers treat the start of a text in its own way: the
fewest that do not begin inside a character."""


def decoded(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    """Returns the text of ids, special tokens left out."""
    return str(tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class IncrementalDetokenizer:
    """Decodes a growing list of ids; the pieces joined are the decoding of the whole."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: list[int]) -> None:
        """Starts after a prompt, whose text is not returned."""
        self._tokenizer = tokenizer
        tails = [prompt_ids[-length:] for length in PROMPT_TOKENS]
        self._window = next((tail for tail in tails if REPLACEMENT not in self._decode(tail)), tails[0])
        self._settled = len(self._window)  # tokens of the window that were settled before the last settled piece
        self._shown = len(self._decode(self._window))  # characters of the window's text that were returned, or prompt

    def push(self, token_ids: list[int]) -> str:
        """Adds tokens and returns the text that they make certain."""
        self._window += token_ids
        text = self._decode(self._window)
        certain = len(text)
        while certain > max(self._shown, len(text) - MAX_HELD) and text[certain - 1] == REPLACEMENT:
            certain -= 1
        piece = text[self._shown : certain]
        self._shown = max(self._shown, certain)
        if certain == len(text):  # no character is open
            if piece:  # what came before it is not needed again
                self._window = self._window[self._settled :]
                self._settled = len(self._window)
                self._shown = len(self._decode(self._window))
            elif len(self._window) - self._settled > MAX_SILENT:
                self._drop_silent(text)
        return piece

    def finish(self) -> str:
        """Returns what was held back because it could have been the start of a character."""
        text = self._decode(self._window)
        piece, self._shown = text[self._shown :], len(text)
        return piece

    def _drop_silent(self, text: str) -> None:
        """Forgets most of the last tokens if they have no text, as special ones: each round would decode all again."""
        shorter = self._window[: self._settled] + self._window[-KEPT_SILENT:]
        if self._decode(shorter) == text:
            self._window = shorter

    def _decode(self, ids: list[int]) -> str:
        return decoded(self._tokenizer, ids)


class StopStrings:
    """Cuts a growing text before the stop string that is completed first, holding back what could still become one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        """Takes the stop strings, none of them empty."""
        self.any = bool(stops)
        """Whether there is something to stop at."""
        self._stops = stops
        self._held = ""
        self.stopped = False
        """Whether a stop string was seen; no text comes after it."""

    def push(self, text: str) -> str:
        """Adds text and returns what is certain to stay."""
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
        """Returns what was held back; the text ended before it became a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0


class Shown(NamedTuple):
    """What tokens made certain of a text."""

    text: str
    num_tokens: int
    """How many of the tokens belong to it: those after one that completes a stop string do not."""
    lengths: list[int]
    """Characters that became certain with each of them; empty unless they are told apart."""


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
            tokenizer: the target's.
            prompt_ids: the prompt.
            stops: what the text ends before.
            per_token: whether it is told what each token made certain, which takes a decoding of each.
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
        """Whether there are stop strings at all."""
        return self._stops.any

    def skip(self, token_ids: list[int], stop_token_ids: frozenset[int]) -> None:
        """Adds tokens whose text was shown before, as far as it is certain. A stop token at their end has none."""
        visible = token_ids[:-1] if token_ids and token_ids[-1] in stop_token_ids else token_ids
        if visible:
            self.push(visible)

    def push(self, token_ids: list[int]) -> Shown:
        """Adds tokens up to the one that completes a stop string, and returns the text that is certain to stay."""
        if not self.may_stop and not self._per_token:
            return Shown(self._detokenizer.push(token_ids), len(token_ids), [])
        pieces: list[str] = []
        for token in token_ids:
            pieces.append(self._stops.push(self._detokenizer.push([token])))
            if self.stopped:
                break
        return Shown("".join(pieces), len(pieces), list(map(len, pieces)) if self._per_token else [])

    def finish(self) -> str:
        """Returns the rest, when no more tokens come."""
        return self._stops.push(self._detokenizer.finish()) + self._stops.finish()

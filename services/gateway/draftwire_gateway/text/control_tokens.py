"""Control tokens in the texts of a conversation: they are read as text, and only the chat template's own as tokens.

transformers encodes marked control tokens as text (`sanitize_control_tokens` of `apply_chat_template`). The marks are
set here: without regular expressions, which are slow on hostile texts, and in the keys of objects too.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import mark_control_tokens

from draftwire.errors import InvalidRequestError

MAX_MARKS = 1000
"""Most control tokens in the texts of a conversation: each is encoded by a call of its own."""

_START, _END = mark_control_tokens("x", re.compile("x")).split("x")


def is_marked(text: str) -> bool:
    """Whether a rendered conversation holds control tokens that are to be read as text.

    Raises:
        InvalidRequestError: it holds too many.
    """
    num_marks = text.count(_START)
    if num_marks > MAX_MARKS:
        raise InvalidRequestError(f"the messages hold the texts of more than {MAX_MARKS} control tokens")
    return num_marks > 0


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """Texts of the tokens that structure a conversation."""

    special: tuple[str, ...]
    """The tokenizer's special tokens."""
    of_template: tuple[str, ...]
    """These, and further added tokens that the chat template writes."""
    unreadable: frozenset[str]
    """Those of them that the tokenizer cannot read as text."""

    def marked(self, what: str, value: Any, *, special_only: bool = False) -> Any:
        """Returns a text, or objects and lists of texts, with a mark around each control token; `special_only`: added
        tokens that are not special keep their meaning. `what` names the value in error messages.

        Raises:
            InvalidRequestError: there is a control token in a key, one that cannot be read as text, or
                a character that marks are made of.
        """
        return _Marker(what, self.special if special_only else self.of_template, self.unreadable).marked(value)


@lru_cache(maxsize=4)
def control_tokens(tokenizer: PreTrainedTokenizerBase, literals: frozenset[str]) -> ControlTokens:
    """Returns the control tokens of a chat template, by the strings in its source.

    Left out are tokens that the tokenizer makes of plain text too, such as a "!" that pads: they are ordinary text.
    """
    added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
    named = set(getattr(tokenizer, "chat_control_tokens", None) or ())
    special, of_template, unreadable = [], [], set()
    for text, is_special in added.items():
        is_written = not text.isspace() and any(text in literal for literal in literals)
        if not (is_special or is_written or text in named):
            continue
        try:
            ids = tokenizer(f"{_START}{text}{_END}", add_special_tokens=False, sanitize_control_tokens=True)
        except ValueError:  # plain text of this kind gives the token as well
            continue
        if tokenizer.convert_tokens_to_ids(text) in ids["input_ids"]:
            unreadable.add(text)
        of_template.append(text)
        if is_special:
            special.append(text)
    return ControlTokens(tuple(special), tuple(of_template), frozenset(unreadable))


class _Marker:
    """Marks one value. Takes time in proportion to its length."""

    def __init__(self, what: str, tokens: tuple[str, ...], unreadable: Collection[str]) -> None:
        self._what = what
        self._tokens = tokens
        self._starts = {token[:2] for token in tokens}
        self._unreadable = unreadable

    def marked(self, value: Any) -> Any:
        match value:
            case str():
                return self._marked_text(value)
            case dict():
                if any(self._found(key) for key in value):
                    raise InvalidRequestError(f"{self._what} holds the text of a control token as a key")
                return {key: self.marked(one) for key, one in value.items()}
            case list():
                return [self.marked(one) for one in value]
        return value

    def _found(self, text: str) -> list[str]:
        """Returns the control tokens in a text."""
        if not any(start in text for start in self._starts):
            return []
        return [token for token in self._tokens if token in text]

    def _marked_text(self, text: str) -> str:
        if _START in text or _END in text:
            raise InvalidRequestError(f"{self._what} holds the characters U+F0000 or U+F0001, which are reserved")
        for token in self._found(text):
            if token in self._unreadable:
                raise InvalidRequestError(f"{self._what} holds the text of a control token")
            text = text.replace(token, f"{_START}{token}{_END}")  # one inside another breaks that one, too
        return text

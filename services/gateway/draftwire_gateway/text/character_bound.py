"""How many characters of a text a token can stand for: longer prompts are refused without being tokenised."""

import json
from math import ceil
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase

COMPOSED = 4
"""Most characters that canonical composition (NFC, NFKC) makes one of: no character decomposes into more."""
KEEPING_NORMALIZERS = frozenset({"NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"})
"""Normalizers that never make a text shorter."""
KEEPING_PRE_TOKENIZERS = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"})
"""Pre-tokenizers that drop no character."""


def characters_per_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Returns an upper bound of the characters that one token stands for; None if there is none, or none is known.

    A bound exists if every character of a text is part of some token. It does not where a tokenizer drops characters,
    such as spaces or accents, or makes one token of a run of unknown ones.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer) or any(
        token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()
    ):
        return None
    shrinks = _shrinks(_state_of(backend.normalizer))
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if shrinks is None or not _keeps(_state_of(backend.pre_tokenizer)) or not _covers(backend, vocabulary):
        return None
    return ceil(shrinks * max(map(len, vocabulary)))


def _state_of(component: Any) -> dict[str, Any]:
    """Returns a normalizer or pre-tokenizer as its JSON; a sequence of none if there is none."""
    if component is None:
        return {"type": "Sequence", "normalizers": [], "pretokenizers": []}
    state: dict[str, Any] = json.loads(component.__getstate__())
    return state


def _shrinks(normalizer: dict[str, Any]) -> float | None:
    """Returns the largest factor by which a normalizer shortens a text; None if there is no bound."""
    match normalizer:
        case {"type": "Sequence", "normalizers": parts}:
            factor = 1.0
            for part in map(_shrinks, parts):
                if part is None:
                    return None
                factor *= part
            return factor
        case {"type": "NFC" | "NFKC"}:
            return float(COMPOSED)
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content} if content:
            return max(1.0, len(pattern) / len(content))
        case {"type": kind} if kind in KEEPING_NORMALIZERS:
            return 1.0
    return None


def _keeps(pre_tokenizer: dict[str, Any]) -> bool:
    """Returns whether every character of a text is in one of the parts that a pre-tokenizer makes of it."""
    match pre_tokenizer:
        case {"type": "Sequence", "pretokenizers": parts}:
            return all(map(_keeps, parts))
        case {"type": "Split" | "Punctuation", "behavior": behavior}:
            return bool(behavior != "Removed")
        case {"type": kind}:
            return kind in KEEPING_PRE_TOKENIZERS
    return False


def _covers(backend: Tokenizer, vocabulary: dict[str, int]) -> bool:
    """Returns whether the model makes tokens of every character, none of them of more than its own characters."""
    model = backend.model
    if not isinstance(model, models.BPE):
        return False
    if model.unk_token is not None and not model.fuse_unk:
        return True
    if model.byte_fallback:
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    stages = json.dumps([_state_of(backend.normalizer), _state_of(backend.pre_tokenizer)])
    return '"ByteLevel"' in stages and vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet())

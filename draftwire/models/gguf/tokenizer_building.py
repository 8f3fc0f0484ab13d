"""Tokenizers of GGUF files. No torch here."""

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from draftwire.errors import InvalidRequestError
from draftwire.models.gguf.family import TOKENS
from draftwire.models.gguf.header import GgufHeader

KIND, SPLIT, MERGES = "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.merges"
TOKEN_KINDS, ADDS_BOS, CHAT_TEMPLATE = (
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.add_bos_token",
    "tokenizer.chat_template",
)
CONTROL, USER_DEFINED = 3, 4
"""Kinds of tokens that are found in a text before it is split; the first are no text."""
NAMED = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "pad_token": "padding_token_id"}
"""Tokens of transformers, and what ends the keys of their ids."""
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 and Qwen 2 split texts, but for how many digits they leave together."""
GPT2, SMOLLM, LLAMA3, QWEN2 = ("default", "gpt-2"), ("smollm",), ("llama-bpe", "llama3", "llama-v3"), ("qwen2",)
KNOWN_SPLITS = (*GPT2, *SMOLLM, *LLAMA3, *QWEN2)


def tokenizer_of(header: GgufHeader) -> PreTrainedTokenizerBase:
    """Returns a file's tokenizer, with its chat template.

    Raises:
        InvalidRequestError: it is of a kind that is not known, or transformers makes another number of tokens of it.
    """
    kind, tokens = header.metadata.get(KIND), header.metadata[TOKENS]
    tokenizer: PreTrainedTokenizerBase
    if kind == "gpt2":
        tokenizer = _byte_level(header, tokens)
    elif kind == "llama":
        tokenizer = AutoTokenizer.from_pretrained(
            header.path.parent, gguf_file=header.path.name, config=PretrainedConfig(), trust_remote_code=False
        )
    else:
        raise InvalidRequestError(f"{header.path} has a tokenizer of model {str(kind)[:40]!r}; known: gpt2, llama")
    if len(tokenizer) != len(tokens):
        raise InvalidRequestError(f"{header.path} has a tokenizer of {len(tokenizer)} tokens, for {len(tokens)}")
    template = header.metadata.get(CHAT_TEMPLATE)
    if isinstance(template, str):
        tokenizer.chat_template = template
    return tokenizer


def _byte_level(header: GgufHeader, tokens: Sequence[str]) -> PreTrainedTokenizerBase:
    split, merges = header.metadata.get(SPLIT, GPT2[0]), header.metadata.get(MERGES)
    if split not in KNOWN_SPLITS:
        known = ", ".join(KNOWN_SPLITS)
        raise InvalidRequestError(f"{header.path} has a tokenizer of kind {str(split)[:40]!r}; known: {known}")
    vocab = {token: number for number, token in enumerate(tokens)}
    pairs = [(first, second) for first, _, second in (str(merge).partition(" ") for merge in merges or ())]
    if len(vocab) < len(tokens) or not pairs:
        raise InvalidRequestError(f"{header.path} has a broken tokenizer: tokens twice, or no merges")
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=pairs, ignore_merges=split in LLAMA3))
    tokenizer.pre_tokenizer = _splitting(split)
    tokenizer.decoder = decoders.ByteLevel()
    if split in QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    kinds = dict(zip(tokens, header.metadata.get(TOKEN_KINDS) or (), strict=False))
    for kind, add in ((CONTROL, tokenizer.add_special_tokens), (USER_DEFINED, tokenizer.add_tokens)):
        add([AddedToken(token, normalized=False) for token in tokens if kinds.get(token) == kind])
    named = {}
    for name, key in NAMED.items():
        number = header.metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(number, int) and number < len(tokens):
            named[name] = tokens[number]
    if header.metadata.get(ADDS_BOS) is True and "bos_token" in named:
        bos = named["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0", special_tokens=[(bos, vocab[bos])]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


def _splitting(split: str) -> Any:
    """Returns what splits texts before they are merged."""
    if split in GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split in SMOLLM:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    words = Regex(WORDS % ("1,3" if split in LLAMA3 else "1"))
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )

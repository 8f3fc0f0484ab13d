"""Choices are texts, also where they look like expressions."""

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from draftwire.automaton import FormCompiler
from draftwire.structured_output import StructuredOutput

TOKENS = ["a", "b", ".", "*", "|", "(", ")", "<e>"]
STOP = 7


def ids_of(mask: NDArray[np.uint8]) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()


def test_signs_of_expressions_stand_for_themselves() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(TOKENS)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    compiler = FormCompiler(PreTrainedTokenizerFast(tokenizer_object=tokenizer), len(TOKENS), [STOP])
    automaton = compiler.compile(StructuredOutput.choice(["a.b", "a*", "b|a", "(b)"]))
    texts: set[str] = set()
    growing: list[list[int]] = [[]]
    while growing:
        ids = growing.pop()
        for token in ids_of(automaton.masks(ids)[0]):
            if token == STOP:
                texts.add("".join(TOKENS[one] for one in ids))
            else:
                growing.append([*ids, token])
        assert len(growing) + len(texts) < 100
    assert texts == {"a.b", "a*", "b|a", "(b)"}

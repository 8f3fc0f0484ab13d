"""Batched speculative decoding in one process: a drafter's step, then a target's, round after round."""

from dataclasses import dataclass
from itertools import count

import torch

from draftwire.drafting.language_model import LanguageModelDrafter
from draftwire.drafting.strategy import Draft, Drafting, DraftRequest
from draftwire.method.distributions import DraftRows, rows_of
from draftwire.method.encoding import Claim, decode_one
from draftwire.method.keys import DrawKey, Role, derive_key
from draftwire.method.quantization import Quantization
from draftwire.models.cached_model import CachedModel
from draftwire.models.kv_cache import CachedSequence
from draftwire.models.sequence_model import Reading
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.session_parameters import ALONE
from draftwire.verification import rule_named
from draftwire.verification.deciding import Judgement
from draftwire.verification.target import Judging, judge

RULE = "block"


def random_ids(count: int, vocab_size: int, seed: int) -> list[int]:
    """Returns reproducible token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count,), generator=generator).tolist()


@dataclass(frozen=True, slots=True)
class Models:
    """Target, drafter and their caches."""

    target: CachedModel
    drafter: CachedModel


@dataclass(slots=True)
class Tally:
    """Counts of judged blocks and tokens."""

    drafted: int = 0
    accepted: int = 0
    committed: int = 0
    judged: int = 0
    """Blocks, each of which is a forward pass of the target for its text."""


class Batch:
    """Sequences with different prompts, prefilled except for the last token."""

    def __init__(
        self,
        models: Models,
        prompts: list[list[int]],
        sampling: SamplingParams,
        quantization: Quantization | None = None,
        context_length: int = 4096,
    ) -> None:
        """Prefills the prompts with both models."""
        self._models, self._sampling = models, sampling
        self._drafter = LanguageModelDrafter(models.drafter, context_length, quantization=quantization)
        self.texts = [list(prompt) for prompt in prompts]
        self.tally = Tally()
        self._judged = [models.target.cache.open(text) for text in self.texts]
        self._drafted = [self._drafter.open(text, ALONE) for text in self.texts]
        self._known = [len(text) for text in self.texts]
        self._drafts: list[Draft | None] = [None] * len(prompts)
        self._blocks: list[tuple[list[int], DraftRows | None]] = [([], None)] * len(prompts)
        self._rounds = count()
        self._round = 0
        self._read(models.target, self._judged)
        self._read(models.drafter, [drafted.cached for drafted in self._drafted])

    def __enter__(self) -> "Batch":
        """Does nothing more."""
        return self

    def __exit__(self, *_: object) -> None:
        """Frees the caches' room."""
        for judged, drafted in zip(self._judged, self._drafted, strict=True):
            self._models.target.cache.close(judged)
            drafted.close()

    def calibrate(self) -> None:
        """Sends committed tokens to the drafter."""
        self._round = next(self._rounds)
        for index, text in enumerate(self.texts):
            self._drafted[index].calibrate(self._known[index], text[self._known[index] :])
            self._known[index] = len(text)

    def draft(self, block_length: int) -> None:
        """Drafts a block for each text."""
        requests = [
            DraftRequest(block_length, self._sampling, self._key(Role.DRAFTING, index), self._models.target.vocab_size)
            for index in range(len(self.texts))
        ]
        step = self._drafter.step([Drafting(*one) for one in zip(self._drafted, requests, strict=True)])
        for index, draft in enumerate(step.drafts):
            assert isinstance(draft, Draft), draft
            self._drafts[index] = draft

    def hand_over(self) -> None:
        """Encodes and decodes the blocks, as on the way to a verifier."""
        for index, draft in enumerate(self._drafts):
            assert draft is not None
            rows = rows_of(decode_one(Claim(draft.token_ids, draft.distributions), self._models.target.vocab_size))
            self._blocks[index] = (draft.token_ids, rows)

    def judge(self) -> None:
        """Judges the blocks from `hand_over`; a sequence without a block gets the target's next token."""
        rule = rule_named(RULE)
        judgings = [
            Judging(
                tokens,
                rows,
                self._sampling,
                rule,
                self._key(Role.VERIFYING, index),
                len(text),
                sequence=sequence,
                committed=text,
            )
            for index, (sequence, text, (tokens, rows)) in enumerate(
                zip(self._judged, self.texts, self._blocks, strict=True)
            )
        ]
        outcomes = judge(self._models.target, judgings).outcomes
        for text, judging, outcome in zip(self.texts, judgings, outcomes, strict=True):
            assert isinstance(outcome, Judgement), outcome
            text += outcome.token_ids
            self.tally.drafted += len(judging.draft_tokens)
            self.tally.accepted += outcome.num_accepted
            self.tally.committed += len(outcome.token_ids)
        self.tally.judged += len(judgings)

    def round(self, block_length: int) -> None:
        """Runs a round; a block length of 0 is plain decoding."""
        if block_length:
            self.calibrate()
            self.draft(block_length)
            self.hand_over()
        else:
            self._round = next(self._rounds)
        self.judge()

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return max(map(len, self.texts))

    def _read(self, model: CachedModel, sequences: list[CachedSequence]) -> None:
        """Prefills missing tokens of the prompts, except the last ones."""
        unread = [text[sequence.length : -1] for sequence, text in zip(sequences, self.texts, strict=True)]
        readings = [Reading(sequence, ids, 0) for sequence, ids in zip(sequences, unread, strict=True) if ids]
        if readings:
            model.read(readings)

    def _key(self, role: Role, index: int) -> DrawKey:
        return DrawKey(derive_key(index, role), 0, self._round)

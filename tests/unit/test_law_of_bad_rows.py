"""Where the target has no distribution after a token, blocks have the law of plain decoding, failures included."""

import copy
from collections.abc import Sequence

import torch
from cases import every
from enumeration import FAILED, Law, largest_deviation, law_of_judged_rounds
from tiny_models import tiny_network, with_exact_norms
from torch import Tensor

from draftwire.errors import UnavailableError
from draftwire.method.distributions import DenseRows
from draftwire.method.keys import DrawKey
from draftwire.models.decoders import decoder_of
from draftwire.models.kv_cache import KvCache
from draftwire.models.sequence_model import Reading
from draftwire.models.torch_models import torch_model
from draftwire.options.logprobs.session_logprobs import LogprobsReport
from draftwire.requests.logprobs import LogprobsRequest
from draftwire.requests.parameters import SamplingParams
from draftwire.verification import RULES, LawRule
from draftwire.verification.deciding import Judgement, JudgingOutcome
from draftwire.verification.target import Judging, judge
from tests.judged import judging_of

torch.set_num_threads(1)

VOCAB_SIZE, TEXT_LEN = 3, 4
PROMPT = [0, 1]
RARE = 2
"""After this token, if an odd number of tokens came before it, logits overflow."""
NETWORK = tiny_network("llama", VOCAB_SIZE, 32, seed=8)
SAMPLING = SamplingParams(3.0)


def is_bad_after(text: Sequence[int]) -> bool:
    return text[-1] == RARE and len(text) % 2 == 0


class OverflowingModel:
    """A model whose logits overflow after some texts."""

    def __init__(self) -> None:
        self.model = torch_model(decoder_of(NETWORK, "lean"), 16 * 2_000)
        self.vocab_size = VOCAB_SIZE

    @property
    def cache(self) -> KvCache:
        return self.model.cache

    def read(self, readings: Sequence[Reading]) -> Tensor:
        texts = [reading.sequence.length for reading in readings]
        logits, row = self.model.read(readings).clone(), 0
        for reading, length in zip(readings, texts, strict=True):
            for place in range(len(reading.token_ids) - reading.keep, len(reading.token_ids)):
                if reading.token_ids[place] == RARE and (length + place + 1) % 2 == 0:
                    logits[row] = torch.inf
                row += 1
        return logits


def draft_rows(text: tuple[int, ...], tokens: tuple[int, ...]) -> Tensor:
    """Returns what a drafter draws from that knows three laws, one for each last token."""
    tables = torch.tensor([[1.0, 2.0, 3.0], [4.0, 1.0, 2.0], [1.0, 1.0, 5.0]], dtype=torch.float64)
    before = [*PROMPT, *text, *tokens]
    rows = [tables[before[len(PROMPT) + len(text) + place - 1]] for place in range(len(tokens))]
    return torch.stack([row / row.sum() for row in rows]) if rows else torch.empty(0, VOCAB_SIZE, dtype=torch.float64)


@torch.inference_mode()
def plain_law() -> Law:
    """Returns the law of texts that are decoded token by token."""
    reference = with_exact_norms(copy.deepcopy(NETWORK))
    law: Law = {}
    growing: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for text, mass in growing:
        if len(text) == TEXT_LEN:
            law[text] = mass
        elif is_bad_after([*PROMPT, *text]):
            law[(*text, FAILED)] = mass
        else:
            logits = reference(input_ids=torch.tensor([[*PROMPT, *text]]), use_cache=False).logits[0, -1]
            for token, prob in enumerate((logits / SAMPLING.temperature).softmax(-1).tolist()):
                growing.append(((*text, token), mass * prob))
    return law


def ended(emitted: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
    return emitted[:TEXT_LEN], len(emitted) >= TEXT_LEN


@every(("rule", "block_length"), [("block", 0), ("block", 1), ("block", 2), ("block", 3), ("token", 3)])
def test_blocks_have_the_law_of_plain_decoding_and_fail_as_often(rule: str, block_length: int) -> None:
    """To drop a block that holds the rare token makes it rarer, and so does to fail where it was accepted."""
    chosen = RULES[rule]
    assert isinstance(chosen, LawRule)
    law = law_of_judged_rounds(OverflowingModel(), chosen, SAMPLING, block_length, PROMPT, draft_rows, ended)
    expected = plain_law()
    assert largest_deviation(law, expected) < 1e-11
    assert sum(mass for text, mass in expected.items() if text[-1] == FAILED) > 0.2
    assert law.keys() == expected.keys()


def one_block(model: OverflowingModel, rule: str, tokens: list[int], committed: list[int], seed: int = 0) -> Judging:
    sequence = model.cache.open(committed, f"{rule} {seed}")
    rows = DenseRows(draft_rows(tuple(committed[len(PROMPT) :]), tuple(tokens)).float())
    report = LogprobsReport(LogprobsRequest(logprobs=0))
    key = DrawKey(bytes(16), seed, 0)
    return judging_of(sequence, committed, tokens, rows, SAMPLING, RULES[rule], key, len(PROMPT), report=report)


@every("rule", RULES)
def test_token_before_a_bad_row_is_committed_and_the_next_round_fails(rule: str) -> None:
    """Of 200 blocks each, some are accepted up to the bad row and others are not: what those emit never reaches it."""
    model = OverflowingModel()
    reached = 0
    for seed in range(200):
        judging = one_block(model, rule, [1, RARE, 0], PROMPT, seed)
        (outcome,) = judge(model, [judging]).outcomes
        assert isinstance(outcome, Judgement)
        assert len(outcome.token_ids) == len(outcome.logprobs) == outcome.num_accepted + 1 <= 2
        assert judging.sequence.length == len(judging.committed) + outcome.num_accepted
        committed = [*judging.committed, *outcome.token_ids]
        following = judging_of(
            judging.sequence, committed, [], None, SAMPLING, judging.rule, DrawKey(bytes(16), seed, 1), len(PROMPT)
        )
        (after,) = judge(model, [following]).outcomes
        assert isinstance(after, UnavailableError) is is_bad_after(committed)
        reached += is_bad_after(committed)
        model.cache.close(judging.sequence)
    assert 0 < reached <= 200 - (rule != "typical"), "which draws nothing to decide"


def decision(outcome: JudgingOutcome) -> tuple[list[int], int]:
    assert isinstance(outcome, Judgement)
    return outcome.token_ids, outcome.num_accepted


@every("place", range(4))
def test_block_is_judged_as_if_it_ended_before_the_bad_row(place: int) -> None:
    """Beside whole blocks, whose decisions do not change."""
    model = OverflowingModel()
    tokens = [0, 1, 0, 1]
    tokens[place] = RARE
    committed = [*PROMPT] if place % 2 else [*PROMPT, 0]  # so that the place is one after which logits overflow
    whole = one_block(model, "block", [0, 1], [*PROMPT, 1], 1)
    (expected,) = judge(model, [whole]).outcomes
    parts = [one_block(model, "block", tokens, committed, 2), one_block(model, "block", [0, 1], [*PROMPT, 1], 1)]
    step = judge(model, parts)
    (decided,) = step.decided
    assert decision(step.outcomes[1]) == decision(expected)
    assert decided.blocks.lengths.tolist() == [place + 1, 2]
    assert decided.lacks_next == [True, False]
    cut = one_block(model, "block", tokens[: place + 1], committed, 2)
    assert decision(judge(model, [cut]).outcomes[0]) == decision(step.outcomes[0])

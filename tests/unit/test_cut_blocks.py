"""The law of rounds whose blocks end early: by a decision before the next draw, and never by leaving a token out.

Blocks are drawn by the real drafter, in batches of differently cut ones, and travel as bytes; its model is a table.
Every outcome of its integer draws and of the rule's numbers is enumerated.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from unittest import mock

import pytest
import torch
from test_wire_round import WireRound
from tiny_models import ExtendsByReading
from torch import Tensor

from draftwire.checking import check_round
from draftwire.checking.all_blocks import emitted_codes
from draftwire.checking.toy_models import Pair, adversarial_pairs, random_pairs
from draftwire.checking.whole_round import Ran
from draftwire.drafting import drawing, language_model
from draftwire.drafting.drawing import Drawer
from draftwire.drafting.language_model import LanguageModelDrafter
from draftwire.drafting.strategy import Draft, Drafting, DraftRequest
from draftwire.method.distributions import joined, rows_of
from draftwire.method.encoding import Claim, decode
from draftwire.method.keys import DrawKey
from draftwire.models.cached_model import appended
from draftwire.models.kv_cache import BLOCK_SIZE, CachedSequence, KvCache
from draftwire.models.sequence_model import Reading
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.session_parameters import ALONE
from draftwire.verification import RULES
from draftwire.verification.blocks import BlockBatch
from draftwire.verification.rule import FixedNoise, verify

torch.set_num_threads(1)

LOSSLESS = [name for name, rule in RULES.items() if rule.is_lossless and rule.needs_draft_probs]
KEY = DrawKey(bytes(16), 0, 0)
BLOCKS_AT_ONCE = 500
PAIRS = [(random_pairs(2)[2], 3), (random_pairs(3)[1], 2), (adversarial_pairs(3)[1], 2)]
"""With the lengths of whole blocks."""
slow = pytest.mark.slow
each_rule = pytest.mark.parametrize("rule", LOSSLESS)
one_rule_fast = pytest.mark.parametrize("rule", ["block", pytest.param("token", marks=slow)])


def pairs_with_one_fast(fast: int) -> pytest.MarkDecorator:
    marked = [pytest.param(*case, marks=[] if case is PAIRS[fast] else slow, id=case[0].name) for case in PAIRS]
    return pytest.mark.parametrize(("pair", "length"), marked)


class TableModel(ExtendsByReading):
    """Gives the logits of a table's row for the last token; one token more than the drafter may draw is the start."""

    def __init__(self, table: Tensor) -> None:
        self.vocab_size = len(table)
        self.cache = KvCache(BLOCKS_AT_ONCE * BLOCK_SIZE)
        self._logits = torch.cat([table, table.new_zeros(len(table), 1)], dim=1).log()

    def read(self, readings: Sequence[Reading], fuzzily: bool = False) -> Tensor:
        with appended(self.cache, [reading.segment for reading in readings]):
            return self._logits[torch.tensor([reading.token_ids[-1] for reading in readings if reading.keep])]

    def keep_path(self, sequence: CachedSequence, path: Sequence[int]) -> None:
        self.cache.keep_path(sequence, path)


class FuzzyTableModel(TableModel):
    """Looks into a quite different table for tokens that are drafted."""

    extends_exactly = False

    def __init__(self, table: Tensor) -> None:
        super().__init__(table)
        self._exact, self._fuzzy = self._logits, self._logits.roll(1, dims=0)

    def extend(self, sequences: Sequence[CachedSequence], token_ids: Tensor) -> Tensor:
        self._logits = self._fuzzy
        rows = super().extend(sequences, token_ids)
        self._logits = self._exact
        return rows


def cut_after(num_asked: int) -> Callable[[], bool]:
    """Says yes when it is asked for the so-manieth time."""
    count = 0

    def is_cut() -> bool:
        nonlocal count
        count += 1
        return count == num_asked

    return is_cut


class CutRound(WireRound):
    """A round whose blocks are cut after a number of draws that depends on the context before the block alone."""

    drawer: type[Drawer] = Drawer
    model: type[TableModel] = TableModel

    def cut(self, context: int) -> int:
        """Returns after how many draws."""
        return 1 + context % self.length

    def blocks(self, contexts: Tensor, uniforms: Tensor) -> list[Draft]:
        """Returns what the drafter sends after contexts."""
        model = self.model(self.pair.drafter)
        drafter = LanguageModelDrafter(model, BLOCK_SIZE, quantization=self.quantization)
        drafts: list[Draft] = []
        for start in range(0, len(contexts), BLOCKS_AT_ONCE):
            numbers = uniforms[start : start + BLOCKS_AT_ONCE]
            sequences, draftings = [], []
            for context in contexts[start : start + BLOCKS_AT_ONCE].tolist():
                is_cut = cut_after(self.cut(context))
                request = DraftRequest(self.length, SamplingParams(), KEY, self.vocab_size, is_cut=is_cut)
                sequences.append(drafter.open([context], ALONE))
                draftings.append(Drafting(sequences[-1], request))
            with (
                mock.patch.object(drawing, "uniforms", return_value=numbers),
                mock.patch.object(language_model, "Drawer", self.drawer),
            ):
                drafts += drafter.step(draftings).drafts  # type: ignore[arg-type]
            for sequence in sequences:
                sequence.close()
        return drafts

    def run(self, contexts: Tensor, uniforms: Tensor) -> Ran:
        drafting, verifying = self.shared(uniforms)
        cases, which = torch.cat([contexts.unsqueeze(1), drafting], dim=1).unique(dim=0, return_inverse=True)
        drafts = self.blocks(cases[:, 0].to(torch.int64), cases[:, 1:])
        padded = [[*draft.token_ids, *[0] * (self.length - len(draft.token_ids))] for draft in drafts]
        lengths, tokens = torch.tensor([len(draft.token_ids) for draft in drafts])[which], torch.tensor(padded)[which]
        claims = {draft.distributions: Claim(draft.token_ids, draft.distributions) for draft in drafts}
        rows = joined([rows_of(read) for read in decode(list(claims.values()), self.vocab_size)])
        ends = accumulate(len(claim.token_ids) for claim in claims.values())
        start_of = dict(zip(claims, [0, *ends], strict=False))
        starts = torch.tensor([start_of[draft.distributions] for draft in drafts])[which]
        within = torch.minimum(torch.arange(self.length), lengths.unsqueeze(1) - 1)
        numbers = contexts
        for position in range(self.length):
            numbers = numbers * self.vocab_size + tokens[:, position]
        blocks = BlockBatch(
            self.target_rows.flatten(0, 1),
            rows,
            tokens,
            lengths,
            numbers.unsqueeze(1) * (self.length + 1) + torch.arange(self.length + 1),
            starts.unsqueeze(1) + within,
        )
        codes = emitted_codes(blocks, verify(self.rule, blocks, FixedNoise(verifying)))
        return Ran(numbers % self.vocab_size**self.length, codes)


@pytest.mark.slow
@each_rule
@pairs_with_one_fast(0)
def test_block_that_is_cut_by_a_counter_keeps_the_targets_law(rule: str, pair: Pair, length: int) -> None:
    """Blocks of one to all tokens in the same batches."""
    report = check_round(CutRound(RULES[rule], pair, length))
    assert report.is_exact
    assert report.deviation < 1e-11


class FuzzyRound(CutRound):
    """A round whose draft tokens but the first come from an approximation of the drafter's model."""

    model = FuzzyTableModel


@pytest.mark.slow
@one_rule_fast
@pairs_with_one_fast(1)
def test_block_that_is_drafted_from_an_approximation_keeps_the_targets_law(rule: str, pair: Pair, length: int) -> None:
    """The law of every token is what is sent, however it came about."""
    report, exact = check_round(FuzzyRound(RULES[rule], pair, length)), check_round(CutRound(RULES[rule], pair, length))
    assert report.is_exact
    assert report.deviation < 1e-11
    assert abs(report.accepted - exact.accepted) > 1e-3, "the approximation is one"


@pytest.mark.slow
@pytest.mark.parametrize("cut", [2, *(pytest.param(cut, marks=slow) for cut in (0, 1))])
def test_cut_round_is_a_shorter_round(cut: int) -> None:
    """Whose law is proved without the drafter elsewhere."""
    pair = random_pairs(2)[2]
    whole = CutRound(RULES["block"], pair, 3)
    whole.cut = lambda context: cut  # type: ignore[method-assign]
    expected = WireRound(RULES["block"], pair, cut or 3)
    assert check_round(whole).accepted == pytest.approx(check_round(expected).accepted, abs=1e-12)


class EndsAfterAToken(Drawer):
    """Draws nothing more behind a certain token."""

    def num_left(self, block: int) -> int:
        return 0 if self.token_ids(block)[-1:] == [0] else super().num_left(block)


class LeavesOutAToken(Drawer):
    """Ends a block before a certain token, which it has drawn: the cut is decided by the token that it leaves out."""

    def draw(self, members: Sequence[int], probs: Tensor) -> Tensor:
        tokens = super().draw(members, probs)
        for block in members:
            if self.token_ids(block)[1:] and self.token_ids(block)[-1] == 0:
                self.left_out.add(block)
        return tokens

    def _lengths(self) -> list[int]:
        return [length - (block in self.left_out) for block, length in enumerate(super()._lengths())]

    def num_left(self, block: int) -> int:
        return 0 if block in self.left_out else super().num_left(block)

    @property
    def left_out(self) -> set[int]:
        return self.__dict__.setdefault("_left_out", set())


def deviation(rule: str, drawer: type[Drawer]) -> float:
    whole = CutRound(RULES[rule], random_pairs(2)[2], 3)
    whole.cut = lambda context: 0  # type: ignore[method-assign]
    whole.drawer = drawer
    return check_round(whole).deviation


@pytest.mark.slow
@one_rule_fast
def test_block_that_ends_behind_a_token_for_its_value_keeps_the_law(rule: str) -> None:
    """What has been drawn stays in the block, and what comes next is not drawn yet."""
    assert deviation(rule, EndsAfterAToken) < 1e-11


@one_rule_fast
def test_block_that_ends_before_a_token_for_what_it_is_is_found(rule: str) -> None:
    assert deviation(rule, LeavesOutAToken) > 1e-3

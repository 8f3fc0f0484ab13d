"""What a draft states is what its tokens were drawn from: its bytes and the same random numbers give them again."""

import math
from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch
from cases import every
from host_reads import host_reads
from torch import Tensor

from draftwire.drafting.drawing import NOISE_AT_ONCE, BlockStart, Drawer
from draftwire.drafting.strategy import Draft, DraftRequest
from draftwire.errors import DraftwireError, UnavailableError
from draftwire.method.distributions import WHOLE_ROW, draw, race
from draftwire.method.encoding import (
    DENSE_FORMATS,
    TOTAL_WEIGHT,
    Claim,
    Decoded,
    DenseProbs,
    DraftDistributions,
    Supports,
    decode_one,
)
from draftwire.method.keys import DrawKey, Role, derive_key
from draftwire.method.quantization import Encoding, Quantization
from draftwire.method.randomness import exponentials, uniforms
from draftwire.requests.parameters import SamplingParams

torch.set_num_threads(1)

TARGET = 1200
GREEDY = SamplingParams(temperature=0.0)
EVERY_QUANTIZATION = every(
    "quantization",
    [Quantization(), Quantization(mass=1.0, max_support=256), *(Quantization(encoding) for encoding in DENSE_FORMATS)],
)


CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Drawn:
    """Blocks that were drawn side by side."""

    starts: list[BlockStart]
    probs: list[list[Tensor]]
    """`[target_vocab]` of each token of each block."""
    drafts: list[Draft | DraftwireError]

    def draft(self, block: int) -> Draft:
        draft = self.drafts[block]
        assert isinstance(draft, Draft)
        return draft

    def decoded(self, block: int) -> Decoded:
        draft = self.draft(block)
        return decode_one(Claim(draft.token_ids, draft.distributions), self.probs[block][0].shape[0])

    def uniforms(self, block: int) -> list[float]:
        return uniforms([self.starts[block].request.key], len(self.draft(block).token_ids))[0].tolist()


def start(
    number: int, num_tokens: int, vocab_size: int, *, is_coupled: bool = False, greedy: bool = False, probs: bool = True
) -> BlockStart:
    key = DrawKey(derive_key(number, Role.DRAFTING), choice=1, round=number + 3)
    sampling = GREEDY if greedy else SamplingParams()
    request = DraftRequest(num_tokens, sampling, key, TARGET, is_coupled=is_coupled, needs_probs=probs)
    return BlockStart(request, vocab_size, position=10 * number)


def drawn(
    starts: list[BlockStart], quantization: Quantization, seed: int = 0, target: int = TARGET, spread: float = 3.0
) -> Drawn:
    """Draws all blocks; at each step the unfinished ones, in another order each time."""
    generator = torch.Generator().manual_seed(seed)
    drawer, rows = Drawer(starts, quantization, CPU), [list[Tensor]() for _ in starts]
    while members := [block for block in range(len(starts)) if drawer.num_left(block)]:
        members = [members[place] for place in torch.randperm(len(members), generator=generator).tolist()]
        probs = torch.zeros(len(members), target)
        for row, block in zip(probs, members, strict=True):
            logits = spread * torch.randn(starts[block].vocab_size, generator=generator)
            row[: len(logits)] = logits.softmax(dim=0)
            if starts[block].request.sampling.greedy:
                row[:] = torch.nn.functional.one_hot(row.argmax(), target)
            rows[block].append(row.clone())
        assert [drawer.position(block) for block in members] == [
            starts[block].position + len(rows[block]) - 1 for block in members
        ]
        drawer.draw(members, probs)
    return Drawn(starts, rows, drawer.drafts())


def mixed() -> list[BlockStart]:
    """Blocks of all kinds, vocabularies and lengths."""
    kinds = [{}, {"is_coupled": True}, {"greedy": True}, {"probs": False}, {"greedy": True, "probs": False}]
    sizes = [TARGET, 7, 200, 256, 257, 1000]
    return [
        start(number, 1 + number * 7 % 5, sizes[number % len(sizes)], **kinds[number % len(kinds)])
        for number in range(60)
    ]


def is_drawn(block: BlockStart) -> bool:
    """Whether it is drawn from what it states."""
    return block.request.needs_probs and not block.request.is_coupled and not block.request.sampling.greedy


def assert_replays(blocks: Drawn, block: int) -> None:
    """Draws from the decoded bytes with the block's numbers, in plain Python where the weights are integers."""
    decoded, tokens, numbers = blocks.decoded(block), blocks.draft(block).token_ids, blocks.uniforms(block)
    if isinstance(decoded, Supports):
        for ids, weights, number, token in zip(
            decoded.token_ids.tolist(), decoded.weights.tolist(), numbers, tokens, strict=True
        ):
            place = next(place for place, end in enumerate(accumulate(weights)) if end > number * TOTAL_WEIGHT)
            assert ids[place] == token
    else:
        assert draw(torch.from_numpy(decoded.probs).double(), torch.tensor(numbers).double()).tolist() == tokens


@every("kind", [{}, {"is_coupled": True}, {"greedy": True}, {"probs": False}])
def test_many_blocks_wait_for_the_device_as_often_as_one(kind: dict[str, bool]) -> None:
    found = list[list[str]]()
    for count in (1, 9):
        starts = [start(number, 4, 200, **kind) for number in range(count)]
        rows = torch.rand(4, count, TARGET).index_fill_(2, torch.arange(200, TARGET), 0.0)
        drawer = Drawer(starts, Quantization(), CPU)
        with host_reads() as reads:
            for row in rows:
                drawer.draw(range(count), row / row.sum(1, keepdim=True))
            drawer.drafts()
        found.append(reads)
    assert found[0] == found[1]
    assert 1 < len(found[0]) < 12


@EVERY_QUANTIZATION
@every("seed", range(3))
def test_tokens_follow_from_bytes_and_numbers_in_a_batch_of_all_kinds(quantization: Quantization, seed: int) -> None:
    starts = mixed()
    blocks = drawn(starts, quantization, seed)
    for number, block in enumerate(starts):
        draft = blocks.draft(number)
        assert len(draft.token_ids) == block.request.num_tokens
        assert draft.distributions.vocab_size == block.vocab_size
        assert max(draft.token_ids) < block.vocab_size
        if is_drawn(block):
            assert draft.distributions.encoding is quantization.encoding
            assert_replays(blocks, number)
        else:
            stated = Encoding.ONE_HOT if block.request.needs_probs else Encoding.NONE
            assert draft.distributions == DraftDistributions(stated, block.vocab_size)


@EVERY_QUANTIZATION
def test_a_block_is_drawn_alike_beside_any_others(quantization: Quantization) -> None:
    starts = mixed()
    blocks = drawn(starts, quantization)
    for number, block in enumerate(starts):
        alone = Drawer([block], quantization, CPU)
        for row in blocks.probs[number]:
            alone.draw([0], row.unsqueeze(0))
        assert alone.drafts() == [blocks.drafts[number]]


def test_sparse_block_states_the_likeliest_tokens_of_each_position() -> None:
    quantization = Quantization(mass=0.9, max_support=16)
    blocks = drawn([start(number, 4, 1000) for number in range(5)], quantization)
    for number in range(5):
        decoded = blocks.decoded(number)
        assert isinstance(decoded, Supports)
        for row, ids, weights in zip(
            blocks.probs[number], decoded.token_ids.tolist(), decoded.weights.tolist(), strict=True
        ):
            used = [token for token, weight in zip(ids, weights, strict=True) if weight]
            assert used == row.topk(len(used)).indices.tolist()
            held = float(row[used].double().sum())
            assert held >= 0.9 or len(used) == 16


@every("encoding", DENSE_FORMATS)
def test_dense_block_states_all_probabilities_as_they_were_rounded(encoding: Encoding) -> None:
    blocks = drawn([start(number, 3, 500) for number in range(3)], Quantization(encoding))
    for number in range(3):
        probs = torch.stack(blocks.probs[number])[:, :500].numpy()
        assert blocks.draft(number).distributions.data == probs.astype(DENSE_FORMATS[encoding]).tobytes()


def assert_falls_where_stated(blocks: Drawn, block: int) -> None:
    """Each number must fall where the stated law puts it, but for 1e-5 of it at the borders, for rounding."""
    decoded = blocks.decoded(block)
    assert isinstance(decoded, DenseProbs)
    law = torch.from_numpy(decoded.probs).double()
    ends = (law / law.sum(dim=1, keepdim=True)).cumsum(dim=1)
    for row, token, uniform in zip(ends, blocks.draft(block).token_ids, blocks.uniforms(block), strict=True):
        assert (float(row[token - 1]) if token else 0.0) - 1e-5 <= uniform <= float(row[token]) + 1e-5


@every("encoding", DENSE_FORMATS)
@every("vocab_size", [TARGET, WHOLE_ROW + 1000])
def test_dense_tokens_are_drawn_from_the_stated_numbers(encoding: Encoding, vocab_size: int) -> None:
    starts = [start(number, 16, vocab_size) for number in range(40)]
    blocks = drawn(starts, Quantization(encoding), target=vocab_size, spread=0.5)
    for number in range(40):
        assert_falls_where_stated(blocks, number)


@every("encoding", DENSE_FORMATS)
def test_dense_tokens_are_drawn_after_rounding(encoding: Encoding) -> None:
    """In float16 one half of the law is rounded down, the other up: a border moves by half a token in the middle."""
    step = 2.0**-10  # of float16, relative to a power of 2
    law = torch.full((2048,), 1.0 / 2048)
    law[:1024] *= 1.0 + 0.49 * step
    law[1024:] *= 1.0 + 0.51 * step
    starts, rows = [start(5, 64, 2048)], [law] * 64
    drawer = Drawer(starts, Quantization(encoding), CPU)
    for row in rows:
        drawer.draw([0], row.unsqueeze(0).clone())
    assert_falls_where_stated(Drawn(starts, [rows], drawer.drafts()), 0)


@EVERY_QUANTIZATION
@every("noise_at_once", [1, 25 * TARGET, 2**21])
def test_unstated_tokens_are_the_likeliest_the_winners_or_drawn_from_all(
    monkeypatch: pytest.MonkeyPatch, quantization: Quantization, noise_at_once: int
) -> None:
    """Greedy ones, coupled ones, and those that nobody asks about."""
    monkeypatch.setitem(NOISE_AT_ONCE, "cpu", noise_at_once)  # one place of a block, two of each or all of them
    blocks = drawn([block for block in mixed() if not is_drawn(block)], quantization)
    for number, block in enumerate(blocks.starts):
        rows, tokens = torch.stack(blocks.probs[number]), blocks.draft(number).token_ids
        if block.request.is_coupled:
            words = torch.tensor([block.request.key.text_words] * len(rows))
            positions = block.position + torch.arange(len(rows))
            assert tokens == race(rows, exponentials(words, positions, TARGET)).winners.tolist()
        elif block.request.sampling.greedy:
            assert tokens == rows.argmax(dim=1).tolist()
        else:
            assert tokens == draw(rows, torch.tensor(blocks.uniforms(number)).double()).tolist()


@EVERY_QUANTIZATION
def test_block_states_what_it_drew_and_is_an_error_if_nothing_was_drawn(
    quantization: Quantization,
) -> None:
    starts = [start(0, 5, 7), start(1, 5, 300), start(2, 5, 300), start(3, 5, 300)]
    drawer, probs = Drawer(starts, quantization, CPU), torch.zeros(2, TARGET)
    probs[:, :300] = (torch.arange(300) + 1.0) / math.fsum(range(301))
    drawer.draw([3, 1], probs)
    drawer.draw([1], probs[1:])
    assert [drawer.num_left(block) for block in range(4)] == [5, 3, 5, 4]
    blocks = Drawn(starts, [list(probs)] * 4, drawer.drafts())
    for number, length in enumerate([0, 2, 0, 1]):
        if length:
            assert len(blocks.draft(number).token_ids) == length
            assert_replays(blocks, number)
        else:
            assert isinstance(blocks.drafts[number], UnavailableError)


@every("num_tokens", [2, 3])
@every("cut_after", [1, 2, 3, 9])
@every("bad", [1, 2, 9])
def test_block_is_whole_unless_it_was_cut_where_a_token_could_follow(num_tokens: int, cut_after: int, bad: int) -> None:
    """It is cut after some draws, and a row is no distribution: that of the first token is one."""
    block = start(1, num_tokens, TARGET)
    count = 0

    def is_cut() -> bool:
        return count >= cut_after

    drawer = Drawer([replace(block, request=replace(block.request, is_cut=is_cut))], Quantization(), CPU)
    goes_on = True
    while goes_on:
        drawer.draw([0], torch.full((1, TARGET), math.nan if count == bad else 1.0 / TARGET))
        count += 1
        goes_on = drawer.goes_on(0)
    assert count == min(num_tokens, cut_after)
    (draft,) = drawer.drafts()
    assert isinstance(draft, Draft)
    assert len(draft.token_ids) == min(count, bad)
    assert draft.is_whole == (cut_after >= num_tokens or bad < count)


def test_no_blocks_give_no_drafts() -> None:
    assert Drawer([], Quantization(), CPU).drafts() == []

"""The law of rounds whose token trees are drawn from integer weights, sent as bytes, and judged as received."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from draftwire.audit import AuditSums, audit_sums
from draftwire.checking.all_trees import AllTrees, all_trees, stated_tree_emissions
from draftwire.checking.emissions import completed_law, largest_deviation, sequence_law
from draftwire.checking.toy_models import Pair, adversarial_pairs, random_pairs
from draftwire.checking.wire_rounds import COARSE, FINE, quantized
from draftwire.method.distributions import SparseRows, joined, rows_of
from draftwire.method.encoding import TOTAL_WEIGHT, Supports, encode_sparse
from draftwire.method.rounds import DraftBlock, Fence, ReceivedBlock
from draftwire.options.trees.token_tree import ROOT, TokenTree
from draftwire.options.trees.traversal import TraversalRule
from draftwire.runtime import messages
from draftwire.v1 import session_pb2
from draftwire.verification import TreeBatch

SHAPES = [TokenTree((-1, -1, 0, 0)), TokenTree((-1, 0, 0, 2)), TokenTree((-1, -1, -1))]
PAIRS = [random_pairs(3)[1], random_pairs(3)[3], adversarial_pairs(3)[2]]
FENCE = Fence(1, 0, 0, 5, 7)
VOCAB_SIZE = 3


def drawn(pair: Pair, shape: TokenTree) -> AllTrees:
    """Returns every tree that can be drawn from the pair's integer weights, in which each node is there."""
    return all_trees(pair, shape, is_distinct=True)


def message_of(trees: AllTrees, index: int) -> session_pb2.DraftBlock:
    """Returns what a drafter sends of one of these trees."""
    batch = trees.batch
    shape, pair = batch.shapes[index], trees.pair
    rows = {parent: int(batch.draft_rows[index, node]) for node, parent in enumerate(shape.parents)}
    weights = (pair.drafter[[rows[node] for node in shape.inner_nodes]] * TOTAL_WEIGHT).round().to(torch.int64)
    weights, ids = weights.sort(dim=1, descending=True)
    (stated,) = encode_sparse(Supports(ids.numpy(), weights.numpy(), VOCAB_SIZE), [len(shape.inner_nodes)])
    tokens = batch.draft_tokens[index, : len(shape)].tolist()
    return messages.block_to_proto(DraftBlock(FENCE, tokens, stated, parents=shape.parents))


def received(trees: AllTrees) -> list[ReceivedBlock]:
    wires = [message_of(trees, index).SerializeToString() for index in range(len(trees.contexts))]
    blocks = [session_pb2.DraftBlock.FromString(wire) for wire in wires]
    return messages.blocks_from_proto(blocks, 1, VOCAB_SIZE, 4, 8)


def batch_of(trees: AllTrees, blocks: Sequence[ReceivedBlock]) -> TreeBatch:
    """Returns what is judged of received trees, with the target's rows."""
    shapes = [block.tree for block in blocks if block.tree is not None]
    assert len(shapes) == len(blocks)
    targets, starts = [], []
    for index, shape in enumerate(shapes):
        starts.append(sum(map(len, targets)))
        targets.append(trees.pair.target[trees.batch.target_rows[index, : len(shape) + 1]])
    rows = [rows_of(block.draft) for block in blocks]  # type: ignore[arg-type]
    return TreeBatch.packed(torch.cat(targets), rows, [block.token_ids for block in blocks], shapes, starts)


def deviation(trees: AllTrees, batch: TreeBatch) -> float:
    law = stated_tree_emissions(TraversalRule(), replace(trees, batch=batch))
    reference = sequence_law(trees.pair.target, trees.shape.depth + 1)
    return largest_deviation(completed_law(law, reference), reference)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape.parents))
@pytest.mark.parametrize("quantization", [COARSE, FINE], ids=["coarse", "fine"])
def test_drawn_trees_through_bytes_keep_the_targets_law(shape: TokenTree, quantization) -> None:
    """Where few tokens are possible, some children are not there."""
    for pair in PAIRS:
        trees = drawn(quantized(pair, quantization), shape)
        assert deviation(trees, batch_of(trees, received(trees))) < 1e-9


def test_mistakes_of_who_reads_a_tree_are_found() -> None:
    """Parents that are not read, siblings that are not told apart, and rows of other tokens."""
    shape = TokenTree((-1, -1, 1, 1))
    trees = drawn(quantized(PAIRS[0], FINE), shape)
    blocks = received(trees)
    right = batch_of(trees, blocks)
    assert deviation(trees, right) < 1e-9
    swapped = [
        SparseRows(rows.token_ids.flip(0), rows.probs.flip(0), VOCAB_SIZE)
        for rows in (rows_of(block.draft) for block in blocks)  # type: ignore[arg-type]
    ]
    other_shape = tuple(TokenTree((-1, -1, 0, 0)) for _ in blocks)
    for wrong in (
        replace(right, shapes=other_shape),
        replace(right, is_distinct=False),
        replace(right, draft=joined(swapped)),
    ):
        assert deviation(trees, wrong) > 1e-4


@pytest.mark.parametrize("is_dense", [False, True], ids=["sparse", "dense"])
def test_audit_of_honest_trees_sums_to_nothing_and_of_others_to_more(*, is_dense: bool) -> None:
    """The mean over all trees that can be drawn, exactly. A drafter whose siblings are drawn again, or by other rows,
    is seen.
    """
    shape = TokenTree((-1, -1, 1, 1))
    trees = drawn(quantized(PAIRS[1], FINE), shape)
    batch = trees.batch if is_dense else batch_of(trees, received(trees))
    honest = mean_of(trees, batch)
    assert abs(honest.acceptance_sum) < 1e-6
    assert abs(honest.surprise_sum) < 1e-6
    assert honest.acceptance_variance > 0.01
    sums = mean_of(trees, replace(batch, is_distinct=False))
    assert abs(sums.surprise_sum) > 0.01


def mean_of(trees: AllTrees, batch: TreeBatch) -> AuditSums:
    """Returns the audit sums of all trees, weighted by how often they are drawn at the start of a text."""
    is_start = trees.contexts == trees.pair.vocab_size
    index = is_start.nonzero().squeeze(1)
    chosen, probs = batch.chosen(index.tolist()), trees.probs[index].tolist()
    total = AuditSums()
    for tree, prob in enumerate(probs):
        sums = sum(audit_sums(chosen.drawn_one_by_one(tree)), AuditSums())
        total += AuditSums(
            sums.num_positions,
            *(prob * value for value in (sums.acceptance_sum, sums.acceptance_variance)),
            *(prob * value for value in (sums.surprise_sum, sums.surprise_variance)),
        )
    return total


def test_nodes_that_are_audited_are_drawn_from_what_their_siblings_left() -> None:
    trees = drawn(quantized(PAIRS[0], FINE), TokenTree((-1, -1, -1)))
    batch = batch_of(trees, received(trees))
    for tree in range(0, batch.batch_size, 3):
        one_by_one = batch.drawn_one_by_one(tree)
        rows, tokens = one_by_one.draft.dense(), one_by_one.draft_tokens[:, 0]
        assert rows.sum(dim=1).tolist() == pytest.approx([1.0] * 3)
        for node in range(3):
            assert rows[node, tokens[:node]].tolist() == [0.0] * node
            assert rows[node, tokens[node]] > 0.0
        assert one_by_one.target_rows[:, 0].tolist() == batch.target_rows[tree, [ROOT + 1] * 3].tolist()

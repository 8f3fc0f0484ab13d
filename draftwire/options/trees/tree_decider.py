"""Decides about token trees, in the place of what `draftwire.verification.deciding` does for chains."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwire.errors import InvalidRequestError
from draftwire.method.block_shape import BlockShape
from draftwire.options.trees.token_tree import TokenTree
from draftwire.options.trees.tree_choice import tree_rule_for
from draftwire.options.trees.tree_rule import verify_trees
from draftwire.options.trees.trees import TreeBatch
from draftwire.requests.automaton import Automaton, BlockMasks
from draftwire.verification.deciding import DecidedShapes, Judgement, ScoredBlock, near_tie_bounds
from draftwire.verification.rule import KeyedNoise


class TreeDecider:
    """The `ShapeDecider` of trees."""

    rule_for = staticmethod(tree_rule_for)

    def decide(
        self, members: Sequence[ScoredBlock], target_probs: Tensor, near_tie: float, decided: list[DecidedShapes]
    ) -> dict[int, Judgement]:
        """Applies the members' rule for trees; see `ShapeDecider.decide`."""
        cases, device = [one.case for one in members], target_probs.device
        shapes = [case.tree for case in cases if isinstance(case.tree, TokenTree)]
        noise = KeyedNoise([case.key for case in cases], [case.num_committed for case in cases], device)
        trees = TreeBatch.packed(
            target_probs,
            [one.draft for one in members],
            [case.draft_tokens for case in cases],
            shapes,
            [one.first_row for one in members],
        )
        ends = [{row - 1 for row in one.bad_rows} for one in members]
        rule = self.rule_for(cases[0].rule, cases[0].sampling)
        if rule.needs_draft_probs:
            kept = [shape.ended_at(end) for shape, end in zip(shapes, ends, strict=True)]
            decided.append(DecidedShapes([one.index for one in members], trees.cut(kept) if any(ends) else trees))
        if cases[0].is_used:
            outcome = verify_trees(rule, trees, noise, ends)
        else:
            outcome = verify_trees(rule, trees.cut([()] * len(cases)), noise)
        near_ties = torch.zeros_like(outcome.last_nodes)
        if outcome.leads is not None:
            near_ties = (outcome.leads < near_tie_bounds(cases, near_tie, device)).sum(dim=1)
        decisions = torch.stack([outcome.last_nodes, outcome.extra_tokens, near_ties]).tolist()  # one transfer
        judgements: dict[int, Judgement] = {}
        for one, shape, end, last_node, extra, num_near_ties in zip(members, shapes, ends, *decisions, strict=True):
            path, tokens = shape.path_to(last_node), one.case.draft_tokens
            if last_node in end:  # nothing can follow. The next round fails on that row, as plain decoding does.
                path, extra = path[:-1], tokens[last_node]
            token_ids = [*(tokens[node] for node in path), extra]
            judgements[one.index] = Judgement(token_ids, len(path), num_near_ties, path=path)
        return judgements

    def masks(
        self, automaton: Automaton, generated_ids: Sequence[int], draft_tokens: Sequence[int], shape: BlockShape
    ) -> BlockMasks:
        """Returns the masks of a tree, whose paths are followed one after the other; see `Automaton.along`."""
        assert isinstance(shape, TokenTree), "it decides about trees alone"
        leaves = [node for node in shape.post_order if not shape.children(node)]
        return masks_along_paths(automaton, generated_ids, draft_tokens, [shape.path_to(leaf) for leaf in leaves])


TREE_DECIDER = TreeDecider()


def masks_along_paths(
    automaton: Automaton, generated_ids: Sequence[int], draft_tokens: Sequence[int], paths: Sequence[Sequence[int]]
) -> BlockMasks:
    """Returns the masks of a token tree, whose paths are followed one after the other; errors as `Automaton.along`.

    Args:
        automaton: of the form.
        generated_ids: as `Automaton.along`.
        draft_tokens: the token of each node.
        paths: nodes on the way to each leaf, from the root on; best depth first, since only what differs from the
            path before is followed anew.

    Raises:
        InvalidRequestError: as `Automaton.along`.
    """
    rows: NDArray[np.uint8] | None = None
    faults: dict[int, InvalidRequestError] = {}
    followed: set[int] = set()
    for path in paths or [()]:  # of a tree without nodes there is the first place
        places = [0, *(node + 1 for node in path)]
        shared = sum(node in followed for node in path)
        followed.update(path)
        if places[shared] in faults:  # what follows has no mask either
            faults.update(dict.fromkeys(places[shared + 1 :], faults[places[shared]]))
            continue
        first_place = 0 if rows is None else shared + 1
        own = automaton.along(generated_ids, [draft_tokens[node] for node in path], first_place)
        if rows is None:
            rows = np.full((len(draft_tokens) + 1, own.rows.shape[1]), 255, dtype=np.uint8)
        rows[places[first_place:]] = own.rows[first_place:]
        faults.update({places[row]: error for row, error in own.faults.items()})
    assert rows is not None, "there is at least one path"
    return BlockMasks(rows, faults)

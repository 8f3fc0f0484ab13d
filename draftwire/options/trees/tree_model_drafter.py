"""Drafts token trees with a language model, and chains where no tree is asked for."""

import torch
from torch import Tensor
from typing_extensions import override

from draftwire.drafting.language_model import BatchMember
from draftwire.drafting.model_strategy import load_drafter
from draftwire.drafting.strategies import LoadedStrategy, StrategyContext
from draftwire.drafting.strategy import Draft
from draftwire.errors import DraftwireError
from draftwire.method.quantization import Encoding
from draftwire.options.ahead.forking_drafter import ForkingDrafter, ForkingSequence
from draftwire.options.trees.growth_plan import WantedTree
from draftwire.options.trees.tree_drafting import GrowingTree, ReadTree, TreeStart, grow
from draftwire.options.trees.tree_kinds import tree_of
from draftwire.requests.session_parameters import SessionParameters


class TreeSequence(ForkingSequence):
    """One session's tokens in the drafter's KV cache, which may end with a tree."""

    tree: ReadTree | None = None
    """The tree that ends the cache, until the next tokens are committed."""

    @override
    def calibrate(self, base_len: int, token_ids: list[int]) -> None:
        if self.tree is not None:  # the path that was committed is kept as if it had been drafted alone
            path = self.tree.path_along(token_ids) if base_len == self._num_committed else []
            self.model.keep_path(self.cached, path)
            self.ids += [self.tree.token_ids[self.tree.read[place]] for place in path]
            self.tree = None
        super().calibrate(base_len, token_ids)


class TreeModelDrafter(ForkingDrafter):
    """A causal language model that drafts trees too."""

    @override
    def open(self, token_ids: list[int], parameters: SessionParameters) -> TreeSequence:
        return TreeSequence(self.model, token_ids, parameters.cache_salt, self._substitute_id, self._calibrates)

    @property
    def draws_trees(self) -> bool:
        """Whether it can draw trees with their distributions: these are rows of integers."""
        return self._quantization.encoding is Encoding.SPARSE_UINT16

    @override
    def _draw(self, logits: Tensor, members: list[BatchMember]) -> tuple[list[Draft | DraftwireError], int]:
        places: dict[bool, list[int]] = {False: [], True: []}
        for place, member in enumerate(members):
            places[member.request.tree is not None].append(place)
        if not places[True]:
            return super()._draw(logits, members)
        rows = logits.split(1)
        own = {is_tree: [rows[place] for place in some] for is_tree, some in places.items()}
        results: dict[int, Draft | DraftwireError] = {}
        num_passes = 0
        if places[False]:
            drafts, num_passes = super()._draw(torch.cat(own[False]), [members[place] for place in places[False]])
            results |= zip(places[False], drafts, strict=True)
        trees = [self._growing(members[place]) for place in places[True]]
        num_passes += grow(self.model, trees, torch.cat(own[True]))
        for place, tree in zip(places[True], trees, strict=True):
            results[place] = tree.draft()
            sequence = members[place].sequence
            assert isinstance(sequence, TreeSequence), "it was opened here"
            sequence.tree = tree.read_tree() if tree.read else None
        return [results[place] for place in range(len(members))], num_passes

    def _growing(self, member: BatchMember) -> GrowingTree:
        sequence, request = member.sequence, member.request
        assert isinstance(request.tree, WantedTree), "of this option"
        vocab_size, edits = min(request.vocab_size, self.model.vocab_size), sequence.edits.of(request)
        start = TreeStart(request, sequence.cached, list(sequence.ids), vocab_size, edits)
        return tree_of(start, request.tree, self._quantization)


def load(_name: str, context: StrategyContext) -> LoadedStrategy:
    """Loads a language model as a strategy."""
    card, drafter = load_drafter(context, TreeModelDrafter)
    return LoadedStrategy(card, drafter)

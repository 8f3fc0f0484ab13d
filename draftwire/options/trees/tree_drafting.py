"""Drafts token trees with a language model: one forward pass for each depth, over all nodes of it that get children.

What the children of a node are depends on the rule that will decide about the tree: see
`draftwire.options.trees.tree_kinds`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from draftwire.drafting.places import mask_after
from draftwire.drafting.strategy import Draft, DraftRequest
from draftwire.errors import DraftwireError
from draftwire.method.sampling import Span, TokenEdits, first_penalized, is_distribution, probabilities_of_spans
from draftwire.models.kv_cache import CachedSequence
from draftwire.models.sequence_model import DraftModel
from draftwire.options.trees.token_tree import ROOT, TokenTree


@dataclass(frozen=True, slots=True)
class ReadTree:
    """A drafted tree, as far as it is in a sequence's cache."""

    shape: TokenTree
    token_ids: list[int]
    read: list[int]
    """The nodes that the sequence has read after its text, in this order."""

    def path_along(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the longest path of nodes whose tokens begin a text, as indices of `read`."""
        places = {node: place for place, node in enumerate(self.read)}
        node, path = ROOT, []
        for token in token_ids:
            fitting = [each for each in self.shape.children(node) if each in places and self.token_ids[each] == token]
            if not fitting:
                break
            node = fitting[0]
            path.append(places[node])
        return path


@dataclass(frozen=True, slots=True)
class TreeStart:
    """A tree before its first token."""

    request: DraftRequest
    cached: CachedSequence
    """Has read the committed tokens."""
    committed: list[int]
    """These tokens, as the model reads them."""
    vocab_size: int
    """Only ids below it may be proposed."""
    edits: TokenEdits
    """Edits of the request's logits."""


@dataclass(slots=True)
class GrowingTree(ABC):
    """A tree that is drafted for one sequence, depth by depth."""

    start: TreeStart
    read: list[int] = field(default_factory=list, init=False)
    """Nodes that were read, in this order."""

    @abstractmethod
    def inner(self, depth: int) -> list[int]:
        """Returns the nodes of a depth that get children; `ROOT` is of depth 0. None if the tree ends before."""

    @abstractmethod
    def parent(self, node: int) -> int:
        """Returns the parent of a node."""

    @abstractmethod
    def tokens(self, nodes: Sequence[int], depth: int) -> Tensor:
        """Returns the tokens of nodes of a depth, `[nodes] int64` on the device."""

    @abstractmethod
    def path(self, node: int) -> list[int]:
        """Returns the tokens on the path to a node. May wait for the device."""

    @abstractmethod
    def expand(self, nodes: Sequence[int], probs: Tensor, depth: int) -> None:
        """Gives nodes of a depth their children.

        Args:
            nodes: of `inner`.
            probs: `[nodes, vocab] float32`, the drafter's distributions after them; 0 where they are none.
            depth: of the nodes.
        """

    @abstractmethod
    def draft(self) -> Draft | DraftwireError:
        """Returns the tree without the nodes that cannot be right; an error if none is left. Waits for the device."""

    @abstractmethod
    def read_tree(self) -> ReadTree:
        """Returns what is in the cache."""

    def spans(self, nodes: Sequence[int], depth: int) -> list[Span]:
        """Returns the positions after some nodes of a depth."""
        start, request, sampling = self.start, self.start.request, self.start.request.sampling
        if sampling.greedy:  # one-hot rows would rank only one token
            sampling = replace(sampling, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
        position, stops = len(start.committed) + depth, request.stop_token_ids
        if not sampling.penalizes and request.automaton is None:
            return [Span(sampling, 1, (), request.prompt_len, stops, position, edits=start.edits)] * len(nodes)
        paths = [self.path(node) for node in nodes]
        found = [mask_after(request, start.committed, path) for path in paths]
        known = next((mask for mask in found if mask is not None), None)
        masks = None
        if known is not None:  # where the form cannot be followed, every token is allowed
            masks = np.concatenate([np.full_like(known, 255) if mask is None else mask for mask in found])
        first = first_penalized(sampling, request.prompt_len)
        text = start.committed[first:] if sampling.penalizes else ()
        prompt_len, text_len = request.prompt_len - first, len(start.committed) - first
        return [Span(sampling, len(nodes), text, prompt_len, stops, text_len, masks, start.edits, paths)]


def grow(model: DraftModel, trees: Sequence[GrowingTree], logits: Tensor) -> int:
    """Drafts the tokens of trees; returns the number of forward passes.

    Args:
        model: the drafter's.
        trees: without nodes.
        logits: `[trees, vocab]`, after the committed tokens of each.
    """
    growing, depth = [(tree, tree.inner(0)) for tree in trees], 0
    while growing:
        rows = _distributions(growing, logits, depth).split([len(nodes) for _, nodes in growing])
        for (tree, nodes), probs in zip(growing, rows, strict=True):
            tree.expand(nodes, probs, depth)
        depth += 1
        growing = [(tree, nodes) for tree in trees if (nodes := tree.inner(depth))]
        if growing:
            logits = _read(model, growing, depth)
    return depth - 1


def _read(model: DraftModel, growing: Sequence[tuple[GrowingTree, list[int]]], depth: int) -> Tensor:
    """Reads nodes of a depth, which get children, and returns the logits after them, `[nodes, vocab]`."""
    tokens, parents = [], []
    for tree, nodes in growing:
        tokens.append(tree.tokens(nodes, depth))
        before = {node: place for place, node in enumerate(tree.read)}
        parents.append(tuple(before.get(tree.parent(node), ROOT) for node in nodes))
        tree.read += nodes
    return model.extend([tree.start.cached for tree, _ in growing], torch.cat(tokens), parents)


def _distributions(growing: Sequence[tuple[GrowingTree, list[int]]], logits: Tensor, depth: int) -> Tensor:
    """Returns the distributions after nodes of a depth, `[nodes, vocab] float32`; 0 where there are none."""
    spans: list[Span] = []
    for (tree, nodes), rows in zip(growing, logits.split([len(nodes) for _, nodes in growing]), strict=True):
        if tree.start.vocab_size < rows.shape[1]:
            rows[:, tree.start.vocab_size :] = -torch.inf
        spans += tree.spans(nodes, depth)
    probs = probabilities_of_spans(logits, spans).float()
    return torch.where(is_distribution(probs).unsqueeze(1), probs, 0.0)

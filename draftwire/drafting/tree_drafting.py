"""Drafts token trees with a language model: one forward pass for each depth, over all nodes of it that get children.

The children of a node are the tokens that come first in the race of their position, under a coupled rule, or the
likeliest ones of a greedy text, as many as the requested shape has. Which tokens they are, and whether some are left
out afterwards, does not matter to the text: rules that walk a tree look the target's own tokens up in it, whatever it
is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from draftwire.drafting.places import mask_after
from draftwire.drafting.strategy import Draft, DraftRequest
from draftwire.errors import DraftwireError, UnavailableError
from draftwire.method.devices import upload
from draftwire.method.encoding import DraftDistributions
from draftwire.method.quantization import Encoding
from draftwire.method.randomness import exponentials
from draftwire.method.sampling import Span, TokenEdits, is_distribution, probabilities_of_spans
from draftwire.method.token_tree import ROOT, TokenTree
from draftwire.models.cached_model import DraftModel
from draftwire.models.kv_cache import CachedSequence


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


@dataclass(slots=True)
class GrowingTree:
    """A tree that is drafted for one sequence."""

    request: DraftRequest
    shape: TokenTree
    """That it asks for."""
    cached: CachedSequence
    """Has read the committed tokens."""
    committed: list[int]
    """These tokens, as the model reads them."""
    vocab_size: int
    """Only ids below it may be proposed."""
    edits: TokenEdits
    """Of the request."""
    read: list[int] = field(default_factory=list)
    """Nodes that were read."""
    tokens: list[Tensor] = field(default_factory=list)
    """`[nodes] int64` of each depth, on the device."""
    is_cut: bool = False
    """Whether it ends with the depth that it has."""
    is_possible: list[Tensor] = field(default_factory=list)
    """`[nodes] bool` of each depth: whether their rows were distributions in which the tokens are not impossible."""

    def inner(self, depth: int) -> list[int]:
        """Returns the nodes of a depth that get children; `ROOT` is of depth 0. None if the tree is cut."""
        self.is_cut = self.is_cut or (depth > 0 and self.request.is_cut())
        if self.is_cut:
            return []
        depths = (0, *self.shape.depths)
        return [node for node in self.shape.inner_nodes if depths[node + 1] == depth]

    def spans(self, nodes: Sequence[int], depth: int) -> list[Span]:
        """Returns the positions after some nodes of a depth."""
        request, sampling = self.request, self.request.sampling
        if sampling.greedy:  # one-hot rows would rank only one token
            sampling = replace(sampling, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
        position, stops = len(self.committed) + depth, request.stop_token_ids
        if not sampling.penalizes and request.automaton is None:
            return [Span(sampling, 1, (), request.prompt_len, stops, position, edits=self.edits)] * len(nodes)
        known, spans = self.token_ids(), []
        for node in nodes:
            path = [known[each] for each in self.shape.path_to(node)]
            text = [*self.committed, *path] if sampling.penalizes else ()
            mask = mask_after(request, self.committed, path)
            spans.append(Span(sampling, 1, text, request.prompt_len, stops, position, mask, self.edits))
        return spans

    def token_ids(self) -> list[int]:
        """Returns the tokens of the nodes so far. Waits for the device."""
        return [int(token) for token in torch.cat(self.tokens).tolist()] if self.tokens else []

    def draft(self) -> Draft | DraftwireError:
        """Returns the tree without the nodes that cannot be right; an error if none is left. Waits for the device."""
        possible = torch.cat(self.is_possible).tolist()
        kept: list[int] = []
        for node, (parent, is_possible) in enumerate(zip(self.shape.parents, possible, strict=False)):
            if is_possible and (parent == ROOT or parent in kept):
                kept.append(node)
        if not kept:
            return UnavailableError("the draft model gave no finite logits")
        tokens, nothing = self.token_ids(), DraftDistributions(Encoding.NONE, self.vocab_size)
        return Draft([tokens[node] for node in kept], nothing, parents=self.shape.cut(kept).compact_parents)

    def read_tree(self) -> ReadTree:
        """Returns what is in the cache."""
        return ReadTree(self.shape, self.token_ids(), self.read)


def grow(model: DraftModel, trees: Sequence[GrowingTree], logits: Tensor) -> int:
    """Drafts the tokens of trees; returns the number of forward passes.

    The host waits for the device only where penalties or a form need the text.

    Args:
        model: the drafter's.
        trees: without nodes.
        logits: `[trees, vocab]`, after the committed tokens of each.
    """
    assert all(sorted(tree.shape.parents) == [*tree.shape.parents] for tree in trees), "depth by depth"
    growing, num_passes = [(tree, [ROOT]) for tree in trees], 0
    for depth in range(max((tree.shape.depth for tree in trees), default=0)):
        if depth:
            growing = [(tree, nodes) for tree in trees if (nodes := tree.inner(depth))]
            if not growing:
                break
            logits, num_passes = _read(model, growing, depth), num_passes + 1
        for (tree, nodes), ranked in zip(growing, _ranked(growing, logits, depth), strict=True):
            counts = [len(tree.shape.children(node)) for node in nodes]
            tree.tokens.append(torch.cat([row[:count] for row, count in zip(ranked.indices, counts, strict=True)]))
            scores = torch.cat([row[:count] for row, count in zip(ranked.values, counts, strict=True)])
            tree.is_possible.append(scores > 0.0)
    return num_passes


def _read(model: DraftModel, growing: Sequence[tuple[GrowingTree, list[int]]], depth: int) -> Tensor:
    """Reads nodes of a depth, which get children, and returns the logits after them, `[nodes, vocab]`."""
    tokens, parents = [], []
    for tree, nodes in growing:
        first = tree.shape.depths.index(depth)
        places = [node - first for node in nodes]
        tokens.append(tree.tokens[depth - 1][upload(places, model.device, torch.int64)])
        before = {node: place for place, node in enumerate(tree.read)}
        parents.append(tuple(before.get(tree.shape.parents[node], ROOT) for node in nodes))
        tree.read += nodes
    return model.extend([tree.cached for tree, _ in growing], torch.cat(tokens), parents)


def _ranked(
    growing: Sequence[tuple[GrowingTree, list[int]]], logits: Tensor, depth: int
) -> "list[torch.return_types.topk]":
    """Returns for each tree the tokens that its nodes' children may be, the best first: scores and ids,
    `[nodes, widest]`. Scores are 0 for impossible tokens, and in rows that are no distributions.
    """
    spans: list[Span] = []
    for tree, nodes in growing:
        rows = logits[len(spans) : len(spans) + len(nodes)]
        if tree.vocab_size < rows.shape[1]:
            rows[:, tree.vocab_size :] = -torch.inf
        spans += tree.spans(nodes, depth)
    probs = probabilities_of_spans(logits, spans)
    probs = torch.where(is_distribution(probs).unsqueeze(1), probs, 0.0).double()
    ranked = []
    for (tree, nodes), own in zip(growing, probs.split([len(nodes) for _, nodes in growing]), strict=True):
        scores = own
        if tree.request.is_coupled and not tree.request.sampling.greedy:
            words = upload([tree.request.key.text_words], own.device)
            position = upload([len(tree.committed) + depth], own.device)
            scores = own / exponentials(words, position, own.shape[1])  # all nodes of a depth share their noise
        ranked.append(scores.topk(min(max(len(tree.shape.children(node)) for node in nodes), scores.shape[1]), dim=1))
    return ranked

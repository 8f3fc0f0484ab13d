"""Drafting strategy that follows a script instead of a model; see `draftwire.models.script`."""

import time
from collections.abc import Sequence
from typing import cast

from draftwire.drafting.strategies import LoadedStrategy, StrategyContext
from draftwire.drafting.strategy import Draft, Drafting, DraftRequest, DraftStep
from draftwire.errors import DraftwireError, InvalidRequestError
from draftwire.method.encoding import DraftDistributions
from draftwire.method.quantization import Encoding
from draftwire.models.model_names import is_scripted
from draftwire.models.script import Script, expected_tokens, recovered_tokens, wait
from draftwire.options.trees.growth_plan import WantedTree
from draftwire.options.trees.token_tree import ROOT, TokenTree
from draftwire.options.trees.tree_shapes import shape_by_chances
from draftwire.requests.session_parameters import SessionParameters


class ScriptedSequence:
    """Counts the tokens of one session."""

    num_reused = 0

    def __init__(self, num_committed: int) -> None:
        """Starts with all committed tokens unread."""
        self.num_committed = num_committed
        self.num_read = 0

    @property
    def num_unread(self) -> int:
        """Committed tokens that have to be read before the next draft."""
        return self.num_committed - self.num_read

    def calibrate(self, base_len: int, token_ids: list[int]) -> None:
        """Commits tokens after the first `base_len`; drafted tokens are forgotten."""
        self.num_committed = base_len + len(token_ids)
        self.num_read = min(self.num_read, self.num_committed - 1)

    def close(self) -> None:
        """Does nothing: no resources are held."""


class ScriptedDrafter:
    """A drafting strategy that waits instead of computing, and proposes the alphabet. In a token tree the siblings of a
    letter are what the target may have in its place, so that the script says how often each is right. Trees are drafted
    where the rule walks them alone: its distributions have one token.
    """

    can_fork = True
    draws_trees = False

    def __init__(self, script: Script) -> None:
        self.context_length = script.context_length
        self._script = script

    def open(self, token_ids: list[int], parameters: SessionParameters) -> ScriptedSequence:
        """Opens a sequence whose committed tokens are `token_ids`."""
        return ScriptedSequence(len(token_ids))

    def fork(self, sequence: ScriptedSequence, base_len: int, token_ids: list[int]) -> ScriptedSequence:
        """Returns another sequence; see `ForkingStrategy.fork`."""
        fork = ScriptedSequence(base_len + len(token_ids))
        fork.num_read = base_len
        return fork

    def step(self, draftings: Sequence[Drafting]) -> DraftStep:
        """Waits as long as the script says, and proposes the alphabet for each sequence that has read its tokens."""
        started = time.perf_counter()
        num_read = 0
        members: list[tuple[int, ScriptedSequence, DraftRequest]] = []
        for index, drafting in enumerate(draftings):
            sequence = cast(ScriptedSequence, drafting.sequence)
            unread = sequence.num_unread
            taken = unread if drafting.max_read is None else min(unread, drafting.max_read)
            sequence.num_read += taken
            num_read += taken
            if drafting.request is not None and taken == unread:
                members.append((index, sequence, drafting.request))
        wait(self._script.calibration_ms / 1e3 + self._script.read_us * num_read / 1e6)
        calibrated = time.perf_counter()
        shapes = [self._shape(sequence, request) for _, sequence, request in members]
        depths = self._drawn([request for _, _, request in members], shapes)
        drafts: list[Draft | DraftwireError | None] = [None] * len(draftings)
        for (index, sequence, request), shape, depth in zip(members, shapes, depths, strict=True):
            drafts[index] = self._draft(sequence, request, shape, depth)
        return DraftStep(drafts, num_read, calibrated - started, time.perf_counter() - calibrated)

    def _shape(self, sequence: ScriptedSequence, request: DraftRequest) -> TokenTree:
        """Returns what to draft: a chain, a tree of the shape that is given, or the one that accepts most."""
        tree = request.tree
        if tree is None:
            return TokenTree.chain(request.num_tokens)
        assert isinstance(tree, WantedTree), "as drafters ask for them"
        if tree.shape is not None:
            return tree.shape
        chances = [self._script.chances_at(depth, sequence.num_committed) for depth in range(tree.depth)]
        return shape_by_chances(chances, request.num_tokens)

    def _drawn(self, requests: Sequence[DraftRequest], shapes: Sequence[TokenTree]) -> list[int]:
        """Waits as long as drawing the batch takes, a pass for each depth, and returns how deep each block is."""
        depths = [0] * len(requests)
        active = list(range(len(requests)))
        while active:
            num_rows = sum(max(1, _num_inner(shapes[index], depths[index])) for index in active)
            wait(self._script.draft_ms / 1e3 + (num_rows - 1) * self._script.draft_row_us / 1e6)
            for index in active:
                depths[index] += 1
            active = [i for i in active if depths[i] < shapes[i].depth and not requests[i].is_cut()]
        return [min(depth, shape.depth) for depth, shape in zip(depths, shapes, strict=True)]

    def _draft(self, sequence: ScriptedSequence, request: DraftRequest, shape: TokenTree, depth: int) -> Draft:
        is_whole = depth == shape.depth  # nothing but a cut ends a block before
        expected = expected_tokens(sequence.num_committed, depth)
        proposed = [[letter, *recovered_tokens(letter)] for letter in expected]
        kept: dict[int, int] = {ROOT: 0}  # each with its token
        for node in (ROOT, *range(len(shape))):
            own_depth = 0 if node == ROOT else shape.depths[node]
            if node in kept and own_depth < depth:  # more children than it thinks of are left out
                kept |= dict(zip(shape.children(node), proposed[own_depth], strict=False))
        tokens = [kept[node] for node in sorted(kept) if node != ROOT]
        shape = shape.cut(sorted(kept.keys() - {ROOT}))
        encoding = Encoding.NONE if request.tree is not None or not request.needs_probs else Encoding.ONE_HOT
        stated = DraftDistributions(encoding, min(request.vocab_size, self._script.vocab_size))
        guesses = [] if request.tree is not None else self._guesses(sequence, request, depth)
        return Draft(tokens, stated, guesses, shape.compact_parents, is_whole)

    def _guesses(self, sequence: ScriptedSequence, request: DraftRequest, length: int) -> list[list[int]]:
        if request.guesses is None:
            return []
        if not request.num_tokens:
            (expected,) = expected_tokens(sequence.num_committed, 1)
            return [[expected, *recovered_tokens(expected)][: request.guesses.most]]
        places = expected_tokens(sequence.num_committed, length)
        return [recovered_tokens(expected)[: request.guesses.most] for expected in places]


def _num_inner(shape: TokenTree, depth: int) -> int:
    """Returns how many nodes of a depth get children."""
    depths = (0, *shape.depths)  # the root's first
    return sum(depths[node + 1] == depth for node in shape.inner_nodes)


def load(_name: str, context: StrategyContext) -> LoadedStrategy:
    """Loads a script as a strategy."""
    if not is_scripted(context.model):
        raise InvalidRequestError(f"strategy scripted takes a script as its model, not {context.model!r}")
    context.require_no_weights("a scripted model")
    script = Script.parse(context.model)
    return LoadedStrategy(context.limited(script.card()), ScriptedDrafter(script))

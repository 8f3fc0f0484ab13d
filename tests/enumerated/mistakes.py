"""Mistakes that are planted in the services' sources, and how large a deviation each causes."""

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from draftwire.drafting.drawing import Drawer
from draftwire.engine import step_drafts
from draftwire.options.ahead.ahead_drafting import AheadDrafting
from draftwire.options.ahead.branch_drafter import BranchDrafter
from draftwire.options.ahead.held_blocks import HeldBlocks
from draftwire.options.confidence.confident_chains import ConfidentChains
from draftwire.verification.deciding import ScoredBlock
from draftwire_gateway.options.drafts_ahead import BegunRounds
from draftwire_gateway.session.generation import Generation
from draftwire_gateway.session.loop import GenerationLoop

LEAST_DEVIATION = 1e-2
"""Total variation that each mistake causes at least in its case."""

Edit = tuple[Any, str, str]
"""A function, a part of its source, and what stands there instead."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake, and the case in which it shows."""

    name: str
    case: str
    edits: tuple[Edit, ...]
    is_slow: bool = False
    """Whether it takes long to see."""

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Has the services run with the mistake."""
        sound = {function: function.__code__ for function, _, _ in self.edits}
        wrong = {function: self._wrong(function) for function in sound}
        try:
            for function, code in wrong.items():
                function.__code__ = code
            yield
        finally:
            for function, code in sound.items():
                function.__code__ = code

    def _wrong(self, function: Any) -> Any:
        """Returns the code of a function with its mistakes."""
        source = textwrap.dedent(inspect.getsource(function))
        for _, old, new in [edit for edit in self.edits if edit[0] is function]:
            assert source.count(old) == 1, f"{function.__qualname__} has {source.count(old)} times: {old}"
            source = source.replace(old, new)
        made: dict[str, Any] = {}
        # Decorators are left out: what they made of the function is what calls it.
        start = min(source.index(word) for word in ("async def ", "def ") if word in source)
        exec(compile(source[start:], function.__code__.co_filename, "exec"), function.__globals__, made)
        return made[function.__name__].__code__


MISTAKES = (
    Mistake(
        "a round that may have begun is asked for as plain",
        "1 ahead, 4 branches, turning to plain",
        ((BegunRounds.arm, "if not self.num_from(round_number):", "if True:"),),
    ),
    Mistake(
        "the last calibration alone says what may have begun",
        "2 ahead, 4 branches, turning to plain",
        ((BegunRounds.request, "max(self._last_round, round_number + rounds_ahead)", "round_number + rounds_ahead"),),
    ),
    Mistake(
        "a run in the place of a drafter ends before what that may have begun (1)",
        "asleep, and awake in a run, bridge 1, 1 ahead",
        ((GenerationLoop._run, "max(request.num_rounds, self._planner.num_begun)", "request.num_rounds"),),
    ),
    Mistake(
        "a run in the place of a drafter ends before what that may have begun (2)",
        "asleep, and awake in a run, bridge 2, 2 ahead",
        ((GenerationLoop._run, "max(request.num_rounds, self._planner.num_begun)", "request.num_rounds"),),
        is_slow=True,
    ),
    Mistake(
        "a run in the place of a drafter ends before what that may have begun (3)",
        "lost with a block under way, and replaced, bridge 1, 1 ahead",
        ((GenerationLoop._run, "max(request.num_rounds, self._planner.num_begun)", "request.num_rounds"),),
    ),
    Mistake(
        "a guess is drawn with the numbers of the round that is drafted for",
        "1 ahead, a guess that is right or wrong",
        (
            (BranchDrafter._drafting, "request(branch.fence.round, 0)", "request(branch.fence.round + 1, 1)"),
            (
                BranchDrafter._drafting,
                "request(branch.fence.round, branch.num",
                "request(branch.fence.round + 1000, branch.num",
            ),
            (
                AheadDrafting._end,
                "draft.guesses[0] if isinstance(draft, Draft)",
                "draft.token_ids if isinstance(draft, Draft)",
            ),
        ),
    ),
    Mistake(
        "a held block is dropped for its first token",
        "1 ahead, 4 branches, turning to plain",
        (
            (
                HeldBlocks.take,
                "is_wanted and place == _place_of(fence)",
                "is_wanted and place == _place_of(fence) and self._blocks[place].token_ids[0] != 0",
            ),
        ),
        is_slow=True,
    ),
    Mistake(
        "a late drafter is not asked for what it has drawn",
        "a drafter slow after a token",
        ((GenerationLoop._handle_timeout, "elif not self._seat.drafter.can_flush:", "elif True:"),),
    ),
    Mistake(
        "a block is dropped for the row behind one of its tokens",
        "overflow on both sides",
        (
            (
                ScoredBlock.num_judged.fget,
                "min(self.num_good, len(self.case.draft_tokens))",
                "len(self.case.draft_tokens) if not self.bad_rows else 0",
            ),
        ),
    ),
    Mistake(
        "a head drafts with the numbers that the rule decides with",
        "a head in the verifier",
        ((step_drafts.request_of, "local_drafting_key(spec.verifying_key)", "spec.verifying_key"),),
    ),
    Mistake(
        "a draft model in the verifier drafts with the numbers that the rule decides with",
        "a draft model in the verifier",
        ((step_drafts.request_of, "local_drafting_key(spec.verifying_key)", "spec.verifying_key"),),
    ),
    Mistake(
        "a seed that was sent is taken for fresh",
        "a request sent again with its seed",
        ((Generation.numbers_are_fresh, "self.has_own_seed or ", ""),),
    ),
    Mistake(
        "the shipped chooser has a round that may have begun asked for as plain",
        "the shipped chooser, which turns to plain",
        ((BegunRounds.arm, "if not self.num_from(round_number):", "if True:"),),
    ),
    Mistake(
        "a block ends before a token that is unlikely",
        "unsure, block",
        (
            (Drawer.draw, "is_good = is_distribution(probs)", "is_good, known = is_distribution(probs), probs.clone()"),
            (
                Drawer.draw,
                "_Drawn(list(members), tokens, is_good)",
                "_Drawn(list(members), tokens, is_good & (known.gather(1, tokens[:, None])[:, 0] > 0.3))",
            ),
            (ConfidentChains._reported, "if not has_ended:", "if False:"),
            (ConfidentChains._reported, "confidence_buckets=buckets)", "confidence_buckets=buckets[:1])"),
        ),
    ),
    Mistake(
        "a block ends before the token behind which the drafter is not sure",
        "unsure behind a token",
        (
            (
                ConfidentChains._sure,
                "self._unsure |= {self.active[row] for row in unsure}",
                "self.drawer._counts = [n - (n > 1 and i in {self.active[row] for row in unsure}) "
                "for i, n in enumerate(self.drawer._counts)]",
            ),
        ),
    ),
)

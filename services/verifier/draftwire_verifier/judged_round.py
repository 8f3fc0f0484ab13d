"""A round that a step has judged, and its verdict. Pure."""

from dataclasses import dataclass

from draftwire.engine.target_session import MAX_UINT32, Step, StepResult, TargetSession
from draftwire.method.round_parts import StepSize, TreePart
from draftwire.method.rounds import DraftTimings, Fence, ReceivedBlock, Verdict
from draftwire.method.token_source import TokenSource
from draftwire.verification.deciding import Judgement


@dataclass(frozen=True, slots=True)
class JudgedRound:
    """A round of one session in a step."""

    step: Step
    result: StepResult
    index: int
    """Index of the session's item in the step."""
    judgement: Judgement
    size: StepSize | None = None

    @property
    def session(self) -> TargetSession:
        """The session."""
        return self.step.items[self.index].session

    @property
    def block(self) -> ReceivedBlock | None:
        """The block that was judged. None if nobody is to see more than a plain round: there was none, or its tokens
        could not enter the text.
        """
        block = self.result.drafted.get(self.session.key) or self.step.items[self.index].block
        return block if block is not None and block.is_used else None

    @property
    def has_failed(self) -> bool:
        """Whether a block was ordered that could not be drafted."""
        drafted = self.result.drafted
        return self.session.key in drafted and drafted[self.session.key] is None

    @property
    def extra(self) -> TokenSource:
        """Source of the last token."""
        block, judgement = self.block, self.judgement
        if block is None or not block.token_ids:
            return TokenSource.PLAIN
        if block.tree is None:
            is_whole = judgement.num_accepted == len(block.token_ids)
        else:
            is_whole = bool(judgement.path) and judgement.path[-1] not in block.tree.parents
        return TokenSource.BONUS if is_whole else TokenSource.RECOVERED

    def verdict(self, fence: Fence) -> Verdict:
        """Returns the verdict, once the session has committed the round that has this fence."""
        session, block, judgement, result = self.session, self.block, self.judgement, self.result
        return Verdict(
            fence=fence,
            token_ids=judgement.token_ids,
            num_draft_tokens=len(block.token_ids) if block else 0,
            num_accepted_tokens=judgement.num_accepted,
            extra=self.extra,
            plain_rounds_left=session.plain_rounds_left,
            verify_us=result.verify_us - int(result.draft_s * 1e6),  # the verifier's own drafts
            queue_us=min(int(max(0.0, self.step.started_at - session.queued_at) * 1e6), MAX_UINT32),
            num_near_ties=judgement.num_near_ties,
            num_cached_tokens=session.num_reused or 0,
            timings=block.timings if block else DraftTimings(),
            mask_us=min(result.mask_us[self.index], MAX_UINT32) if result.mask_us else 0,
            logprobs=session.report.of_round(block, judgement) if session.report is not None else None,
            tree=TreePart(block.depth) if block and block.tree is not None else None,
            step=self.size,
            confidence_buckets=block.confidence_buckets if block else b"",
        )

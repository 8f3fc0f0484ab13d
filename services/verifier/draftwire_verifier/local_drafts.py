"""Drafts that the verifier makes by itself, from the committed tokens of a session. Pure: no tensors, no transport."""

from collections.abc import Sequence
from dataclasses import dataclass

from draftwire.drafting.model_free.possible import possible
from draftwire.drafting.model_free.registry import TextDrafters
from draftwire.drafting.model_free.text_drafter import READ_AT_ONCE, FollowedText
from draftwire.errors import InvalidRequestError
from draftwire.method.encoding import Claim, DraftDistributions, decode_one
from draftwire.method.quantization import Encoding
from draftwire.method.rounds import Fence, LocalDraft, ReceivedBlock, TargetSessionSpec
from draftwire.requests.session_parameters import SessionParameters

NO_DRAFTER = -1
"""Identity of the sender of a local block: no drafter has it."""


@dataclass(slots=True, eq=False)
class LocalText:
    """What drafts for one session: a strategy, with its view of the text."""

    strategy: str
    """Name of a text drafter."""
    text: FollowedText
    """The committed tokens that were read."""
    num_draft_tokens: int = 0
    """Most tokens of a block; 0 while the rounds are plain."""

    @classmethod
    def open(cls, strategy: str, drafters: TextDrafters, parameters: SessionParameters) -> "LocalText":
        """Starts with no token read.

        Args:
            strategy: name of a text drafter.
            drafters: there are.
            parameters: of the session.
        """
        salt = parameters.cache_salt if parameters.shares_text else None
        return cls(strategy, drafters.named(strategy).open((), salt))

    def block(
        self,
        fence: Fence,
        committed: Sequence[int],
        spec: TargetSessionSpec,
        vocab_size: int,
    ) -> ReceivedBlock | None:
        """Returns the block of the open round; None if nothing is guessed.

        Forms are not followed here, on the event loop, where their masks would delay all sessions: rules refuse what
        they do not allow.

        Args:
            fence: of the round.
            committed: all committed tokens.
            spec: of the session.
            vocab_size: of the target.
        """
        if not self.num_draft_tokens:
            return None
        start = self.text.length
        self.text.commit(committed[start : start + READ_AT_ONCE])
        room = spec.max_len - len(committed) - 1
        if self.text.length < len(committed) or room < 1:
            return None
        parameters = spec.parameters
        token_ids = possible(
            self.text.guess(min(self.num_draft_tokens, room)).token_ids,
            len(committed) - parameters.prompt_len,
            parameters.sampling,
            parameters.stop_token_ids,
            vocab_size,
        )
        if not token_ids:
            return None
        has_distributions = parameters.rule.needs_draft_probs
        encoding = Encoding.ONE_HOT if has_distributions else Encoding.NONE
        claim = Claim(token_ids, DraftDistributions(encoding, vocab_size))
        return ReceivedBlock(
            fence,
            token_ids,
            decode_one(claim, vocab_size),
            has_distributions,
            NO_DRAFTER,
            local_strategy=self.strategy,
        )


def check_local(draft: LocalDraft, spec: TargetSessionSpec, drafters: TextDrafters) -> None:
    """Checks a requested draft.

    Args:
        draft: what is requested.
        spec: of the session.
        drafters: there are.

    Raises:
        InvalidRequestError: the strategy is unknown, or the number is out of range.
    """
    drafters.named(draft.strategy)
    most = spec.parameters.max_draft_tokens
    if not 1 <= draft.num_draft_tokens <= most:
        raise InvalidRequestError(f"a local draft has 1 to {most} tokens here, not {draft.num_draft_tokens}")

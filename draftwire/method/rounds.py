"""Messages that the three services exchange about a session, independent of the transport."""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from draftwire.errors import BlockViolationError
from draftwire.method.block_shape import CHAIN, BlockShape
from draftwire.method.encoding import Decoded, DraftDistributions
from draftwire.method.keys import KEY_BYTES
from draftwire.method.round_parts import AheadPart, BranchLimits, GuessPart, LogprobsPart, StepSize, TreePart
from draftwire.method.token_source import TokenSource
from draftwire.requests.logprobs import NO_LOGPROBS, LogprobsRequest, PromptPart
from draftwire.requests.session_parameters import SessionParameters

TOKEN_BYTES = 8
"""Size that a draft token counts for in memory, beside its distribution."""


@dataclass(frozen=True, slots=True)
class Fence:
    """Identifies the session, the round and the committed prefix that a message belongs to."""

    session_id: int
    epoch: int
    round: int
    prefix_len: int
    """Committed tokens before the round, prompt included."""
    prefix_hash: int
    """`CommittedTokens.hash` of that prefix."""


class CommittedTokens:
    """The committed ids of a session, prompt first, with the running hash that fences compare. Append-only."""

    def __init__(self, ids: list[int]) -> None:
        """Starts from `ids`, which are copied."""
        self.ids: list[int] = []
        self._hash = hashlib.blake2b(digest_size=8)
        self.append(ids)

    def __len__(self) -> int:
        return len(self.ids)

    def append(self, ids: list[int]) -> None:
        """Commits more tokens."""
        self.ids.extend(ids)
        self._hash.update(np.asarray(ids, dtype="<u4").tobytes())

    @property
    def hash(self) -> int:
        """64-bit hash of all ids, independent of how they were split into appends."""
        return int.from_bytes(self._hash.digest(), "little")

    def hash_with(self, ids: Sequence[int]) -> int:
        """Returns what `hash` would be after more ids."""
        longer = self._hash.copy()
        longer.update(np.asarray(ids, dtype="<u4").tobytes())
        return int.from_bytes(longer.digest(), "little")


class FenceVerdict(Enum):
    """Result of comparing a message's fence with the expected one."""

    CURRENT = "current"
    STALE = "stale"
    """An older epoch or round: the message is dropped."""
    VIOLATION = "violation"
    """A future epoch or round, or another prefix: a fault of the sender."""


def judge_fence(received: Fence, expected: Fence) -> FenceVerdict:
    """Compares a message's fence with the one that the receiver expects."""
    received_time, expected_time = (received.epoch, received.round), (expected.epoch, expected.round)
    if received_time < expected_time:
        return FenceVerdict.STALE
    return FenceVerdict.CURRENT if received == expected else FenceVerdict.VIOLATION


@dataclass(frozen=True, slots=True)
class DraftTimings:
    """Durations of a drafter's phases, microseconds."""

    calibration_us: int = 0
    """Reading of committed tokens."""
    draft_us: int = 0
    """Drawing of the block."""
    num_drafted_sessions: int = 0
    """Sessions that shared the passes; 0 if the drafter does not say."""


@dataclass(frozen=True, slots=True)
class DrafterIdentity:
    """Identity of a drafter: chosen by the verifier, and shown by the drafter when it connects again."""

    drafter_id: int
    """Number in permits, refusals, logs and metrics."""
    token: bytes
    """Secret of `KEY_BYTES`, which shows that the identity was given to whoever has it."""


@dataclass(frozen=True, slots=True)
class Permit:
    """Credential with which a drafter pushes blocks for one session."""

    number: int
    """0 for the session's first drafter, and higher for each drafter that replaces it."""
    token: bytes

    @classmethod
    def make(cls, key: bytes, number: int, drafter_id: int | None = None) -> "Permit":
        """Makes a session's permit from its key, which no drafter knows.

        Args:
            key: of the session.
            number: of the permit.
            drafter_id: the drafter that may show it, by the identity that the verifier gave it; None lets any.
        """
        named = number.to_bytes(4, "little") + (b"" if drafter_id is None else drafter_id.to_bytes(8, "little"))
        return cls(number, hashlib.blake2b(named, key=key, digest_size=KEY_BYTES).digest())

    def is_made_with(self, key: bytes, drafter_id: int | None = None) -> bool:
        """Whether it is genuine, and names this drafter or nobody."""
        made = (Permit.make(key, self.number, name) for name in (drafter_id, None)) if key else ()
        return any(hmac.compare_digest(self.token, permit.token) for permit in made)


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """Tokens that a drafter proposes for one round, with the distributions that they were drawn from."""

    fence: Fence
    token_ids: list[int]
    distributions: DraftDistributions
    timings: DraftTimings = field(default_factory=DraftTimings)
    permit: Permit | None = None
    """Sent with the first block of a drafter for a session."""
    is_ahead: bool = False
    """Whether the drafter began to draft it before it knew the text."""
    parents: tuple[int, ...] = CHAIN
    """Parents of the nodes of a token tree, as `TokenTree.parents`; `distributions` then has a row for each token with
    children."""
    confidence_buckets: bytes = b""
    """How sure the drafter was of each place, and of the one that the block ended before, if it ended for that; empty
    unless `Calibration.stop_below` asks for it. See `draftwire.method.confidence`."""


@dataclass(frozen=True, slots=True)
class ReceivedBlock:
    """A draft block whose distributions were checked."""

    fence: Fence
    token_ids: list[int]
    draft: Decoded | BlockViolationError
    """The distributions of the tokens, or the error of the block."""
    has_distributions: bool
    """Whether the drafter sent distributions."""
    drafter_id: int
    """The drafter that sent it, by its identity."""
    timings: DraftTimings = field(default_factory=DraftTimings)
    permit: Permit | None = None
    is_used: bool = True
    """Whether its tokens may enter the text. If not, they are audited, and the round is decided without them."""
    local_strategy: str = ""
    """Strategy of the verifier that drafted it; empty if a drafter did."""
    is_ahead: bool = False
    """Whether its drafter began to draft it before it knew the text, as the drafter says."""
    tree: BlockShape | None = None
    """Its shape, if it is no chain."""
    confidence_buckets: bytes = b""
    """Sureness of its places, as in `DraftBlock`."""

    @property
    def depth(self) -> int:
        """Draft tokens on its longest path."""
        return len(self.token_ids) if self.tree is None else self.tree.depth

    @property
    def num_bytes(self) -> int:
        """Size of its tokens and distributions in memory."""
        size = 0 if isinstance(self.draft, BlockViolationError) else self.draft.num_bytes
        return size + TOKEN_BYTES * len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verifier's decision about one round."""

    fence: Fence
    """The round, and the prefix before it."""
    token_ids: list[int]
    """The tokens that the round commits: accepted draft tokens, then the extra one."""
    num_draft_tokens: int
    num_accepted_tokens: int
    extra: TokenSource
    """Source of the last token; never ACCEPTED."""
    plain_rounds_left: int
    """Rounds of the run that the verifier will still decode without a further request."""
    verify_us: int = 0
    """Duration of the step that decided the round, without drafting in it."""
    queue_us: int = 0
    """Wait of the block, or of the plain round, for that step."""
    timings: DraftTimings = field(default_factory=DraftTimings)
    num_near_ties: int = 0
    """Tokens of the round that rounding could have changed; 0 for rules that do not count them."""
    num_cached_tokens: int = 0
    """Tokens that the target found in its KV cache instead of reading them, over the whole session."""
    mask_us: int = 0
    """CPU time of the verifier's masks of the session's form, those of rejected draft tokens included; 0 without a
    form."""
    logprobs: LogprobsPart | None = None
    """None unless the session requests some."""
    guess: GuessPart | None = None
    """None if the verifier neither drafted the tokens by itself nor knows how it would have fared."""
    ahead: AheadPart | None = None
    """None if nothing was drafted ahead."""
    tree: TreePart | None = None
    """None if no token tree was judged."""
    step: StepSize | None = None
    """Size of the step that decided the round; None if the verifier does not say."""
    confidence_buckets: bytes = b""
    """Sureness of its places, as in `DraftBlock`."""

    @property
    def mask_s(self) -> float:
        """CPU time of all masks of the round, seconds: a drafter has made the same before each draft token."""
        num_twice = 0 if self.is_of_verifier else self.num_draft_tokens
        return self.mask_us / 1e6 * (1.0 + num_twice / (self.num_draft_tokens + 1))

    @property
    def num_draft_positions(self) -> int:
        """Draft tokens that could all have been accepted."""
        return self.num_draft_tokens if self.tree is None else self.tree.draft_depth

    @property
    def ended_unsure(self) -> bool:
        """Whether the block ended because the drafter was not sure of the next place."""
        return len(self.confidence_buckets) > self.num_draft_tokens

    @property
    def is_of_verifier(self) -> bool:
        """Whether the verifier drafted the tokens by itself."""
        return self.guess is not None and self.guess.local_strategy != ""

    @property
    def sources(self) -> list[TokenSource]:
        """The source of each token."""
        return [*[TokenSource.ACCEPTED] * self.num_accepted_tokens, self.extra]


@dataclass(frozen=True, slots=True)
class PromptRead:
    """Log-probabilities of the prompt tokens that a step has read. Sent before the session's first verdict."""

    session_id: int
    epoch: int
    part: PromptPart


@dataclass(frozen=True, slots=True)
class LocalDraft:
    """Request for drafts that a verifier makes by itself."""

    strategy: str
    """One of the verifier's `local_strategies`."""
    num_draft_tokens: int
    """Most draft tokens in a round."""
    instead: str = ""
    """Another of them, for a verifier whose head is in quarantine; empty for plain rounds then."""


@dataclass(frozen=True, slots=True)
class PlainRun:
    """Requests `num_rounds` rounds without a drafter from the verifier, from the fence's round on."""

    fence: Fence
    num_rounds: int
    draft: LocalDraft | None = None
    """Drafts of the verifier in them; None is plain decoding, one token a round."""


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A token tree to draft."""

    num_nodes: int
    """Draft tokens at most, 1 or more."""
    shape: BlockShape | None = None
    """Shape of so many nodes, depth by depth; None where the drafter looks for the best nodes."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Sends the drafter the tokens committed since `base_len` and requests the next block."""

    fence: Fence
    """The round to draft for; its prefix includes `token_ids`."""
    base_len: int
    token_ids: list[int]
    num_draft_tokens: int
    """Draft tokens; with `tree`, on each path at most."""
    permit: Permit | None = None
    """Permit of the drafter, sent with the first calibration unless the session was opened with it."""
    max_rounds_ahead: int = 0
    """Rounds beyond this one to draft for before their calibrations come."""
    tree: DraftTree | None = None
    """None is a chain."""
    stop_below: float | None = None
    """How sure the drafter has to be of a place: the block ends before one of less; 0 ends none. None does not ask."""


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """Tells the drafter of a round's block how the round ended; the calibration says it again."""

    fence: Fence
    """The next round; its prefix includes `token_ids`."""
    token_ids: list[int]
    """The tokens that the round committed."""


@dataclass(frozen=True, slots=True)
class SendDrafted:
    """Requests that the drafter end the block in progress and send its tokens."""

    session_id: int
    epoch: int
    round: int


@dataclass(frozen=True, slots=True)
class BlockSent:
    """Replies to `SendDrafted`: the block is on its way to the verifier. Says nothing of what was drawn."""

    session_id: int
    epoch: int
    round: int


@dataclass(frozen=True, slots=True)
class TargetSessionSpec:
    """Parameters of a new session on a verifier."""

    session_id: int
    epoch: int
    first_round: int
    token_ids: list[int]
    """All committed tokens: the prompt and tokens generated before."""
    parameters: SessionParameters
    verifying_key: bytes
    """Key of the role COUPLING under a coupled rule, where the drafter has the same; else of VERIFYING."""
    plain_rounds: int
    """Rounds without a drafter that the verifier begins with."""
    max_len: int
    """Upper bound of committed tokens, prompt included."""
    permit_key: bytes = b""
    """Signs the permits of the session's drafters; if empty, the session accepts no blocks from drafters."""
    logprobs: LogprobsRequest = NO_LOGPROBS
    """The log-probabilities that the verifier reports."""
    reports_draft_logprobs: bool = False
    """Whether the verifier also reports the drafter's log-probabilities."""
    watched: LocalDraft | None = None
    """Drafts that the verifier could make: verdicts of rounds in which it does not report how they would have fared."""
    max_held_blocks: int = 0
    """Blocks of coming rounds that it holds at most; 0 refuses them."""
    max_tree_nodes: int = 0
    """Draft tokens of a token tree at most; 0 refuses trees."""


@dataclass(frozen=True, slots=True)
class DraftSessionSpec:
    """Parameters of a new session on a drafter."""

    session_id: int
    epoch: int
    token_ids: list[int]
    """All committed tokens."""
    parameters: SessionParameters
    drafting_key: bytes
    """Key of the role COUPLING under a coupled rule; else of DRAFTING."""
    verifier_address: str
    target_vocab_size: int
    max_len: int
    """Upper bound of committed and drafted tokens together."""
    permit: Permit | None
    """None if it comes with the first calibration."""
    ahead: BranchLimits | None = None
    """None: nothing is drafted ahead."""
    max_tree_nodes: int = 0
    """Draft tokens of a token tree at most; 0: none is requested."""

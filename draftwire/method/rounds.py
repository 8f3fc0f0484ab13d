"""What the three services tell each other about a session, free of any transport."""

import hashlib
import hmac
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from draftwire.errors import BlockViolationError
from draftwire.method.encoding import Decoded, DraftDistributions
from draftwire.method.keys import KEY_BYTES
from draftwire.method.token_source import TokenSource
from draftwire.requests.logprobs import NO_LOGPROBS, LogprobsRequest, PromptPart, TokenLogprob
from draftwire.requests.session_parameters import SessionParameters


@dataclass(frozen=True, slots=True)
class Fence:
    """Places a message in the life of a session: which session, which round, after which committed tokens."""

    session_id: int
    epoch: int
    round: int
    prefix_len: int
    """Committed tokens before the round, prompt included."""
    prefix_hash: int
    """`CommittedTokens.hash` of that prefix."""


class CommittedTokens:
    """The committed ids of a session, prompt first, with the running hash that fences compare. Only ever grows."""

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
        """64-bit hash of all ids, independent of how they were appended."""
        return int.from_bytes(self._hash.digest(), "little")


class FenceVerdict(Enum):
    """What a message's fence says about it."""

    CURRENT = "current"
    STALE = "stale"
    """An older epoch or round: drop it."""
    VIOLATION = "violation"
    """From the future, or about another prefix: the sender is wrong."""


def judge_fence(received: Fence, expected: Fence) -> FenceVerdict:
    """Compares a message's fence with the one that the receiver waits for."""
    received_time, expected_time = (received.epoch, received.round), (expected.epoch, expected.round)
    if received_time < expected_time:
        return FenceVerdict.STALE
    return FenceVerdict.CURRENT if received == expected else FenceVerdict.VIOLATION


@dataclass(frozen=True, slots=True)
class DraftTimings:
    """Where a drafter's time went, microseconds."""

    calibration_us: int = 0
    draft_us: int = 0


@dataclass(frozen=True, slots=True)
class DrafterIdentity:
    """What a verifier knows a drafter by: chosen by the verifier, and shown by the drafter when it connects again."""

    drafter_id: int
    """In permits, refusals, logs and metrics."""
    token: bytes
    """Secret of `KEY_BYTES`, which shows that the identity was given to whoever has it."""


@dataclass(frozen=True, slots=True)
class Permit:
    """Lets a drafter push blocks for one session."""

    number: int
    """0 for the session's first drafter, and higher for each one that takes its place."""
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
    attempt: int = 0
    timings: DraftTimings = field(default_factory=DraftTimings)
    permit: Permit | None = None
    """With the first block that a drafter sends for a session."""


@dataclass(frozen=True, slots=True)
class ReceivedBlock:
    """A draft block after its distributions were checked."""

    fence: Fence
    token_ids: list[int]
    draft: Decoded | BlockViolationError
    """What the tokens were drawn from, or what is wrong with the block."""
    has_distributions: bool
    """Whether the drafter said anything about them."""
    drafter_id: int
    """The drafter that sent it, by its identity."""
    attempt: int = 0
    timings: DraftTimings = field(default_factory=DraftTimings)
    permit: Permit | None = None
    is_used: bool = True
    """Whether its tokens may enter the text. If not, they are audited, and the round is decided without them."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the verifier decided about one round."""

    fence: Fence
    """The round, and the prefix before it."""
    token_ids: list[int]
    """The tokens that the round commits: accepted draft tokens, then the extra one."""
    num_draft_tokens: int
    num_accepted_tokens: int
    extra: TokenSource
    """Where the last of the tokens came from; never ACCEPTED."""
    plain_rounds_left: int
    """Plain rounds that the verifier will still decode by itself."""
    verify_us: int = 0
    queue_us: int = 0
    timings: DraftTimings = field(default_factory=DraftTimings)
    num_near_ties: int = 0
    """Tokens of the round that rounding could have changed, as far as the rule counts them."""
    num_cached_tokens: int = 0
    """Tokens that the target did not have to read, because another session had, over the whole session."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """One for each of the tokens, if the session asks for them."""
    draft_logprobs: list[float] = field(default_factory=list)
    """What the drafter gave each of the tokens, nats, if the session asks for it: -inf of what it could not have drawn,
    NaN where nothing was drawn in the same place, or nothing is known of what from."""

    @property
    def sources(self) -> list[TokenSource]:
        """Where each of the tokens came from."""
        return [*[TokenSource.ACCEPTED] * self.num_accepted_tokens, self.extra]


@dataclass(frozen=True, slots=True)
class PromptRead:
    """What the target says of tokens of a prompt that a step has read. Comes before the session's first verdict."""

    session_id: int
    epoch: int
    part: PromptPart


@dataclass(frozen=True, slots=True)
class PlainRun:
    """Asks the verifier to decode `num_rounds` tokens without a drafter, from the fence's round on."""

    fence: Fence
    num_rounds: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """Tells the drafter what was committed since `base_len` and asks for the next block."""

    fence: Fence
    """The round to draft for; its prefix includes `token_ids`."""
    base_len: int
    token_ids: list[int]
    num_draft_tokens: int
    attempt: int = 0
    permit: Permit | None = None
    """With the first one, unless the session was opened with it."""


@dataclass(frozen=True, slots=True)
class SendDrafted:
    """Asks for a block under way as far as it is drawn."""

    session_id: int
    epoch: int
    round: int
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class TargetSessionSpec:
    """Opens a session on a verifier."""

    session_id: int
    epoch: int
    first_round: int
    token_ids: list[int]
    """All that is committed: the prompt and what was generated before."""
    parameters: SessionParameters
    verifying_key: bytes
    """Of the role COUPLING under a coupled rule, where the drafter has the same; else of VERIFYING."""
    plain_rounds: int
    max_len: int
    """Most tokens that will ever be committed, prompt included."""
    permit_key: bytes = b""
    """Makes the permits of the drafters whose blocks the session takes; empty takes none."""
    logprobs: LogprobsRequest = NO_LOGPROBS
    """What the verifier reports of tokens."""
    reports_draft_logprobs: bool = False
    """Whether it also reports what the drafter gave them."""


@dataclass(frozen=True, slots=True)
class DraftSessionSpec:
    """Opens a session on a drafter."""

    session_id: int
    epoch: int
    token_ids: list[int]
    """All that is committed."""
    parameters: SessionParameters
    drafting_key: bytes
    """Of the role COUPLING under a coupled rule; else of DRAFTING."""
    verifier_address: str
    target_vocab_size: int
    max_len: int
    """Most tokens that committed and drafted ones will ever be together."""
    permit: Permit | None
    """None if it comes with the first calibration."""

"""Model descriptions that servers send to their peers, and the comparison of vocabularies."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from draftwire.errors import ModelMismatchError
from draftwire.requests.rules import RuleFacts, unknown_rule

PROTOCOL_VERSION = 10
"""Version of the messages in `protos/draftwire/v1`. Incremented with every change that an older peer would misread."""
OLDEST_PROTOCOL_VERSION = 10
"""The oldest version that this release supports."""

PARTIAL_BLOCKS = "partial_blocks"
"""Capability of a drafter: can end a block in progress and send the tokens drawn so far."""
FLUSH_REPLIES = "flush_replies"
"""Capability of a drafter: replies to that request when the block is sent."""
ISSUED_IDENTITIES = "issued_identities"
"""Capability of a verifier that gives drafters their identities, and of a drafter that shows the one that it was given,
tells gateways of it, and takes a permit that names it."""
HELD_BLOCKS = "held_blocks"
"""Capability of a verifier: holds blocks of coming rounds, and tells drafters how rounds ended."""
FEATURES = "features"
"""Capability of a verifier: keeps what a head reads of its hidden states, and sends it to drafters with that head."""
NEEDS_FEATURES = "needs_features"
"""Capability of a drafter: cannot draft without."""
DRAFT_AHEAD = "draft_ahead"
"""Capability of a drafter: drafts for coming rounds while one is being judged, and takes outcomes from verifiers."""

CONFIDENCE = "confidence"
"""Capability of a drafter: ends blocks where it is not sure, and says how sure it was. Of a verifier: takes blocks that
ended so before their first token, and repeats in verdicts what the drafter says."""

DRAFTS_ON_OUTCOMES = "drafts_on_outcomes"
"""Capability of a verifier: tells drafters how the rounds of their blocks ended. Of a drafter: begins the next round
then, if the latest calibration lets it, and does not wait to be asked."""


@dataclass(frozen=True, slots=True)
class WarmUpStep:
    """A step before the first request: the prompt of one sequence."""

    num_rows: int
    """Tokens of the prompt."""
    duration_us: int
    """Microseconds that it took."""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Properties of a loaded model that its peers need."""

    name: str
    """Folder name or hub name."""
    revision: str
    """Commit of the hub repository; empty for a folder."""
    dtype: str
    """Numerics of the forward pass, such as `float32`."""
    vocabulary_fingerprint: bytes
    """`fingerprint` of the token strings."""
    vocab_size: int
    """Rows of the output, padding included."""
    context_length: int
    """Positions that the model can attend to."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end a generation."""
    protocol_version: int = PROTOCOL_VERSION
    weights_fingerprint: bytes = b""
    """Equal for equal weights; see `draftwire.models.loading.weights_fingerprint`."""
    oldest_protocol_version: int = OLDEST_PROTOCOL_VERSION
    capabilities: frozenset[str] = frozenset()
    """Names of optional features that not every peer of these protocol versions supports."""
    rules: tuple[RuleFacts, ...] = ()
    """The rules that a verifier offers; empty for a drafter."""
    local_strategies: tuple[str, ...] = ()
    """Strategies by which a verifier drafts by itself; empty for a drafter."""
    max_tree_nodes: int = 0
    """Draft tokens of a token tree that it drafts or judges, at most; 0 if it knows no trees."""
    warm_up_steps: tuple[WarmUpStep, ...] = ()
    """Steps of the warm-up; empty if the peer does not say."""

    def rule_named(self, name: str) -> RuleFacts:
        """Returns a rule that a verifier offers.

        Raises:
            InvalidRequestError: the verifier does not offer it.
        """
        for rule in self.rules:
            if rule.name == name:
                return rule
        raise unknown_rule(rule.name for rule in self.rules)


def fingerprint(tokens: Sequence[str]) -> bytes:
    """Returns the SHA-256 of a vocabulary: of the token strings in the order of their ids, each with its length."""
    digest = hashlib.sha256()
    for token in tokens:
        encoded = token.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(4, "little"))
        digest.update(encoded)
    return digest.digest()


def can_take_over(first: ModelDescription, second: ModelDescription) -> bool:
    """Whether a session on one model can continue on the other: same weights, numerics, vocabulary and context."""
    same = ("weights_fingerprint", "dtype", "vocabulary_fingerprint", "vocab_size", "context_length", "stop_token_ids")
    return all(getattr(first, name) == getattr(second, name) for name in same)


def check_protocol(name: str, oldest: int, latest: int) -> None:
    """Checks that there is a protocol version which both this release and a peer support.

    Raises:
        ModelMismatchError: there is no common version.
    """
    if oldest > PROTOCOL_VERSION or latest < OLDEST_PROTOCOL_VERSION:
        theirs, ours = _versions(oldest, latest), _versions(OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION)
        raise ModelMismatchError(f"{name} speaks protocol {theirs}, this server speaks {ours}")


def _versions(oldest: int, latest: int) -> str:
    return f"version {latest}" if oldest == latest else f"versions {oldest} to {latest}"


def vocabulary_mismatch(
    target: ModelDescription, drafter: ModelDescription, target_tokens: Sequence[str], drafter_tokens: Sequence[str]
) -> ModelMismatchError:
    """Returns an error that names the first token in which two vocabularies differ."""
    return ModelMismatchError(differing_tokens(target.name, drafter.name, target_tokens, drafter_tokens))


def differing_tokens(target: str, drafter: str, target_tokens: Sequence[str], drafter_tokens: Sequence[str]) -> str:
    """Returns in words how the vocabularies of two models, by name, differ."""
    pairs = enumerate(zip_longest(target_tokens, drafter_tokens))
    token_id, (ours, theirs) = next(((i, pair) for i, pair in pairs if pair[0] != pair[1]), (-1, (None, None)))
    return (
        f"vocabularies differ: target {target} has {len(target_tokens)} tokens, drafter {drafter} has "
        f"{len(drafter_tokens)}; the first difference is token {token_id}: {ours!r} against {theirs!r}"
    )

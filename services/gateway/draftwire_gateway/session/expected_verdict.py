"""Bounds of the verdict of the open round. A verifier that exceeds them is lost, like one that is silent."""

from collections.abc import Sequence

from draftwire.errors import ProtocolViolationError
from draftwire.method.round_parts import GuessPart, LogprobsPart
from draftwire.method.rounds import LocalDraft, Verdict
from draftwire.requests.logprobs import TokenLogprob
from draftwire_gateway.session.generation import Generation


class ExpectedVerdict:
    """Limits of the open round's verdict: the block and the plain rounds that were requested, not more."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._num_draft_tokens = 0
        self._num_nodes = 0
        self._num_ahead = 0
        self._num_plain_rounds = 0
        self._local: LocalDraft | None = None

    def open(self, num_plain_rounds: int) -> None:
        """Records that the session is opened on a verifier, which starts with plain rounds."""
        self._num_draft_tokens = self._num_nodes = self._num_ahead = 0
        self._num_plain_rounds, self._local = num_plain_rounds, None

    def request_block(self, num_draft_tokens: int, *, num_nodes: int = 0, is_ahead: bool = False) -> None:
        """Records the request of a block; it may be judged even after its drafter was given up. A token tree has
        `num_nodes`, and `num_draft_tokens` on each path; `is_ahead` if the drafter may draft as many for further
        rounds, before they are requested.
        """
        self._num_nodes = num_nodes
        self._num_ahead = max(self._num_ahead, num_draft_tokens) if is_ahead else 0
        # The round's block may have been drafted already, as long as those that were requested before.
        self._num_draft_tokens = max(num_draft_tokens, self._num_ahead)

    def request_plain(self, num_rounds: int, draft: LocalDraft | None = None) -> None:
        """Records the request of rounds without a drafter, in which the verifier may draft by itself."""
        self._num_plain_rounds, self._local = num_rounds, draft

    def end_round(self, verdict: Verdict) -> None:
        """Ends the open round: what is left is the rest of a plain run."""
        self._num_draft_tokens, self._num_plain_rounds = self._num_ahead, verdict.plain_rounds_left
        self._num_nodes = 0
        if not verdict.plain_rounds_left:
            self._local = None

    def check(self, verdict: Verdict, vocab_size: int) -> None:
        """Checks a verdict that has the open round's fence, before anything is computed from it.

        Raises:
            ProtocolViolationError: it is not a verdict of what was requested.
        """
        num_tokens, prefix_len = len(verdict.token_ids), verdict.fence.prefix_len
        guess, logprobs = verdict.guess or GuessPart(), verdict.logprobs or LogprobsPart()
        local = self._local if verdict.is_of_verifier else None
        names_local = not verdict.is_of_verifier or (
            local is not None and guess.local_strategy in (local.strategy, local.instead)
        )
        _require(names_local, "has drafts of the verifier that were not requested")
        most_drafted = self._num_draft_tokens if local is None else local.num_draft_tokens
        _require(verdict.num_draft_positions <= most_drafted, "judges more draft tokens than were requested")
        if verdict.tree is not None:
            is_tree_wanted = local is None and verdict.num_draft_tokens <= self._num_nodes
            _require(is_tree_wanted, "judges a larger token tree than was requested")
            _require(verdict.tree.draft_depth <= verdict.num_draft_tokens, "judges a tree deeper than it has tokens")
        _require(verdict.num_accepted_tokens <= verdict.num_draft_positions, "accepts more draft tokens than it judged")
        _require(num_tokens == verdict.num_accepted_tokens + 1, "has another number of tokens than were accepted")
        _require(max(verdict.token_ids) < vocab_size, "has a token beyond the vocabulary")
        _require(prefix_len + num_tokens <= self._generation.max_len, "reaches beyond the end of the completion")
        most_left = 0 if verdict.num_draft_tokens and local is None else max(0, self._num_plain_rounds - 1)
        _require(verdict.plain_rounds_left <= most_left, "leaves more plain rounds than were requested")
        _require(verdict.num_near_ties <= num_tokens, "counts more near-ties than tokens")
        _require(verdict.num_cached_tokens <= prefix_len, "counts more cached tokens than there are")
        if guess.watched is not None:
            _require(self._generation.adapts_length, "reports guesses that were not to be watched")
            most_right = num_tokens if guess.watched.has_guess else 0
            _require(guess.watched.num_right <= most_right, "has guessed more tokens than there are")
        is_wanted, has_details = self._generation.logprobs.logprobs is not None, self._generation.token_details
        _require(len(logprobs.target) == num_tokens * is_wanted, "has other log-probabilities than were requested")
        _require(len(logprobs.draft) == num_tokens * has_details, "has other details than were requested")
        check_top(logprobs.target, self._generation.logprobs.logprobs, vocab_size)


def check_top(tokens: Sequence[TokenLogprob], num_top: int | None, vocab_size: int) -> None:
    """Checks the likeliest tokens of reported log-probabilities, of which `num_top` were requested; None if nothing
    was.

    Raises:
        ProtocolViolationError: there are more than were requested, or one is beyond the vocabulary.
    """
    _require(all(len(token.top) <= (num_top or 0) for token in tokens), "has more likeliest tokens than were requested")
    in_vocabulary = all(token_id < vocab_size for token in tokens for token_id, _ in token.top)
    _require(in_vocabulary, "has a likeliest token beyond the vocabulary")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ProtocolViolationError(f"the verifier's answer {message}")

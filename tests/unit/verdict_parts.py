"""What verdicts report of options, whether they are on or off."""

from draftwire.method.round_parts import AheadPart, GuessPart, WatchedGuess
from draftwire.method.rounds import Verdict


def strategy_of(verdict: Verdict) -> str:
    return (verdict.guess or GuessPart()).local_strategy


def watched_of(verdict: Verdict) -> WatchedGuess | None:
    return (verdict.guess or GuessPart()).watched


def ahead_of(verdict: Verdict) -> AheadPart:
    return verdict.ahead or AheadPart()


def depth_of(verdict: Verdict) -> int:
    return 0 if verdict.tree is None else verdict.tree.draft_depth

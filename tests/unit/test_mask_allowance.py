"""Masks that take long cost a session its drafts, until they take less."""

from gateway_fakes import make_generation

from draftwire.method.rounds import Fence, Verdict
from draftwire.method.token_source import TokenSource
from draftwire.requests.structured_output import MASKS_PER_TOKEN_S
from draftwire_gateway.options.mask_allowance import CREDIT_S, MaskAllowance
from draftwire_gateway.session.session_state import SessionState


def verdict(num_tokens: int, mask_s: float) -> Verdict:
    tokens = [1] * num_tokens
    return Verdict(
        Fence(1, 0, 3, 9, 5), tokens, num_tokens, num_tokens - 1, TokenSource.BONUS, 0, mask_us=round(mask_s * 1e6)
    )


def test_usual_masks_never_use_the_allowance_up() -> None:
    """Five of 200 µs in rounds that commit one token: ten times what is usual."""
    allowance = MaskAllowance(SessionState(make_generation()))
    for _ in range(1_000):
        allowance.end_round(verdict(1, 5 * 2e-4), was_held=False)
        assert not allowance.is_used_up


def test_rounds_are_plain_while_masks_take_longer_than_tokens_allow() -> None:
    allowance = MaskAllowance(SessionState(make_generation()))
    for _ in range(100):
        allowance.end_round(verdict(1, 0.0), was_held=False)  # no more than the credit is kept
    allowance.end_round(verdict(3, CREDIT_S + 2 * MASKS_PER_TOKEN_S), was_held=False)
    assert not allowance.is_used_up
    allowance.end_round(verdict(2, 4 * MASKS_PER_TOKEN_S), was_held=False)
    assert allowance.is_used_up
    allowance.end_round(verdict(1, MASKS_PER_TOKEN_S / 2), was_held=False)
    assert allowance.is_used_up
    allowance.end_round(verdict(1, MASKS_PER_TOKEN_S / 2), was_held=False)
    assert not allowance.is_used_up


def test_one_slow_mask_is_not_the_end_of_speculation() -> None:
    allowance = MaskAllowance(SessionState(make_generation()))
    allowance.end_round(verdict(1, 10.0), was_held=False)
    num_plain = 0
    while allowance.is_used_up:
        allowance.end_round(verdict(1, 0.0), was_held=False)
        num_plain += 1
    assert 0 < num_plain <= CREDIT_S / MASKS_PER_TOKEN_S

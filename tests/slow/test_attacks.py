"""A minute of attacks on three processes: none ends, no honest completion is lost, memory stays within its bound."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.alone

ATTACKS = (
    "endless_forms",
    "newlines_as_grammar",
    "empty_messages_in_a_message",
    "unfinished_bodies",
    "prompts_far_beyond_the_context",
    "frozen_drafter",
    "lying_verifier",
    "fresh_identities",
    "silent_http_sockets",
    "chunks_of_one_byte",
)
"""One for each kind of hole. `make attacks` carries out all, and bounds gaps by 1 s, which needs a quiet machine."""
MAX_GAP_S = 4.0
"""Less than any of these took before it was closed."""


def test_honest_users_do_not_notice_attacks() -> None:
    arguments = [*ATTACKS, "--seconds-each", "2", "--max-gap-s", str(MAX_GAP_S)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.attacks", *arguments], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert f"{len(ATTACKS)} attacks" in done.stdout
    assert done.stdout.rstrip().endswith(" 0 lost")

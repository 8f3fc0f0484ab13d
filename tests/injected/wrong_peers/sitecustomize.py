"""Makes a verifier or a drafter behave as no honest one does. Python loads this file in processes whose path has its
folder; `WRONG_PEER` says how.

stall           the verifier's step number 40, and each hundredth after it, takes 6 s
draft_tokens    its fifth verdict says that 2**27 draft tokens were judged
withhold        a drafter sends no block after its tenth, and says again and again that it did
flood           a drafter sends 256 more blocks with each, for coming rounds and texts that it makes up
slow_tokens     a drafter takes 0.18 s for each fourth token 1 after a token 0, and no time for other tokens; the
                verifier's steps take 10 ms, so that much can happen between them
"""

import asyncio
import os
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

STALL_SECONDS, FIRST_STALL, STALL_EVERY = 6.0, 40, 100
TOKEN_SECONDS, SLOW_TOKENS, SLOW_EVERY = 0.18, [0, 1], 4
"""So seldom that it is not what the gateway expects."""
STEP_SECONDS = 0.01
LYING_VERDICT = 5
SENT_BLOCKS, REPLY_SECONDS = 10, 0.2
FLOOD = 256
"""Blocks of made-up texts for each true one: eight times what a stream may send for nothing."""


def stall() -> None:
    from draftwire_verifier.engine import TargetEngine

    step, count = TargetEngine.step, 0

    def stalling(self: TargetEngine, *arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count >= FIRST_STALL and (count - FIRST_STALL) % STALL_EVERY == 0:
            time.sleep(STALL_SECONDS)
        return step(self, *arguments)

    TargetEngine.step = stalling  # type: ignore[method-assign]


def lie_about_draft_tokens() -> None:
    from draftwire.runtime import messages

    encode, count = messages.verdict_to_proto, 0

    def lying(verdict: Any) -> Any:
        nonlocal count
        count += 1
        message = encode(verdict)
        if count % LYING_VERDICT == 0:
            message.num_draft_tokens = 2**27
        return message

    messages.verdict_to_proto = lying


def withhold_blocks() -> None:
    from draftwire_drafter.core import DrafterCore

    push, count = DrafterCore._push, 0

    def withholding(self: DrafterCore, *arguments: Any) -> None:
        nonlocal count
        count += 1
        if count <= SENT_BLOCKS:
            push(self, *arguments)

    def say_it_is_sent(self: DrafterCore, command: Any) -> None:
        session = self._scheduler.sessions.get((command.session_id, command.epoch))
        if session is not None:
            self._reply(session, command.round)
            asyncio.get_running_loop().call_later(REPLY_SECONDS, say_it_is_sent, self, command)

    DrafterCore._push = withholding  # type: ignore[method-assign]
    DrafterCore.send_drafted = say_it_is_sent  # type: ignore[method-assign]


def flood() -> None:
    from draftwire_drafter.wire import GrpcBlockLink

    push = GrpcBlockLink.push

    def flooding(self: GrpcBlockLink, block: Any) -> None:
        push(self, block)
        for number in range(FLOOD):
            coming, made_up = block.fence.round + 1 + number % 2, (block.fence.prefix_hash + 1 + number) % 2**64
            length = block.fence.prefix_len + 1 + number % 3
            fence = replace(block.fence, round=coming, prefix_len=length, prefix_hash=made_up)
            push(self, replace(block, fence=fence, permit=None, is_ahead=True))

    GrpcBlockLink.push = flooding  # type: ignore[method-assign]


def take_time_for_steps() -> None:
    from draftwire_verifier.engine import TargetEngine

    step = TargetEngine.step

    def slow(self: TargetEngine, *arguments: Any) -> Any:
        time.sleep(STEP_SECONDS)
        return step(self, *arguments)

    TargetEngine.step = slow  # type: ignore[method-assign]


def take_time_for_tokens() -> None:
    from draftwire.drafting.drawing import Drawer

    draw, count = Drawer.draw, 0

    def drawing(self: Drawer, members: Any, probs: Any) -> Any:
        nonlocal count
        tokens = draw(self, members, probs)
        if any(self.token_ids(block)[-2:] == SLOW_TOKENS for block in members):
            count += 1
            time.sleep(0.0 if count % SLOW_EVERY else TOKEN_SECONDS)
        return tokens

    Drawer.draw = drawing  # type: ignore[method-assign]


WAYS = {
    ("verifier", "stall"): stall,
    ("verifier", "draft_tokens"): lie_about_draft_tokens,
    ("verifier", "slow_tokens"): take_time_for_steps,
    ("drafter", "flood"): flood,
    ("drafter", "withhold"): withhold_blocks,
    ("drafter", "slow_tokens"): take_time_for_tokens,
}

for (service, way), spoil in WAYS.items():
    is_meant = f"serve\0{service}" in Path("/proc/self/cmdline").read_text()
    if is_meant and os.environ.get("WRONG_PEER") == way:
        try:
            spoil()
        except BaseException:  # which Python would print, and go on with an honest peer
            traceback.print_exc()
            os._exit(3)

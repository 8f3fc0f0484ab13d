"""Decodes messages of draft blocks, of which a peer may send any."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from draftwire.errors import ProtocolViolationError
from draftwire.method.rounds import ReceivedBlock
from draftwire.runtime import messages
from draftwire.runtime.interceptor import num_received_bytes
from draftwire.v1 import session_pb2

OFF_LOOP_BYTES = 2**18
"""Larger messages (dense distributions) are decoded on another thread than the event loop's."""
_THREAD = ThreadPoolExecutor(1, "decode")
"""One for all of them: what is decoded takes several times the memory of the message."""


async def decoded_blocks(
    blocks: Sequence[session_pb2.DraftBlock],
    drafter_id: int,
    limits: tuple[int, int, int],
    most_blocks: int = messages.MAX_BLOCKS,
) -> list[ReceivedBlock]:
    """Decodes the draft blocks of the message that the current call has just received, `most_blocks` at most.

    `limits` are the vocabulary size of the target, the most draft tokens of a block, and the most nodes of a token
    tree; see `messages.blocks_from_proto`.

    Raises:
        ProtocolViolationError: there are more. None is decoded.
    """
    if len(blocks) > most_blocks:
        raise ProtocolViolationError(f"a message holds at most {most_blocks} blocks")
    if num_received_bytes.get() > OFF_LOOP_BYTES:
        decode = partial(messages.blocks_from_proto, blocks, drafter_id, *limits)
        return await asyncio.get_running_loop().run_in_executor(_THREAD, decode)
    return messages.blocks_from_proto(blocks, drafter_id, *limits)

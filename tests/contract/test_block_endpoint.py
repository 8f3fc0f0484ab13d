"""What RemoteDrafter's endpoint takes of a drafter, over gRPC: few blocks, small ones, and useless ones slowly."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import patch

import grpc
import pytest

from draftwire.errors import ProtocolViolationError
from draftwire.method.rounds import ReceivedBlock
from draftwire.models.description import ModelDescription
from draftwire.runtime import messages, received_blocks
from draftwire.runtime.interceptor import num_received_bytes
from draftwire.runtime.messages import MAX_BLOCKS
from draftwire.runtime.received_blocks import OFF_LOOP_BYTES, decoded_blocks
from draftwire.v1 import session_pb2, verifier_pb2, verifier_pb2_grpc
from draftwire_verifier.brake import BURST, LONGEST_REST_S, REST_S
from vllm_remote_drafter.block_endpoint import BlockEndpoint
from vllm_remote_drafter.remote_settings import RemoteDrafterSettings

MODEL = ModelDescription("target", "", "float32", bytes(32), vocab_size=1000, context_length=5000, stop_token_ids=())
LONG = 4
SECONDS = 10.0


def message_of(num_blocks: int, **fields: Any) -> verifier_pb2.PushDraftBlocksRequest:
    blocks = [session_pb2.DraftBlock(**fields)] * num_blocks
    return verifier_pb2.PushDraftBlocksRequest(blocks=verifier_pb2.DraftBlocks(blocks=blocks))


class Receiver:
    """Notes what is delivered, of which nothing is of use unless the test says otherwise."""

    def __init__(self) -> None:
        self.num_blocks, self.are_useful = 0, False

    def deliver(self, blocks: Sequence[ReceivedBlock]) -> int:
        self.num_blocks += len(blocks)
        return len(blocks) if self.are_useful else 0


@asynccontextmanager
async def greeted(receiver: Receiver) -> AsyncIterator[Any]:
    """Yields a drafter's stream to an endpoint that has welcomed it."""
    endpoint = BlockEndpoint(MODEL, LONG, receiver.deliver)
    port = await endpoint.start(RemoteDrafterSettings(("localhost:1",)), None)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(SECONDS):
            call = verifier_pb2_grpc.VerifierServiceStub(channel).PushDraftBlocks()
            hello = verifier_pb2.DrafterHello(model=messages.model_to_proto(MODEL), instance_id=1)
            await call.write(verifier_pb2.PushDraftBlocksRequest(hello=hello))
            assert (await call.read()).welcome.name == MODEL.name
            yield call
    finally:
        await endpoint.stop()


async def test_full_message_of_blocks_without_distributions_is_taken() -> None:
    receiver = Receiver()
    fence = session_pb2.Fence(
        session_id=2**64 - 1, epoch=2**32 - 1, round=2**32 - 1, prefix_len=2**32 - 1, prefix_hash=2**64 - 1
    )
    async with greeted(receiver) as call:
        await call.write(message_of(MAX_BLOCKS, fence=fence, token_ids=[2**32 - 1] * LONG))
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
    assert receiver.num_blocks == MAX_BLOCKS


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (message_of(MAX_BLOCKS + 1), grpc.StatusCode.FAILED_PRECONDITION),
        (message_of(1, token_ids=[1] * 2**18), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (message_of(300_000), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
    ids=["many blocks", "a large block", "very many blocks"],
)
async def test_message_that_is_too_large_ends_the_stream_before_it_is_decoded(
    message: verifier_pb2.PushDraftBlocksRequest, code: grpc.StatusCode
) -> None:
    receiver = Receiver()
    with patch.object(messages, "blocks_from_proto") as decode:
        async with greeted(receiver) as call:
            await call.write(message)
            assert await call.code() is code
    decode.assert_not_called()


async def test_useless_blocks_are_read_slowly_and_useful_ones_are_not() -> None:
    receiver, rests = Receiver(), list[float]()
    sleep = asyncio.sleep

    async def rest(seconds: float) -> None:
        rests.append(seconds)
        await sleep(0)

    num_messages = BURST // MAX_BLOCKS
    with patch("vllm_remote_drafter.block_endpoint.asyncio.sleep", rest):
        for receiver.are_useful in (True, False):
            rests.clear()
            async with greeted(receiver) as call:
                for _ in range(num_messages + 1):
                    await call.write(message_of(MAX_BLOCKS))
                await call.done_writing()
                assert await call.code() is grpc.StatusCode.OK
            last = 0.0 if receiver.are_useful else min(LONGEST_REST_S, MAX_BLOCKS * REST_S)
            assert rests == [0.0] * num_messages + [last]


async def test_large_message_is_decoded_off_the_loop_and_a_small_one_on_it() -> None:
    limits = (MODEL.vocab_size, LONG, 0)
    blocks = message_of(2, token_ids=[1]).blocks.blocks
    for num_bytes, is_off in ((OFF_LOOP_BYTES, False), (OFF_LOOP_BYTES + 1, True)):
        num_received_bytes.set(num_bytes)
        with patch.object(received_blocks._THREAD, "submit", wraps=received_blocks._THREAD.submit) as submit:
            assert [one.drafter_id for one in await decoded_blocks(blocks, 7, limits)] == [7, 7]
        assert submit.called is is_off
    with pytest.raises(ProtocolViolationError, match="at most 1 blocks"):
        await decoded_blocks(blocks, 7, limits, most_blocks=1)

"""What gRPC is told about connections: nothing is misspelt, nothing is left to chance."""

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc
from hypothesis import given
from hypothesis import strategies as st

from draftwire.client.client_channels import CHANNEL_OPTIONS
from draftwire.errors import InvalidRequestError
from draftwire.models.description import ModelDescription
from draftwire.runtime.call_limits import CallLimits
from draftwire.runtime.channels import (
    CONTROL_MESSAGE_BYTES,
    ENVELOPE_BYTES,
    HANDSHAKE_MS,
    IDLE_MS,
    MAX_CONNECTIONS,
    MIN_PING_INTERVAL_MS,
    PUBLIC_WINDOW_BYTES,
    check_prompt_fits,
    client_options,
    in_messages,
    server_options,
)
from draftwire.runtime.settings import LEAST_KEEPALIVE_S, LEAST_MESSAGE_BYTES, ConnectionSettings
from draftwire.v1 import session_pb2, verifier_pb2
from draftwire_drafter.wire import check_block_fits

MIB = 2**20
SETTINGS = ConnectionSettings(
    max_message_bytes=8 * MIB, keepalive_time_s=2.5, keepalive_timeout_s=1.5, flow_control_window_bytes=3 * MIB
)
KINDS = {
    "control": client_options(SETTINGS, bulk=False),
    "bulk": client_options(SETTINGS, bulk=True),
    "server": server_options(SETTINGS, CallLimits(max_calls=99)),
    "public": server_options(SETTINGS, CallLimits(2 * MIB, is_public=True)),
    "user": CHANNEL_OPTIONS,
}


def arguments(kind: str) -> dict[str, int]:
    return dict(KINDS[kind])


@pytest.fixture(scope="module")
def grpc_library() -> bytes:
    return Path(cygrpc.__file__).read_bytes()


# Names


@pytest.mark.parametrize("kind", KINDS)
def test_every_argument_is_one_that_grpc_knows_and_given_once(grpc_library: bytes, kind: str) -> None:
    """An unknown one would be ignored. Names end with a zero byte in the library, so no prefix of one is found."""
    assert [name for name in arguments(kind) if name.encode() + b"\0" not in grpc_library] == []
    assert len(arguments(kind)) == len(KINDS[kind])


@pytest.mark.parametrize("name", ["grpc.keepalive_time", "grpc.http2.min_recv_ping_interval_without_data_ms"])
def test_unknown_argument_would_be_found(grpc_library: bytes, name: str) -> None:
    assert name.encode() + b"\0" not in grpc_library


# Values


ALL = {"grpc.default_compression_algorithm": grpc.Compression.NoCompression}
OF_SERVICES = {
    **ALL,
    # Both ends ask silent peers, also while no call runs.
    "grpc.keepalive_time_ms": 2_500,
    "grpc.keepalive_timeout_ms": 1_500,
    "grpc.http2.ping_timeout_ms": 1_500,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.max_pings_without_data": 0,
    # The window of flow control is the one that was set.
    "grpc.http2.lookahead_bytes": 3 * MIB,
    "grpc.http2.bdp_probe": 0,
    # Nothing that is compressed is taken: there would be no limit to what becomes of it.
    "grpc.compression_enabled_algorithms_bitset": 1 << grpc.Compression.NoCompression,
}
OF_CLIENTS = {**OF_SERVICES, "grpc.min_reconnect_backoff_ms": 1_500}
OF_SERVERS = {
    **OF_SERVICES,
    "grpc.so_reuseport": 0,  # shares its port with nobody
    "grpc.max_allowed_incoming_connections": MAX_CONNECTIONS,
    "grpc.server_handshake_timeout_ms": HANDSHAKE_MS,
}


def limits(most_bytes: int) -> dict[str, int]:
    """Messages are limited in both directions."""
    return dict.fromkeys(("grpc.max_receive_message_length", "grpc.max_send_message_length"), most_bytes)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("user", ALL),
        ("control", {**OF_CLIENTS, **limits(CONTROL_MESSAGE_BYTES), "grpc.use_local_subchannel_pool": 0}),
        ("bulk", {**OF_CLIENTS, **limits(8 * MIB), "grpc.use_local_subchannel_pool": 1}),  # has connections of its own
        ("server", {**OF_SERVERS, **limits(8 * MIB), "grpc.max_concurrent_streams": 99}),
        ("server", {"grpc.max_connection_idle_ms": None}),
        # Users' calls send little ahead, and connections that they have forgotten are closed.
        ("public", {**OF_SERVERS, **limits(2 * MIB), "grpc.http2.lookahead_bytes": PUBLIC_WINDOW_BYTES}),
        ("public", {"grpc.max_connection_idle_ms": IDLE_MS}),
    ],
)
def test_connections_are_what_settings_say_and_as_their_kind_needs(kind: str, expected: dict[str, int | None]) -> None:
    found = arguments(kind)
    assert {name: found.get(name) for name in expected} == expected


def test_smaller_limit_of_messages_holds_for_requests_too() -> None:
    options = dict(server_options(SETTINGS, CallLimits(max_request_bytes=64 * MIB)))
    assert options["grpc.max_receive_message_length"] == SETTINGS.max_message_bytes


def test_control_streams_never_allow_more_than_was_set() -> None:
    options = dict(client_options(replace(SETTINGS, max_message_bytes=MIB), bulk=False))
    assert options["grpc.max_send_message_length"] == MIB


@pytest.mark.parametrize("kind", ["control", "bulk"])
def test_lost_peer_is_tried_again_soon(kind: str) -> None:
    options = arguments(kind)
    assert options["grpc.initial_reconnect_backoff_ms"] <= options["grpc.max_reconnect_backoff_ms"] <= 2_000


@pytest.mark.parametrize("seconds", [LEAST_KEEPALIVE_S, 10.0, 3600.0])
def test_no_server_sends_a_client_away_that_can_be_configured(seconds: float) -> None:
    """Whatever the server's own keep-alive is."""
    server = dict(server_options(replace(SETTINGS, keepalive_time_s=seconds), CallLimits()))
    assert server["grpc.http2.min_ping_interval_without_data_ms"] == MIN_PING_INTERVAL_MS
    assert server["grpc.keepalive_permit_without_calls"] == 1
    least = dict(client_options(replace(SETTINGS, keepalive_time_s=LEAST_KEEPALIVE_S), bulk=True))
    for client in (least, arguments("user")):
        assert client["grpc.keepalive_time_ms"] >= 2 * MIN_PING_INTERVAL_MS


# On the wire


async def _goaway_after_pings(port: int, interval_s: float) -> bool:
    """Whether a client that only pings is sent away. gRPC's own clients never ping more often than once a second."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    empty_settings, ping = bytes(3) + b"\x04" + bytes(5), b"\x00\x00\x08\x06\x00" + bytes(12)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + empty_settings)
    answer = b""
    try:
        for _ in range(6):
            writer.write(ping)
            with contextlib.suppress(TimeoutError):
                answer += await asyncio.wait_for(reader.readuntil(b"too_many_pings"), interval_s)
    except (ConnectionError, asyncio.IncompleteReadError) as error:
        answer += getattr(error, "partial", b"")
    writer.close()
    return b"too_many_pings" in answer


@pytest.mark.slow
async def test_the_limit_of_pings_is_in_force_and_clients_below_it_may_stay() -> None:
    """So the argument is not only known by name: a server's own default allows one ping in five minutes."""
    server = grpc.aio.server(options=server_options(SETTINGS, CallLimits()))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    intervals = (MIN_PING_INTERVAL_MS / 1e3 + 0.1, 0.05)
    try:
        sent_away = await asyncio.gather(*(_goaway_after_pings(port, interval_s) for interval_s in intervals))
    finally:
        await server.stop(grace=0)
    assert sent_away == [False, True]


# What must fit


MODEL = ModelDescription("target", "", "float32", bytes(32), vocab_size=1000, context_length=5000, stop_token_ids=())


PROMPT_BYTES = (MODEL.context_length + 2 * MODEL.vocab_size) * 5 + ENVELOPE_BYTES
BLOCK_BYTES = 10 * MIB


@pytest.mark.parametrize(
    ("check", "what", "needed", "said"),
    [
        (check_prompt_fits, MODEL, PROMPT_BYTES, rf" .* 5000 tokens.* {PROMPT_BYTES}"),
        (check_block_fits, BLOCK_BYTES, BLOCK_BYTES + ENVELOPE_BYTES, " but a draft block"),
    ],
)
def test_prompt_that_fills_the_context_and_longest_block_must_fit(
    check: Callable[[Any, int], None], what: Any, needed: int, said: str
) -> None:
    check(what, needed)
    with pytest.raises(InvalidRequestError, match=f"max_message_bytes is {needed - 1},{said}"):
        check(what, needed - 1)


def test_prompt_that_fills_the_context_must_fit_into_a_request_of_a_user() -> None:
    check_prompt_fits(MODEL, PROMPT_BYTES, "max_request_bytes")
    with pytest.raises(InvalidRequestError, match=f"max_request_bytes is {PROMPT_BYTES - 1}, .* so high, or serve"):
        check_prompt_fits(MODEL, PROMPT_BYTES - 1, "max_request_bytes")


def test_what_the_check_allows_for_is_enough_for_the_largest_request() -> None:
    """Ids of 32 bits, every token allowed and a stop token, every bias set, a salt of characters of 4 bytes each."""
    largest_id, largest = 2**32 - 1, 2**64 - 1
    sampling = session_pb2.SamplingParameters(
        **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), 0.5),
        **dict.fromkeys(("presence_penalty", "frequency_penalty"), 0.5),
        **dict.fromkeys(("top_k", "min_tokens"), largest_id),
        logit_bias={largest_id - index: 1.0 for index in range(1024)},
        allowed_token_ids=[largest_id] * MODEL.vocab_size,
    )
    request = verifier_pb2.OpenTargetSessionRequest(
        **dict.fromkeys(("lease_id", "session_id"), largest),
        **dict.fromkeys(("epoch", "first_round", "plain_rounds", "max_len"), largest_id),
        token_ids=[largest_id] * MODEL.context_length,
        verifying_key=bytes(16),
        parameters=session_pb2.SessionParameters(
            **dict.fromkeys(("choice", "prompt_len", "max_draft_tokens"), largest_id),
            stop_token_ids=[largest_id] * MODEL.vocab_size,
            sampling=sampling,
            rule=session_pb2.VerificationRule(name="x" * 64, is_lossless=True, is_coupled=True),
            cache_salt="\N{GRINNING FACE}" * 256,
        ),
    )
    assert request.ByteSize() <= PROMPT_BYTES


# Large batches on control streams


def commands(sizes: Sequence[int]) -> verifier_pb2.RunTargetSessionsResponse:
    """Returns a message with one event for each size, at least so large."""
    events = [
        verifier_pb2.TargetEvent(failure=session_pb2.SessionFailure(session_id=size, message="x" * size))
        for size in sizes
    ]
    return verifier_pb2.RunTargetSessionsResponse(events=events)


def sizes_in(message: verifier_pb2.RunTargetSessionsResponse) -> list[int]:
    return [event.failure.session_id for event in message.events]


@given(st.lists(st.integers(0, 600_000), min_size=1, max_size=12))
def test_batches_keep_the_order_of_events_and_stay_below_the_size_limit(sizes: list[int]) -> None:
    parts = list(in_messages(commands, sizes))
    assert [size for part in parts for size in sizes_in(part)] == sizes
    assert all(part.ByteSize() <= LEAST_MESSAGE_BYTES for part in parts)


def test_usual_batch_is_one_message_and_a_single_event_is_never_lost() -> None:
    for sizes, parts in (([100] * 1000, [[100] * 1000]), ([2 * MIB, 5], [[2 * MIB], [5]])):
        assert [sizes_in(part) for part in in_messages(commands, sizes)] == parts


# Settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_message_bytes", MIB - 1),
        ("max_message_bytes", 2**31),
        ("keepalive_time_s", 0.9),
        ("keepalive_time_s", 3601.0),
        ("keepalive_time_s", math.nan),
        ("keepalive_timeout_s", 0.0),
        ("keepalive_timeout_s", math.inf),
        ("flow_control_window_bytes", 2**16 - 1),
        ("flow_control_window_bytes", 2**30 + 1),
    ],
)
def test_setting_out_of_range_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        replace(SETTINGS, **{name: value})


def test_settings_at_their_limits_are_taken() -> None:
    ConnectionSettings(MIB, LEAST_KEEPALIVE_S, 3600.0, 2**16)
    ConnectionSettings(2**31 - 1, 3600.0, 1.0, 2**30)

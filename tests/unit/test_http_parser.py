"""What h11 is not given to parse, and what it parses as before."""

import random

import h11
import pytest

from draftwire.runtime.http_parser import (
    CHUNK_BYTES,
    MAX_EVENTS,
    MAX_HEAD_LINES,
    MAX_TRAILER_LINES,
    SMALL_CHUNKS,
    RequestParser,
)

CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%s\r\n%s\r\n" % (len(data), extension, data)


def events(parser: RequestParser) -> list[h11.Event]:
    """Returns the events of one turn."""
    parser.events_left = MAX_EVENTS
    found = []
    while isinstance(event := parser.next_event(), h11.Event):
        found.append(event)
    return found


def all_events(parser: RequestParser) -> list[h11.Event]:
    found = events(parser)
    while parser.is_held:
        found += events(parser)
    return found


def status_of(data: bytes, *, takes_bodies: bool = True) -> int:
    """Returns the status with which a request is refused; 0 if it is not."""
    parser = RequestParser(takes_bodies=takes_bodies)
    parser.receive_data(data)
    try:
        all_events(parser)
    except h11.RemoteProtocolError:
        assert parser.fault is not None
        return parser.fault.error_status_hint
    return 0


def test_a_turn_has_a_bounded_number_of_events() -> None:
    parser = RequestParser()
    parser.receive_data(CHUNKED + chunk(b"x") * 200 + b"0\r\n\r\n")
    turns = [len(events(parser)) for _ in range(4)]
    assert turns == [MAX_EVENTS, MAX_EVENTS, MAX_EVENTS, 202 - 3 * MAX_EVENTS]
    assert not parser.is_held


@pytest.mark.parametrize("size", [1, 2, 16, CHUNK_BYTES // 2])
@pytest.mark.parametrize("extension", [b"", b";a=" + b"b" * 2 * CHUNK_BYTES], ids=["", "extension"])
def test_body_of_many_small_chunks_is_refused(size: int, extension: bytes) -> None:
    few = chunk(b"x" * size, extension) * SMALL_CHUNKS
    more = chunk(b"x" * size, extension) * 4 * SMALL_CHUNKS
    assert status_of(CHUNKED + few + b"0\r\n\r\n") == 0
    assert status_of(CHUNKED + more) == 413


def test_body_of_large_chunks_may_have_any_number_of_them() -> None:
    assert status_of(CHUNKED + chunk(b"x" * CHUNK_BYTES) * 4 * SMALL_CHUNKS) == 0
    assert status_of(CHUNKED + chunk(b"x" * 2**18) + chunk(b"x") * 3 * SMALL_CHUNKS) == 0, "on average"


def test_chunks_of_the_requests_before_do_not_count() -> None:
    request = CHUNKED + chunk(b"x") * (SMALL_CHUNKS - 1) + b"0\r\n\r\n"
    parser = RequestParser()
    for _ in range(3):
        parser.receive_data(request)
        assert isinstance(all_events(parser)[-1], h11.EndOfMessage)
        parser.send(h11.Response(status_code=200, headers=[(b"content-length", b"0")]))
        parser.send(h11.EndOfMessage())
        parser.start_next_cycle()


@pytest.mark.parametrize(
    "headers",
    [
        b"content-length: 3\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 3\r\n",
        b"Transfer-Encoding: Chunked\r\nContent-Length: 0\r\n",
    ],
)
def test_request_with_two_lengths_is_refused(headers: bytes) -> None:
    assert status_of(b"POST / HTTP/1.1\r\nhost: x\r\n" + headers + b"\r\n0\r\n\r\n") == 400


def test_chunks_of_an_older_version_are_refused() -> None:
    assert status_of(CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"0\r\n\r\n") == 400


@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"OPTIONS"])
def test_request_that_has_no_body_by_its_method_is_refused_with_one(method: bytes) -> None:
    head = method + b" / HTTP/1.1\r\nhost: x\r\n"
    assert status_of(head + b"content-length: 1\r\n\r\nx") == 400
    assert status_of(head + b"transfer-encoding: chunked\r\n\r\n") == 400
    assert status_of(head + b"content-length: 0\r\n\r\n") == 0


def test_no_body_is_taken_where_none_is_read() -> None:
    assert status_of(CHUNKED, takes_bodies=False) == 413
    assert status_of(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\n", takes_bodies=False) == 413
    assert status_of(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n", takes_bodies=False) == 0


@pytest.mark.parametrize("step", [1, 7, 2**20], ids=lambda step: f"segments of {step}")
def test_lines_of_heads_and_trailers_are_counted_before_they_are_parsed(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = MAX_HEAD_LINES - 2
    head = b"GET / HTTP/1.1\r\nhost: x\r\n"
    trailers = CHUNKED + chunk(b"0\r\n" + b"a\n" * 100) + b"000;a\r\n"
    taken = [head + b"a:\r\n" * most + b"\r\n", trailers + b"a:\r\n" * MAX_TRAILER_LINES + b"\r\n"]
    refused = [head + b"a:\r\n" * (most + 1) + b"\r\n", trailers + b"a:\r\n" * (MAX_TRAILER_LINES + 1) + b"\r\n"]
    for whole, status in ((one, status) for status, many in ((0, taken), (431, refused)) for one in many):
        parser, found = RequestParser(), 0
        for start in range(0, len(whole), step):
            parser.receive_data(whole[start : start + step])
            try:
                all_events(parser)
            except h11.RemoteProtocolError:
                found = parser.fault.error_status_hint if parser.fault else 0
                break
        assert found == status, whole[:80]


def test_lines_of_a_body_are_no_lines_of_a_head() -> None:
    lines = b"a\n" * 1000
    assert status_of(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2000\r\n\r\n" + lines) == 0


def test_requests_are_parsed_as_h11_parses_them() -> None:
    """In segments and turns that are drawn, with trailers, extensions, and payloads that look like chunks."""
    generator = random.Random(5)
    for _ in range(150):
        payloads = [
            generator.choice((b"0\r\n\r\n", b"x", b"\n", b"0\n" * 40, b"y" * 700))
            for _ in range(generator.randrange(150))
        ]
        whole = CHUNKED + b"".join(chunk(one, generator.choice((b"", b";a"))) for one in payloads) + b"00 ;b\r\n"
        whole += generator.choice((b"", b"a: b\r\nc: d\r\n")) + b"\r\n"
        if payloads and generator.random() < 0.3:
            place = generator.randrange(len(CHUNKED), len(whole))
            whole = whole[:place] + b"!" + whole[place + 1 :]
        cuts = sorted(generator.sample(range(1, len(whole)), min(len(whole) - 1, generator.randrange(8))))
        ours, theirs = RequestParser(), h11.Connection(h11.SERVER)
        results = []
        for parser, read in ((ours, all_events), (theirs, _events_of_h11)):
            body, end = bytearray(), "open"
            try:
                for start, stop in zip([0, *cuts], [*cuts, len(whole)], strict=True):
                    parser.receive_data(whole[start:stop])
                    for event in read(parser):  # type: ignore[operator]
                        body += event.data if isinstance(event, h11.Data) else b""
                        end = repr(event.headers) if isinstance(event, h11.EndOfMessage) else end
            except h11.RemoteProtocolError:
                end = "refused"
            results.append(end if end == "refused" else (bytes(body), end))
        assert results[0] == results[1]


def _events_of_h11(parser: h11.Connection) -> list[h11.Event]:
    found = []
    while isinstance(event := parser.next_event(), h11.Event):
        found.append(event)
    return found

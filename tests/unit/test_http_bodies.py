"""Bodies of HTTP requests: what all of them together take is taken before they are read, and given back in time."""

import asyncio
import json
import threading
import tracemalloc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from draftwire.errors import NoRoomError, UnauthenticatedError
from draftwire_gateway.body_budget import PATIENCE_SECONDS, SMALL_BYTES, BodyBudget, BodyShare
from draftwire_gateway.http import body_reading, json_parsing
from draftwire_gateway.http.body import CompletionBody
from draftwire_gateway.http.body_reading import MAX_PARSERS, PIECE_BYTES, BodyReader
from draftwire_gateway.http.json_parsing import MAX_OBJECTS, parse
from draftwire_gateway.http.refusal import RefusedError
from draftwire_gateway.http.routes import COMPLETIONS
from draftwire_gateway.http.streaming import GeneratingRoute
from draftwire_gateway.metrics import GatewayMetrics

BODY = json.dumps({"model": "m", "prompt": [1, 2, 3], "stream": True}).encode()
Receive = Callable[[], Awaitable[dict[str, Any]]]
DOCS = Path(__file__).parents[2] / "docs"
PARSED_OVER_LENGTH = 29
"""Most memory that parsing takes, in lengths of the body."""


def scope(*, length: int | None = None) -> dict[str, Any]:
    headers = [(b"content-type", b"application/json")]
    headers += [] if length is None else [(b"content-length", str(length).encode())]
    return {"type": "http", "headers": headers}


async def never() -> dict[str, Any]:
    raise AssertionError("nothing is read")


def pieces_of(data: bytes, size: int, on_read: Callable[[], None] = lambda: None) -> Receive:
    left = [data[start : start + size] for start in range(0, len(data), size)]

    async def receive() -> dict[str, Any]:
        on_read()
        await asyncio.sleep(0)
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    return receive


class Silent:
    """A client that sends the head of a request and nothing else."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()

    async def __call__(self) -> dict[str, Any]:
        self.has_begun.set()
        await asyncio.Event().wait()
        raise AssertionError("never")


async def read(reader: BodyReader, scope: dict[str, Any], receive: Receive) -> CompletionBody:
    with reader.budget.share() as share:
        return await reader.read(CompletionBody, scope, receive, share)  # type: ignore[arg-type]


# Before a body is read


@pytest.mark.parametrize("length", [400_000, None], ids=["declared", "chunked"])
async def test_body_for_which_there_is_no_room_is_not_read(length: int | None) -> None:
    budget = BodyBudget(500_000)
    with budget.share() as other, budget.share() as small:
        other.take(370_000)
        small.take(65_000)
        with pytest.raises(NoRoomError, match="retry"):
            await read(BodyReader(2**20, budget), scope(length=length), never)
        assert budget.num_bytes == 435_000
    assert budget.num_bytes == 0


@pytest.mark.parametrize("count", [20, 40])
async def test_bodies_that_never_end_take_no_more_however_many_there_are(count: int) -> None:
    """And what is not taken is not read: 20 of them take what 40 do."""
    budget = BodyBudget(2**20)
    reader, piece, num_read, most = BodyReader(2**20, budget), b" " * (3 * PIECE_BYTES // 2), 0, 0

    async def endless() -> dict[str, Any]:
        nonlocal num_read, most
        most = max(most, budget.num_bytes)
        await asyncio.sleep(0)
        num_read += len(piece)
        return {"type": "http.request", "body": piece, "more_body": True}

    results = await asyncio.gather(*(read(reader, scope(), endless) for _ in range(count)), return_exceptions=True)
    assert all(isinstance(error, NoRoomError | RefusedError) for error in results)
    assert 2**19 < most <= 2**20
    assert num_read <= 2**20 + count * len(piece), "each asks for one piece before it finds that there is no room"
    assert budget.num_bytes == 0


async def test_body_of_undeclared_length_reserves_before_each_read() -> None:
    budget = BodyBudget()
    seen: list[int] = []
    data = BODY + b" " * (2 * PIECE_BYTES)
    reader = BodyReader(2**20, budget)
    with budget.share() as share:
        receive = pieces_of(data, PIECE_BYTES, lambda: seen.append(budget.num_bytes))
        await reader.read(CompletionBody, scope(), receive, share)  # type: ignore[arg-type]
        assert seen == [PIECE_BYTES, 2 * PIECE_BYTES, 3 * PIECE_BYTES]
        assert budget.num_bytes == len(data)


async def test_length_that_is_declared_in_thousands_of_digits_is_too_large() -> None:
    for digits in ("9" * 21, "9" * 10_000):
        given = scope()
        given["headers"].append((b"content-length", digits.encode()))
        with pytest.raises(RefusedError, match="at most"):
            await read(BodyReader(2**20), given, never)


# Whose room it is


def arriving(stack: ExitStack, budget: BodyBudget, num_bytes: int) -> tuple[BodyShare, list[str]]:
    share, ended = stack.enter_context(budget.share()), list[str]()
    share.take(num_bytes)
    stack.enter_context(share.arriving(lambda: ended.append("given up")))
    return share, ended


def test_slow_body_makes_room_for_others_and_a_quick_one_keeps_its_room() -> None:
    now = [0.0]
    budget = BodyBudget(1_000_000, lambda: now[0])
    with ExitStack() as stack:
        _, first = arriving(stack, budget, 300_000)
        now[0] = 1.0
        second_share, second = arriving(stack, budget, 300_000)
        complete = stack.enter_context(budget.share())
        complete.take(100_000)
        for now[0], ended in ((PATIENCE_SECONDS, []), (PATIENCE_SECONDS + 0.5, ["given up"])):
            with budget.share() as newcomer:
                with pytest.raises(NoRoomError) if not ended else ExitStack():
                    newcomer.take(200_000)
                assert (first, second) == (ended, [])
        now[0] = 100.0
        with pytest.raises(NoRoomError):
            second_share.take(700_000)  # which does not help itself
        assert second == []
        with pytest.raises(NoRoomError):
            complete.take(2_000_000)  # however much is given up for it
        assert (second, budget.num_bytes) == (["given up"], 100_000)
        with pytest.raises(NoRoomError, match="slowly"):
            second_share.take(1)
    assert budget.num_bytes == 0


async def test_body_that_is_given_up_ends_at_once_and_says_when_to_try_again() -> None:
    now = [0.0]
    budget = BodyBudget(1_000_000, lambda: now[0])
    client = Silent()
    slow = asyncio.create_task(read(BodyReader(2**20, budget), scope(length=700_000), client))
    await client.has_begun.wait()
    now[0] = PATIENCE_SECONDS + 1.0
    body = await read(BodyReader(2**20, budget), scope(length=200_000), pieces_of(BODY, 10))
    assert body.prompt == [[1, 2, 3]]
    with pytest.raises(NoRoomError, match="slowly"):
        await slow
    assert budget.num_bytes == 0


async def test_small_bodies_have_room_that_large_ones_leave() -> None:
    budget = BodyBudget(1_000_000)
    with ExitStack() as stack:
        for _ in range(7):
            stack.enter_context(budget.share()).take(100_000)
        with pytest.raises(NoRoomError):
            stack.enter_context(budget.share()).take(100_000)
        with budget.share() as small:
            small.take(SMALL_BYTES)
        assert (await read(BodyReader(2**20, budget), scope(length=len(BODY)), pieces_of(BODY, 10))).model == "m"


def test_bodies_of_one_caller_take_half_of_the_room_at_most() -> None:
    budget = BodyBudget(1_000_000)
    with ExitStack() as stack:
        for _ in range(2):  # what is given back counts no more
            with budget.share("alice") as first:
                first.take(450_000)
                with budget.share("alice") as second, pytest.raises(NoRoomError, match="alice"):
                    second.take(60_000)
                stack.enter_context(budget.share("bob")).take(40_000)
        with budget.share() as nobody:
            nobody.take(600_000)


# Parsers


async def test_only_so_many_bodies_are_parsed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    running, most, lock = 0, 0, threading.Lock()
    full = threading.Barrier(MAX_PARSERS)

    def parsed(kind: Any, data: bytes, ignored: Any) -> CompletionBody:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        full.wait(10.0)  # until as many run as may
        with lock:
            running -= 1
        return CompletionBody(model="m", prompt="p")  # type: ignore[arg-type]

    monkeypatch.setattr(body_reading, "read", parsed)
    reader, data = BodyReader(2**20), b" " * (body_reading.MAX_BODY_ON_LOOP + 1)
    await asyncio.gather(*(read(reader, scope(length=len(data)), pieces_of(data, 2**20)) for _ in range(8)))
    assert most == MAX_PARSERS


def body_of(key: str, items: Iterable[str], num_bytes: int = 500_000) -> bytes:
    """Returns a body with as many of the items as fit. One character of it makes Python take four bytes for each."""
    ends = {"prompt": "[]", "logit_bias": "{}"}[key]
    taken: list[str] = []
    for item in items:
        num_bytes -= len(item.encode()) + 1
        if num_bytes < 0:
            break
        taken.append(item)
    return f'{{"model": "😀", "{key}": {ends[0]}{",".join(taken)}{ends[1]}}}'.encode()


LETTERS = [chr(code) for code in range(0x100, 0x800)]
DENSE_BODIES = {
    "token ids": lambda: body_of("prompt", repeat("257")),
    "texts of a letter": lambda: body_of("prompt", repeat('"Ā"')),
    "keys of two letters": lambda: body_of("logit_bias", (f'"{a}{b}":1' for a in LETTERS for b in LETTERS)),
    "keys of digits": lambda: body_of("logit_bias", (f'"{number}":1' for number in range(10**6))),
}


@pytest.mark.parametrize("make", DENSE_BODIES.values(), ids=list(DENSE_BODIES))
def test_parsing_takes_no_more_memory_than_the_docs_say(make: Callable[[], bytes]) -> None:
    """What Python allocates at the peak, whether the body is taken or refused; with -s each is printed.

    The sum of docs/threats.md has this for the largest bodies.
    """
    data = make()
    tracemalloc.start()
    try:
        with suppress(RefusedError):
            body_reading.read(CompletionBody, data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    print(f"{peak / len(data):.1f} times {len(data)} bytes")
    assert peak < PARSED_OVER_LENGTH * len(data)
    for page in ("http.md", "threats.md"):
        assert f"{PARSED_OVER_LENGTH} times" in (DOCS / page).read_text()


@pytest.mark.parametrize("lists", ["[]," * MAX_OBJECTS, "[" * MAX_OBJECTS + "]" * MAX_OBJECTS + ","])
def test_too_many_lists_are_refused_before_one_is_made(monkeypatch: pytest.MonkeyPatch, lists: str) -> None:
    monkeypatch.setattr(json_parsing.json, "loads", lambda *_, **__: pytest.fail("is not parsed"))
    with pytest.raises(RefusedError, match=f"at most {MAX_OBJECTS} lists"):
        parse(f'{{"prompt": [{lists[:-1]}]}}'.encode())


def test_lists_within_texts_are_not_counted() -> None:
    code = 'a["b"] = [\\' * MAX_OBJECTS
    assert parse(json.dumps({"prompt": code, "stop": ["[", "\\", '"']}).encode())["prompt"] == code


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet='"\\[]a{,\n', max_size=40))
@example('"\\')
@example('"\\"[')
@example('\\"[["[')
def test_lists_are_counted_as_they_begin_outside_of_texts(text: str) -> None:
    count, is_text, is_escaped = 0, False, False
    for one in text:
        if is_text:
            is_text = is_escaped or one != '"'
            is_escaped = one == "\\" and not is_escaped
        else:
            is_text = one == '"'
            count += one == "["
    found = [one.group() for one in json_parsing._TEXT_OR_LIST.finditer(text.encode())]
    assert found.count(b"[") == count


@pytest.mark.parametrize("inside", ['\\"', "\\\\", "a\\", "["])
@pytest.mark.parametrize("count", [1000, 2000])
def test_text_that_does_not_end_is_passed_over_once(inside: str, count: int) -> None:
    """Whoever looked for its end from each of its quotation marks would take n * n steps."""
    data = ('"' + inside * count).encode()
    assert [found.span() for found in json_parsing._TEXT_OR_LIST.finditer(data)] == [(0, len(data))]


def test_pydantics_own_parser_would_take_the_last_of_two_equal_keys() -> None:
    """And count nothing: why bodies are parsed here, and only validated there. If this fails, think again."""
    assert from_json(b'{"n": 1, "n": 2}') == {"n": 2}


# Before and after


class Core:
    """As much of a core as a route asks for; what it generates is nothing."""

    description = SimpleNamespace(name="m")
    model_names = ("m",)

    def __init__(self, budget: BodyBudget) -> None:
        self.metrics = GatewayMetrics()
        self.is_full = False
        self.taken: list[int] = []
        self.bodies: list[Any] = []
        self._budget = budget
        self.has_place = True
        self.queue = SimpleNamespace(
            has_place=lambda num_choices: self.has_place, refuse_if_full=self.refuse_if_full, place=self.place
        )

    def num_refused(self, by: str) -> float | None:
        read, of_caller = self.metrics.registry.get_sample_value, {"by": by, "caller": Callers.name}
        count = read("draftwire:requests_refused_total", {"by": by})
        assert count == (read("draftwire:caller_requests_refused_total", of_caller) or 0.0)
        return count

    def refuse_if_full(self, num_choices: int = 1) -> None:
        if self.is_full:
            raise NoRoomError("full")

    @asynccontextmanager
    async def place(self, num_choices: int, caller: str = "") -> AsyncIterator[None]:
        self.refuse_if_full(num_choices)
        yield

    async def complete(self, requested: Any) -> list[Any]:
        self.taken.append(self._budget.num_bytes)
        return [SimpleNamespace(choice=0)]

    async def check_form(self, generations: Any, form_payer: str) -> Any:
        return generations

    async def generate(self, generations: Any, place: Any, traceparent: str) -> AsyncIterator[Any]:
        self.taken.append(self._budget.num_bytes)
        self.bodies = [body() for body in self.bodies]
        return
        yield


class Noting(BodyReader):
    """Keeps weak references to the bodies that it read."""

    core: Core

    async def parse(self, *args: Any) -> Any:
        body = await super().parse(*args)
        self.core.bodies.append(weakref.ref(body))
        return body


class Callers:
    """Knows one caller, who may be refused."""

    name = "somebody"
    error: Exception | None = None

    def authenticate(self, authorization: str | None) -> Any:
        if authorization != "Bearer good":
            raise UnauthenticatedError("who?")
        return self

    def refuse_if_over(self, num_choices: int = 1) -> None:
        if self.error is not None:
            raise self.error

    @contextmanager
    def request(self, num_choices: int) -> Iterator[None]:
        yield

    def charge(self, num_tokens: int) -> None:
        pass


def route_and_core(budget: BodyBudget, waiting: BodyBudget | None = None) -> tuple[GeneratingRoute[Any], Core, Callers]:
    bodies, core, callers = Noting(2**20, budget), Core(budget), Callers()
    bodies.core = core
    return GeneratingRoute(COMPLETIONS, core, list, callers, bodies, waiting or BodyBudget()), core, callers  # type: ignore[arg-type]


async def ask(route: GeneratingRoute[Any], receive: Receive, token: bytes = b"Bearer good") -> None:
    async def send(message: Any) -> None:
        pass

    given = scope(length=len(BODY))
    given["headers"].append((b"authorization", token))
    await route(given, receive, send)  # type: ignore[arg-type]


async def test_nothing_is_read_for_who_is_unknown_or_has_no_room() -> None:
    route, core, callers = route_and_core(BodyBudget())
    with pytest.raises(UnauthenticatedError):
        await ask(route, never, b"Bearer bad")
    callers.error = NoRoomError("used up")
    with pytest.raises(NoRoomError, match="used up"):
        await ask(route, never)
    callers.error, core.is_full = None, True
    with pytest.raises(NoRoomError, match="full"):
        await ask(route, never)
    assert (core.num_refused("caller"), core.num_refused("gateway")) == (1.0, 1.0)


async def test_body_for_which_there_is_no_room_counts_as_refused() -> None:
    budget = BodyBudget(200)
    route, core, _ = route_and_core(budget)
    with budget.share() as other:
        other.take(190)
        with pytest.raises(NoRoomError):
            await ask(route, never)
    assert (core.num_refused("caller"), core.num_refused("gateway")) == (0.0, 1.0)


async def test_waiting_body_for_which_there_is_no_room_counts_as_refused() -> None:
    route, core, _ = route_and_core(BodyBudget(), waiting=BodyBudget(len(BODY) - 1))
    core.has_place = False
    with pytest.raises(NoRoomError, match="bodies"):
        await ask(route, pieces_of(BODY, 10))
    assert (core.num_refused("gateway"), core.taken) == (1.0, [])


async def test_body_is_held_and_counts_until_it_is_a_request_and_no_longer() -> None:
    budget = BodyBudget()
    route, core, _ = route_and_core(budget)
    first = pieces_of(BODY, 10)

    async def receive() -> dict[str, Any]:
        return await first() if not core.bodies else await Silent()()

    await ask(route, receive)
    assert core.taken == [len(BODY), 0]
    assert core.bodies == [None], "it is not kept while its request runs"

"""Clients of HTTP whose gateway is killed go on at another one: no token is lost, and none comes twice."""

import itertools
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tiny_models import save_spelling_model

from benchmarks.law import stack_options
from draftwire.cli.local_stack import LocalStack
from draftwire.client import Client
from tests.in_process import InProcessStack

TOKENS = [*"abcdefghijklmnopqrstuvwxyz", "<e>"]
MAX_TOKENS = 300
NUM_TEXTS = 10
CONCURRENCY = 5
SECONDS_BETWEEN_KILLS = 1.0
MAX_SECONDS = 90.0


class Gateways:
    """Two processes, one of which is killed now and then and comes back elsewhere."""

    def __init__(self, peers: dict[str, str]) -> None:
        self._options = {"gateway": {**peers, "speculation": "fixed", "local_drafts": "none"}}
        self._stacks = [self._started() for _ in range(2)]
        self.num_kills = 0

    def _started(self) -> LocalStack:
        stack = LocalStack(self._options)
        stack.start()
        return stack

    def address(self, number: int) -> str:
        return self._stacks[number % 2].http_address

    def kill_in_turn(self, is_over: threading.Event) -> None:
        for number in itertools.count():
            if is_over.wait(SECONDS_BETWEEN_KILLS):
                return
            self._stacks[number % 2].kill()
            self.num_kills += 1
            self._stacks[number % 2].stop()
            self._stacks[number % 2] = self._started()

    def stop(self) -> None:
        for stack in self._stacks:
            stack.stop()


class InterruptedStreamError(Exception):
    """A stream that did not end."""


def events_of(url: str, asked: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields id and data of the events of a stream."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(asked).encode(), headers)
    event_id, is_complete = "", False
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            for line in response:
                name, _, value = line.decode().rstrip("\n").partition(": ")
                if name == "id":
                    event_id = value
                elif (name, value) == ("data", "[DONE]"):
                    is_complete = True
                elif name == "data":
                    yield event_id, json.loads(value)
    except (OSError, ValueError, urllib.error.HTTPError) as error:
        raise InterruptedStreamError from error
    if not is_complete:
        raise InterruptedStreamError


def complete(gateways: Gateways, seed: int) -> tuple[list[int], str, int]:
    """Returns ids and text of a completion, and how often it was interrupted after its first token."""
    asked: dict[str, Any] = {
        "model": "target",
        "prompt": "hello",
        "seed": seed,
        "max_tokens": MAX_TOKENS,
        "stream": True,
    }
    asked |= {"stream": True, "rejection_sample_method": "coupled", "ignore_eos": True, "return_token_ids": True}
    ids, text, last_id, num_interruptions = list[int](), "", "", 0
    for attempt in itertools.count(seed):
        try:
            for event_id, data in events_of(gateways.address(attempt), asked):
                (choice,) = data["choices"]
                ids += choice["token_ids"]
                text += choice["text"]
                last_id = event_id
            return ids, text, num_interruptions
        except InterruptedStreamError:
            if ids:
                num_interruptions += 1
                asked["generated_choices"] = [{"choice": 0, "token_ids": ids, "event_id": last_id}]
            time.sleep(0.05)
    raise AssertionError("not reached")


@pytest.mark.timeout(300)
def test_killed_gateway_loses_no_completion_and_repeats_no_token(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("resume")
    target, drafter = (
        save_spelling_model(folder / name, TOKENS, len(TOKENS) - 1, seed, 512)
        for name, seed in (("target", 6), ("drafter", 9))
    )
    with InProcessStack(stack_options(target, drafter)) as stack:
        peers = {name: f"127.0.0.1:{stack.services[name].port}" for name in ("verifier", "drafter")}
        gateways, is_over = Gateways(peers), threading.Event()
        killer = threading.Thread(target=gateways.kill_in_turn, args=(is_over,))
        killer.start()
        try:
            with ThreadPoolExecutor(CONCURRENCY) as pool:
                done = list(pool.map(lambda seed: complete(gateways, seed), range(NUM_TEXTS)))
        finally:
            is_over.set()
            killer.join()
            gateways.stop()
        options: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "rejection_sample_method": "coupled"}
        with Client(stack.address) as client:
            for seed, (ids, text, _) in enumerate(done):
                expected = client.generate("hello", seed=seed, **options)
                assert (ids, text) == (expected.token_ids, expected.text)
    num_interruptions = sum(interruptions for _, _, interruptions in done)
    print(f"{gateways.num_kills} kills, {num_interruptions} interruptions of {NUM_TEXTS} streams")
    assert num_interruptions >= 3

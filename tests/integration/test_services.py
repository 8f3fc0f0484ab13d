"""What users and operators of the three processes can rely on."""

import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
from conftest import read_metric
from grpc_health.v1 import health_pb2, health_pb2_grpc
from transformers import AutoModelForCausalLM

from benchmarks.law import stack_options
from draftwire.client import Client
from draftwire.errors import InvalidRequestError, NoRoomError, UnavailableError
from draftwire.services.local_stack import LocalStack
from draftwire.verification import RULES
from tests.tiny_models import save_tiny_model

PROMPT = [0, 2, 1, 1]


def wait_until(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


@torch.inference_mode()
def greedy_ids(folder: Path, prompt: list[int], count: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    output = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None)
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_speculative_tokens", [0, 1, 4, 8])
def test_greedy_output_is_the_targets_own(
    client: Client, pair: tuple[Path, Path], rule: str, num_speculative_tokens: int
) -> None:
    completion = client.generate(
        PROMPT,
        temperature=0.0,
        max_tokens=40,
        num_speculative_tokens=num_speculative_tokens,
        rejection_sample_method=rule,
    )
    assert completion.token_ids == greedy_ids(pair[0], PROMPT, 40)
    assert completion.finish_reason == "length"
    assert completion.rejection_sample_method == rule
    assert (completion.statistics.num_drafts > 0) == (num_speculative_tokens > 0)


def test_every_block_travels_from_drafter_to_verifier_directly(stack: LocalStack, client: Client) -> None:
    sent, received = read_metric(stack, "drafter", "blocks_sent"), read_metric(stack, "verifier", "blocks_received")
    judged = 0
    for seed in range(10):
        judged += client.generate(PROMPT, max_tokens=30, seed=seed).statistics.num_drafts
    assert judged > 10
    assert read_metric(stack, "drafter", "blocks_sent") - sent == judged
    assert read_metric(stack, "verifier", "blocks_received") - received == judged


def test_a_round_emits_more_than_one_token_and_the_statistics_add_up(client: Client) -> None:
    completion = client.generate(PROMPT, max_tokens=50, seed=3)
    numbers = completion.statistics
    assert completion.block_efficiency > 1.1
    assert numbers.num_emitted_tokens == numbers.num_rounds + numbers.num_accepted_tokens
    assert numbers.num_generated_tokens == len(completion.token_ids) == 50
    assert sum(numbers.num_accepted_tokens_per_pos) == numbers.num_accepted_tokens
    assert list(numbers.num_accepted_tokens_per_pos) == sorted(numbers.num_accepted_tokens_per_pos, reverse=True)


def test_tokens_stream_as_they_are_committed(client: Client) -> None:
    pieces = list(client.stream(PROMPT, max_tokens=30, seed=1))
    assert len(pieces) > 5
    assert sum(len(piece.token_ids) for piece in pieces) == 30


BAD_REQUESTS = {
    "empty text": ({"prompt": ""}, "prompt is empty"),
    "empty ids": ({"prompt": []}, "prompt is empty"),
    "prompt as long as the context": ({"prompt": [1] * 64}, "context"),
    "id beyond the vocabulary": ({"prompt": [3]}, "token ids"),
    "negative temperature": ({"temperature": -0.1}, "temperature"),
    "NaN temperature": ({"temperature": math.nan}, "temperature"),
    "infinite temperature": ({"temperature": math.inf}, "temperature"),
    "top_p of 0": ({"top_p": 0.0}, "top_p"),
    "top_p above 1": ({"top_p": 1.01}, "top_p"),
    "NaN top_p": ({"top_p": math.nan}, "top_p"),
    "negative top_k": ({"top_k": -1}, "range"),
    "unknown rule": ({"rejection_sample_method": "magic"}, "block, token"),
    "no tokens": ({"max_tokens": 0}, "max_tokens"),
    "tokens beyond the context": ({"max_tokens": 61}, "max_tokens"),
    "too long blocks": ({"num_speculative_tokens": 17}, "num_speculative_tokens"),
    "empty stop string": ({"stop": [""]}, "stop"),
    "too many stop strings": ({"stop": ["a"] * 17}, "stop"),
    "stop id beyond the vocabulary": ({"stop_token_ids": [9]}, "stop_token_ids"),
    "chat without a template": ({"prompt": [{"role": "user", "content": "t1"}]}, "chat template"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_request_gets_a_clear_error_and_breaks_nothing(client: Client, name: str) -> None:
    options, message = BAD_REQUESTS[name]
    with pytest.raises(InvalidRequestError, match=message):
        client.generate(**{"prompt": PROMPT, "max_tokens": 5, **options})
    assert len(client.generate(PROMPT, max_tokens=5).token_ids) == 5


def test_cancelled_request_frees_its_sessions(stack: LocalStack, client: Client) -> None:
    stream = client.stream(PROMPT, max_tokens=60, num_speculative_tokens=2)
    next(iter(stream))
    stream.cancel()
    for service in ("verifier", "drafter"):
        wait_until(lambda service=service: read_metric(stack, service, "num_sessions") == 0)


def test_services_report_health(stack: LocalStack) -> None:
    names = {"gateway": "GatewayService", "verifier": "VerifierService", "drafter": "DrafterService"}
    for service, name in names.items():
        with grpc.insecure_channel(f"127.0.0.1:{stack.services[service].port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for asked in ("", f"draftwire.v1.{name}"):
                answer = stub.Check(health_pb2.HealthCheckRequest(service=asked), timeout=5)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_drafter_with_another_vocabulary_is_refused_with_the_first_differing_token(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    odd = save_tiny_model(tmp_path / "odd", 3, seed=2, tokens=["t0", "zebra", "t2"])
    with pytest.raises(UnavailableError, match=r"token 1: 't1' against 'zebra'"):
        LocalStack(stack_options(pair[0], odd)).__enter__()


def test_missing_model_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="no model folder"):
        LocalStack({"verifier": {"model": tmp_path / "nothing"}}).__enter__()


def test_speculation_ends_at_the_drafters_context_and_the_request_goes_on(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    short = save_tiny_model(tmp_path / "short", 3, seed=2, context_length=24)
    with LocalStack(stack_options(pair[0], short)) as stack, Client(stack.address) as client:
        completion = client.generate(PROMPT, temperature=0.0, max_tokens=50)
        assert completion.token_ids == greedy_ids(pair[0], PROMPT, 50)
        assert completion.statistics.num_drafts > 0
        assert completion.drafter_error == ""
        long_prompt = PROMPT * 8
        beyond = client.generate(long_prompt, temperature=0.0, max_tokens=20)
        assert beyond.token_ids == greedy_ids(pair[0], long_prompt, 20)
        assert "context" in beyond.drafter_error


def test_padded_vocabularies_over_the_same_tokens_work_together(tmp_path: Path) -> None:
    names = ["t0", "t1", "t2"]
    target = save_tiny_model(tmp_path / "target", 5, seed=0, tokens=names)
    drafter = save_tiny_model(tmp_path / "drafter", 8, seed=2, tokens=names)
    for one, other in ((target, drafter), (drafter, target)):
        with LocalStack(stack_options(one, other)) as stack, Client(stack.address) as client:
            completion = client.generate(PROMPT, max_tokens=50, seed=1)
            assert len(completion.token_ids) == 50
            assert completion.drafter_error == ""
            assert completion.statistics.num_drafts > 0


@pytest.fixture
def own_stack(pair: tuple[Path, Path]) -> Iterator[LocalStack]:
    """A stack that a test may break."""
    with LocalStack(stack_options(*pair)) as running:
        yield running


def test_killed_drafter_costs_speed_only(own_stack: LocalStack, pair: tuple[Path, Path]) -> None:
    with Client(own_stack.address) as client:
        stream = client.stream(PROMPT, temperature=0.0, max_tokens=55, num_speculative_tokens=1)
        ids: list[int] = []
        for piece in stream:
            if not ids:
                own_stack.services["drafter"].process.kill()
            ids += piece.token_ids
        assert ids == greedy_ids(pair[0], PROMPT, 55)
        assert stream.completion is not None
        wait_until(lambda: not client.server().HasField("drafter"))
        after = client.generate(PROMPT, temperature=0.0, max_tokens=55)
        assert after.token_ids == ids
        assert after.statistics.num_drafts == 0


def test_hung_drafter_costs_its_timeout_only(pair: tuple[Path, Path]) -> None:
    options = stack_options(*pair)
    options["gateway"] = {"block_timeout_s": 0.3}
    with LocalStack(options) as stack, Client(stack.address) as client:
        client.generate(PROMPT, max_tokens=10)
        stream = client.stream(PROMPT, temperature=0.0, max_tokens=55, num_speculative_tokens=1)
        ids: list[int] = []
        for piece in stream:
            if not ids:
                stack.services["drafter"].process.send_signal(signal.SIGSTOP)
            ids += piece.token_ids
        stack.services["drafter"].process.send_signal(signal.SIGCONT)
        assert ids == greedy_ids(pair[0], PROMPT, 55)


def test_lost_verifier_is_an_error_of_the_request_and_the_gateway_finds_the_next_one(
    own_stack: LocalStack, pair: tuple[Path, Path]
) -> None:
    verifier = own_stack.services["verifier"]
    with Client(own_stack.address) as client:
        verifier.process.kill()
        with pytest.raises(UnavailableError):
            client.generate(PROMPT, max_tokens=50)
        options = {"verifier": {**stack_options(*pair)["verifier"], "port": verifier.port}}
        with LocalStack(options):
            deadline = time.monotonic() + 20
            while True:
                try:
                    completion = client.generate(PROMPT, temperature=0.0, max_tokens=40)
                    break
                except UnavailableError:
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
            assert completion.token_ids == greedy_ids(pair[0], PROMPT, 40)


def test_sigterm_lets_running_requests_finish_and_ends_with_status_0(own_stack: LocalStack) -> None:
    with Client(own_stack.address) as client:
        pieces = iter(client.stream(PROMPT, max_tokens=60, num_speculative_tokens=1))
        count = len(next(pieces).token_ids)
        for service in own_stack.services.values():
            service.process.send_signal(signal.SIGTERM)
        count += sum(len(piece.token_ids) for piece in pieces)
        assert count == 60
    for service in own_stack.services.values():
        assert service.process.wait(20) == 0


def test_second_server_on_a_port_in_use_fails_with_a_clear_error(
    own_stack: LocalStack, pair: tuple[Path, Path]
) -> None:
    options = {"verifier": {**stack_options(*pair)["verifier"], "port": own_stack.services["verifier"].port}}
    with pytest.raises(UnavailableError, match="cannot listen"):
        LocalStack(options).__enter__()


def test_full_verifier_refuses_with_no_room(pair: tuple[Path, Path]) -> None:
    options = stack_options(*pair)
    options["verifier"]["max_sessions"] = 1
    with LocalStack(options) as stack, Client(stack.address) as client:
        streams = [client.stream(PROMPT, max_tokens=60, num_speculative_tokens=0) for _ in range(8)]
        refused = 0
        for stream in streams:
            try:
                assert sum(len(piece.token_ids) for piece in stream) == 60
            except NoRoomError:
                refused += 1
        assert 1 <= refused < 8

"""What users and operators of the three processes can rely on."""

import math
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from observing import read_metric, wait_until
from transformers import AutoModelForCausalLM

from benchmarks.law import CONTEXT_LENGTH, LOSSLESS, stack_options
from benchmarks.relay import free_port
from draftwire.client import Client
from draftwire.errors import InvalidRequestError, NoRoomError, UnavailableError
from draftwire.models.kv_cache import BLOCK_SIZE
from draftwire.models.script import expected_tokens
from draftwire.verification import RULES
from tests.in_process import InProcessStack
from tests.stacks import SCRIPTED_ROOM
from tests.tiny_models import save_tiny_model, tiny_network

PROMPT = [0, 2, 1, 1]
READY = Path(__file__).parents[2] / "deploy" / "ready.sh"


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
    expected = greedy_ids(pair[0], PROMPT, 40)

    def num_drafts() -> int:
        completion = client.generate(
            PROMPT,
            temperature=0.0,
            max_tokens=40,
            num_speculative_tokens=num_speculative_tokens,
            rejection_sample_method=rule,
        )
        assert completion.token_ids == expected
        assert completion.finish_reason == "length"
        assert completion.rejection_sample_method == rule
        return completion.statistics.num_drafts

    if num_speculative_tokens:
        wait_until(lambda: num_drafts() > 0, "the drafter is ready before all is said")
    else:
        assert num_drafts() == 0


def test_every_block_travels_from_drafter_to_verifier_directly(stack: InProcessStack, client: Client) -> None:
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


def test_lossy_rule_is_marked_in_the_response_and_counted(stack: InProcessStack, client: Client) -> None:
    completion = client.generate(PROMPT, max_tokens=10, rejection_sample_method="typical")
    assert completion.is_lossy
    before = read_metric(stack, "gateway", "lossy_requests")
    assert client.generate(PROMPT, max_tokens=10, rejection_sample_method="typical").is_lossy
    for rule in ("block", "token", "coupled"):
        assert not client.generate(PROMPT, max_tokens=10, rejection_sample_method=rule).is_lossy
    assert read_metric(stack, "gateway", "lossy_requests") == before + 1
    assert list(client.server().lossy_rejection_sample_methods) == ["typical"]


def test_gateway_with_a_lossy_default_does_not_start(pair: tuple[Path, Path]) -> None:
    options = stack_options(*pair)
    options["gateway"]["rejection_sample_method"] = "typical"
    with pytest.raises(UnavailableError, match="typical is lossy"), InProcessStack(options):
        pass


def test_same_seed_gives_the_same_text_under_coupled_whatever_the_blocks(client: Client) -> None:
    texts = {
        tuple(
            client.generate(
                PROMPT, max_tokens=40, seed=11, num_speculative_tokens=length, rejection_sample_method="coupled"
            ).token_ids
        )
        for length in (0, 1, 2, 4, 8, 16)
    }
    assert len(texts) == 1
    others = {
        tuple(client.generate(PROMPT, max_tokens=40, seed=seed, rejection_sample_method="coupled").token_ids)
        for seed in range(5)
    }
    assert len(others) == 5, "the seed matters"


def test_stop_tokens_wait_for_min_tokens_and_only_allowed_tokens_appear(client: Client) -> None:
    for seed in range(10):
        completion = client.generate(PROMPT, max_tokens=40, seed=seed, stop_token_ids=[1], min_tokens=7)
        assert 1 not in completion.token_ids[:7]
        assert (completion.token_ids[-1] == 1) == (completion.finish_reason == "stop")
        allowed = client.generate(PROMPT, max_tokens=20, seed=seed, allowed_token_ids=[0, 2])
        assert set(allowed.token_ids) <= {0, 2}


def test_tokens_stream_as_they_are_committed(client: Client) -> None:
    pieces = list(client.stream(PROMPT, max_tokens=30, seed=1))
    assert len(pieces) > 5
    assert sum(len(piece.token_ids) for piece in pieces) == 30


BAD_REQUESTS = {
    "empty text": ({"prompt": ""}, "prompt is empty"),
    "empty ids": ({"prompt": []}, "prompt is empty"),
    "prompt as long as the context": ({"prompt": [1] * CONTEXT_LENGTH}, "context"),
    "id beyond the vocabulary": ({"prompt": [3]}, "token ids"),
    "negative temperature": ({"temperature": -0.1}, "temperature"),
    "NaN temperature": ({"temperature": math.nan}, "temperature"),
    "infinite temperature": ({"temperature": math.inf}, "temperature"),
    "top_p of 0": ({"top_p": 0.0}, "top_p"),
    "top_p above 1": ({"top_p": 1.01}, "top_p"),
    "NaN top_p": ({"top_p": math.nan}, "top_p"),
    "negative top_k": ({"top_k": -1}, "range"),
    "min_p above 1": ({"min_p": 1.5}, "min_p"),
    "NaN min_p": ({"min_p": math.nan}, "min_p"),
    "repetition penalty of 0": ({"repetition_penalty": 0.0}, "repetition_penalty"),
    "presence penalty above 2": ({"presence_penalty": 2.5}, "presence_penalty"),
    "NaN frequency penalty": ({"frequency_penalty": math.nan}, "frequency_penalty"),
    "bias above 100": ({"logit_bias": {1: 101.0}}, "logit_bias"),
    "NaN bias": ({"logit_bias": {1: math.nan}}, "logit_bias"),
    "bias beyond the vocabulary": ({"logit_bias": {3: 1.0}}, "logit_bias"),
    "allowed id beyond the vocabulary": ({"allowed_token_ids": [1, 3]}, "allowed_token_ids"),
    "no token possible": ({"allowed_token_ids": [1], "stop_token_ids": [1], "min_tokens": 2}, "allowed_token_ids"),
    "more tokens at least than at most": ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
    "unknown rule": ({"rejection_sample_method": "magic"}, "block, token"),
    "tokens beyond the context": ({"max_tokens": CONTEXT_LENGTH - 3}, "max_tokens"),
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


def test_cancelled_request_frees_its_sessions(stack: InProcessStack, client: Client) -> None:
    stream = client.stream(PROMPT, max_tokens=60, num_speculative_tokens=2)
    pieces = iter(stream)  # kept: to drop it would cancel, too
    next(pieces)
    stream.cancel()
    for service in ("verifier", "drafter"):
        wait_until(lambda service=service: read_metric(stack, service, "num_sessions") == 0, f"{service} is idle")


def test_services_report_health(stack: InProcessStack) -> None:
    names = {"gateway": "GatewayService", "verifier": "VerifierService", "drafter": "DrafterService"}
    for service, name in names.items():
        with grpc.insecure_channel(f"127.0.0.1:{stack.services[service].port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for asked in ("", f"draftwire.v1.{name}"):
                answer = stub.Check(health_pb2.HealthCheckRequest(service=asked), timeout=5)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_other_vocabulary_is_refused_with_the_first_differing_token(pair: tuple[Path, Path], tmp_path: Path) -> None:
    odd = save_tiny_model(tmp_path / "odd", 3, seed=2, tokens=["t0", "zebra", "t2"])
    with pytest.raises(UnavailableError, match=r"token 1: 't1' against 'zebra'"):
        InProcessStack(stack_options(pair[0], odd)).__enter__()


def test_missing_model_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="no model folder"):
        InProcessStack({"verifier": {"model": tmp_path / "nothing"}}).__enter__()


def test_speculation_ends_at_the_drafters_context_and_the_request_goes_on(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    short = save_tiny_model(tmp_path / "short", 3, seed=2, context_length=24)
    with InProcessStack(stack_options(pair[0], short)) as stack, Client(stack.address) as client:
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
        with InProcessStack(stack_options(one, other)) as stack, Client(stack.address) as client:
            client.generate(PROMPT, max_tokens=50)  # may be over before the drafter has compared vocabularies
            completion = client.generate(PROMPT, max_tokens=50, seed=1)
            assert len(completion.token_ids) == 50
            assert completion.drafter_error == ""
            assert completion.statistics.num_drafts > 0


def test_full_verifier_refuses_with_no_room(pair: tuple[Path, Path]) -> None:
    options = stack_options(*pair)
    options["verifier"]["max_sessions"] = 1
    options["gateway"]["max_waiting_requests"] = 0
    with InProcessStack(options) as stack, Client(stack.address) as client:
        streams = [client.stream(PROMPT, max_tokens=60, num_speculative_tokens=0) for _ in range(8)]
        refused = 0
        for stream in streams:
            try:
                assert sum(len(piece.token_ids) for piece in stream) == 60
            except NoRoomError:
                refused += 1
        assert 1 <= refused < 8


def test_prompt_that_was_read_before_is_not_read_again(stack: InProcessStack, client: Client) -> None:
    """The metrics tell at both services; another salt reads again."""
    names = ("prefix_cache_queries", "prefix_cache_hits")
    prompt = [index % 3 for index in range(BLOCK_SIZE + 8)]
    wait_until(lambda: client.generate(PROMPT, max_tokens=30).statistics.num_drafts > 0, "the drafter is connected")

    def tried(*salts: str) -> tuple[list[list[int]], list[list[float]]] | None:
        """Returns ids and counts; None where one had no drafts, for on a busy machine all is said before they come."""
        ids, counts = [], []
        for salt in salts:
            before = [read_metric(stack, service, name) for service in ("verifier", "drafter") for name in names]
            completion = client.generate(prompt, temperature=0.0, max_tokens=20, cache_salt=salt)
            if not completion.statistics.num_drafts:
                return None
            ids.append(completion.token_ids)
            after = [read_metric(stack, service, name) for service in ("verifier", "drafter") for name in names]
            counts.append([new - old for new, old in zip(after, before, strict=True)])
            assert completion.statistics.num_cached_prompt_tokens == counts[-1][1]
        return ids, counts

    trials = (tried(f"first {number}", f"first {number}", f"second {number}") for number in range(20))
    ids, counts = next(trial for trial in trials if trial is not None)
    read, reused = [len(prompt), 0] * 2, [len(prompt), BLOCK_SIZE] * 2
    assert counts == [read, reused, read]
    assert ids[0] == ids[1] == ids[2]


SCRIPTED_PROMPT = "abcde"


@pytest.mark.parametrize("rule", LOSSLESS)
def test_scripted_pair_is_accepted_as_its_script_says(scripted_client: Client, rule: str) -> None:
    """Some 1,500 blocks; false alarm of either comparison below 1e-6, by Hoeffding's bound."""

    def draw(seed: int):
        options = {"max_tokens": 200, "num_speculative_tokens": 3, "rejection_sample_method": rule}
        return scripted_client.generate(SCRIPTED_PROMPT, seed=seed, **options)

    with ThreadPoolExecutor(8) as pool:
        completions = list(pool.map(draw, range(16)))
    assert all(len(completion.token_ids) == 200 and not completion.drafter_error for completion in completions)
    # Blocks at the end are shorter; each position is compared among those that reached it, but for these few.
    blocks = sum(completion.statistics.num_drafts for completion in completions)
    accepted = [sum(c.statistics.num_accepted_tokens_per_pos[position] for c in completions) for position in range(3)]
    assert blocks > 1_000
    assert accepted[0] / blocks == pytest.approx(0.8, abs=0.09)
    assert accepted[1] / accepted[0] == pytest.approx(0.5, abs=0.1)
    rate = sum(accepted) / sum(completion.statistics.num_draft_tokens for completion in completions)
    assert rate == pytest.approx((0.8 + 0.8 * 0.5 + 0.8 * 0.5 * 0.5) / 3, abs=0.05)


def test_one_step_serves_many_sessions(scripted_stack: InProcessStack, scripted_client: Client) -> None:
    names = {"verifier": "target_passes", "drafter": "blocks_sent"}

    def counts() -> dict[str, tuple[float, float]]:
        return {
            service: (read_metric(scripted_stack, service, "engine_steps"), read_metric(scripted_stack, service, name))
            for service, name in names.items()
        }

    before = counts()
    with ThreadPoolExecutor(8) as pool:
        completions = list(pool.map(lambda seed: scripted_client.generate("x", max_tokens=100, seed=seed), range(8)))
    after = counts()
    steps, rounds = (after["verifier"][index] - before["verifier"][index] for index in range(2))
    assert rounds >= sum(completion.statistics.num_rounds for completion in completions)
    assert steps < 0.6 * rounds
    draft_steps, blocks = (after["drafter"][index] - before["drafter"][index] for index in range(2))
    assert draft_steps < blocks


def test_full_kv_cache_refuses_new_sessions_and_spares_running_ones(
    scripted_stack: InProcessStack, scripted_client: Client
) -> None:
    prompt = list(SCRIPTED_PROMPT.encode())
    half = SCRIPTED_ROOM // 2
    count = half - len(prompt)
    options = {"max_tokens": count, "temperature": 0.0, "num_speculative_tokens": 0}
    streams = [iter(scripted_client.stream(prompt, **options)) for _ in range(2)]
    ids = [next(stream).token_ids for stream in streams]
    assert read_metric(scripted_stack, "verifier", "kv_cache_usage_perc") == 1.0
    for _ in range(20):
        with pytest.raises(NoRoomError, match="KV cache") as refusal:
            scripted_client.generate(prompt, max_tokens=count)
        assert refusal.value.retry_after_s > 0.0
    with pytest.raises(NoRoomError):
        scripted_client.generate("x", max_tokens=1)
    assert read_metric(scripted_stack, "verifier", "num_sessions") == 2
    for stream, started in zip(streams, ids, strict=True):
        assert [*started, *(token for piece in stream for token in piece.token_ids)] == expected_tokens(5, count)
    wait_until(lambda: read_metric(scripted_stack, "verifier", "kv_cache_usage_perc") == 0.0, "the cache is empty")
    assert len(scripted_client.generate(prompt, max_tokens=8).token_ids) == 8


def test_health_check_of_the_images_asks_whether_a_service_is_ready(stack: InProcessStack) -> None:
    def status(variables: dict[str, str], default: int) -> int:
        command = ["bash", str(READY), "OWN_METRICS_PORT", str(default), "0"]
        return subprocess.run(command, env=variables, capture_output=True, timeout=20, check=False).returncode

    port = stack.services["verifier"].metrics_port
    assert (status({}, port), status({"OWN_METRICS_PORT": str(port)}, 1)) == (0, 0)
    assert status({}, 1) != 0
    assert status({}, stack.services["verifier"].port) != 0, "which speaks gRPC alone"


def test_health_check_of_the_images_waits_for_a_service_that_is_starting() -> None:
    """So that a container is healthy when its service is ready, not one interval of checks later."""
    statuses = [503]
    is_asked = threading.Event()

    class Probe(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(statuses[-1])
            self.end_headers()
            is_asked.set()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    port = free_port()
    with subprocess.Popen(["bash", str(READY), "OWN_METRICS_PORT", str(port), "30"], env={}) as waiting:
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(0.5)  # nothing listens yet
        with ThreadingHTTPServer(("127.0.0.1", port), Probe) as service:
            threading.Thread(target=service.serve_forever, args=(0.02,), daemon=True).start()
            assert is_asked.wait(5.0)
            assert waiting.poll() is None, "it is loading"
            statuses.append(200)
            assert waiting.wait(5.0) == 0
            service.shutdown()


def test_log_says_which_decoder_runs_a_model_and_why(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    save_tiny_model(other, 3)
    tiny_network("gpt2", 3, 64, dtype=torch.float32).save_pretrained(other)
    lines: list[tuple[str, object, object]] = []

    def note(service: str, line: Mapping[str, object]) -> None:
        if line["event"] == "models.decoder_chosen":
            lines.append((service, line["decoder"], line["reason"]))

    options = stack_options(pair[0], other)
    with InProcessStack(options, on_log=note) as stack, Client(stack.address) as client:
        assert client.generate(PROMPT, temperature=0.0, max_tokens=20).token_ids == greedy_ids(pair[0], PROMPT, 20)
    assert sorted(lines, key=str) == [
        ("drafter", "transformers", "models of type gpt2 have layers of their own"),
        ("verifier", "lean", ""),
    ]


def test_unknown_decoder_is_refused_at_start(pair: tuple[Path, Path]) -> None:
    options = stack_options(*pair)
    options["verifier"]["decoder"] = "fast"
    with pytest.raises(UnavailableError, match="decoder must be one of auto, lean, transformers, not 'fast'"):
        InProcessStack(options).__enter__()

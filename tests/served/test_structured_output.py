"""The three services give constrained texts the target's masked law, and refuse forms that cannot be followed."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
import torch
from observing import read_metric, wait_until
from tiny_models import save_spelling_model
from transformers import AutoModelForCausalLM

from benchmarks.law import CONTEXT_LENGTH, JUDGED, LOSSLESS, PROMPT, compare, draw_completions, stack_options
from draftwire.cli.local_stack import LocalStack
from draftwire.client import Client, StructuredOutput
from draftwire.errors import InvalidRequestError
from draftwire.requests.parameters import SamplingParams
from draftwire.v1 import gateway_pb2, gateway_pb2_grpc, session_pb2
from tests.in_process import InProcessStack

ALPHA = 1e-6
"""Probability of a false alarm of each test. Seeds are fixed, but block borders depend on timing."""
TOKENS = ["a", "b", "ab", "c", "<e>"]
STOP = 4
EXPRESSION = "[ab]{2}(c|ab)?"
TEXTS = {first + second + end for first in "ab" for second in "ab" for end in ("", "c", "ab")}
"""All texts of the form, which have at most five tokens with the one that ends them."""
FORM = StructuredOutput.regex(EXPRESSION)
Law = dict[tuple[int, ...], float]


def save_model(folder: Path, seed: int, context_length: int = CONTEXT_LENGTH) -> Path:
    """Writes a tiny model whose tokens are texts that can be spelt in several ways."""
    return save_spelling_model(folder, TOKENS, STOP, seed, context_length)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"), 6)


@pytest.fixture(scope="module")
def running(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessStack]:
    options = stack_options(target, save_model(tmp_path_factory.mktemp("drafter"), 9))
    with InProcessStack(options) as stack:
        yield stack


def allowed(text: tuple[int, ...]) -> list[int]:
    """Returns which tokens can go on, found without any automaton."""
    written = "".join(TOKENS[token] for token in text)
    longer = [token for token in range(STOP) if any(full.startswith(written + TOKENS[token]) for full in TEXTS)]
    return longer + [STOP] * (written in TEXTS)


@torch.inference_mode()
def masked_law(folder: Path, start: tuple[int, ...] = ()) -> Law:
    """Returns the target's law of all texts of the form that begin like this."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    law: Law = {}
    growing: Law = {start: 1.0}
    while growing:
        following: Law = {}
        for text, mass in growing.items():
            logits = model(input_ids=torch.tensor([[*PROMPT, *text]])).logits[0, -1]
            possible = allowed(text)
            for token, prob in zip(possible, logits[possible].softmax(0).tolist(), strict=True):
                (law if token == STOP else following)[(*text, token)] = mass * prob
        growing = following
    return law


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", [LOSSLESS[0], *(pytest.param(rule, marks=pytest.mark.evidence) for rule in LOSSLESS[1:])]
)
def test_constrained_outputs_follow_the_masked_law_of_the_target(
    running: InProcessStack, target: Path, rule: str
) -> None:
    """Beside requests of all other kinds, without forms. False alarm: 1e-6, by chi-square."""
    law, sampling = masked_law(target), SamplingParams(structured_output=FORM)
    completions = list(draw_completions(running.address, rule, sampling, range(800), 12))
    result = compare(rule, completions, law, 12)
    print(result)
    assert {completion.text for completion in completions} <= TEXTS
    assert all(completion.finish_reason == "stop" for completion in completions)
    assert all(not completion.drafter_error for completion in completions)
    assert result.share_of_rounds_with_draft > 0.05, "the drafter took part"
    assert result.degrees_of_freedom > 4
    assert max(map(len, law)) <= JUDGED
    assert result.p_value > ALPHA, result


def test_a_text_that_is_resumed_in_the_middle_of_its_form_goes_on_with_it(
    running: InProcessStack, target: Path
) -> None:
    """As moved ones are: the verifier gets the tokens and follows them. False alarm: 1e-6, by chi-square."""
    start = (0, 1)
    law = masked_law(target, start)
    counts = dict.fromkeys(law, 0)
    with grpc.insecure_channel(running.address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        for seed in range(300):
            request = gateway_pb2.GenerateRequest(
                token_ids=gateway_pb2.TokenIds(ids=PROMPT),
                sampling=session_pb2.SamplingParameters(
                    structured_output=session_pb2.StructuredOutput(regex=EXPRESSION)
                ),
                max_tokens=9,
                seed=seed,
                generated_choices=[gateway_pb2.GeneratedChoice(token_ids=start)],
            )
            ids = [token for response in stub.Generate(request) for token in response.delta.token_ids]
            counts[(*start, *ids)] += 1
    statistic = sum((count - 300 * law[text]) ** 2 / (300 * law[text]) for text, count in counts.items())
    assert len(law) == 4
    assert min(law.values()) * 300 > 5, "each of the texts comes often enough"
    assert statistic < 30.7, "of chi-square with 3 degrees of freedom, 1e-6 is above this"


def test_generated_tokens_that_do_not_have_the_form_are_refused(running: InProcessStack) -> None:
    request = gateway_pb2.GenerateRequest(
        token_ids=gateway_pb2.TokenIds(ids=PROMPT),
        sampling=session_pb2.SamplingParameters(structured_output=session_pb2.StructuredOutput(regex=EXPRESSION)),
        generated_choices=[gateway_pb2.GeneratedChoice(token_ids=[3])],
    )
    with grpc.insecure_channel(running.address) as channel, pytest.raises(grpc.RpcError) as raised:
        list(gateway_pb2_grpc.GatewayServiceStub(channel).Generate(request))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]


def test_processed_logprobs_are_of_the_masked_law_and_raw_ones_are_not(running: InProcessStack, target: Path) -> None:
    law = masked_law(target)
    with Client(running.address) as client:
        form = {"structured_output": FORM, "seed": 3, "logprobs": 0}
        processed = client.generate(PROMPT, logprobs_mode="processed", **form)
        raw = client.generate(PROMPT, logprobs_mode="raw", **form)
    assert processed.logprobs is not None
    assert raw.logprobs is not None
    total = sum(token.logprob for token in processed.logprobs)
    assert total == pytest.approx(torch.tensor(law[tuple(processed.token_ids)]).log().item(), abs=1e-4)
    assert sum(token.logprob for token in raw.logprobs) < total - 0.1


def test_each_of_several_choices_has_the_form(running: InProcessStack) -> None:
    expression = "([ab]{2}c){12}"
    options = {"num_choices": 3, "temperature": 3.0, "seed": 1}
    with Client(running.address) as client:
        form = StructuredOutput.regex(expression)
        (choices,) = client.generate_many([PROMPT], structured_output=form, **options)
        (plain,) = client.generate_many([PROMPT], max_tokens=36, **options)
    assert all(re.fullmatch(expression, choice.text) for choice in choices)
    assert len({choice.text for choice in choices}) == 3
    assert not any(re.fullmatch(expression, choice.text) for choice in plain)


def test_a_text_whose_verifier_is_killed_goes_on_with_its_form(tmp_path: Path) -> None:
    """The form counts: a verifier that began with it anew, or at another place, would make the text too long."""
    expression = "(ab{1,2}c){80}"
    options = stack_options(save_model(tmp_path / "target", 6, 400), save_model(tmp_path / "drafter", 9, 400))
    with ExitStack() as exits:
        stacks = [exits.enter_context(InProcessStack({"verifier": options["verifier"]})) for _ in range(2)]
        drafter = exits.enter_context(InProcessStack({"drafter": options["drafter"]}))
        peers = {
            "verifier": ",".join(f"127.0.0.1:{one.services['verifier'].port}" for one in stacks),
            "drafter": f"127.0.0.1:{drafter.services['drafter'].port}",
        }
        gateway = exits.enter_context(InProcessStack({"gateway": peers}))
        client = exits.enter_context(Client(gateway.address))
        stream = client.stream(PROMPT, structured_output=StructuredOutput.regex(expression), seed=2)
        pieces = iter(stream)
        num_before = len(next(pieces).token_ids)
        (holder,) = [one for one in stacks if read_metric(one, "verifier", "num_sessions")]
        holder.kill("verifier")
        for _ in pieces:
            pass
    completion = stream.completion
    assert completion is not None
    assert completion.statistics.num_verifiers_lost == 1
    assert completion.statistics.num_accepted_tokens > 0
    assert 0 < num_before < 80
    assert completion.finish_reason == "stop"
    assert re.fullmatch(expression, completion.text)


@pytest.mark.slow
def test_a_target_of_two_processes_follows_the_form(target: Path, tmp_path: Path) -> None:
    options = stack_options(target, save_model(tmp_path, 9))
    options["verifier"] |= {"tensor_parallel_size": 2, "tensor_parallel_timeout_s": 10.0}
    law = masked_law(target)
    with LocalStack(options) as stack, Client(stack.address) as client:
        wait_until(lambda: client.generate(PROMPT, max_tokens=30).statistics.num_drafts > 0, "the drafter takes part")
        asked = {"structured_output": FORM, "logprobs": 0, "logprobs_mode": "processed"}
        completions = [client.generate(PROMPT, seed=seed, **asked) for seed in range(12)]
    for completion in completions:
        assert completion.text in TEXTS
        total = sum(token.logprob for token in completion.logprobs or ())
        assert total == pytest.approx(torch.tensor(law[tuple(completion.token_ids)]).log().item(), abs=1e-4)
    assert len({completion.text for completion in completions}) > 1


@pytest.mark.parametrize(
    "form",
    [
        StructuredOutput.regex("(a"),
        StructuredOutput.json('{"type":'),
        StructuredOutput.json({"type": "array", "uniqueItems": True}),
        StructuredOutput.grammar('rule: "a"'),
        StructuredOutput.choice(["x"]),
    ],
    ids=lambda form: form.texts[0],
)
def test_forms_that_cannot_be_followed_are_refused_before_anything_opens(
    running: InProcessStack, form: StructuredOutput
) -> None:
    with Client(running.address) as client, pytest.raises(InvalidRequestError, match="structured_output"):
        client.generate(PROMPT, structured_output=form)

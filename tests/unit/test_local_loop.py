"""The loop in one process: what the rule sees is the target's, round after round."""

import copy
from dataclasses import dataclass

import pytest
import torch
from cases import every
from definitions import defined_law
from enumeration import Law, largest_deviation, law_of_judged_rounds
from tiny_models import save_tiny_model, tiny_network, with_exact_norms
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftwire.drafting.language_model import LanguageModelDrafter
from draftwire.errors import InvalidRequestError
from draftwire.local_loop import LocalRun, speculate
from draftwire.method.distributions import SparseRows, quantize, race
from draftwire.method.encoding import TOTAL_WEIGHT
from draftwire.method.keys import DrawKey, Role, derive_key
from draftwire.method.quantization import Encoding, Quantization
from draftwire.method.randomness import exponentials
from draftwire.method.sampling import Span, probabilities_of_spans
from draftwire.models.cached_model import CachedModel
from draftwire.models.decoders import decoder_of
from draftwire.models.torch_models import torch_model
from draftwire.requests.parameters import SamplingParams
from draftwire.verification import RULES, LawRule
from tests.cache_integrity import check_integrity

PROMPT = [1, 3, 0, 2, 2]
VOCAB_SIZE = 5


torch.set_num_threads(1)


@dataclass
class Pair:
    """Two models under test, and copies that keep transformers' own attention."""

    target: CachedModel
    strategy: LanguageModelDrafter
    target_reference: PreTrainedModel
    drafter_reference: PreTrainedModel


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    target, drafter = (
        AutoModelForCausalLM.from_pretrained(save_tiny_model(folder / str(seed), VOCAB_SIZE, seed), dtype=torch.float32)
        for seed in (0, 2)
    )
    references = copy.deepcopy(target), copy.deepcopy(drafter)
    strategy = LanguageModelDrafter(torch_model(decoder_of(drafter), 64), context_length=64)
    return Pair(torch_model(decoder_of(target), 64), strategy, *references)


ENCODINGS = [Encoding.DENSE_FLOAT32, Encoding.SPARSE_UINT16]
STOP_TOKENS = frozenset({1, 4})
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(0.7, top_k=3, top_p=0.9),
    SamplingParams(0.0),
    SamplingParams(1.1, min_p=0.05, repetition_penalty=1.6, presence_penalty=0.8, frequency_penalty=0.3),
    SamplingParams(1.5, logit_bias=((0, 2.0), (3, -1.0)), allowed_token_ids=(0, 1, 3, 4), min_tokens=15),
]


def rows_of(model: PreTrainedModel, text: list[int], first: int, sampling: SamplingParams) -> Tensor:
    """Returns the laws after `text[:first]`, `text[:first + 1]` and so on, each computed by itself."""
    logits = model(input_ids=torch.tensor([text]), use_cache=False).logits[0]
    rows = [
        probabilities_of_spans(logits[end - 1 : end].clone(), [Span(sampling, 1, text[:end], len(PROMPT), STOP_TOKENS)])
        for end in range(first, len(text) + 1)
    ]
    return torch.cat(rows)


CASES = [("block", 4, sampling, encoding) for sampling in SAMPLINGS for encoding in ENCODINGS]
CASES += [(rule, 4, sampling, ENCODINGS[0]) for rule in RULES for sampling in SAMPLINGS[1:4:2]]
CASES += [(rule, length, SAMPLINGS[0], ENCODINGS[0]) for rule in RULES for length in (0, 1)]


@pytest.mark.slow
@torch.inference_mode()
@every(("rule", "block_length", "sampling", "encoding"), CASES)
def test_rule_sees_the_targets_and_the_drafters_own_rows_at_every_position(
    pair: Pair, rule: str, block_length: int, sampling: SamplingParams, encoding: Encoding
) -> None:
    """Together with the enumeration of the rules this proves the law of the output: caches and indices are right.

    Where nothing is told about the drafter's rows, its tokens are compared with the race that they won.
    """
    committed, lengths, chosen = list(PROMPT), set(), RULES[rule]
    words = torch.tensor([DrawKey(derive_key(9, Role.COUPLING), 0, 0).text_words])
    quantization = Quantization(encoding, mass=0.9)
    strategy = LanguageModelDrafter(pair.strategy.model, pair.strategy.context_length, quantization=quantization)
    for judgement in speculate(
        pair.target, strategy, PROMPT, LocalRun(sampling, 25, block_length, rule, 9, STOP_TOKENS)
    ):
        blocks, tokens = judgement.blocks, judgement.blocks.draft_tokens[0].tolist()
        assert len(tokens) == min(block_length, len(PROMPT) + 25 - len(committed) - 1)
        text = committed + tokens
        expected_target = rows_of(pair.target_reference, text, len(committed), sampling)
        assert (blocks.padded_target_probs()[0] - expected_target).abs().max() < 1e-5
        if tokens:
            expected_draft = rows_of(pair.drafter_reference, text, len(committed), sampling)[:-1]
            if chosen.needs_draft_probs and encoding is Encoding.DENSE_FLOAT32:
                assert (blocks.padded_draft_probs()[0] - expected_draft).abs().max() < 1e-5
            elif chosen.needs_draft_probs:
                quantized = quantize(expected_draft, quantization)
                rounded = SparseRows(quantized.token_ids, quantized.weights.float() / TOTAL_WEIGHT, VOCAB_SIZE).dense()
                # Rounding in the network moves a weight by one here and there, and the likeliest token's by as many.
                assert (blocks.padded_draft_probs()[0] - rounded).abs().max() < 1e-4
            if chosen.is_coupled:
                times = exponentials(words.expand(len(tokens), -1), torch.arange(len(committed), len(text)), VOCAB_SIZE)
                assert race(expected_draft, times).winners.tolist() == tokens
        assert judgement.token_ids[:-1] == tokens[: judgement.num_accepted]
        lengths.add(judgement.num_accepted)
        committed += judgement.token_ids
    assert len(committed) == len(PROMPT) + 25
    assert block_length < 4 or sampling.temperature != 1.0 or len(lengths) >= 3, "accepted in full, in part, not at all"


@torch.inference_mode()
@every("rule", [*RULES, "examples.rules.greedy_block:GreedyBlockRule"])
def test_greedy_text_is_the_targets_own_and_a_seed_decides_another(pair: Pair, rule: str) -> None:
    ids = text(pair, 0, rule=rule, sampling=SamplingParams(0.0))
    expected = pair.target_reference.generate(
        torch.tensor([PROMPT]), max_new_tokens=18, do_sample=False, eos_token_id=None
    )
    assert ids[:18] == expected[0, len(PROMPT) :].tolist()
    assert text(pair, 1, rule=rule) == text(pair, 1, rule=rule) != text(pair, 2, rule=rule)


def text(
    pair: Pair, seed: int, prompt: list[int] = PROMPT, rule: str = "block", sampling: SamplingParams = SAMPLINGS[0]
) -> list[int]:
    rounds = speculate(
        pair.target, pair.strategy, prompt, LocalRun(sampling, 18, 4, rule, seed, cuts_last_block=rule in RULES)
    )
    return [token for judgement in rounds for token in judgement.token_ids]


def test_unknown_rule_is_refused_before_anything_is_opened(pair: Pair) -> None:
    with pytest.raises(InvalidRequestError, match="unknown rule 'greedy'; known: block"):
        text(pair, 1, rule="greedy")
    assert pair.target.cache.sequences == set()


def test_prompt_that_was_read_before_gives_the_same_text(pair: Pair) -> None:
    prompt, texts = [number % VOCAB_SIZE for number in range(33)], []
    for num_reused in (0, 32):
        sequence = pair.target.cache.open(prompt)
        pair.target.cache.close(sequence)
        assert sequence.num_reused == num_reused
        texts.append(text(pair, 1, prompt))
    assert texts[0] == texts[1]


def test_finished_and_abandoned_runs_give_their_room_back(pair: Pair) -> None:
    text(pair, 1)
    rounds = speculate(pair.target, pair.strategy, PROMPT, LocalRun(SamplingParams(), 30, 4, "block", 1))
    next(rounds)
    caches = (pair.target.cache, pair.strategy.model.cache)
    assert all(len(cache.sequences) == 1 for cache in caches)
    rounds.close()
    for cache in caches:
        assert cache.sequences == set()
        assert cache.num_free_blocks == cache.num_blocks
        check_integrity(cache)


# The law of texts whose logits depend on the text

SMALL_VOCAB, SMALL_PROMPT, SMALL_STOPS, SMALL_LENGTH = 3, [0, 2], frozenset({2}), 4
TEXTUAL = {
    "repetition": SamplingParams(1.2, repetition_penalty=1.7),
    "presence": SamplingParams(0.9, presence_penalty=1.5),
    "frequency": SamplingParams(frequency_penalty=1.2),
    "min_tokens": SamplingParams(min_tokens=2),
    "min_tokens in a later round": SamplingParams(min_tokens=3),
    "bias": SamplingParams(logit_bias=((1, 1.3), (2, -0.4))),
    "all of them": SamplingParams(
        0.8,
        repetition_penalty=1.4,
        presence_penalty=0.7,
        frequency_penalty=-0.6,
        min_tokens=2,
        logit_bias=((0, -0.9),),
    ),
}


@torch.inference_mode()
def plain_law(reference: PreTrainedModel, params: SamplingParams) -> Law:
    """Returns the law of texts that are decoded token by token."""
    law: Law = {(): 1.0}
    for _ in range(SMALL_LENGTH):
        texts = [[*SMALL_PROMPT, *text] for text in law]
        logits = reference(input_ids=torch.tensor(texts), use_cache=False).logits[:, -1].tolist()
        rows = [defined_law(row, params, text, 2, SMALL_STOPS) for row, text in zip(logits, texts, strict=True)]
        law = {
            (*text, token): mass * prob
            for (text, mass), row in zip(law.items(), rows, strict=True)
            for token, prob in enumerate(row)
        }
    return law


def blocked_law(model: CachedModel, rule: str, params: SamplingParams, block_length: int, **options: object) -> Law:
    """Returns the law of texts whose drafter knows two laws, after an even and after an odd last token, and nothing
    of the parameters."""
    tables = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.125, 0.75]])  # float32 numbers that sum to 1 exactly

    def draft_rows(text: tuple[int, ...], tokens: tuple[int, ...]) -> Tensor:
        return tables[torch.tensor([*SMALL_PROMPT, *text, *tokens])[1 + len(text) :][:block_length] % 2]

    chosen = RULES[rule]
    assert isinstance(chosen, LawRule)
    return law_of_judged_rounds(
        model,
        chosen,
        params,
        block_length,
        SMALL_PROMPT,
        draft_rows,
        lambda emitted: (emitted[:SMALL_LENGTH], len(emitted) >= SMALL_LENGTH),
        stop_token_ids=SMALL_STOPS,
        **options,
    )


@pytest.fixture(scope="module")
def small() -> tuple[CachedModel, PreTrainedModel]:
    network = tiny_network("llama", SMALL_VOCAB, 32, seed=8)
    reference = with_exact_norms(copy.deepcopy(network))
    return torch_model(decoder_of(network, "lean"), 16 * 700), reference


@every("name", TEXTUAL)
def test_blocks_have_the_law_of_plain_decoding_if_logits_depend_on_text(
    small: tuple[CachedModel, PreTrainedModel], name: str
) -> None:
    """By enumeration of all blocks of all rounds through `judge`, in float64."""
    model, reference = small
    params = TEXTUAL[name]
    expected = plain_law(reference, params)
    for rule, block_length in (("block", 3), ("token", 2)) if name == "all of them" else (("block", 2),):
        law = blocked_law(model, rule, params, block_length)
        assert largest_deviation(law, expected) < 1e-10
        assert sum(law.values()) == pytest.approx(1.0, abs=1e-9)
        assert not any(SMALL_STOPS & set(text[: params.min_tokens]) for text in law)
        assert any(mass > 1e-3 and 2 in text for text, mass in law.items())


@every("name", ["presence", "frequency", "min_tokens"])
def test_enumeration_sees_prompt_and_generated_text_confused_either_way(
    small: tuple[CachedModel, PreTrainedModel], name: str
) -> None:
    model, reference = small
    law = blocked_law(model, "block", TEXTUAL[name], 2, prompt_len=0)
    assert largest_deviation(law, plain_law(reference, TEXTUAL[name])) > 1e-3

"""Draft heads: whether the features that they read are those of a fresh pass, and what reading and drafting takes."""

import random
from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks.gpu_sections.batch import random_ids
from benchmarks.gpu_sections.pair import Pair
from benchmarks.gpu_sections.plan import Plan
from benchmarks.gpu_sections.section import Budget, Findings, Row
from benchmarks.gpu_sections.timer import Timer
from draftwire.models.cached_model import CachedModel
from draftwire.models.decoders import decoder_of
from draftwire.models.kv_cache import CachedSequence
from draftwire.models.sequence_model import FeatureSpan, Reading
from draftwire.models.torch_models import torch_model
from draftwire.options.heads.draft_head import DraftHead, PairReading
from draftwire.options.heads.head_formats import TargetFacts, required_shapes, shape_of
from draftwire.options.heads.head_loading import build_head
from draftwire.options.heads.taps import FeatureSource
from tools.synth.synthesis import ModelShape, build_target

LARGEST_ERROR = 1e-4
"""Of float32 features."""
NUM_TEXTS = 4
STEPS = {True: 8, False: 40}
"""Steps whose features are compared, by whether the plan is tiny."""
COUNTS = (1, 2, 5, 5, 5, 40)
"""Numbers of tokens per step."""
DRAFT_TOKENS = 4
BATCHES = (1, 16)
HEAD_VOCAB = 32_000
"""Most ids that a head drafts, as published ones do."""
CACHE_TOKENS = 8192


def heads(plan: Plan, pair: Pair, findings: Findings, _: Budget) -> None:
    """Runs the section."""
    torch.set_float32_matmul_precision("highest")
    model = build_target(plan.exact_shape, torch.float32, str(plan.device), seed=1)
    for is_static in (False, True):
        name = "static" if is_static else "packed"
        findings.results[f"features_{name}"] = found = largest_feature_error(model, plan, is_static)
        label = f"largest error of float32 features, {name} steps ({found['rows']} rows)"
        findings.rows.append(Row(label, found["largest_error"], "", LARGEST_ERROR))
    head = random_head(plan)
    source = FeatureSource(head.config.taps, head.fuse)
    timer = Timer(plan.device)
    for is_static in (False, True):
        name = "static" if is_static else "packed"
        with_features, without = (
            verify_ms(plan, torch_model(pair.target, CACHE_TOKENS, is_static, features=each), timer)
            for each in (source, None)
        )
        findings.results[f"verify_{name}"] = {"with_features_ms": with_features, "without_ms": without}
        findings.rows.append(Row(f"{name}: verify step that keeps features", with_features, "ms"))
        findings.rows.append(Row(f"{name}: verify step without", without, "ms"))
    for batch in BATCHES:
        findings.results[f"draft_{batch}"] = drafted_ms = draft_ms(plan, head, batch, timer)
        label = f"head, batch {batch}: reading two pairs and drafting {DRAFT_TOKENS} tokens"
        findings.rows.append(Row(label, drafted_ms, "ms"))
    findings.results["feature_bytes"] = head.token_bytes
    findings.results["travelling_bytes"] = travels = head.config.hidden_size * 2
    findings.rows.append(Row("fused features of a token, bfloat16", travels, "bytes"))


@torch.inference_mode()
def largest_feature_error(model: LlamaForCausalLM, plan: Plan, is_static: bool) -> dict[str, Any]:
    """Compares features that were kept by slot, over steps of different sizes and rewinds, with those of fresh passes.

    All steps come before the first comparison, so that steps run on while the device has work.
    """
    num_layers = plan.exact_shape.num_layers
    taps = (0, num_layers // 2, num_layers - 1)
    cached = torch_model(
        decoder_of(model, "lean"),
        CACHE_TOKENS,
        is_static,
        features=FeatureSource(taps, lambda features: features),
    )
    generator = random.Random(5)
    texts: list[list[int]] = [[] for _ in range(NUM_TEXTS)]
    sequences = [cached.cache.open() for _ in texts]
    for _ in range(STEPS[plan.is_tiny]):
        members = generator.sample(range(NUM_TEXTS), generator.randint(1, NUM_TEXTS))
        readings = []
        for index in members:
            if len(texts[index]) > 4 and generator.random() < 0.3:
                del texts[index][-3:]
                cached.cache.truncate(sequences[index], len(texts[index]))
            ids = [generator.randrange(cached.vocab_size) for _ in range(generator.choice(COUNTS))]
            texts[index] += ids
            readings.append(Reading(sequences[index], ids, 1))
        cached.read(readings)
    errors, num_rows = [0.0], 0
    for sequence, text in zip(sequences, texts, strict=True):
        if not text:
            continue
        own = cached.features([FeatureSpan(sequence, 0, len(text))])
        whole = torch.tensor([text], device=plan.device)
        states = model(input_ids=whole, use_cache=False, output_hidden_states=True).hidden_states
        expected = torch.cat([states[layer][0] for layer in taps], dim=-1)
        errors.append(float((own - expected).abs().max()))
        num_rows += len(text)
    return {"largest_error": max(errors), "rows": num_rows}


def random_head(plan: Plan) -> DraftHead:
    """Returns an EAGLE-3 head of random weights for the timed target, of the proportions of published ones."""
    shape: ModelShape = plan.shape
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": min(HEAD_VOCAB, shape.vocab_size),
        "max_position_embeddings": shape.context_length,
        "rms_norm_eps": 1e-5,
        "eagle_aux_hidden_state_layer_ids": [1, shape.num_layers // 2, shape.num_layers - 1],
    }
    facts = TargetFacts(shape.hidden_size, shape.num_layers, shape.vocab_size, 1e-5, shape.context_length)
    made = shape_of("a random head", config, facts)
    generator = torch.Generator(device=plan.device).manual_seed(7)
    tensors = {
        name: torch.zeros(size, dtype=torch.int64, device=plan.device)
        if name == "d2t"
        else torch.randn(size, generator=generator, device=plan.device, dtype=torch.float32).mul_(0.02).to(plan.dtype)
        for name, size in required_shapes(made).items()
    }
    return build_head(made, tensors, CACHE_TOKENS)


def verify_ms(plan: Plan, model: CachedModel, timer: Timer) -> float:
    """Returns the median time of a target's forward pass over a block of `DRAFT_TOKENS`, after a text, milliseconds."""
    sequence = model.cache.open()
    ids = random_ids(plan.prompt_tokens + 1 + DRAFT_TOKENS, model.vocab_size, 0)
    model.read([Reading(sequence, ids[: plan.prompt_tokens], 0)])
    reading = Reading(sequence, ids[plan.prompt_tokens :], 1 + DRAFT_TOKENS)

    def forget() -> None:
        model.cache.truncate(sequence, plan.prompt_tokens)

    return timer.median_ms(lambda: model.read([reading]), plan.repetitions, forget)


@torch.inference_mode()
def draft_ms(plan: Plan, head: DraftHead, batch: int, timer: Timer) -> float:
    """Returns the median time of reading two pairs of each text and drafting after them greedily, milliseconds."""
    config, sequences = head.config, [head.open() for _ in range(batch)]
    length = plan.prompt_tokens

    def reading(sequence: CachedSequence, count: int) -> PairReading:
        features = torch.randn(count, config.hidden_size, device=head.device).to(head.dtype)
        return PairReading(sequence, random_ids(count, config.vocab_size, count), features)

    head.read([reading(sequence, length) for sequence in sequences])
    pairs = [reading(sequence, 2) for sequence in sequences]

    def forget() -> None:
        for sequence in sequences:
            head.truncate(sequence, length)

    def draft() -> None:
        state = head.read(pairs)
        for _ in range(DRAFT_TOKENS - 1):
            state = head.extend(state, state.logits.argmax(dim=-1))

    milliseconds = timer.median_ms(draft, plan.repetitions, forget)
    for sequence in sequences:
        head.close(sequence)
    return milliseconds

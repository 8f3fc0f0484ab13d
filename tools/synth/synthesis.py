"""Synthetic pairs: a target and a drafter of any shape with random weights and a chosen agreement.

A random trunk (embedding, a few layers, final norm, head) is the drafter. The target is the same trunk with further
random layers between its last layer and its norm, whose additions to the residual stream are scaled by one number. At
0 the models are the same; the larger the scale, the less they agree. `synthesize` finds it for a given agreement.

Every layer is computed like any other, so the speed is that of a real pair of the shape.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import islice, product
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils.logging import disable_progress_bar

from draftwire.errors import InvalidRequestError

END_OF_TEXT = "<|endoftext|>"
"""The last id of the vocabulary. Neither tokenizer nor generation config declare it as a stop token: completions run to
their `max_tokens`."""

ENTROPY = 2.0
"""Mean entropy of a distribution over the vocabulary at temperature 1, nats; code and prose have 1 to 2.6."""

QUERY_SCALE = 3.0
"""Standard deviation of attention scores. At 1 attention is nearly uniform, so that the output hardly depends on the
context, and greedy texts run in circles, where the agreement drifts off."""

SMALLEST_SCALE, LARGEST_SCALE = 1e-5, 4.0
"""Range of the scale of the further layers' outputs. Beyond the largest the trunk has no effect any more."""

TOLERANCE = 0.005
"""The search ends when the agreement, on the search's own texts, deviates by at most this."""

MOST_TRIALS = 12

LETTERS = " etaoinshrdlcumwfgypbvkjxqz"
ALPHABET = LETTERS + "".join(chr(code) for code in range(32, 127) if chr(code) not in LETTERS)
"""Characters of the tokens of two and three bytes: printable ASCII, so that most texts are valid UTF-8, and streaming
does not hold back incomplete characters."""

LLAMA_TYPES = ("llama", "mistral")
"""Values of `model_type` whose layers are Llama's."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Hyperparameters of a Llama model."""

    hidden_size: int
    intermediate_size: int
    """Width of the MLPs."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """Fewer than `num_heads`: grouped-query attention."""
    vocab_size: int
    head_dim: int = 0
    """0 is `hidden_size / num_heads`."""
    tie_word_embeddings: bool = False
    """Whether head and embedding share one matrix."""
    context_length: int = 4096
    """Positions that both models declare."""

    def __post_init__(self) -> None:
        if self.head_dim == 0 and self.num_heads > 0:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        for field in fields(self):
            if field.type is int and getattr(self, field.name) < 1:
                raise InvalidRequestError(
                    f"{field.name} of a shape must be at least 1, not {getattr(self, field.name)}"
                )
        if self.hidden_size % self.num_heads or self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise InvalidRequestError(
                f"num_heads {self.num_heads} must divide hidden_size {self.hidden_size}, num_kv_heads "
                f"{self.num_kv_heads} must divide num_heads, and head_dim {self.head_dim} must be even"
            )
        largest = 257 + len(ALPHABET) ** 2 + len(ALPHABET) ** 3
        if not 257 <= self.vocab_size <= largest:
            raise InvalidRequestError(f"vocab_size must be 257 (all bytes, end of text) to {largest}")

    def config(self, num_layers: int, dtype: torch.dtype) -> LlamaConfig:
        """Returns the configuration of a model of this shape with `num_layers` layers and no end of text."""
        config = LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.context_length,
            tie_word_embeddings=self.tie_word_embeddings,
            bos_token_id=None,
            eos_token_id=None,
        )
        config.dtype = dtype
        return config


SHAPES = {
    "tiny": ModelShape(64, 176, 4, 4, 2, 512, context_length=1024),
    "150m": ModelShape(768, 2048, 14, 12, 12, 32000),
    "370m": ModelShape(1024, 2816, 24, 16, 16, 32000),
    "1b": ModelShape(2048, 5632, 22, 32, 4, 32000),
    "llama-3-8b": ModelShape(4096, 14336, 32, 32, 8, 128256, context_length=8192),
}
"""Shapes by name: 0.25, 148, 374, 1,100 and 8,030 million parameters."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Number and lengths of the texts on which an agreement is measured."""

    num_texts: int
    prompt_length: int
    """Random tokens that a text starts with."""
    text_length: int
    """Tokens that the target adds, each of which is a measured position."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Measured agreement of a drafter with a target."""

    mean: float
    """Mean over positions. Temperature above 0: sum over x of min(target's, drafter's probability), the probability
    that a draft token is accepted. Temperature 0: whether both have the same likeliest token."""
    standard_error: float
    """Standard error of the mean, from the spread between texts."""
    entropy: float
    """Mean entropy of the drafter's distribution at the temperature, nats."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One step of the search."""

    scale: float
    agreement: Agreement


@dataclass(frozen=True, slots=True)
class SyntheticPair:
    """A target, its drafter, and how they were made."""

    target: LlamaForCausalLM
    drafter: LlamaForCausalLM
    """Shares all its tensors with the target."""
    shape: ModelShape
    """Shape of the target; the drafter differs only in the number of layers."""
    seed: int
    scale: float
    """Scale of the further layers' additions to the residual stream."""
    wanted_agreement: float
    agreement: Agreement
    """Agreement on texts that the search has not used."""
    temperature: float
    """Temperature of the texts and distributions of the measurement."""

    @property
    def draft_layers(self) -> int:
        """Layers of the drafter."""
        return len(self.drafter.model.layers)


def read_shape(path: Path) -> ModelShape:
    """Reads the shape of a Llama-type model from its `config.json`.

    Raises:
        InvalidRequestError: the file cannot be read, lacks a number, or is for another type of model.
    """
    try:
        config = json.loads(path.read_text())
        kind = config.get("model_type")
        if kind not in LLAMA_TYPES or config.get("sliding_window"):
            raise InvalidRequestError(f"{path} is of model type {kind!r}, or has a window; known: {LLAMA_TYPES}")
        return ModelShape(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            vocab_size=config["vocab_size"],
            head_dim=config.get("head_dim") or 0,
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            context_length=config.get("max_position_embeddings", 4096),
        )
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise InvalidRequestError(f"{path} is no readable config.json: {error}") from error
    except KeyError as error:
        raise InvalidRequestError(f"{path} does not state {error}") from error


@torch.no_grad()
def synthesize(
    shape: ModelShape,
    *,
    draft_layers: int,
    agreement: float,
    temperature: float,
    dtype: torch.dtype,
    device: str,
    seed: int,
    on_trial: Callable[[Trial], None] | None = None,
) -> SyntheticPair:
    """Builds a target of a shape and a drafter with a given agreement, above 0 and defined in `Agreement`; 1 makes the
    further layers add nothing.

    The search for the scale measures about five pairs; the agreement that is returned is measured on other texts. All
    texts are generated by the target, because acceptance depends on the text; see `measure`. The same seed gives the
    same pair on the same kind of device.

    Weights are drawn in their `dtype` on the device. `on_trial` is called after each step of the search.

    Raises:
        InvalidRequestError: a parameter is out of range, or no scale yields the agreement.
    """
    if not 1 <= draft_layers < shape.num_layers:
        raise InvalidRequestError(f"the drafter must have 1 to {shape.num_layers - 1} layers, not {draft_layers}")
    if not 0 < agreement <= 1:
        raise InvalidRequestError(f"agreement must be above 0 and at most 1, not {agreement}")
    if not 0 <= temperature < math.inf:
        raise InvalidRequestError(f"temperature must be 0 or more, not {temperature}")
    target = build_target(shape, dtype, device, seed)
    drafter = share_trunk(target, shape, draft_layers)
    # Standard errors of about 0.01 or less. Greedy agreement is yes or no at each position, so it needs more positions
    # than a sum over the vocabulary.
    search, final = Sample(96 if temperature == 0 else 32, 8, 16), Sample(128 if temperature == 0 else 64, 8, 24)

    def measured(scale: float) -> Agreement:
        with _outputs_scaled(target, draft_layers, scale):
            generator = _generator(device, seed, "search")
            trial = Trial(scale, measure(target, drafter, temperature, search, generator))
        if on_trial is not None:
            on_trial(trial)
        return trial.agreement

    first = (1 - agreement) / math.sqrt(shape.num_layers - draft_layers)  # about right where the agreement is high
    scale = 0.0 if agreement == 1 else _find_scale(measured, agreement, first)
    for module in _further_outputs(target, draft_layers):
        module.weight.mul_(scale)
    found = measure(target, drafter, temperature, final, _generator(device, seed, "final"))
    return SyntheticPair(
        target=target,
        drafter=drafter,
        shape=shape,
        seed=seed,
        scale=scale,
        wanted_agreement=agreement,
        agreement=found,
        temperature=temperature,
    )


def write_pair(pair: SyntheticPair, folder: Path) -> None:
    """Writes `folder/target` and `folder/drafter` for `load_model`, and `folder/synthesis.json`."""
    disable_progress_bar()  # would write between other output
    tokenizer = build_tokenizer(pair.shape.vocab_size, pair.shape.context_length)
    for name, model in (("target", pair.target), ("drafter", pair.drafter)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    facts = {
        "shape": asdict(pair.shape),
        "draft_layers": pair.draft_layers,
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "seed": pair.seed,
        "scale": pair.scale,
        "temperature": pair.temperature,
        "wanted_agreement": pair.wanted_agreement,
        "measured_agreement": pair.agreement.mean,
        "standard_error": pair.agreement.standard_error,
        "drafter_entropy_nats": pair.agreement.entropy,
    }
    (folder / "synthesis.json").write_text(json.dumps(facts, indent=2) + "\n")


@torch.no_grad()
def build_target(shape: ModelShape, dtype: torch.dtype, device: str, seed: int) -> LlamaForCausalLM:
    """Returns a random model, every weight drawn on its device and in its dtype, one at a time.

    Layers' weights have variance 1 / fan-in and token embeddings 1, so that no layer dominates. The gain of the final
    norm sets the logits' deviation, and with it the entropy. Its signs are random, because otherwise a head tied to the
    embedding would make each token its own likeliest successor.
    """
    generator = _generator(device, seed, "weights")
    model = _without_weights(shape.config(shape.num_layers, dtype))
    weights = {}
    for name, parameter in model.named_parameters():
        size = tuple(parameter.shape)
        if name == "model.norm.weight":
            signs = torch.randint(2, size, generator=generator, device=device) * 2 - 1
            weights[name] = (signs * _logit_deviation(shape.vocab_size) * size[0] ** -0.5).to(dtype)
        elif len(size) == 1:
            weights[name] = torch.ones(size, dtype=dtype, device=device)
        else:
            weights[name] = torch.randn(size, generator=generator, dtype=dtype, device=device)
            if not name.startswith(("model.embed_tokens", "lm_head")):
                weights[name].mul_(size[1] ** -0.5 * (QUERY_SCALE if "q_proj" in name else 1))
    return _with_weights(model, weights, device)


def share_trunk(target: LlamaForCausalLM, shape: ModelShape, draft_layers: int) -> LlamaForCausalLM:
    """Returns a model of the target's embedding, first layers, norm and head, sharing their tensors."""
    drafter = _without_weights(shape.config(draft_layers, target.dtype))
    weights = target.state_dict()
    names = [name for name, _ in drafter.named_parameters()]
    return _with_weights(drafter, {name: weights[name] for name in names}, str(target.device))


@torch.no_grad()
def measure(
    target: LlamaForCausalLM,
    drafter: LlamaForCausalLM,
    temperature: float,
    sample: Sample,
    generator: torch.Generator,
) -> Agreement:
    """Measures the agreement along texts that the target generates at a temperature after random prompts.

    Many short texts rather than a few long ones: a greedy text of a random model may run in a circle, and the agreement
    along it is that of the circle's few tokens. `QUERY_SCALE` makes circles rare, so that what holds for the first
    tokens of many texts holds for all of a long one; docs/synthetic-pairs.md has the figures.
    """
    device, vocab_size = target.device, target.config.vocab_size
    size = (sample.num_texts, sample.prompt_length)
    tokens = torch.randint(vocab_size - 1, size, generator=generator, device=device)
    step_target, step_drafter = _stepper(target), _stepper(drafter)
    agreements, entropies = [], []
    for _ in range(sample.text_length):
        target_logits, draft_logits = step_target(tokens), step_drafter(tokens)
        if temperature == 0:
            tokens = target_logits.argmax(-1, keepdim=True)
            agreements.append((tokens == draft_logits.argmax(-1, keepdim=True)).squeeze(-1).double())
            entropies.append(0.0)
            continue
        target_probs = (target_logits / temperature).softmax(-1)
        draft_probs = (draft_logits / temperature).softmax(-1)
        agreements.append(torch.minimum(target_probs, draft_probs).sum(-1, dtype=torch.float64))
        entropies.append(torch.special.entr(draft_probs).sum(-1).mean().item())
        tokens = target_probs.multinomial(1, generator=generator)
    by_text = torch.stack(agreements).mean(0)
    return Agreement(
        mean=by_text.mean().item(),
        standard_error=by_text.std().item() / math.sqrt(len(by_text)),
        entropy=sum(entropies) / len(entropies),
    )


def build_tokenizer(vocab_size: int, context_length: int) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer of exactly `vocab_size` ids: bytes, pairs, triples, end of text.

    The byte strings of all ids are distinct, and decoding the ids of a text returns the text.
    """
    letters = ["\u0120" if letter == " " else letter for letter in ALPHABET]  # how byte-level tokenizers show a space
    merges = list(islice(_merges(letters), vocab_size - 257))
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
    )


def _merges(letters: list[str]) -> Iterator[tuple[str, str]]:
    """Yields the merges of all pairs of letters, then of all triples, in the order of the letters."""
    for count in (2, 3):
        for places in sorted(product(range(len(letters)), repeat=count), key=max):
            *left, right = (letters[place] for place in places)
            yield "".join(left), right


def _find_scale(measured: Callable[[float], Agreement], wanted: float, first: float) -> float:
    """Returns the scale at which the agreement is `wanted`.

    Narrows the interval between a scale that is too small and one that is too large by linear interpolation of
    logarithms, because the odds of disagreement grow about as a power of the scale.

    Raises:
        InvalidRequestError: the models agree more than `wanted` at every scale.
    """
    goal = _log_odds(wanted)
    low, high = (math.log(SMALLEST_SCALE), -math.inf), (math.log(LARGEST_SCALE), math.inf)  # logs of scale and of odds
    scale = math.log(first)
    for _ in range(MOST_TRIALS):
        mean = measured(math.exp(scale)).mean
        if abs(mean - wanted) <= TOLERANCE:
            break
        odds = _log_odds(mean)
        if odds > goal:
            high = (scale, odds)
        elif scale < high[0]:
            low = (scale, odds)
        else:
            raise InvalidRequestError(
                f"agreement {wanted} is out of reach: at this temperature it is still {mean:.3f} with the further "
                f"layers {LARGEST_SCALE:g} times as strong as the trunk; ask for more, or for fewer draft layers"
            )
        if math.isinf(high[1]):
            scale = min(scale + goal - odds, high[0])
        elif math.isinf(low[1]):
            scale = max(scale + goal - odds, low[0])
        else:
            share = (goal - low[1]) / (high[1] - low[1])
            scale = low[0] + min(max(share, 0.1), 0.9) * (high[0] - low[0])
    return math.exp(scale)


def _log_odds(agreement: float) -> float:
    """Returns the logarithm of the odds of disagreement, kept finite."""
    agreement = min(max(agreement, 1e-6), 1 - 1e-6)
    return math.log((1 - agreement) / agreement)


def _logit_deviation(vocab_size: int) -> float:
    """Returns the deviation of independent normal logits whose softmax has the mean entropy `ENTROPY`."""
    logits = torch.randn(32, vocab_size, generator=torch.Generator().manual_seed(0))
    low, high = 0.0, 64.0
    for _ in range(24):
        middle = (low + high) / 2
        entropy = torch.special.entr((logits * middle).softmax(-1)).sum(-1).mean().item()
        low, high = (middle, high) if entropy > ENTROPY else (low, middle)
    return middle


def _without_weights(config: LlamaConfig) -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def _with_weights(model: LlamaForCausalLM, weights: dict[str, torch.Tensor], device: str) -> LlamaForCausalLM:
    """Assigns tensors, without copies, to a model on the meta device."""
    model.load_state_dict(weights, strict=False, assign=True)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.model.rotary_emb = cast(Any, LlamaRotaryEmbedding(model.config)).to(device)  # not among the weights
    return cast(LlamaForCausalLM, model.requires_grad_(False).eval())


def _further_outputs(target: LlamaForCausalLM, draft_layers: int) -> list[torch.nn.Linear]:
    """Returns the projections after the trunk that write to the residual stream."""
    return [
        module
        for layer in target.model.layers[draft_layers:]
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj)
    ]


@contextmanager
def _outputs_scaled(target: LlamaForCausalLM, draft_layers: int, scale: float) -> Iterator[None]:
    """Scales the outputs of the further layers by hooks, without changing or copying their weights."""
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output: output * scale)
        for module in _further_outputs(target, draft_layers)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _stepper(model: LlamaForCausalLM) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function from the next tokens, [texts, tokens], to the logits after them, [texts, vocab] float32."""
    cache = DynamicCache(config=model.config)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        output: Any = cast(Any, model)(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cast(torch.Tensor, output.logits[:, -1].float())

    return step


def _generator(device: str, seed: int, purpose: str) -> torch.Generator:
    """Returns a generator whose draws are independent of those for other purposes."""
    digest = hashlib.sha256(f"{seed} {purpose}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))

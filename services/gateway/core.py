"""The gateway without its edge: which peers serve a request, and the running requests."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from transformers import PreTrainedTokenizerBase

from draftwire.errors import InvalidRequestError, NoRoomError
from draftwire.logprobs import PromptPart
from draftwire.models.description import ModelDescription
from draftwire.models.loading import load_tokenizer
from draftwire.services.gateway.config import GatewayConfig
from draftwire.services.gateway.loop import Delta, Finish, GenerationLoop
from draftwire.services.gateway.ports import Peers
from draftwire.services.gateway.request import (
    Generation,
    RequestedGeneration,
    SpeculationDefaults,
    complete_request,
)
from draftwire.services.gateway.text import TextStream
from draftwire.services.metrics import GatewayMetrics
from draftwire.verification import rule_named

MAX_PROMPT_CHARACTERS = 4_000_000
"""Longer prompts are refused before they are tokenised."""


class GatewayCore:
    """Runs requests on the verifiers and drafters that there are. All methods run on the event loop."""

    def __init__(self, config: GatewayConfig, peers: Peers) -> None:
        """Takes the peers; `serve_model` comes before the first request.

        Raises:
            InvalidRequestError: the default rule is unknown or lossy.
        """
        name = config.rejection_sample_method
        if not rule_named(name).is_lossless:
            raise InvalidRequestError(f"{name} is lossy: requests may ask for it, but it cannot be the default")
        self.config = config
        self._peers = peers
        self.metrics = GatewayMetrics()
        self.num_requests = 0
        self.description: ModelDescription
        """The target model."""
        self._tokenizer: PreTrainedTokenizerBase

    @property
    def defaults(self) -> SpeculationDefaults:
        """What requests get that do not say."""
        config = self.config
        return SpeculationDefaults(
            config.num_speculative_tokens, config.max_speculative_tokens, config.rejection_sample_method
        )

    def serve_model(self, description: ModelDescription, tokenizer_files: dict[str, bytes]) -> None:
        """Takes the target model and its tokenizer."""
        self.description, self._tokenizer = description, load_tokenizer(tokenizer_files)

    async def tokenize(self, text: str) -> list[int]:
        """Returns the ids of a prompt, with whatever the target's tokenizer puts in front.

        Raises:
            InvalidRequestError: the text is empty or far beyond any context.
        """
        if not text:
            raise InvalidRequestError("the prompt is empty")
        if len(text) > MAX_PROMPT_CHARACTERS:
            raise InvalidRequestError(f"the prompt has more than {MAX_PROMPT_CHARACTERS} characters")
        encoding = await asyncio.to_thread(self._tokenizer, text)
        return list(encoding["input_ids"])

    async def render_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Returns the ids of a conversation, rendered by the target's chat template, ready for the answer.

        Raises:
            InvalidRequestError: the target has no chat template, or it refuses the messages.
        """
        if not messages:
            raise InvalidRequestError("the prompt is empty")
        if not self._tokenizer.chat_template:
            raise InvalidRequestError(f"{self.description.name} has no chat template; send a text prompt")
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise what they like
            raise InvalidRequestError(f"the chat template refuses the messages: {type(error).__name__}") from error
        encoding = await asyncio.to_thread(self._tokenizer, text, add_special_tokens=False)
        return list(encoding["input_ids"])

    def complete(self, requested: RequestedGeneration) -> Generation:
        """Checks a request and fills in the defaults; see `complete_request`."""
        return complete_request(requested, self.description, self.defaults)

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta | PromptPart | Finish]:
        """Carries out a request.

        Raises:
            NoRoomError: too many requests run already.
            UnavailableError: no verifier can be reached.
        """
        if self.num_requests >= self.config.max_requests:
            raise NoRoomError(f"{self.config.max_requests} requests are running, which is the limit; retry in a second")
        text = TextStream(self._tokenizer, generation.prompt_ids, generation.stop)
        if generation.generated_ids:  # may be many
            await asyncio.to_thread(text.skip, list(generation.generated_ids), generation.stop_token_ids)
        loop = GenerationLoop(generation, self._peers, text, self.config.loop)
        self.num_requests += 1
        result = "failed"
        try:
            async with aclosing(loop.run()) as events:
                async for event in events:
                    if isinstance(event, Finish):
                        result = event.reason.value
                    yield event
        except (asyncio.CancelledError, GeneratorExit):
            result = "cancelled"
            raise
        finally:
            self.num_requests -= 1
            self.metrics.drafters_lost.inc(loop.statistics.num_drafters_lost)
            self.metrics.verifiers_lost.inc(loop.statistics.num_verifiers_lost)
            self.metrics.requests.labels(result).inc()
            if generation.is_lossy:
                self.metrics.lossy_requests.labels(generation.rule).inc()

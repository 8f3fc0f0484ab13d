"""The gateway without its gRPC and HTTP edges: admission, tokenisation and the generation of requests."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path

import jinja2
from transformers import PreTrainedTokenizerBase

from draftwire.errors import ContextLengthError, InvalidRequestError
from draftwire.models.description import ModelDescription
from draftwire.models.tokenizer import load_tokenizer
from draftwire.options.draft_model.draft_model_name import DRAFT_MODEL
from draftwire.options.heads.head_names import HEAD_NAMES
from draftwire.options.model_free.names import RETRIEVAL, SUFFIX, parts_of
from draftwire.options.structured_output.form_sandbox import FormSandbox
from draftwire.options.structured_output.grammar_automaton import FormVocabulary
from draftwire.requests.rules import RuleFacts
from draftwire.requests.structured_output import MASKS_PER_TOKEN_S, structured
from draftwire.requests.tool_calls import SYNTAXES, ToolSyntax, syntax_of_template
from draftwire.runtime.served_request import served_request_id
from draftwire.runtime.watched_files import read_bytes
from draftwire_gateway.config import AUTO_LOCAL_DRAFTS, AUTO_TOOL_SYNTAX, NO_LOCAL_DRAFTS, GatewayConfig
from draftwire_gateway.metrics import GatewayMetrics
from draftwire_gateway.options.mask_allowance import mask_s
from draftwire_gateway.request_queue import QueuePlace, RequestQueue
from draftwire_gateway.request_record import RequestRecord
from draftwire_gateway.requested_generation import RequestedGeneration, SpeculationDefaults, complete_request
from draftwire_gateway.session.choices import ChoiceEvent, ChoiceRunner, PromptEcho
from draftwire_gateway.session.generation import Generation
from draftwire_gateway.session.loop import GenerationLoop
from draftwire_gateway.session.ports import Peers
from draftwire_gateway.session.round_times import RoundTimes
from draftwire_gateway.session.spans import RequestSpans, RequestTracing
from draftwire_gateway.session_plugs import plugs_of
from draftwire_gateway.speculation.pairs import Pairs
from draftwire_gateway.text.chat import ChatTemplate, parse_template
from draftwire_gateway.text.control_tokens import is_marked
from draftwire_gateway.text.conversation import Conversation
from draftwire_gateway.text.text import TextStream, decoded
from draftwire_gateway.text.tokenizer_pool import MAX_PROMPT_CHARACTERS, TokenizerPool

MAX_IDS_ON_LOOP = 100_000
"""Requests with more token ids are checked on a thread, because they would block the event loop."""


class GatewayCore:
    """Runs requests on the connected verifiers and drafters. All methods run on the event loop."""

    def __init__(self, config: GatewayConfig, peers: Peers) -> None:
        """Needs `serve_model` before the first request."""
        self.config = config
        self._peers = peers
        self.defaults = SpeculationDefaults(
            config.num_speculative_tokens,
            config.max_speculative_tokens,
            config.rejection_sample_method,
            adapts_length=config.speculation != "fixed",
            local_strategies=local_strategies(config.local_drafts),
            drafter_names=self._drafter_names,
            rounds_ahead=config.ahead.draft_ahead_rounds,
            max_branches=config.ahead.draft_ahead_branches,
            num_draft_nodes=config.num_draft_nodes,
            stop_below=config.stop_below,
        )
        self.metrics = GatewayMetrics(counts_callers=config.caller_metrics)
        self.pairs = Pairs(config.max_speculative_tokens, config.num_speculative_tokens)
        """Choose the lengths of drafts."""
        self.tracing: RequestTracing | None = None
        """Decides which requests are traced; None traces none. Set before the first request."""
        self.queue = RequestQueue(config.max_requests, config.max_waiting_requests, config.max_wait_s)
        self.metrics.num_running.set_function(lambda: self.queue.num_running)
        self.metrics.num_waiting.set_function(lambda: self.queue.num_waiting)
        self.description: ModelDescription
        """The target model."""
        self.tool_syntax: ToolSyntax | None = None
        """How the target writes tool calls; None if that is not known, or calls are not to be read."""
        self._tokenizer: PreTrainedTokenizerBase
        self._tokenizers: TokenizerPool
        self._chat_template: ChatTemplate
        self._forms = FormSandbox(self._form_vocabulary)
        self._template_text = None if config.chat_template is None else _read_template(config.chat_template)
        self._token_texts: dict[int, str] = {}

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names under which HTTP serves the target, the first of which it lists first."""
        return self.config.served_names or (self.description.name,)

    @property
    def target(self) -> ModelDescription:
        """The target model, with the rules that at least one connected verifier offers."""
        offered: dict[str, RuleFacts] = {}
        for description in (self.description, *(verifier.description for verifier in self._peers.targets())):
            for rule in description.rules:
                if rule.name not in offered or rule.takes_trees:  # as verifiers from before there were trees do not say
                    offered[rule.name] = rule
        return replace(self.description, rules=tuple(offered.values()))

    def _drafter_names(self) -> tuple[str, ...]:
        """Returns by what names requests may ask for drafters: draft models, and strategies of verifiers."""
        names = dict.fromkeys(self._peers.draft_models())
        for verifier in self._peers.targets() if self.config.local_drafts != NO_LOCAL_DRAFTS else ():
            names |= dict.fromkeys(verifier.description.local_strategies)
        return tuple(names)

    def serve_model(self, description: ModelDescription, tokenizer_files: dict[str, bytes]) -> None:
        """Sets the target model and loads its tokenizer and chat template."""
        self.description, self._tokenizer = description, load_tokenizer(tokenizer_files)
        if self._template_text is not None:
            self._tokenizer.chat_template = self._template_text
        self._tokenizers = TokenizerPool(self._tokenizer, description)
        TextStream(self._tokenizer, [], ())  # reads the vocabulary, which takes long if it is large
        self._chat_template = ChatTemplate(self._tokenizer, description.name)
        self.tool_syntax = _tool_syntax(self.config.tool_call_syntax, self._tokenizer)
        self.metrics.of_model.model_name = description.name

    def stop(self) -> None:
        """Ends the process that compiles forms."""
        self._forms.stop()

    def _form_vocabulary(self) -> FormVocabulary:
        description = self.description
        return FormVocabulary.of(self._tokenizer, description.vocab_size, description.stop_token_ids)

    @property
    def num_requests(self) -> int:
        """Choices of requests that run, are being prepared or wait."""
        return self.queue.num_running + self.queue.num_waiting

    async def tokenize(self, text: str, caller: str = "", *, with_special: bool = True) -> list[int]:
        """Returns the token ids of a prompt, with the special tokens that the target's tokenizer puts in front, if they
        are wanted. Callers take turns.

        Raises:
            InvalidRequestError: the text is empty, certainly longer than the context, or takes too long.
            NoRoomError: too many prompts wait, or others took the time.
        """
        if not text:
            raise InvalidRequestError("the prompt is empty")
        return await self._tokenizers.encode(text, caller, add_special_tokens=with_special)

    async def render_chat(self, conversation: Conversation, caller: str = "", *, must_call: bool = False) -> list[int]:
        """Returns the token ids of a conversation, rendered by the target's chat template up to the answer.

        Callers take turns. Control tokens in the conversation's own texts are encoded as text. Where the answer has to
        be calls, a template without a place for tools is told of them by a system message.

        Raises:
            InvalidRequestError: the target has no chat template, the template refuses the conversation or leaves
                something out, or the text is certainly longer than the context or takes too long.
            NoRoomError: too many conversations are being rendered, or texts tokenised.
        """
        if conversation.num_characters > MAX_PROMPT_CHARACTERS:
            raise InvalidRequestError(f"the prompt has more than {MAX_PROMPT_CHARACTERS} characters")
        if must_call and not self._chat_template.takes_tools:
            conversation = conversation.with_tools_told()
        text = await self._chat_template.render(conversation, caller)
        options = {"sanitize_control_tokens": True} if is_marked(text) else {}
        return await self._tokenizers.encode(text, caller, add_special_tokens=False, **options)

    def token_text(self, token_id: int) -> str:
        """Decodes a single token of the target, special or not; an incomplete character becomes U+FFFD."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = str(self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
            self._token_texts[token_id] = text
        return text

    async def detokenize(self, token_ids: list[int]) -> str:
        """Returns the text of token ids, special tokens included.

        Raises:
            InvalidRequestError: there are more ids than the context has, or one is none of the target's.
        """
        target = self.description
        if len(token_ids) > target.context_length:
            raise ContextLengthError.of(target.context_length, f"tokens has {len(token_ids)}")
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < target.vocab_size:
            raise InvalidRequestError(f"tokens must be in 0..{target.vocab_size - 1}")
        return await asyncio.to_thread(decoded, self._tokenizer, token_ids, with_special=True)

    async def text_lengths(self, token_ids: list[int]) -> list[int]:
        """Returns, for each token, how many characters of the text of all of them it makes final."""
        text = TextStream(self._tokenizer, [], (), per_token=True)
        return (await asyncio.to_thread(text.push, token_ids)).lengths

    async def complete(self, requested: RequestedGeneration) -> list[Generation]:
        """Checks a request and fills in the defaults; see `complete_request`. A large one is checked on a thread."""
        if requested.num_ids > MAX_IDS_ON_LOOP:
            return await asyncio.to_thread(complete_request, requested, self.target, self.defaults)
        return complete_request(requested, self.target, self.defaults)

    async def check_form(self, generations: Sequence[Generation], caller: str) -> list[Generation]:
        """Compiles the requested structured output in a process with limits, and returns the choices with its cost.

        An invalid form is refused before a session is opened. Verifiers and drafters compile no form that was not
        measured. The caller's budget of compiling pays, see `payer`.

        Raises:
            InvalidRequestError: see `FormSandbox.measure`.
            NoRoomError: the caller has made too much compile, or too many forms are being compiled.
        """
        form = generations[0].sampling.structured_output if generations else None
        if form is None:
            return list(generations)
        cost = await self._forms.measure(structured(form), caller)
        return [replace(one, form_memory_bytes=cost.memory_bytes, form_caller=caller) for one in generations]

    async def generate(
        self, generations: Sequence[Generation], place: QueuePlace, traceparent: str = ""
    ) -> AsyncGenerator[ChoiceEvent]:
        """Runs the choices of one request, which has a place in the queue, and yields their events: echoes of prompts
        first. The traceparent header is not validated.

        Raises:
            InvalidRequestError: the verifier refuses the request; its limits may be lower than the gateway's.
            NoRoomError: no verifier had room for as long as a request may wait.
            UnavailableError: no verifier can be reached.
        """
        trace = None
        if self.tracing is not None:
            trace = self.tracing.begin(traceparent, len(generations), served_request_id())
        with RequestRecord(self.metrics, generations, trace, place.caller) as record:

            async def make_loop(generation: Generation) -> GenerationLoop:
                loop = await self._make_loop(generation, trace)
                record.begin_choice(generation.choice, loop.statistics)
                return loop

            wait_for_room, on_open = partial(self.queue.wait_for_room, place), partial(self.queue.mark_open, place)
            runner = ChoiceRunner(generations, make_loop, wait_for_room, on_open)
            echoes = [generation for generation in generations if generation.echo]
            async with aclosing(runner.run()) as events:
                async for event in events:
                    while echoes:  # not before a verifier has room: until then a refusal is no part of a text
                        echo = echoes.pop(0)
                        text = await asyncio.to_thread(decoded, self._tokenizer, echo.prompt_ids)
                        yield ChoiceEvent(echo, PromptEcho(echo.prompt_ids, text))
                    record.add(event)
                    yield event

    async def _make_loop(self, generation: Generation, trace: RequestSpans | None) -> GenerationLoop:
        text = TextStream(
            self._tokenizer, generation.prompt_ids, generation.stop, generation.token_details, generation.shown_tokens
        )
        if generation.generated_ids:  # on a thread, since they may be many
            await asyncio.to_thread(text.skip, list(generation.generated_ids), generation.stop_token_ids)
        spans = trace.choice(generation) if trace is not None else None
        observers = [self.metrics.observe_round, *([spans.add_round] if spans is not None else [])]
        if generation.sampling.structured_output is not None:
            observers.append(partial(self._charge_masks, generation.form_caller))
        plugs = plugs_of(generation, self.pairs, observers, spans)
        return GenerationLoop(generation, self._peers, text, self.config.loop, plugs)

    def _charge_masks(self, caller: str, times: RoundTimes) -> None:
        """Makes a caller pay for masks of a round, as for compiling, if they took longer than is allowed."""
        self._forms.charge(caller, mask_s(times) - MASKS_PER_TOKEN_S * times.num_tokens)


def _read_template(path: Path) -> str:
    """Reads a chat template. Raises if the file cannot be read, or is none."""
    try:
        text = read_bytes(path, "chat_template").decode()
        parse_template(text)
    except (UnicodeDecodeError, jinja2.TemplateError) as error:
        raise InvalidRequestError(f"chat_template: {path}: {error}") from error
    return text


def _tool_syntax(option: str, tokenizer: PreTrainedTokenizerBase) -> ToolSyntax | None:
    if option != AUTO_TOOL_SYNTAX:
        return SYNTAXES.get(option)
    try:
        template = tokenizer.get_chat_template(tools=[])
    except ValueError:
        return None
    return syntax_of_template(template)


def local_strategies(local_drafts: str) -> tuple[str, ...]:
    """Returns the strategies that an option `local_drafts` stands for."""
    if local_drafts == NO_LOCAL_DRAFTS:
        return ()
    return (
        (*HEAD_NAMES, DRAFT_MODEL, SUFFIX, RETRIEVAL) if local_drafts == AUTO_LOCAL_DRAFTS else parts_of(local_drafts)
    )

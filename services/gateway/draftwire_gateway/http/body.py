"""What may be asked for over HTTP. Whatever has no field here is refused by its name, never ignored.

A parameter that is null counts as left out, as in OpenAI's own server.
"""

import asyncio
import json
import re
from collections.abc import Sized
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from draftwire.requests.parameters import MAX_ALLOWED_TOKENS, MAX_BIASED_TOKENS, NUMBERS, SamplingParams
from draftwire.requests.structured_output import MAX_CHOICES as MAX_FORM_CHOICES
from draftwire_gateway.http.json_parsing import NAME, parse
from draftwire_gateway.http.refusal import RefusedError
from draftwire_gateway.session.generation import MAX_CHOICES, MAX_STOP_STRINGS
from draftwire_gateway.text.conversation import MAX_CHAT_MESSAGES, MAX_TOOL_CALLS, MAX_TOOLS

MAX_BODY_ON_LOOP = 64 * 2**10
"""Bytes. Larger ones are read on a thread."""

UNSUPPORTED = {
    "audio": "the output is text",
    "function_call": "functions are described with tools",
    "functions": "functions are described with tools",
    "metadata": "nothing is stored",
    "modalities": "input and output are text",
    "moderation": "texts are not judged",
    "parallel_tool_calls": "the output is text, tool calls in it are not read",
    "prediction": "a drafter predicts, see num_speculative_tokens",
    "prompt_cache_key": "prefixes are shared by content, see cache_salt",
    "prompt_cache_options": "prefixes are shared by content, see cache_salt",
    "prompt_cache_retention": "prefixes are shared by content, see cache_salt",
    "reasoning_effort": "what a chat template knows of is said with chat_template_kwargs",
    "safety_identifier": "texts are not judged",
    "service_tier": "all requests are served alike",
    "store": "nothing is stored",
    "suffix": "the model goes on with the prompt",
    "use_beam_search": "tokens are drawn",
    "verbosity": "what a chat template knows of is said with chat_template_kwargs",
    "web_search_options": "nothing is searched",
}
"""Parameters of OpenAI and others that cannot be honoured, and why."""

_DIGITS = re.compile(r"0|[1-9][0-9]{0,9}")


def _wrong(message: str) -> PydanticCustomError:
    # Braces would be read as places to fill in.
    return PydanticCustomError("value", message.replace("{", "(").replace("}", ")"))


class FirstFault(FailFast):
    """Ends the reading of a list at its first wrong entry: each more would cost a kilobyte."""

    __hash__ = object.__hash__  # which annotations of what may be None need


class Strict(BaseModel):
    """Takes nothing that it has no field for, and converts nothing. However much is wrong, few faults are collected."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Leaves out what is null, and of what has no field all but the first."""
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        said = {key: value for key, value in given.items() if value is not None}
        stray = next((key for key in said if key not in known), None)
        return {key: value for key, value in said.items() if key in known or key == stray}


def _as_list(given: Any) -> Any:
    return [given] if isinstance(given, str) else given


def _as_parts(given: Any) -> Any:
    return [{"type": "text", "text": given}] if isinstance(given, str) else given


def dumped(value: dict[str, Any]) -> str:
    """Returns an object as JSON."""
    return json.dumps(value, ensure_ascii=False)


def _as_json(given: Any) -> Any:
    return dumped(given) if isinstance(given, dict) else given


def _as_object(given: Any) -> str:
    """Returns as JSON what may be any object: a large one is written where the body is read."""
    if not isinstance(given, dict):
        raise _wrong("has to be an object")
    return dumped(given)


def _refuse_over(given: Sized, most: int) -> None:
    if len(given) > most:
        raise _wrong(f"takes at most {most}, not {len(given)}")


def _few(most: int) -> BeforeValidator:
    """Refuses a list that is far too long before anything is made of it."""

    def check(given: Any) -> Any:
        if isinstance(given, list):
            _refuse_over(given, most)
        return given

    return BeforeValidator(check)


def _are_ids(given: Any) -> bool:
    return isinstance(given, list) and all(type(one) is int for one in given)


def _as_prompts(given: Any) -> list[str | list[int]]:
    if isinstance(given, str) or (given and _are_ids(given)):
        return [given]
    if isinstance(given, list) and not _are_ids(given[:1]):
        _refuse_over(given, MAX_CHOICES)
    if isinstance(given, list) and given and (all(isinstance(one, str) for one in given) or all(map(_are_ids, given))):
        return given
    raise _wrong("has to be a text, token ids, or a list of either, and not empty")


def _as_biases(given: Any) -> Any:
    if not isinstance(given, dict):
        raise _wrong("has to be an object from token ids to numbers")
    _refuse_over(given, MAX_BIASED_TOKENS)
    for token, bias in given.items():
        if not (isinstance(token, str) and _DIGITS.fullmatch(token)) or type(bias) not in (int, float):
            raise _wrong("has to be an object from token ids, as strings, to numbers")
    return {int(token): float(bias) for token, bias in given.items()}


class StreamOptions(Strict):
    """How an answer is streamed."""

    include_usage: bool = False
    """A last chunk says what the request cost."""
    include_obfuscation: Literal[False] = False
    """Chunks are not padded."""


class OutputForm(Strict):
    """The form of the text; exactly one."""

    json_schema: Annotated[str | None, BeforeValidator(_as_object)] = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], FirstFault(), _few(MAX_FORM_CHOICES)] | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _is_one(self) -> "OutputForm":
        if len(self.model_fields_set) != 1:
            raise _wrong("takes exactly one of json, regex, choice and grammar")
        return self


TokenIds = Annotated[list[int], FirstFault(), _few(MAX_ALLOWED_TOKENS)]
"""A set of tokens; none is larger than the largest vocabularies."""


if TYPE_CHECKING:

    class SamplingNumbers:
        """A field for each of `NUMBERS`."""
else:
    SamplingNumbers = create_model(
        "SamplingNumbers",
        __base__=Strict,
        **{name: (kind, getattr(SamplingParams(), name)) for name, kind in NUMBERS.items()},
    )


class GenerateBody(SamplingNumbers, Strict):
    """What both routes take. Ranges are those of docs/parameters.md, and are checked where they are for gRPC."""

    model: str
    n: int = 1
    stop: Annotated[list[str], FirstFault(), _few(MAX_STOP_STRINGS), BeforeValidator(_as_list)] = []
    seed: int | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_as_biases)] = {}
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Names who asks, for whoever keeps books; has no effect here."""
    # Not OpenAI's; named as over gRPC.
    num_speculative_tokens: int | None = None
    rejection_sample_method: str | None = None
    allowed_token_ids: TokenIds | None = None
    stop_token_ids: TokenIds = []
    ignore_eos: bool = False
    cache_salt: str = ""
    prompt_logprobs: int | None = None
    logprobs_mode: str | None = None
    structured_output: OutputForm | None = None
    token_details: bool = False

    @model_validator(mode="after")
    def _streams(self) -> "GenerateBody":
        if self.stream_options is not None and not self.stream:
            raise _wrong("stream_options: says nothing without stream")
        return self


class CompletionBody(GenerateBody):
    """POST /v1/completions."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_as_prompts)]
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = None
    max_tokens: int = 16
    suffix: Literal[""] = ""

    @model_validator(mode="after")
    def _draws_no_more(self) -> "CompletionBody":
        if self.best_of is not None and self.best_of != self.n:
            raise _wrong("best_of: is not supported unless it equals n, because no completion is left out")
        return self


class TextPart(Strict):
    """A part of a message. There are no others than text."""

    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    """What a tool call calls."""

    name: str
    arguments: Annotated[str, BeforeValidator(_as_json)] = "{}"


class MessageToolCall(Strict):
    """A tool that an assistant's message calls."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Strict):
    """One message of a conversation."""

    role: str
    content: Annotated[list[TextPart], FirstFault(), BeforeValidator(_as_parts)] = []
    name: str = ""
    tool_calls: Annotated[list[MessageToolCall], FirstFault(), _few(MAX_TOOL_CALLS)] = []
    tool_call_id: str = ""

    @model_validator(mode="after")
    def _says_something(self) -> "ChatMessage":
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise _wrong("has no content")
        return self


class Function(Strict):
    """A function that the model may ask for."""

    name: str
    description: str = ""
    parameters: Annotated[str, BeforeValidator(_as_object)] = ""
    """JSON; empty is not said."""
    strict: Literal[False] = False
    """Calls are not read, so nothing can be promised of them."""


class ToolBody(Strict):
    """A tool for the template to describe."""

    type: Literal["function"]
    function: Function


class JsonSchema(Strict):
    """A schema, in the form of `response_format`."""

    name: str = ""
    """Has no effect here."""
    description: str = ""
    """Has no effect here."""
    json_schema: Annotated[str, BeforeValidator(_as_object)] = Field(alias="schema")
    strict: bool = True
    """Has no effect here: texts have the form in any case."""


class ResponseFormat(Strict):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise _wrong("json_schema comes with the type json_schema, and with no other")
        return self


class ChatBody(GenerateBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], FirstFault(), _few(MAX_CHAT_MESSAGES)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: Annotated[list[ToolBody], FirstFault(), _few(MAX_TOOLS)] = []
    tool_choice: Literal["auto", "none"] = "auto"
    response_format: ResponseFormat | None = None
    chat_template_kwargs: Annotated[str, BeforeValidator(_as_object)] = "{}"
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "ChatBody":
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise _wrong("max_completion_tokens: says something else than max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise _wrong("top_logprobs: says nothing without logprobs")
        if not self.messages:
            raise _wrong("messages: is empty")
        num_calls = sum(len(message.tool_calls) for message in self.messages)
        if num_calls > MAX_TOOL_CALLS:
            raise _wrong(f"tool_calls: takes at most {MAX_TOOL_CALLS}, not {num_calls}")
        formats = self.response_format is not None and self.response_format.type != "text"
        if formats and self.structured_output is not None:
            raise _wrong("response_format: cannot be beside structured_output")
        return self


Body = TypeVar("Body", bound=GenerateBody)


async def read(kind: type[Body], data: bytes) -> Body:
    """Reads the body of a request; a large one on a thread.

    Raises:
        RefusedError: it is no JSON, or says something that the route does not take. Of what it says only names and
            numbers are quoted.
    """
    if len(data) > MAX_BODY_ON_LOOP:
        return await asyncio.to_thread(_read, kind, data)
    return _read(kind, data)


def _read(kind: type[Body], data: bytes) -> Body:
    given = parse(data)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        # A stray name explains more than what is missing because of it.
        fault = next((one for one in faults if one["type"] == "extra_forbidden"), faults[0])
        raise _refusal(fault) from None


def _refusal(fault: ErrorDetails) -> RefusedError:
    place = fault["loc"]
    path = _path(place)
    top = path.partition(".")[0].partition("[")[0] or None
    if fault["type"] == "extra_forbidden":
        name = str(place[-1])
        if not NAME.fullmatch(name):  # may be anything, and is not ours to show
            return RefusedError(
                400, f"{path or 'the request'} has a key that means nothing here", code="unknown_parameter"
            )
        if len(place) == 1 and name in UNSUPPORTED:
            return RefusedError(
                400, f"{name} is not supported: {UNSUPPORTED[name]}", code="unsupported_parameter", param=name
            )
        return RefusedError(400, f"{path} is not a parameter of this route", code="unknown_parameter", param=path)
    if top == "suffix":
        return RefusedError(
            400, f"suffix is not supported: {UNSUPPORTED['suffix']}", code="unsupported_parameter", param="suffix"
        )
    if fault["type"] == "missing":
        return RefusedError(400, f"{path} is missing", code="missing_required_parameter", param=path)
    if not place:  # the message begins with the name
        name, _, said = fault["msg"].partition(": ")
        return RefusedError(400, f"{name} {said}", param=name)
    return RefusedError(400, f"{path}: {fault['msg']}", param=top)


def _path(place: tuple[int | str, ...]) -> str:
    """Returns where something stands, such as messages[0].content; a key that may be anything is left out."""
    path = ""
    for part in place:
        if isinstance(part, int):
            path += f"[{part}]"
        elif NAME.fullmatch(part):
            path += f".{part}" if path else part
    return path

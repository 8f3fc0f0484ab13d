"""Request bodies of the HTTP routes. An unknown parameter is refused by its name, never ignored.

A parameter that is null counts as left out, as in OpenAI's own server.
"""

import json
import re
from collections.abc import Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from draftwire.requests.parameters import MAX_ALLOWED_TOKENS, MAX_BIASED_TOKENS, NUMBERS, SamplingParams
from draftwire.requests.structured_output import MAX_CHOICES as MAX_FORM_CHOICES
from draftwire_gateway.http.event_ids import event_id_of
from draftwire_gateway.http.json_parsing import NAME, parse
from draftwire_gateway.http.neutral_fields import without_neutral
from draftwire_gateway.http.refusal import RefusedError
from draftwire_gateway.requested_generation import MAX_CHOICES, MAX_DRAFTERS, MAX_STOP_STRINGS
from draftwire_gateway.text.conversation import MAX_CHAT_MESSAGES, MAX_TOOL_CALLS, MAX_TOOLS

_WHY_UNSUPPORTED = {
    "the output is text": ("audio", "detokenize"),
    "nothing is stored": ("background",),
    "nothing is stored: send the whole conversation": ("conversation", "previous_response_id"),
    "tokens are drawn": ("early_stopping", "length_penalty", "use_beam_search"),
    "functions are described with tools": ("function_call", "functions"),
    "answers have what other parameters ask for": ("include",),
    "a stop string ends the text before it": ("include_stop_str_in_output",),
    "nothing is stored, and it has to be an object": ("metadata",),
    "tools are called by the client": ("max_tool_calls",),
    "input and output are text": ("modalities",),
    "texts are not judged": ("moderation", "safety_identifier"),
    "a drafter predicts, see num_speculative_tokens": ("prediction",),
    "all requests are served alike": ("priority", "service_tier"),
    "prefixes are shared by content, see cache_salt": (
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
    ),
    "it has to be a text": ("request_id",),
    "control tokens are never text": ("skip_special_tokens", "spaces_between_special_tokens"),
    "the model goes on with the prompt": ("suffix",),
    "prompts are never cut": ("truncation",),
    "nothing is searched": ("web_search_options",),
}
UNSUPPORTED = {name: why for why, names in _WHY_UNSUPPORTED.items() for name in names}
"""Parameters of OpenAI and others that are not supported, and why."""

OTHER_PARTS = {
    "image_url": "images",
    "input_image": "images",
    "input_audio": "audio",
    "file": "files",
    "input_file": "files",
    "video_url": "videos",
}
"""Contents of parts of messages that other models take, by type."""
ITEM_TYPES = frozenset({"message", "function_call", "function_call_output", "reasoning"})
"""Types of the items of `input` of /v1/responses."""
REMEDY = "; a gateway with --unknown-parameters ignore leaves it out"
MAX_NAMES_IGNORED = 64
"""Unknown keys of one object that are told; all are left out."""

_DIGITS = re.compile(r"0|[1-9][0-9]{0,9}")


def value_error(message: str) -> PydanticCustomError:
    """Returns a fault for a validator to raise, whose message is shown. Pydantic treats braces as placeholders."""
    return PydanticCustomError("value", message.replace("{", "(").replace("}", ")"))


class FirstFault(FailFast):
    """Stops the validation of a list at its first invalid entry: each further error would take a kilobyte."""

    __hash__ = object.__hash__  # required in annotations of optional fields


@dataclass(slots=True)
class LeftOut:
    """Unknown keys of a body that were left out."""

    leaves_out_all: bool
    """Whether those of all models are, and none is refused."""
    names: set[str] = field(default_factory=set)


class Strict(BaseModel):
    """A model that refuses unknown keys and converts no types. The number of collected errors is bounded."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any, info: ValidationInfo) -> Any:
        """Drops keys whose value is null, and all unknown keys but the first, or all if they are to be left out."""
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        present = {key: value for key, value in given.items() if value is not None}
        unknown = [key for key in present if key not in known]
        left_out: LeftOut | None = info.context
        leaves_out = cls.model_config.get("extra") == "ignore" or (left_out is not None and left_out.leaves_out_all)
        if leaves_out:
            if left_out is not None:
                left_out.names.update(key for key in unknown[:MAX_NAMES_IGNORED] if NAME.fullmatch(key))
            unknown = []
        return {key: value for key, value in present.items() if key in known or key in unknown[:1]}


SENT_BACK = ConfigDict(extra="ignore")
"""Configuration of what clients send as a server's answer had it, with more than is asked for: that is left out."""


def _as_list(given: Any) -> Any:
    return [given] if isinstance(given, str) else given


def as_parts(given: Any) -> Any:
    """Returns a text as a list of one part; anything else as it is, to be validated."""
    return [{"type": "text", "text": given}] if isinstance(given, str) else given


def dumped(value: dict[str, Any]) -> str:
    """Returns an object as JSON."""
    return json.dumps(value, ensure_ascii=False)


def _as_json(given: Any) -> Any:
    return dumped(given) if isinstance(given, dict) else given


def as_object(given: Any) -> str:
    """Serialises an object of any content: during validation, so that a large one is serialised on a thread."""
    if not isinstance(given, dict):
        raise value_error("has to be an object")
    return dumped(given)


def _refuse_over(given: Sized, most: int) -> None:
    if len(given) > most:
        raise value_error(f"takes at most {most}, not {len(given)}")


def at_most(most: int) -> BeforeValidator:
    """Returns a validator that refuses a list with more entries before they are validated."""

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
    raise value_error("has to be a text, token ids, or a list of either, and not empty")


def _as_biases(given: Any) -> Any:
    if not isinstance(given, dict):
        raise value_error("has to be an object from token ids to numbers")
    _refuse_over(given, MAX_BIASED_TOKENS)
    for token, bias in given.items():
        if not (isinstance(token, str) and _DIGITS.fullmatch(token)) or type(bias) not in (int, float):
            raise value_error("has to be an object from token ids, as strings, to numbers")
    return {int(token): float(bias) for token, bias in given.items()}


class StreamOptions(Strict):
    """Options of a streamed response."""

    include_usage: bool = False
    """Whether a last chunk reports the token usage."""
    continuous_usage_stats: bool = False
    """Whether, with `include_usage`, every chunk has the tokens of its choice so far."""
    include_obfuscation: Literal[False] = False
    """Padding of chunks, which is not supported."""


class OutputForm(Strict):
    """Structured output; exactly one of the fields is set."""

    json_schema: Annotated[str | None, BeforeValidator(as_object, dict[str, Any])] = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], FirstFault(), at_most(MAX_FORM_CHOICES)] | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _check_exactly_one(self) -> "OutputForm":
        if len(self.model_fields_set) != 1:
            raise value_error("takes exactly one of json, regex, choice and grammar")
        return self


TokenIds = Annotated[list[int], FirstFault(), at_most(MAX_ALLOWED_TOKENS)]
"""A set of tokens, at most as large as the largest vocabularies."""


class GeneratedChoiceBody(Strict):
    """The part of a choice that an interrupted response had."""

    choice: int = 0
    token_ids: Annotated[list[int], FirstFault()] = []
    """The `token_ids` of all its chunks, with `return_token_ids`."""
    is_finished: bool = False
    """Whether its finish reason came: nothing of it is sent again."""
    event_id: str | None = None
    """The id of its last event, by which the ids are checked."""

    @model_validator(mode="after")
    def _check_event(self) -> "GeneratedChoiceBody":
        if self.event_id is not None and self.event_id != event_id_of(self.choice, self.token_ids):
            raise value_error("event_id is of an event after other tokens: one is lost, repeated or another choice's")
        return self


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
    """Parameters of both routes. Ranges are those of docs/parameters.md, and are checked in the core, as for gRPC."""

    model: str
    n: int = 1
    stop: Annotated[list[str], FirstFault(), at_most(MAX_STOP_STRINGS), BeforeValidator(_as_list, str | list[str])] = []
    seed: int | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_as_biases, dict[str, float])] = {}
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Has no effect here."""
    has_random_seed: bool = False
    """Has no effect: clients of earlier versions send it."""
    # Not in OpenAI's API; named as in gRPC.
    num_speculative_tokens: int | None = None
    num_draft_nodes: int | None = None
    stop_below: float | None = None
    drafter: Annotated[list[str], FirstFault(), at_most(MAX_DRAFTERS), BeforeValidator(_as_list, str | list[str])] = []
    rejection_sample_method: str | None = None
    allowed_token_ids: TokenIds | None = None
    stop_token_ids: TokenIds = []
    ignore_eos: bool = False
    cache_salt: str = ""
    prompt_logprobs: int | None = None
    logprobs_mode: str | None = None
    structured_output: OutputForm | None = None
    token_details: bool = False
    return_token_ids: bool = False
    """Whether choices have `token_ids`, and events an id: what `generated_choices` needs."""
    generated_choices: Annotated[list[GeneratedChoiceBody], FirstFault(), at_most(MAX_CHOICES)] = []
    """The choices of an interrupted response: this one goes on after it."""

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, given: Any) -> Any:
        """Drops what asks for what happens anyway; before unknown keys are looked for."""
        return without_neutral(given, frozenset(cls.model_fields)) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _check_stream_options(self) -> "GenerateBody":
        if self.stream_options is not None and not self.stream:
            raise value_error("stream_options: says nothing without stream")
        return self


class CompletionBody(GenerateBody):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        list[str | list[int]], BeforeValidator(_as_prompts, str | list[int] | list[str] | list[list[int]])
    ]
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = None
    max_tokens: int = 16
    suffix: Literal[""] = ""

    @model_validator(mode="after")
    def _check_best_of(self) -> "CompletionBody":
        if self.best_of is not None and self.best_of != self.n:
            raise value_error("best_of: is not supported unless it equals n, because no completion is left out")
        return self


def as_text_type(given: Any) -> Any:
    """Refuses the types of parts that other models take, in words."""
    if given in OTHER_PARTS:
        raise value_error(f"the model takes text alone, no {OTHER_PARTS[given]}")
    return given


class TextPart(Strict):
    """A part of a message, which is always text."""

    model_config = SENT_BACK
    type: Annotated[Literal["text"], BeforeValidator(as_text_type, str)]
    text: str


class CalledFunction(Strict):
    """Function and arguments of a tool call."""

    name: str
    arguments: Annotated[str, BeforeValidator(_as_json, str | dict[str, Any])] = "{}"


class MessageToolCall(Strict):
    """A tool call in an assistant's message."""

    model_config = SENT_BACK
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Strict):
    """One message of a conversation."""

    model_config = SENT_BACK
    role: str
    content: Annotated[list[TextPart], FirstFault(), BeforeValidator(as_parts, str | list[TextPart])] = []
    name: str = ""
    tool_calls: Annotated[list[MessageToolCall], FirstFault(), at_most(MAX_TOOL_CALLS)] = []
    tool_call_id: str = ""
    reasoning_content: str = ""
    """Has no effect here: templates leave out how earlier answers were found."""
    audio: None = None
    """Has to be null: the model takes text alone."""
    function_call: None = None
    """Has to be null: calls are in tool_calls."""

    @model_validator(mode="after")
    def _check_content(self) -> "ChatMessage":
        may_be_empty = self.role == "assistant"  # as an answer is that was cut within its only call
        if "content" not in self.model_fields_set and not self.tool_calls and not may_be_empty:
            raise value_error("has no content")
        return self


class Function(Strict):
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Annotated[str, BeforeValidator(as_object, dict[str, Any])] = ""
    """JSON schema; empty if left out."""
    strict: bool = False
    """Whether the arguments of every call follow the schema, also where the model is free to call or not."""


class ToolBody(Strict):
    """A tool that the chat template describes to the model."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """The function that has to be called."""

    name: str


class NamedTool(Strict):
    """A `tool_choice` that names one."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Strict):
    """The schema of a `response_format`."""

    name: str = ""
    """Has no effect here."""
    description: str = ""
    """Has no effect here."""
    json_schema: Annotated[str, BeforeValidator(as_object, dict[str, Any])] = Field(alias="schema")
    strict: bool = True
    """Has no effect here: texts always follow the schema."""


class ResponseFormat(Strict):
    """Structured output of a chat answer, in OpenAI's format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise value_error("json_schema comes with the type json_schema, and with no other")
        return self


Messages = Annotated[list[ChatMessage], FirstFault(), at_most(MAX_CHAT_MESSAGES)]


class Conversing(Strict):
    """Fields that a chat template renders, without the messages."""

    tools: Annotated[list[ToolBody], FirstFault(), at_most(MAX_TOOLS)] = []
    chat_template_kwargs: Annotated[str, BeforeValidator(as_object, dict[str, Any])] = "{}"
    continue_final_message: bool = False


class ChatBody(GenerateBody, Conversing):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    """Whether an answer may have several calls."""
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _check(self) -> "ChatBody":
        self.check_combinations()
        return self

    def check_combinations(self) -> None:
        """Refuses parameters that contradict each other."""
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise value_error("max_completion_tokens: says something else than max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise value_error("top_logprobs: says nothing without logprobs")
        if not self.messages:
            raise value_error("messages: is empty")
        num_calls = sum(len(message.tool_calls) for message in self.messages)
        if num_calls > MAX_TOOL_CALLS:
            raise value_error(f"tool_calls: takes at most {MAX_TOOL_CALLS}, not {num_calls}")
        formats = self.response_format is not None and self.response_format.type != "text"
        if formats and self.structured_output is not None:
            raise value_error("response_format: cannot be beside structured_output")
        if self.must_call:
            if not self.tools:
                raise value_error("tool_choice: says nothing without tools")
            if self.has_form:
                raise value_error("tool_choice: the answer cannot be calls and have another form")

    @property
    def has_form(self) -> bool:
        """Whether the request prescribes a form of the text itself. Where the answer has to be calls there is no text,
        and `response_format` says nothing of it.
        """
        formats = self.response_format is not None and self.response_format.type != "text" and not self.must_call
        return formats or self.structured_output is not None

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be tool calls."""
        return self.tool_choice not in ("auto", "none")

    @property
    def offered_tools(self) -> list[ToolBody]:
        """Tools that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools


class TokenizeBody(Conversing):
    """Body of POST /tokenize: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages = []
    add_special_tokens: bool = True
    """Whether the tokens come first that the tokenizer puts before a text; a conversation has those of its template."""
    add_generation_prompt: Literal[True] = True
    """Conversations always end where the answer begins, unless `continue_final_message` is set."""
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_exactly_one(self) -> "TokenizeBody":
        if (self.prompt is None) == (not self.messages):
            raise value_error("prompt: a prompt or messages are needed, and not both")
        return self


class DetokenizeBody(Strict):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


Body = TypeVar("Body", bound=GenerateBody)
AnyBody = TypeVar("AnyBody", bound=Strict)


def read(kind: type[AnyBody], data: bytes | bytearray, left_out: LeftOut | None = None) -> AnyBody:
    """Parses and validates the body of a request. For a large one to be called on a thread. `left_out` says whether
    unknown parameters are left out, and gets the names of those that are; None refuses them.

    Raises:
        RefusedError: the body is not JSON, or is invalid for the route. The message quotes only names and numbers.
    """
    given = parse(data)
    try:
        return kind.model_validate(given, context=left_out)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        # A misspelt name is more useful than the field that is missing because of it.
        fault = next((one for one in faults if one["type"] == "extra_forbidden"), faults[0])
        raise _refusal(fault) from None


def _refusal(fault: ErrorDetails) -> RefusedError:
    place = fault["loc"]
    path = _path(place)
    top = path.partition(".")[0].partition("[")[0] or None
    if len(place) == 1 and top in UNSUPPORTED:
        message = f"{top} is not supported: {UNSUPPORTED[top]}{REMEDY}"
        return RefusedError(400, message, code="unsupported_parameter", param=top)
    if fault["type"] == "extra_forbidden":
        name = str(place[-1])
        if not NAME.fullmatch(name):  # may be user data, and is not quoted
            return RefusedError(
                400, f"{path or 'the request'} has a key that means nothing here", code="unknown_parameter"
            )
        message = f"{path} is not a parameter of this route{REMEDY}"
        return RefusedError(400, message, code="unknown_parameter", param=path)
    if fault["type"] == "missing":
        return RefusedError(400, f"{path} is missing", code="missing_required_parameter", param=path)
    if fault["type"].startswith("union_tag"):  # its message quotes what was sent
        return RefusedError(400, f"{path}: has no type that is known here", param=top)
    if not place:  # of a model validator: the message begins with the name
        name, _, message = fault["msg"].partition(": ")
        return RefusedError(400, f"{name} {message}", param=name)
    return RefusedError(400, f"{path}: {fault['msg']}", param=top)


def _path(place: tuple[int | str, ...]) -> str:
    """Returns the path of a value, such as messages[0].content. Keys that are not valid names are left out."""
    path = ""
    for before, part in zip((None, *place), place, strict=False):
        if isinstance(part, int):
            path += f"[{part}]"
        elif isinstance(before, int) and part in ITEM_TYPES:  # which of several models was meant
            continue
        elif NAME.fullmatch(part):
            path += f".{part}" if path else part
    return path

"""Fields of responses, as `/openapi.json` describes them. `openai_types` writes them; tests compare the two."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FinishedBy = Literal["stop", "length"]
AnswerFinishedBy = Literal["stop", "length", "tool_calls"]


class Described(BaseModel):
    """A part of a response; nothing is in it that is not described."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ErrorFields(Described):
    """Fields of an error."""

    message: str
    """One sentence, which quotes nothing of the request but names and numbers."""
    type: str
    param: str | None
    """The parameter that the message is about."""
    code: str | None


class ErrorBody(Described):
    """An error."""

    error: ErrorFields


class PromptUsage(Described):
    """Details of the tokens of the prompts."""

    cached_tokens: int
    """Those whose keys and values were there already."""


class CompletionUsage(Described):
    """Details of the generated tokens, and of those that were drafted for them."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageBody(Described):
    """Tokens of a request. Those of a prompt count once, whatever the number of its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptUsage
    completion_tokens_details: CompletionUsage


class SpeculationOfChoice(Described):
    """How speculative decoding went."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    draft_length_histogram: list[int]
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_accepted_tokens_per_pos: list[int]
    num_rounds: int
    block_efficiency: float
    """Tokens for each round."""
    rejection_sample_method: str
    is_lossy: bool
    """Whether the method changes the distribution of the text."""
    drafter_error: str
    seed: int
    time_to_first_token_ms: float
    duration_ms: float
    num_ahead_hits: int
    """Rounds whose block was drafted before their text was known, and there when they began."""
    num_ahead_late: int
    """Rounds whose block was drafted before their text was known, and came after they began."""
    num_ahead_misses: int
    """Rounds for which a drafter that may draft ahead had drafted no block, or none that was judged."""
    num_ahead_wasted_tokens: int
    """Draft tokens of blocks that were drafted ahead for texts that did not come true."""
    max_held_bytes: int
    """Largest size of the blocks that the verifier held for a completion."""
    num_trees: int
    """Rounds whose block was a token tree."""
    num_draft_positions: int
    """Draft tokens that could have been accepted: of a token tree, those on its longest path."""
    num_drafters_lost: int
    num_verifiers_lost: int


class NumberedSpeculation(SpeculationOfChoice):
    """The same of one choice."""

    index: int


class Speculation(SpeculationOfChoice):
    """Sums over all choices."""

    choices: list[NumberedSpeculation] = []
    """Sums of each choice, where there are several."""


class MetricsBody(Described):
    """Cost of the request."""

    speculative_decoding: Speculation


class TokenDetail(Described):
    """Source of a token, with `token_details`."""

    id: int
    text: str
    """Text that the token made certain: all of them joined are the text."""
    source: Literal["accepted", "recovered", "bonus", "plain"]
    logprob: float | None
    draft_logprob: float | None


class JudgedTokens(Described):
    """Tokens that a round judged."""

    num_draft_tokens: int
    num_draft_positions: int
    """Number of these that could all have been accepted: of a token tree, those of its longest path."""


class RoundDetail(JudgedTokens):
    """Tokens that a round judged and committed."""

    num_tokens: int


class WholeDetails(Described):
    """Details of a whole choice."""

    tokens: list[TokenDetail]
    rounds: list[RoundDetail]


class ChunkDetails(JudgedTokens):
    """Details of a round of a choice."""

    tokens: list[TokenDetail]


class RankedPromptToken(Described):
    """A likely token at a place in the prompt."""

    id: int
    text: str
    logprob: float


class PromptToken(RankedPromptToken):
    """A token of the prompt, with `prompt_logprobs`."""

    top: list[RankedPromptToken]


class CompletionLogprobs(Described):
    """Log-probabilities of a completion's tokens: lists with an entry for each."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class RankedToken(Described):
    """A token and its log-probability; -9999.0 is that of one that cannot be."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatToken(RankedToken):
    """A token of an answer."""

    top_logprobs: list[RankedToken]


class ChatLogprobs(Described):
    """Log-probabilities of an answer's tokens."""

    content: list[ChatToken]
    refusal: None


class AnyChoice(Described):
    """Fields that choices of both routes have."""

    index: int
    prompt_logprobs: list[PromptToken | None] = []
    """Log-probabilities of the prompt, at its first choice, with the parameter of this name; null for the first
    token."""
    token_ids: list[int] = []
    """Ids of the text's tokens, with `return_token_ids`."""


class CompletionChoice(AnyChoice):
    """A completion."""

    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishedBy
    draftwire: WholeDetails | None = None


class CompletionChunkChoice(AnyChoice):
    """The next part of a completion."""

    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishedBy | None
    draftwire: ChunkDetails | None = None


class CalledFunctionBody(Described):
    """A function that the model calls."""

    name: str
    arguments: str
    """JSON."""


class ToolCallBody(Described):
    """A tool call of an answer."""

    id: str
    type: Literal["function"]
    function: CalledFunctionBody


class FunctionDelta(Described):
    """The next part of a call; the name comes with its first part."""

    name: str = ""
    arguments: str
    """JSON, in parts to be joined."""


class ToolCallDelta(Described):
    """A tool call, or the next part of one."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class AssistantMessage(Described):
    """An answer."""

    role: Literal["assistant"]
    content: str | None
    """Null if there are only tool calls."""
    tool_calls: list[ToolCallBody] = []


class AssistantDelta(Described):
    """The next part of an answer; the role comes with the first chunk."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    tool_calls: list[ToolCallDelta] = []


class ChatChoice(AnyChoice):
    """An answer to a conversation."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: AnswerFinishedBy
    draftwire: WholeDetails | None = None


class ChatChunkChoice(AnyChoice):
    """The next part of a choice's answer."""

    delta: AssistantDelta
    logprobs: ChatLogprobs | None
    finish_reason: AnswerFinishedBy | None
    draftwire: ChunkDetails | None = None


class ResponseHead(Described):
    """Fields that all responses begin with."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str


class TextCompletion(ResponseHead):
    """Response of POST /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageBody
    metrics: MetricsBody


class CompletionChunk(ResponseHead):
    """An event of a streamed response of POST /v1/completions. The last may have usage and metrics, and no choice."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: UsageBody | None = None
    metrics: MetricsBody | None = None


class ChatCompletion(ResponseHead):
    """Response of POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageBody
    metrics: MetricsBody


class ChatCompletionChunk(ResponseHead):
    """An event of a streamed response of POST /v1/chat/completions."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: UsageBody | None = None
    metrics: MetricsBody | None = None


class OutputText(Described):
    """Text of an answer of /v1/responses."""

    type: Literal["output_text"]
    text: str
    annotations: list[None]
    """Always empty, as the following."""
    logprobs: list[None]


class OutputMessage(Described):
    """A message of an answer of /v1/responses."""

    type: Literal["message"]
    id: str
    status: Literal["completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputCall(Described):
    """A tool call of an answer of /v1/responses."""

    type: Literal["function_call"]
    id: str
    call_id: str
    """Id with which its output is sent back."""
    name: str
    arguments: str
    """JSON."""
    status: Literal["completed", "incomplete"]


class IncompleteDetails(Described):
    """Reason why an answer is not complete."""

    reason: Literal["max_output_tokens"]


class OutputUsage(CompletionUsage):
    """Details of the generated tokens."""

    reasoning_tokens: Literal[0]


class ResponsesUsage(Described):
    """Tokens of a request to /v1/responses."""

    input_tokens: int
    input_tokens_details: PromptUsage
    output_tokens: int
    output_tokens_details: OutputUsage
    total_tokens: int


class ResponseBody(Described):
    """Response of POST /v1/responses. Nothing of it is stored."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete"]
    incomplete_details: IncompleteDetails | None
    output: list[OutputMessage | OutputCall]
    usage: ResponsesUsage
    metrics: MetricsBody
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    text: dict[str, dict[str, str]]
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    background: Literal[False]
    store: Literal[False]
    truncation: Literal["disabled"]
    service_tier: Literal["default"]
    metadata: dict[str, str]
    error: None


class ModelFacts(Described):
    """Properties of a model."""

    vocab_size: int
    dtype: str
    revision: str
    num_speculative_tokens: int
    max_speculative_tokens: int
    rejection_sample_method: str
    drafters: list[str]
    """Models of the connected drafters."""


class ListedModel(Described):
    """A model that can be asked."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    """The model's own name, whatever names it is served under."""
    max_model_len: int
    """Tokens of prompt and completion together."""
    draftwire: ModelFacts


class ListedModels(Described):
    """The target, under each of its names."""

    object: Literal["list"]
    data: list[ListedModel]


class VersionBody(Described):
    """Version of the gateway."""

    version: str


class TokenizedBody(Described):
    """Tokens of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None
    """Text of each, with `return_token_strs`."""


class DetokenizedBody(Described):
    """Text of tokens."""

    prompt: str


class HealthBody(Described):
    """Whether requests are taken."""

    status: str
    """`ok`, or why not, such as `loading` or `draining`."""

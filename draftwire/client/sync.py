"""A blocking client.

with Client("localhost:50051") as client:
for piece in client.stream("def merge_sorted(a, b):", temperature=0.0, max_tokens=64):
print(piece.text, end="")
"""

import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from draftwire.client.patience import Patience
from draftwire.client.security import Security
from draftwire.errors import (
    RETRY_KEY,
    DraftwireError,
    InvalidRequestError,
    ModelMismatchError,
    NoRoomError,
    ProtocolViolationError,
    UnauthenticatedError,
    UnavailableError,
)
from draftwire.logprobs import PackedTop, TokenLogprob, unpack_top
from draftwire.v1 import gateway_pb2, gateway_pb2_grpc, session_pb2

DEFAULT_ADDRESS = "127.0.0.1:50051"

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", 64 * 2**20),
    # While the gateway reads a long prompt, nothing is sent for minutes, and what stands in between forgets silent
    # connections: load balancers after a minute, address translators (NAT) after a few. So the gateway is asked every
    # 30 s whether it is still there, for as long as a completion runs; without an answer within 20 s the completion
    # fails instead of waiting for ever. Gateways allow far more pings than that.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),  # gRPC 1.85 waits a minute without it, whatever the line above says
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Texts are short: compressing would cost time at every token.
    ("grpc.default_compression_algorithm", int(grpc.Compression.NoCompression)),
]

_TOO_LARGE = "message larger than max"
"""Part of what gRPC says of a message above the receiver's limit. It has no status of its own for that."""

_ERRORS: dict[grpc.StatusCode, type[DraftwireError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.FAILED_PRECONDITION: ModelMismatchError,
}
StartCall = Callable[[gateway_pb2.GenerateRequest], Any]
"""Sends a request to the next gateway and returns the call."""

_FINISH_REASONS = {gateway_pb2.FINISH_REASON_STOP: "stop", gateway_pb2.FINISH_REASON_LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens and text that became final, or log-probabilities of more of the prompt."""

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] | None = None
    """One for each of the tokens; None unless asked for."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """Of the prompt's next tokens, the first one left out; in pieces of their own, before all others."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished completion, or the end of a streamed one."""

    text: str
    token_ids: list[int]
    finish_reason: str
    """"stop" or "length"."""
    seed: int
    """The seed that was used."""
    rejection_sample_method: str
    """The verification rule that was used."""
    is_lossy: bool
    """Whether that rule changes the distribution of the text."""
    drafter_error: str
    """Why the completion went on without a drafter; empty if it did not have to."""
    statistics: gateway_pb2.GenerationStatistics
    """Of the last part, if the completion was interrupted."""
    num_resumed: int = 0
    """How often it was interrupted and resumed."""
    logprobs: list[TokenLogprob] | None = None
    """One for each of the tokens; None unless asked for."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """One for each token of the prompt but the first; None unless asked for."""

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the time from the request's arrival to its last token, at the gateway."""
        return self.statistics.num_generated_tokens / max(self.statistics.duration_us, 1) * 1e6

    @property
    def block_efficiency(self) -> float:
        """Tokens emitted per forward pass of the target."""
        return self.statistics.num_emitted_tokens / max(self.statistics.num_rounds, 1)

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens over draft tokens; 0 where none were drafted."""
        return self.statistics.num_accepted_tokens / max(self.statistics.num_draft_tokens, 1)

    @property
    def draft_acceptance_rate(self) -> float:
        """The same, by its name in other servers."""
        return self.acceptance_rate

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted in a round that judged a draft block, on average; 0 if there was none."""
        return self.statistics.mean_acceptance_length

    @property
    def acceptance_histogram(self) -> list[int]:
        """Rounds that judged a draft block, by how many of its tokens were accepted: 0, 1, 2, ..."""
        return list(self.statistics.acceptance_histogram)

    @property
    def num_spec_steps(self) -> int:
        """Rounds that judged a draft block."""
        return self.statistics.num_drafts

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens judged."""
        return self.statistics.num_draft_tokens

    @property
    def num_accepted_draft_tokens(self) -> int:
        """Draft tokens accepted."""
        return self.statistics.num_accepted_tokens


class _Collected:
    """What has come of a completion, over all its calls."""

    def __init__(self, request: gateway_pb2.GenerateRequest) -> None:
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] | None = [] if request.HasField("logprobs") else None
        self.prompt_logprobs: list[TokenLogprob] | None = [] if request.HasField("prompt_logprobs") else None

    def take(self, delta: gateway_pb2.GenerateDelta) -> Piece:
        """Adds more tokens or text.

        Raises:
            ProtocolViolationError: log-probabilities are missing.
        """
        tokens = _tokens(delta)
        if self.logprobs is not None:
            if len(tokens) != len(delta.token_ids):
                raise ProtocolViolationError("the gateway leaves out log-probabilities: it may be of an older version")
            self.logprobs += tokens
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        return Piece(list(delta.token_ids), delta.text, tokens if self.logprobs is not None else None)

    def take_prompt(self, message: gateway_pb2.PromptLogprobs) -> Piece | None:
        """Adds more of the prompt; None if all of it has come before, because the call is not the first.

        Raises:
            ProtocolViolationError: tokens are missing.
        """
        if self.prompt_logprobs is None:
            return None
        num_known = len(self.prompt_logprobs) + 1 - message.first_position
        if num_known < 0:
            raise ProtocolViolationError("the gateway leaves out log-probabilities of the prompt")
        new = _tokens(message)[num_known:]
        self.prompt_logprobs += new
        return Piece([], "", [] if self.logprobs is not None else None, new) if new else None


class CompletionStream:
    """Iterates over the pieces of one completion; `completion` is there when it is exhausted.

    A stream that is interrupted is resumed from the tokens that have come, by the next gateway, or by the same one if
    there is no other: the pieces go on as if nothing had happened.
    """

    def __init__(self, start: StartCall, request: gateway_pb2.GenerateRequest, patience: Patience) -> None:
        """Use `Client.stream`."""
        self.completion: Completion | None = None
        self._start = start
        self._request = request
        self._patience = patience
        self._is_cancelled = False
        self._num_resumed = 0
        self._call = start(request)

    def __iter__(self) -> Iterator[Piece]:
        collected = _Collected(self._request)
        while self.completion is None:
            try:
                for response in self._call:
                    match response.WhichOneof("event"):
                        case "delta":
                            self._patience.renew()
                            yield collected.take(response.delta)
                        case "prompt_logprobs":
                            piece = collected.take_prompt(response.prompt_logprobs)
                            if piece is not None:  # what is known already is no progress
                                self._patience.renew()
                                yield piece
                        case "finish":
                            self.completion = _completion(collected, response.finish, self._num_resumed)
            except grpc.RpcError as error:
                self._resume(collected.token_ids, _error_of(error), error)
            else:
                if self.completion is None:
                    self._resume(collected.token_ids, UnavailableError("the stream ended without a finish"), None)

    def cancel(self) -> None:
        """Ends the generation; the server frees what it held."""
        self._is_cancelled = True
        self._call.cancel()

    def _resume(self, token_ids: list[int], refusal: DraftwireError, error: grpc.RpcError | None) -> None:
        """Starts anew from the tokens that have come, after a pause.

        Raises:
            DraftwireError: that is of no use, or was tried for too long.
        """
        is_final = error is not None and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        is_lost = isinstance(refusal, UnavailableError | NoRoomError) and not is_final and not self._is_cancelled
        if not is_lost or not self._patience.wait(refusal):
            raise refusal from error
        self._num_resumed += bool(token_ids)
        del self._request.generated_token_ids[:]
        self._request.generated_token_ids.extend(token_ids)
        self._call = self._start(self._request)


class Client:
    """A connection to a gateway. Thread-safe; close it, or use it as a context manager."""

    def __init__(
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
        tls_target_name: str | None = None,
        token: str | None = None,
    ) -> None:
        """Prepares; the first call connects. Files are read now.

        Args:
            address: host:port of the gateway, or of several, as a list or separated by commas. A completion goes to one
                of them, and to the next if it is interrupted.
            tls_ca: PEM file of the issuers that are believed; without it, the connection is plaintext.
            tls_cert: PEM file of the certificate to show, where the gateway wants one.
            tls_key: PEM file of its key.
            tls_target_name: name that the gateway's certificate must carry instead of its address.
            token: bearer token, where the gateway wants one. It travels as it is: give it over TLS, or on one machine.

        Raises:
            InvalidRequestError: a file cannot be read, or is given without those that it needs.
        """
        addresses = address.split(",") if isinstance(address, str) else list(address)
        self._address = ", ".join(addresses)
        security = Security(tls_ca, tls_cert, tls_key, tls_target_name, token)
        self._channels = [security.open_channel(one.strip(), CHANNEL_OPTIONS) for one in addresses]
        self._metadata = security.metadata
        self._stubs = [gateway_pb2_grpc.GatewayServiceStub(channel) for channel in self._channels]
        self._turns = count(random.randrange(len(self._stubs)))

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        for channel in self._channels:
            channel.close()

    def stream(
        self,
        prompt: str | Sequence[int] | Sequence[dict[str, str]],
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None,
        allowed_token_ids: Sequence[int] | None = None,
        min_tokens: int | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        seed: int | None = None,
        num_speculative_tokens: int | None = None,
        rejection_sample_method: str | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        logprobs_mode: str | None = None,
        cache_salt: str = "",
        timeout_s: float | None = None,
        wait_for_server_s: float | None = None,
        resume_s: float = 30.0,
    ) -> CompletionStream:
        """Starts a completion. What is None is left to the server.

        Args:
            prompt: text, token ids, or chat messages with "role" and "content".
            temperature: 0 is greedy.
            top_k: keep the k most likely tokens.
            top_p: keep the most likely tokens up to this mass.
            min_p: keep tokens at least so many times as likely as the most likely one.
            repetition_penalty: makes tokens of prompt and output less likely; 1 is off.
            presence_penalty: subtracted from the logits of generated tokens.
            frequency_penalty: subtracted from a token's logit once for each time it was generated.
            logit_bias: added to the logits of these token ids.
            allowed_token_ids: no other token is possible; at least one.
            min_tokens: nothing ends the text before so many tokens, but stop strings do.
            max_tokens: most tokens to generate; without it, what the context leaves.
            stop: the text ends before the first of these.
            stop_token_ids: generation ends with the first of these.
            seed: makes the run repeatable.
            num_speculative_tokens: draft tokens per round; 0 is plain decoding.
            rejection_sample_method: verification rule.
            logprobs: reports the target's log-probability of each token and so many of the likeliest ones, 0 to 20.
            prompt_logprobs: the same for each token of the prompt but the first.
            logprobs_mode: "raw", before any processing, or "processed", of what tokens are drawn from.
            cache_salt: what the server computes for this prompt is shared with requests of the same salt only.
            timeout_s: deadline for the whole completion.
            wait_for_server_s: how long the server may take to come up before the request is sent.
            resume_s: how long a completion that was interrupted is tried again; 0 raises the interruption.

        Raises:
            InvalidRequestError: here or while iterating: a parameter is out of range.
            NoRoomError: while iterating: the server is full; says when to try again.
            UnavailableError: here or while iterating: the server cannot be reached.
        """
        if allowed_token_ids is not None and not len(allowed_token_ids):
            raise InvalidRequestError("allowed_token_ids is empty: no token is possible")
        if wait_for_server_s is not None:
            self.wait_ready(wait_for_server_s)
        try:
            request = gateway_pb2.GenerateRequest(
                sampling=session_pb2.SamplingParameters(
                    temperature=temperature,
                    top_k=top_k,
                    top_p=top_p,
                    min_p=min_p,
                    repetition_penalty=repetition_penalty,
                    presence_penalty=presence_penalty,
                    frequency_penalty=frequency_penalty,
                    logit_bias=logit_bias,
                    allowed_token_ids=allowed_token_ids,
                    min_tokens=min_tokens,
                ),
                max_tokens=max_tokens,
                stop=stop,
                stop_token_ids=stop_token_ids,
                seed=secrets.randbits(64) if seed is None else seed,  # the same if it is resumed
                num_speculative_tokens=num_speculative_tokens,
                rejection_sample_method=rejection_sample_method,
                cache_salt=cache_salt,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                logprobs_mode=logprobs_mode,
                **_prompt(prompt),
            )
        except UnicodeError as error:  # whose message would quote the prompt
            raise InvalidRequestError("a text holds characters that UTF-8 cannot encode") from error
        except (ValueError, TypeError) as error:  # a number that does not fit its field
            raise InvalidRequestError(str(error)) from error
        deadline = None if timeout_s is None else time.monotonic() + timeout_s

        def start(request: gateway_pb2.GenerateRequest) -> Any:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            stub = self._stubs[next(self._turns) % len(self._stubs)]
            return stub.Generate(request, timeout=left, metadata=self._metadata)

        return CompletionStream(start, request, Patience(len(self._stubs), resume_s, deadline))

    def generate(self, prompt: str | Sequence[int] | Sequence[dict[str, str]], **options: Any) -> Completion:
        """Returns a whole completion; takes what `stream` takes."""
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        assert stream.completion is not None, "a stream without error ends with a finish"
        return stream.completion

    def server(self) -> gateway_pb2.GetServerResponse:
        """Returns which models answer, and the server's defaults."""
        try:
            return self._get_server(10.0, waits=False)
        except grpc.RpcError as error:
            raise _error_of(error) from error

    def wait_ready(self, timeout_s: float) -> None:
        """Returns when the gateway, or one of several, serves requests.

        Raises:
            UnavailableError: it does not within the time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                left = max(deadline - time.monotonic(), 0.1)
                self._get_server(left, waits=len(self._stubs) == 1)  # one that is down must not keep us from others
                return
            except grpc.RpcError as error:
                if time.monotonic() > deadline:
                    message = (
                        f"no gateway answered at {self._address} within {timeout_s:g} s{self._why_not(error)}; "
                        "`draftwire up` starts one"
                    )
                    raise UnavailableError(message) from error
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise _error_of(error) from error
                time.sleep(0.2)  # up, but still loading

    def _why_not(self, error: grpc.RpcError) -> str:
        """Returns why a call that waited was not made, which its own status does not say: a certificate, say."""
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            try:
                self._get_server(1.0, waits=False)
            except grpc.RpcError as refused:
                error = refused
        return f" ({error.details()})"

    def _get_server(self, timeout_s: float, *, waits: bool) -> gateway_pb2.GetServerResponse:
        """Returns the first answer of the gateways, asked in turn.

        Args:
            timeout_s: how long each may take.
            waits: whether that includes the time until it can be reached.

        Raises:
            grpc.RpcError: that of the last one, if none answers.
        """
        *others, last = self._stubs
        request = gateway_pb2.GetServerRequest()
        for stub in others:
            with suppress(grpc.RpcError):
                return stub.GetServer(request, timeout=timeout_s, wait_for_ready=waits, metadata=self._metadata)
        return last.GetServer(request, timeout=timeout_s, wait_for_ready=waits, metadata=self._metadata)


def _prompt(prompt: Any) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text": prompt}
    if prompt and isinstance(prompt[0], dict):
        if not all(message.keys() == {"role", "content"} for message in prompt):
            raise InvalidRequestError('a chat message has a "role", a "content" and nothing else')
        chat_messages = [gateway_pb2.ChatMessage(**message) for message in prompt]
        return {"chat": gateway_pb2.ChatPrompt(messages=chat_messages)}
    return {"token_ids": gateway_pb2.TokenIds(ids=prompt)}


def _tokens(message: gateway_pb2.GenerateDelta | gateway_pb2.PromptLogprobs) -> list[TokenLogprob]:
    """Returns what a message says of its tokens, if anything.

    Raises:
        ProtocolViolationError: the numbers do not fit the tokens, or are none.
    """
    top = message.top_logprobs
    packed = PackedTop(top.num_top, top.token_ids, top.logprobs) if message.HasField("top_logprobs") else None
    try:
        return unpack_top(message.token_ids, message.logprobs, packed)
    except InvalidRequestError as error:
        raise ProtocolViolationError(f"the gateway sends no log-probabilities: {error}") from error


def _completion(collected: _Collected, finish: gateway_pb2.GenerateFinish, num_resumed: int) -> Completion:
    """Returns what has come.

    Raises:
        ProtocolViolationError: log-probabilities of the prompt are missing.
    """
    prompt = collected.prompt_logprobs
    if prompt is not None and len(prompt) != max(0, finish.statistics.num_prompt_tokens - 1):
        raise ProtocolViolationError("the gateway leaves out log-probabilities of the prompt")
    return Completion(
        text="".join(collected.text),
        token_ids=collected.token_ids,
        finish_reason=_FINISH_REASONS[finish.reason],
        seed=finish.seed,
        rejection_sample_method=finish.rejection_sample_method,
        is_lossy=finish.is_lossy,
        drafter_error=finish.drafter_error,
        statistics=finish.statistics,
        num_resumed=num_resumed,
        logprobs=collected.logprobs,
        prompt_logprobs=collected.prompt_logprobs,
    )


def _error_of(error: grpc.RpcError) -> DraftwireError:
    code = error.code()
    details = error.details() or code.name
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in details:  # asking again does not help
        return InvalidRequestError(f"the request is too large: {details} bytes")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        hints = {item.key: item.value for item in error.trailing_metadata() or ()}
        return NoRoomError.hinted(details, hints.get(RETRY_KEY))
    return _ERRORS.get(code, UnavailableError)(details)

"""A blocking client.

with Client("localhost:50051") as client:
for piece in client.stream("def merge_sorted(a, b):", temperature=0.0, max_tokens=64):
print(piece.text, end="")
"""

import random
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from draftwire.client.completion import Completion
from draftwire.client.forms import form_to_proto
from draftwire.client.patience import Patience
from draftwire.client.prompts import Prompt, Prompts, is_several, prompt_fields
from draftwire.client.security import Security
from draftwire.client.stream import CompletionStream, error_of
from draftwire.errors import InvalidRequestError, UnavailableError
from draftwire.structured_output import StructuredOutput
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
        prompt: Prompt | Prompts,
        *,
        num_choices: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
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
        structured_output: StructuredOutput | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        seed: int | None = None,
        num_speculative_tokens: int | None = None,
        rejection_sample_method: str | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        logprobs_mode: str | None = None,
        echo: bool = False,
        token_details: bool = False,
        cache_salt: str = "",
        timeout_s: float | None = None,
        wait_for_server_s: float | None = None,
        resume_s: float = 30.0,
    ) -> CompletionStream:
        """Starts a completion, or several side by side. What is None is left to the server.

        Args:
            prompt: text, token ids, or chat messages in OpenAI's form; or a list of such prompts. A list of numbers,
                and one of messages, is one prompt.
            num_choices: completions of each prompt, independent of each other. Those of the prompt of index i are the
                choices i * num_choices to (i + 1) * num_choices - 1.
            tools: with chat messages alone, what the model may call, in OpenAI's form; the output is text.
            template_arguments: with chat messages alone, further variables of the chat template.
            continue_final_message: with chat messages alone, goes on with the last one instead of answering it.
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
            structured_output: the form that the text has, such as `StructuredOutput.json({"type": "object"})`.
            max_tokens: most tokens to generate, or none at 0; without it, what the context leaves.
            stop: the text ends before the first of these.
            stop_token_ids: generation ends with the first of these.
            ignore_eos: the model's own stop tokens end nothing.
            seed: makes the run repeatable.
            num_speculative_tokens: draft tokens per round; 0 is plain decoding.
            rejection_sample_method: verification rule.
            logprobs: reports the target's log-probability of each token and so many of the likeliest ones, 0 to 20.
            prompt_logprobs: the same for each token of the prompt but the first.
            logprobs_mode: "raw", before any processing, or "processed", of what tokens are drawn from.
            echo: begins each text with its prompt's.
            token_details: tells of each token what text it has and what the drafter gave it.
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
                    structured_output=form_to_proto(structured_output),
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
                num_choices=num_choices,
                echo=echo,
                token_details=token_details,
                ignore_eos=ignore_eos,
                **prompt_fields(prompt, tools, template_arguments, continue_final_message),
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

    def generate(self, prompt: Prompt, **options: Any) -> Completion:
        """Returns a whole completion; takes what `stream` takes, but asks for one.

        Raises:
            InvalidRequestError: also if several are asked for.
        """
        if is_several(prompt) or options.get("num_choices") not in (None, 1):
            raise InvalidRequestError("generate returns one completion; generate_many returns several")
        ((completion,),) = self.generate_many(prompt, **options)
        return completion

    def generate_many(self, prompts: Prompt | Prompts, **options: Any) -> list[list[Completion]]:
        """Returns the completions of each prompt; takes what `stream` takes.

        Returns:
            A list for each prompt, also of a single one, of `num_choices` completions each.
        """
        stream = self.stream(prompts, **options)
        for _ in stream:
            pass
        completions, num_choices = stream.completions, options.get("num_choices") or 1
        return [completions[first : first + num_choices] for first in range(0, len(completions), num_choices)]

    def server(self) -> gateway_pb2.GetServerResponse:
        """Returns which models answer, and the server's defaults."""
        try:
            return self._get_server(10.0, waits=False)
        except grpc.RpcError as error:
            raise error_of(error) from error

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
                    raise error_of(error) from error
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

"""Settings that several services have, with their validation."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from draftwire.errors import InvalidRequestError
from draftwire.method.tree_limits import MAX_TREE_NODES
from draftwire.runtime.addresses import is_loopback

AUTO = "auto"
"""Value of `kv_cache_tokens` that stands for what fits into memory."""
CacheTokens = int | Literal["auto"]
"""A number of tokens, or `AUTO`."""


def require(condition: bool, message: str) -> None:
    """Refuses a bad setting.

    Raises:
        InvalidRequestError: the condition does not hold.
    """
    if not condition:
        raise InvalidRequestError(message)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Addresses on which a service listens, and how it stops."""

    host: str = "127.0.0.1"
    """Address to listen on. One that other machines reach needs tls_cert, or allow_plaintext."""
    port: int = 0
    """gRPC port; 0 takes a free one, which the log names."""
    metrics_port: int | None = None
    """Port of `/metrics`; 0 takes a free one; None serves none."""
    drain_seconds: float = 20.0
    """How long running sessions may go on after SIGTERM."""
    log_format: str = "console"
    """"console" for people, "json" for machines."""
    stop_with_stdin: bool = False
    """Drains and stops when standard input, a pipe, ends: so a service does not outlive the process that started it."""

    def __post_init__(self) -> None:
        require(0 <= self.port <= 65535, f"port must be in 0..65535, not {self.port}")
        require(self.metrics_port is None or 0 <= self.metrics_port <= 65535, "metrics_port must be in 0..65535")
        require(self.drain_seconds >= 0.0, "drain_seconds must not be negative")
        require(self.log_format in ("console", "json"), f"log_format must be console or json, not {self.log_format!r}")


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """How a service shows who it is, and whom it believes, on the connections that it opens and those that it accepts.

    The files are read again when they change; see `draftwire.runtime.tls`.
    """

    tls_cert: Path | None = None
    """PEM file: the certificate of this service and those between it and its issuer. Shown to callers, and to the
    services that this one calls."""
    tls_key: Path | None = None
    """PEM file: the key of tls_cert, without a password."""
    tls_ca: Path | None = None
    """PEM file: issuers of the certificates that are believed. With it, services are called over TLS only."""
    tls_require_client_cert: bool = True
    """Whether callers must show a certificate that tls_ca issued, where tls_ca is given."""
    tls_target_name: str | None = None
    """Name that the certificates of called services must carry instead of the address at which they are called."""
    allow_plaintext: bool = False
    """Whether prompts and texts may leave this machine unencrypted: for networks that encrypt on their own."""

    def __post_init__(self) -> None:
        has_both = (self.tls_cert is None) == (self.tls_key is None)
        require(has_both, "tls_cert and tls_key come together: a certificate and its key")
        has_use = self.tls_target_name is None or self.tls_ca is not None
        require(has_use, "tls_target_name is the name in certificates that tls_ca issued: set tls_ca too")

    @property
    def requires_client_cert(self) -> bool:
        """Whether callers must show a certificate."""
        return self.tls_ca is not None and self.tls_require_client_cert

    def check_listening(self, host: str) -> None:
        """Checks that a service may listen at a host.

        Raises:
            InvalidRequestError: other machines reach the host without TLS, which is not allowed; or client
                certificates are required without TLS.
        """
        if self.tls_cert is None:
            may_listen = self.allow_plaintext or is_loopback(host)
            require(may_listen, f"host {host} is reached from other machines: set tls_cert and tls_key{_OR_PLAINTEXT}")
            can_show = not self.requires_client_cert
            require(can_show, "tls_ca asks callers for certificates, which needs tls_cert and tls_key")

    def check_dialling(self, host: str) -> None:
        """Checks that a service does not call other machines in plaintext, unless that is allowed.

        Raises:
            InvalidRequestError: it would.
        """
        may_dial = self.tls_ca is not None or self.allow_plaintext or is_loopback(host)
        require(may_dial, f"{host} would be called without TLS: set tls_ca{_OR_PLAINTEXT}")


_OR_PLAINTEXT = ", or allow_plaintext where the network encrypts on its own"


LEAST_MESSAGE_BYTES = 2**20
"""Smallest limit of message sizes: every service accepts such messages, however it is configured."""

LEAST_KEEPALIVE_S = 1.0
"""Shortest interval of keep-alive pings that can be configured."""


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """Limits and timeouts of a service's connections, those that it opens and those that it accepts."""

    max_message_bytes: int = 64 * 2**20
    """Largest gRPC message, bytes: vocabularies, tokenizers, prompts (5 bytes x tokens), draft blocks (dense ones take
    4 bytes x vocabulary x draft tokens)."""
    keepalive_time_s: float = 10.0
    """Seconds of silence on a connection after which the peer is asked whether it is still there, 1 to 3600."""
    keepalive_timeout_s: float = 10.0
    """Seconds that a peer may take to answer that, 1 to 3600. One that does not is lost: a connection that was cut
    without being closed is noticed within keepalive_time_s + keepalive_timeout_s."""
    flow_control_window_bytes: int = 4 * 2**20
    """Bytes that a peer may send ahead on a stream or connection, 64 KiB to 1 GiB. At least bandwidth x round-trip
    time: 4 MiB carry 10 Gbit/s over 3 ms."""

    def __post_init__(self) -> None:
        most_message_bytes, most_seconds = 2**31 - 1, 3600.0
        require(self.max_message_bytes >= LEAST_MESSAGE_BYTES, "max_message_bytes must be at least 1 MiB")
        require(self.max_message_bytes <= most_message_bytes, "max_message_bytes must be below 2 GiB")
        for name in ("keepalive_time_s", "keepalive_timeout_s"):
            is_valid = LEAST_KEEPALIVE_S <= getattr(self, name) <= most_seconds
            require(is_valid, f"{name} must be in {LEAST_KEEPALIVE_S:g}..{most_seconds:g}")
        is_valid = 2**16 <= self.flow_control_window_bytes <= 2**30
        require(is_valid, "flow_control_window_bytes must be 64 KiB to 1 GiB")


ENGINES = ("auto", "draftwire", "openvino", "vllm")
WEIGHTS = ("auto", "f32", "u8")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Model that a service runs, and how it runs it."""

    model: str
    """Folder or hub name of a Hugging Face causal language model, or a GGUF file of the Llama family."""
    revision: str | None = None
    """Commit or branch on the hub."""
    dtype: str = "auto"
    """float32, bfloat16, float16, or auto: the checkpoint's own; on a CPU bfloat16 if that is faster, else float32."""
    device: str = "cpu"
    """A torch device, such as "cpu" or "cuda:0"."""
    threads: int = 1
    """CPU threads of torch."""
    engine: str = "auto"
    """Engine that runs the model: "draftwire", our own code and transformers; "openvino", on CPUs, for models of the
    Llama family, which needs draftwire[openvino]; or of a verifier "vllm", for its models, quantisation, kernels and
    parallelism, which needs draftwire[vllm]. Auto is openvino where that is installed and faster, else draftwire."""
    weights: str = "auto"
    """How openvino stores the model's matrices: "f32", or "u8": eight bits, by which steps of few rows take a third of
    the time, and which makes it another model, whose law is served then. Auto quantises nothing but models from
    quantised GGUF files."""
    decoder: str = "auto"
    """Code that does the forward passes: "lean", our own code for the Llama family, "transformers", or auto: lean for
    models that it can run."""
    huge_pages: bool = True
    """Whether weights on a CPU are moved to huge pages, where Linux has them (`madvise` or `always`): steps are faster,
    and memory is counted in pieces of 2 MiB."""
    cuda_graphs: bool = True
    """Whether the lean decoder on a GPU replays recorded steps instead of launching every kernel; takes a little memory
    for each shape of a step."""

    def __post_init__(self) -> None:
        require(bool(self.model), "a model folder or hub name is needed")
        require(self.threads >= 1, "threads must be at least 1")
        require(self.engine in ENGINES, f"engine must be {', '.join(ENGINES[:-1])} or vllm, not {self.engine!r}")
        require(self.weights in WEIGHTS, f"weights must be auto, f32 or u8, not {self.weights!r}")
        is_open = self.engine in ("auto", "openvino") or self.weights == "auto"
        require(is_open, f"weights {self.weights} are of engine openvino, not of {self.engine}")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How many sessions an engine serves and how it shares its time among them."""

    max_sessions: int = 64
    """Sessions that may be open at once; more are refused with RESOURCE_EXHAUSTED."""
    max_draft_tokens: int = 16
    """Draft tokens in a block, at most."""
    max_tree_nodes: int = 0
    """Draft tokens in a token tree, at most, of which a path has at most max_draft_tokens; 0 does without trees, for
    which a step takes memory as it does for blocks as long. At most 64."""
    kv_cache_tokens: CacheTokens = 65_536
    """Room of the KV cache, tokens of all sessions together. A session reserves its prompt and its max_tokens when it
    opens; what does not fit is refused with RESOURCE_EXHAUSTED. Also limits the context. "auto" measures at start what
    fits into memory: of a GPU see gpu_memory_utilization; of a machine or container 0.4 of what is left."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that this process may take, weights included, with kv_cache_tokens auto. Of several
    processes on one GPU each takes its own share."""
    max_added_latency_ms: float = 100.0
    """How much the reading of long prompts may add to the time of a running session's next tokens, at drafter and
    verifier together, milliseconds; beside long steps, up to one and a half of one more. Set it alike at both."""
    watchdog_s: float = 120.0
    """Seconds that one call on the device may take before health says NOT_SERVING, so that the process is restarted.
    Loading the model does not count."""

    def __post_init__(self) -> None:
        require(self.max_sessions >= 1, "max_sessions must be at least 1")
        require(self.max_draft_tokens >= 1, "max_draft_tokens must be at least 1")
        require(0 <= self.max_tree_nodes <= MAX_TREE_NODES, f"max_tree_nodes must be in 0..{MAX_TREE_NODES}")
        is_size = self.kv_cache_tokens == AUTO or (isinstance(self.kv_cache_tokens, int) and self.kv_cache_tokens >= 16)
        require(is_size, f"kv_cache_tokens must be at least 16, or auto, not {self.kv_cache_tokens!r}")
        require(0.0 < self.gpu_memory_utilization <= 1.0, "gpu_memory_utilization must be in (0, 1]")
        require(0.0 < self.max_added_latency_ms < float("inf"), "max_added_latency_ms must be positive")
        require(0.0 < self.watchdog_s < float("inf"), "watchdog_s must be positive")

    def check_device(self, device: str) -> None:
        """Checks that `gpu_memory_utilization` has an effect on the model's device, if it is set.

        Raises:
            InvalidRequestError: it is set, and has none.
        """
        is_used = self.kv_cache_tokens == AUTO and device != "cpu"
        is_unset = self.gpu_memory_utilization == EngineSettings().gpu_memory_utilization
        require(is_used or is_unset, "gpu_memory_utilization sets nothing without kv_cache_tokens auto and a GPU")


@dataclass(frozen=True, slots=True)
class TextDraftSettings:
    """Texts that drafts without a model read beside the text itself; see docs/model-free.md."""

    retrieval_store: Path | None = None
    """Folder that draftwire index build made: texts go on as its files do."""
    shared_tokens: int = 0
    """Tokens of generated texts that are kept, so that later texts with the same cache_salt go on as they did; each
    takes 500 bytes. 0 keeps none."""

    def __post_init__(self) -> None:
        require(self.shared_tokens == 0 or self.shared_tokens >= 2, "shared_tokens must be 0, or at least 2")


@dataclass(frozen=True, slots=True)
class TracingSettings:
    """Destination of spans; see docs/tracing.md."""

    otlp_endpoint: str | None = None
    """Collector of OpenTelemetry that gets the spans of traced requests, over gRPC: http://host:port without TLS, or
    https://host:port. None traces nothing."""

    def __post_init__(self) -> None:
        is_url = self.otlp_endpoint is None or _is_endpoint(self.otlp_endpoint)
        require(is_url, f"otlp_endpoint must be http://host:port or https://host:port, not {self.otlp_endpoint!r}")


def _is_endpoint(url: str) -> bool:
    try:
        parts = urlsplit(url)
        has_address = bool(parts.hostname) and parts.port is not None
    except ValueError:  # not a port number
        return False
    return has_address and url == f"{parts.scheme}://{parts.netloc}" and parts.scheme in ("http", "https")

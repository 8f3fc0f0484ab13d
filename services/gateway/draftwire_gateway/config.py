"""Configuration of a gateway."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from draftwire.method.ahead_limits import MAX_BRANCHES, MAX_ROUNDS_AHEAD
from draftwire.method.tree_limits import MAX_TREE_NODES
from draftwire.options.draft_model.draft_model_name import DRAFT_MODEL
from draftwire.options.heads.head_names import HEAD_NAMES
from draftwire.options.model_free.names import TEXT_DRAFTER_NAMES, are_text_drafters
from draftwire.requests.tool_calls import PLAIN_LIST, SYNTAXES
from draftwire.runtime.settings import (
    LEAST_MESSAGE_BYTES,
    ConnectionSettings,
    ServerSettings,
    TlsSettings,
    TracingSettings,
    require,
)
from draftwire_gateway.session.loop_settings import LoopSettings

NO_DRAFTER = NO_LOCAL_DRAFTS = "none"
"""Value of the option `drafter` for no drafter, and of `local_drafts` for verifiers that draft nothing."""
AUTO_LOCAL_DRAFTS = "auto"
"""Value of `local_drafts`: what each verifier can."""
AUTO_TOOL_SYNTAX, NO_TOOL_SYNTAX = "auto", "none"
"""Values of `tool_call_syntax`: as the chat template says, and tool calls stay text."""

DEFAULT_VERIFIER, DEFAULT_DRAFTER = "127.0.0.1:50052", "127.0.0.1:50053"

DNS_PREFIX = "dns:///"
"""Prefix of a DNS name with a service at each of its addresses."""

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""Valid names of services and namespaces in Kubernetes."""

ANY_ORIGIN = "*"
ORIGIN = re.compile(r"(http://(?!.*:80$)|https://(?!.*:443$))[a-z0-9_.-]+(:[0-9]{1,5})?")
"""Pattern of origins as browsers write them: in lower case, without the usual port."""
API_KEY = re.compile(r"[!-~]{8,}")
MODEL_NAME = re.compile(r"[^\s,][^,\n]{0,255}")

HOST_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
"""Valid names of hosts, in lower case."""


@dataclass(frozen=True, slots=True)
class DiscoverySettings:
    """How verifiers and drafters are discovered, and which of them work together."""

    discovery: str = "static"
    """Source of the addresses of verifiers and drafters: "static", the options verifier and drafter, or
    "kubernetes"."""
    verifier_service: str | None = None
    """Service in Kubernetes whose endpoints are the verifiers."""
    drafter_service: str | None = None
    """Service in Kubernetes whose endpoints are the drafters; without it there are none."""
    namespace: str | None = None
    """Namespace of both services; by default the one that this pod is in."""
    near_drafter_sessions: int = 8
    """How many sessions more than one in another zone a drafter in the verifier's zone may have, and still be taken."""

    def __post_init__(self) -> None:
        known = ("static", "kubernetes")
        require(self.discovery in known, f"discovery must be static or kubernetes, not {self.discovery!r}")
        for name in ("verifier_service", "drafter_service", "namespace"):
            value = getattr(self, name)
            require(value is None or self.in_kubernetes, f"{name} is for discovery kubernetes: set that too")
            is_name = value is None or LABEL.fullmatch(value) is not None
            require(is_name, f"{name}: {value!r} is not a name in Kubernetes")
        is_named = not self.in_kubernetes or self.verifier_service is not None
        require(is_named, "discovery kubernetes needs verifier_service")
        require(self.near_drafter_sessions >= 0, "near_drafter_sessions must not be negative")

    @property
    def in_kubernetes(self) -> bool:
        """Whether services are discovered through Kubernetes."""
        return self.discovery == "kubernetes"


@dataclass(frozen=True, slots=True)
class AheadSettings:
    """How far drafters draft ahead of the verdict."""

    draft_ahead_rounds: int = 0
    """Rounds for which a drafter may draft before their text is known, while earlier ones are being judged; 0 for none.
    """
    draft_ahead_branches: int = 8
    """Texts that a session may have next, for which a drafter drafts ahead at once at most."""

    def __post_init__(self) -> None:
        in_range = 0 <= self.draft_ahead_rounds <= MAX_ROUNDS_AHEAD
        require(in_range, f"draft_ahead_rounds must be in 0..{MAX_ROUNDS_AHEAD}")
        in_range = 1 <= self.draft_ahead_branches <= MAX_BRANCHES
        require(in_range, f"draft_ahead_branches must be in 1..{MAX_BRANCHES}")


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """All settings of a gateway. Invalid values raise at start."""

    server: ServerSettings = field(default_factory=lambda: ServerSettings(port=50051))
    http_port: int | None = 8000
    """Port of the HTTP edge in the form of OpenAI's, on the same host and with the same certificates; 0 takes a free
    one, which the log names; "none" serves none."""
    http_allowed_hosts: str | None = None
    """Names, separated by commas, under which HTTP is answered, beside localhost and IP addresses: other names in the
    header host are refused, as are pages of other origins. By default all names are taken, but for localhost alone
    where the gateway listens on this machine alone and no tokens are needed."""
    allowed_origins: str | None = None
    """Origins, separated by commas, whose pages may call the HTTP edge from a browser (CORS), such as
    https://chat.example.com; "*" for all. By default none."""
    served_model_name: str | None = None
    """Names, separated by commas, under which HTTP serves the target in the place of its own."""
    chat_template: Path | None = None
    """File of a chat template in the place of the target's own."""
    unknown_parameters: str = "refuse"
    """Handling of parameters of HTTP requests that mean nothing here: "refuse", or "ignore", with a line in the log the
    first time that one is seen."""
    verifier: str | None = None
    """host:port of each verifier, separated by commas; by default 127.0.0.1:50052. Drafters are told the same
    addresses. dns:///name:port stands for all addresses of a name, which is looked up again every few seconds."""
    drafter: str | None = None
    """The same of each drafter; by default 127.0.0.1:50053; "none" serves plain decoding only."""
    discovery: DiscoverySettings = field(default_factory=DiscoverySettings)
    speculation: str = "adaptive"
    """How many tokens to draft where a request names no number: "adaptive", 0 to 8, as many as measured rounds say is
    fastest, except where the text depends on a seed that was given and on drafts; or "fixed",
    num_speculative_tokens."""
    local_drafts: str = AUTO_LOCAL_DRAFTS
    """How a verifier drafts by itself where no drafter does: "suffix" or "lookup", from earlier places of each text,
    "retrieval", from files, or several joined by "+"; "eagle3", "eagle", "medusa", "hydra" or "mtp", by its head;
    "model", by the draft model in its process; "auto", by head or draft model if it has one, else suffix and retrieval
    as far as it can; or "none"."""
    num_speculative_tokens: int = 4
    """Draft tokens per round where a request names no number and none is chosen, and the first length that is tried;
    0 is plain decoding."""
    max_speculative_tokens: int = 16
    """Most that a request may ask for."""
    num_draft_nodes: int = 0
    """Draft tokens of a token tree in each round, where a request does not say and its rule takes trees: its paths have
    num_speculative_tokens, which are then not chosen. 0: chains. Drafters and verifiers need max_tree_nodes."""
    stop_below: float = 0.0
    """Blocks of drafters that are language models end before a place in which no token has so much probability, where a
    request does not say; 0 ends none. Not token trees."""
    rejection_sample_method: str = "block"
    """Verification rule where a request does not say: block, token or coupled. Lossy rules have to be asked for."""
    tool_call_syntax: str = AUTO_TOOL_SYNTAX
    """How the target writes tool calls, which HTTP reads: "hermes", "llama3_json", "mistral"; "auto", as the chat
    template writes those of earlier answers; or "none", as text."""
    startup_timeout_s: float = 120.0
    """How long the first verifier and the first drafter may take to come up."""
    max_requests: int = 256
    """Requests that may run at once, each choice counted; more wait."""
    max_waiting_requests: int = 1024
    """Requests that may wait for others to end, each choice counted; more are refused with RESOURCE_EXHAUSTED. 0: none
    waits."""
    max_wait_s: float = 300.0
    """How long a request may wait."""
    max_request_bytes: int = 8 * 2**20
    """Largest request of a user over gRPC, bytes: a prompt as long as the context (5 bytes x tokens), and what it
    resumes. max_message_bytes limits it too."""
    loop: LoopSettings = field(default_factory=LoopSettings)
    ahead: AheadSettings = field(default_factory=AheadSettings)
    connections: ConnectionSettings = field(default_factory=ConnectionSettings)
    tls: TlsSettings = field(default_factory=lambda: TlsSettings(tls_require_client_cert=False))
    tracing: TracingSettings = field(default_factory=TracingSettings)
    trace_sample_ratio: float = 1.0
    """Share of the requests that are traced, 0 to 1, of those that do not say whether they are to be."""
    api_key: str | None = None
    """One bearer token that callers must show. In the environment, which other users of the machine cannot read, it is
    safer than on a command line; tokens_file has several, with limits."""
    tokens_file: Path | None = None
    """TOML file of the bearer tokens that callers must show, and their limits; without it nobody needs one. Read again
    when it changes."""
    caller_metrics: bool = False
    """Whether `/metrics` counts tokens by caller, the name of the bearer token: two series of each name."""
    access_log: bool = False
    """Whether each request is logged when it ends: method, route, status, duration, tokens, caller and id, never its
    content."""

    def __post_init__(self) -> None:
        is_port = self.http_port is None or 0 <= self.http_port <= 65535
        require(is_port, f"http_port must be in 0..65535, not {self.http_port}")
        for name in self.allowed_hosts:
            require(HOST_NAME.fullmatch(name) is not None, f"http_allowed_hosts: {name!r} is not a name of a host")
        for origin in self.origins:
            is_origin = origin == ANY_ORIGIN or ORIGIN.fullmatch(origin) is not None
            require(is_origin, f"allowed_origins: {origin!r} is not an origin, such as https://chat.example.com")
        require(all(map(MODEL_NAME.fullmatch, self.served_names)), "served_model_name: a name has 1 to 256 characters")
        known = ("refuse", "ignore")
        is_known = self.unknown_parameters in known
        require(is_known, f"unknown_parameters must be refuse or ignore, not {self.unknown_parameters!r}")
        require(self.api_key is None or self.tokens_file is None, "api_key and tokens_file both say who may call")
        is_key = self.api_key is None or API_KEY.fullmatch(self.api_key) is not None
        require(is_key, "api_key must have 8 characters at least, of ASCII and without spaces")
        names_callers = self.needs_tokens or not self.caller_metrics
        require(names_callers, "caller_metrics counts by the name of a token: set tokens_file or api_key too")
        self.tls.check_listening(self.server.host)
        has_issuer = self.tls.tls_ca is not None or not self.tls.tls_require_client_cert
        require(has_issuer, "tls_require_client_cert needs tls_ca, which says whose certificates are believed")
        if self.discovery.in_kubernetes:
            for name in ("verifier", "drafter"):
                says_once = getattr(self, name) is None
                require(says_once, f"{name} and discovery kubernetes both say where to find one: set one of them")
            self.tls.check_dialling("a pod")
        else:
            self._check_addresses(self.verifiers)
            self._check_addresses(self.drafters)
        require(
            0 <= self.num_speculative_tokens <= self.max_speculative_tokens,
            f"num_speculative_tokens must be in 0..{self.max_speculative_tokens}, not {self.num_speculative_tokens}",
        )
        is_size = 0 <= self.num_draft_nodes <= MAX_TREE_NODES
        require(is_size, f"num_draft_nodes must be in 0..{MAX_TREE_NODES}, not {self.num_draft_nodes}")
        require(0.0 <= self.stop_below <= 1.0, f"stop_below must be in 0..1, not {self.stop_below}")
        is_policy = self.speculation in ("adaptive", "fixed")
        require(is_policy, f"speculation must be adaptive or fixed, not {self.speculation!r}")
        alone = (AUTO_LOCAL_DRAFTS, NO_LOCAL_DRAFTS, *HEAD_NAMES, DRAFT_MODEL)
        is_known = self.local_drafts in alone or are_text_drafters(self.local_drafts)
        known_drafts = ", ".join((AUTO_LOCAL_DRAFTS, *TEXT_DRAFTER_NAMES, *HEAD_NAMES, DRAFT_MODEL))
        require(is_known, f"local_drafts must be {known_drafts} or {NO_LOCAL_DRAFTS}, not {self.local_drafts!r}")
        known_syntaxes = (AUTO_TOOL_SYNTAX, *(name for name in SYNTAXES if name != PLAIN_LIST.name), NO_TOOL_SYNTAX)
        is_known = self.tool_call_syntax in known_syntaxes
        names = ", ".join(known_syntaxes)
        require(is_known, f"tool_call_syntax must be one of {names}, not {self.tool_call_syntax!r}")
        require(self.startup_timeout_s > 0.0, "startup_timeout_s must be positive")
        require(self.max_requests >= 1, "max_requests must be at least 1")
        require(self.max_waiting_requests >= 0, "max_waiting_requests must not be negative")
        require(self.max_wait_s > 0.0, "max_wait_s must be positive")
        is_valid = LEAST_MESSAGE_BYTES <= self.max_request_bytes < 2**31
        require(is_valid, "max_request_bytes must be 1 MiB to 2 GiB")
        require(0.0 <= self.trace_sample_ratio <= 1.0, "trace_sample_ratio must be in 0..1")
        has_use = self.trace_sample_ratio == 1.0 or self.tracing.otlp_endpoint is not None
        require(has_use, "trace_sample_ratio says which requests are traced, and none are: set otlp_endpoint too")

    @property
    def allowed_hosts(self) -> frozenset[str]:
        """The names of `http_allowed_hosts`, in lower case; empty where that is not set."""
        names = () if self.http_allowed_hosts is None else self.http_allowed_hosts.lower().split(",")
        return frozenset(name.strip() for name in names)

    @property
    def origins(self) -> tuple[str, ...]:
        """The origins of `allowed_origins`."""
        return () if self.allowed_origins is None else _parts(self.allowed_origins)

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names of `served_model_name`."""
        return () if self.served_model_name is None else _parts(self.served_model_name)

    @property
    def needs_tokens(self) -> bool:
        """Whether callers must show a bearer token."""
        return self.tokens_file is not None or self.api_key is not None

    @property
    def verifiers(self) -> tuple[str, ...]:
        """host:port of each verifier, or DNS names, each with `DNS_PREFIX`."""
        return _parts(DEFAULT_VERIFIER if self.verifier is None else self.verifier)

    @property
    def drafters(self) -> tuple[str, ...]:
        """The same for drafters; empty for plain decoding only."""
        return () if self.drafter == NO_DRAFTER else _parts(DEFAULT_DRAFTER if self.drafter is None else self.drafter)

    def _check_addresses(self, addresses: tuple[str, ...]) -> None:
        for address in addresses:
            host, _, port = address.removeprefix(DNS_PREFIX).rpartition(":")
            is_address = bool(host) and port.isdigit() and int(port) <= 65535
            require(is_address, f"{address!r} is not host:port")
            self.tls.check_dialling(host)
        num_names = sum(address.startswith(DNS_PREFIX) for address in addresses)
        require(num_names in (0, len(addresses)), f"{DNS_PREFIX} stands before all names of a list, or before none")


def _parts(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))

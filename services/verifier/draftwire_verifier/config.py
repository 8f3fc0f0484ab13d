"""Configuration of a verifier."""

import json
from dataclasses import dataclass, field, replace
from typing import Any

from draftwire.engine.ranks.place import WantedGroup
from draftwire.errors import InvalidRequestError
from draftwire.runtime.settings import (
    ConnectionSettings,
    EngineSettings,
    ModelSettings,
    ServerSettings,
    TextDraftSettings,
    TlsSettings,
    TracingSettings,
    require,
)


@dataclass(frozen=True, slots=True)
class TensorParallelSettings:
    """How many processes share the model, each on a device of its own; see docs/tensor-parallel.md."""

    tensor_parallel_size: int = 1
    """Processes that compute the model together, each with a share of every layer's weights and of the KV cache; with
    device cuda each takes a GPU. They are started on this machine, or by torchrun on several."""
    tensor_parallel_timeout_s: float = 30.0
    """Seconds that these processes wait for each other, at most: when one is silent for longer in the middle of a step,
    the verifier ends, to be started again as a whole."""

    def __post_init__(self) -> None:
        require(self.tensor_parallel_size >= 1, "tensor_parallel_size must be at least 1")
        require(0.0 < self.tensor_parallel_timeout_s < float("inf"), "tensor_parallel_timeout_s must be positive")


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """Settings of a target that vLLM runs; see docs/vllm.md."""

    vllm_args: str | None = None
    """Arguments of vLLM's engine in JSON, by vLLM's names: {"tensor_parallel_size": 4, "quantization": "fp8"}. What
    other options set, and what this cannot serve exactly, is refused."""

    def __post_init__(self) -> None:
        _ = self.arguments  # validates

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of vLLM's engine by name.

        Raises:
            InvalidRequestError: they are no JSON object.
        """
        try:
            given = json.loads(self.vllm_args or "{}")
        except ValueError as error:
            raise InvalidRequestError(f"vllm_args are no JSON: {error}") from None
        require(isinstance(given, dict), "vllm_args must be a JSON object: names and values")
        return dict(given)


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """A head that drafts from the target's hidden states, inside the verifier or elsewhere; see docs/heads.md."""

    draft_head: str | None = None
    """Folder of an EAGLE-1, EAGLE-3, Medusa or Hydra head that was trained for the model, as its authors or speculators
    save it, or of a MiMo model for its own multi-token-prediction layer: it drafts inside the verifier, from the
    model's own hidden states."""
    feature_head: str | None = None
    """Folder of such a head that drafters draft with (their option head): the verifier keeps what the head reads first
    of the hidden states, and sends it to them. With draft_head, drafters with the same head are sent it anyway."""

    def __post_init__(self) -> None:
        require(
            None in (self.draft_head, self.feature_head), "set draft_head or feature_head: features of one are kept"
        )

    @property
    def folder(self) -> str | None:
        """Folder of the head whose features are kept; None if none are."""
        return self.draft_head or self.feature_head


@dataclass(frozen=True, slots=True)
class DraftModelSettings:
    """A language model that drafts inside the verifier's process; see docs/serving.md."""

    draft_model: str | None = None
    """Folder of a small model with the model's vocabulary, which drafts in this process, for all sessions of a step at
    once: on one machine no messages are needed, and two processes do not slow each other down."""
    draft_device: str | None = None
    """Its device; by default the model's."""
    draft_threads: int | None = None
    """Its CPU threads; by default as many as the model's."""

    def __post_init__(self) -> None:
        require(self.draft_threads is None or self.draft_threads >= 1, "draft_threads must be at least 1")
        for name in ("draft_device", "draft_threads"):
            is_of_none = getattr(self, name) is None or self.draft_model is not None
            require(is_of_none, f"{name} is of draft_model, which is not set")

    def loading(self, target: ModelSettings) -> ModelSettings | None:
        """Returns how it is loaded beside a target; None if there is none."""
        if self.draft_model is None:
            return None
        device, threads = self.draft_device or target.device, self.draft_threads or target.threads
        return replace(target, model=self.draft_model, revision=None, device=device, threads=threads)


@dataclass(frozen=True, slots=True)
class VerifierConfig:
    """Everything that can be set. Bad values raise at start."""

    loading: ModelSettings
    server: ServerSettings = field(default_factory=lambda: ServerSettings(port=50052, metrics_port=9052))
    engine: EngineSettings = field(default_factory=EngineSettings)
    parallel: TensorParallelSettings = field(default_factory=TensorParallelSettings)
    vllm: VllmSettings = field(default_factory=VllmSettings)
    texts: TextDraftSettings = field(default_factory=TextDraftSettings)
    heads: HeadSettings = field(default_factory=HeadSettings)
    own_drafts: DraftModelSettings = field(default_factory=DraftModelSettings)
    connections: ConnectionSettings = field(default_factory=ConnectionSettings)
    tls: TlsSettings = field(default_factory=TlsSettings)
    tracing: TracingSettings = field(default_factory=TracingSettings)
    rules: str | None = None
    """Verification rules of your own that requests may ask for too, by where they can be imported from, separated by
    commas: package.module.Attribute. Prove them with draftwire check-rule first."""
    block_sources: str | None = None
    """Sources of blocks of your own, by which the verifier drafts by itself where requests name them, by where they can
    be imported from, separated by commas: package.module:Class."""

    def __post_init__(self) -> None:
        self.engine.check_device(self.loading.device)
        self.tls.check_listening(self.server.host)
        require(all(self.own_rules), f"rules takes package.module.Attribute, by commas, not {self.rules!r}")
        is_path = [":" in path for path in self.own_sources]
        require(all(is_path), f"block_sources takes package.module:Class, by commas, not {self.block_sources!r}")
        require(self.tls.tls_target_name is None, "tls_target_name sets nothing here: a verifier calls nobody")

        require(self.vllm.vllm_args is None or self.is_vllm, "vllm_args are for engine vllm")
        is_spread = self.parallel.tensor_parallel_size > 1
        has_own = self.own_drafts.draft_model is not None
        require(not (is_spread and has_own), "draft_model drafts beside a target in one process")
        if has_own and self.own_drafts.draft_device is not None:
            self.engine.check_device(self.own_drafts.draft_device)
        require(not (is_spread and self.loading.engine == "openvino"), "engine openvino runs a target in one process")
        require(not (is_spread and self.loading.weights != "auto"), "weights are of engine openvino, for one process")
        if self.is_vllm:
            self._check_vllm()

    def _check_vllm(self) -> None:
        """Refuses settings that set nothing for vLLM."""
        for name in ("draft_head", "feature_head"):
            is_unset = getattr(self.heads, name) is None
            require(is_unset, f"{name} needs the hidden states of engine draftwire, not of vllm")
        require(self.own_drafts.draft_model is None, "draft_model drafts beside our own engines, not beside vllm")
        require(self.engine.max_tree_nodes == 0, "max_tree_nodes needs engine draftwire: vllm reads no token trees")
        loading, unset = self.loading, ModelSettings(self.loading.model)
        for name, instead in (
            ("decoder", "vLLM has its own"),
            ("threads", "set VLLM_CPU_OMP_THREADS_BIND"),
            ("cuda_graphs", "set enforce_eager in vllm_args"),
            ("huge_pages", "set GLIBC_TUNABLES=glibc.malloc.hugetlb=1"),
        ):
            is_unset = getattr(loading, name) == getattr(unset, name)
            require(is_unset, f"{name} sets nothing with engine vllm: {instead}")
        may_choose = loading.device in ("cpu", "cuda")
        require(may_choose, f"device {loading.device} with engine vllm: CUDA_VISIBLE_DEVICES says which GPUs it takes")
        size = self.parallel.tensor_parallel_size
        is_said_once = size == 1 or self.vllm.arguments.get("tensor_parallel_size", size) == size
        require(is_said_once, "tensor_parallel_size and that of vllm_args differ: set one of them")

    @property
    def is_vllm(self) -> bool:
        """Whether vLLM runs the target."""
        return self.loading.engine == "vllm"

    @property
    def own_rules(self) -> tuple[str, ...]:
        """Import path of each of `rules`."""
        return _parts_of(self.rules)

    @property
    def own_sources(self) -> tuple[str, ...]:
        """Import path of each of `block_sources`."""
        return _parts_of(self.block_sources)

    @property
    def wanted_group(self) -> WantedGroup:
        """Size and limits of the group of processes."""
        parallel = self.parallel
        size = 1 if self.is_vllm else parallel.tensor_parallel_size  # vLLM starts its ranks itself
        timeout_s = parallel.tensor_parallel_timeout_s
        return WantedGroup("verifier", "tensor_parallel_size", size, timeout_s)


def _parts_of(paths: str | None) -> tuple[str, ...]:
    return () if paths is None else tuple(map(str.strip, paths.split(",")))

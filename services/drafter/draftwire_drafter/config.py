"""Configuration of a drafter."""

from dataclasses import dataclass, field

from draftwire.engine.ranks.place import WantedGroup
from draftwire.method.quantization import Encoding, Quantization, position_bytes
from draftwire.options.heads.feature_format import FeatureEncoding
from draftwire.options.heads.head_names import HEAD_NAMES
from draftwire.options.layer_parallel.layer_settings import LayerParallelSettings
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
class DraftSettings:
    """How tokens are drafted, and what is made of distributions before tokens are drawn from them and both are sent."""

    strategy: str = "auto"
    """How tokens are drafted: "model", by a language model; "suffix" or "lookup", from earlier places of each text, or
    "retrieval", from files, for all of which the option model names the tokenizer alone, and of which several are
    joined by "+"; "model+suffix" and the like, by a language model whose tokens the others continue; "eagle3", "eagle",
    "medusa", "hydra" or "mtp", by the option head; "scripted", by a script, for tests; package.module:Class, by a
    strategy of your own; or auto: what fits the model."""
    draft_encoding: Encoding = Encoding.SPARSE_UINT16
    """How distributions travel: sparse_uint16 takes a few dozen bytes a token, dense_float32 and dense_float16 take 4
    and 2 bytes x vocabulary."""
    draft_mass: float = 0.98
    """Share of a distribution's mass that a sparse one keeps, in (0, 1]; more is accepted more often and takes more
    bytes."""
    draft_max_support: int = 64
    """Tokens that a sparse distribution keeps, at most, 1 to 1,024."""

    def __post_init__(self) -> None:
        _ = self.quantization  # validates

    @property
    def quantization(self) -> Quantization:
        """Encoding and truncation in the form that a drafting strategy takes."""
        return Quantization(self.draft_encoding, self.draft_mass, self.draft_max_support)

    def block_bytes(self, vocab_size: int, max_draft_tokens: int) -> int:
        """Returns the largest size of the distributions of one block, bytes."""
        return max_draft_tokens * position_bytes(self.draft_encoding, vocab_size, self.draft_max_support)


@dataclass(frozen=True, slots=True)
class FedHeadSettings:
    """A head that drafts from features that verifiers send; see docs/heads.md."""

    head: str | None = None
    """Folder of an EAGLE-1, EAGLE-3, Medusa or Hydra head or multi-token-prediction layer, for a strategy of that name.
    The option model names its target, of which only the tensors are read that the head shares. Verifiers need the same
    head: their option feature_head, or draft_head."""
    feature_encoding: FeatureEncoding = FeatureEncoding.FLOAT8
    """How features travel, of which a token takes as many numbers as the head is wide: float8, with a scale for each
    token, bfloat16 or float32."""
    feature_window: int = 512
    """Tokens before the end of a text, at most, whose features a head is sent when it begins."""

    def __post_init__(self) -> None:
        require(1 <= self.feature_window <= 8192, f"feature_window must be in 1..8192, not {self.feature_window}")


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Everything that can be set. Bad values raise at start."""

    loading: ModelSettings
    server: ServerSettings = field(default_factory=lambda: ServerSettings(port=50053, metrics_port=9053))
    engine: EngineSettings = field(default_factory=EngineSettings)
    drafts: DraftSettings = field(default_factory=DraftSettings)
    texts: TextDraftSettings = field(default_factory=TextDraftSettings)
    heads: FedHeadSettings = field(default_factory=FedHeadSettings)
    layers: LayerParallelSettings = field(default_factory=LayerParallelSettings)
    connect_timeout_s: float = 10.0
    """How long a session's opening may wait for the verifier to answer."""
    connections: ConnectionSettings = field(default_factory=ConnectionSettings)
    tls: TlsSettings = field(default_factory=TlsSettings)
    tracing: TracingSettings = field(default_factory=TracingSettings)

    def __post_init__(self) -> None:
        self.engine.check_device(self.loading.device)
        self.tls.check_listening(self.server.host)
        self.tls.check_dialling(
            self.server.host
        )  # gateways name the verifiers: remote ones, if this host accepts remote gateways
        require(self.connect_timeout_s > 0.0, "connect_timeout_s must be positive")
        is_head = self.drafts.strategy in HEAD_NAMES
        require(
            is_head is (self.heads.head is not None),
            f"a head is for strategies {', '.join(HEAD_NAMES)}, and for these alone",
        )
        self._check_engine()
        is_lean = self.loading.decoder != "transformers" or not self.layers.is_parallel
        require(is_lean, "layer_parallel_size and layer_groups need decoder lean, or auto, not transformers")

    def _check_engine(self) -> None:
        """Refuses engines that cannot draft, or not so."""
        loading = self.loading
        require(loading.engine != "vllm", "engine vllm runs targets: drafters have auto, draftwire or openvino")
        is_openvino = loading.engine == "openvino" or loading.weights != "auto"
        has_layers = self.layers.is_parallel
        require(not (is_openvino and has_layers), "layer_parallel_size and layer_groups need engine draftwire")
        has_trees = self.engine.max_tree_nodes > 0
        require(not (is_openvino and has_trees), "max_tree_nodes of a drafter needs engine draftwire")

    @property
    def wanted_group(self) -> WantedGroup:
        """Size and limits of the group of processes."""
        return self.layers.wanted_group

"""Head that a verifier loads beside its target. Runs on the torch thread."""

from pathlib import Path

import torch

from draftwire.engine.cache_sizing import FeatureUser, size_while_loading
from draftwire.engine.step_drafts import LOCAL_QUANTIZATION
from draftwire.errors import InvalidRequestError
from draftwire.models.card import ModelCard, path_of
from draftwire.models.model_names import is_scripted
from draftwire.models.sequence_model import SequenceModel
from draftwire.options.heads.draft_head import DraftHead
from draftwire.options.heads.head_drafter import HeadDrafter
from draftwire.options.heads.head_drafts import HeadDrafts
from draftwire.options.heads.head_loading import load_fusion, load_head, read_shape
from draftwire.options.heads.taps import FeatureModel, FeatureSource, check_taps
from draftwire.runtime.settings import EngineSettings, ModelSettings


class TargetHead:
    """A head, or only what makes its features for drafters elsewhere.

    Attributes:
        fingerprint: of the head whose features are kept; empty before it is loaded.
        feature_size: numbers that are kept of a token.
    """

    def __init__(self, folder: str, target: ModelSettings, engine: EngineSettings, *, drafts: bool) -> None:
        """Refuses a head that does not fit before the target's weights are loaded, which may take minutes. `drafts`
        says whether it drafts inside the verifier.

        Raises:
            InvalidRequestError: see `read_shape`; or the target has no weights.
        """
        if is_scripted(target.model):
            raise InvalidRequestError("a head reads hidden states, which a scripted model has none of")
        self._folders = Path(folder).expanduser(), Path(path_of(target.model, target.dtype))
        read_shape(*self._folders)
        self._cache_tokens = size_while_loading(engine)
        self._drafts = drafts
        self._head: DraftHead | None = None
        self.fingerprint = b""
        self.feature_size = 0

    def load(self, card: ModelCard, device: torch.device, num_layers: int) -> FeatureUser:
        """Loads it in the type and onto the device of a target of so many layers, with room for the largest step."""
        dtype = getattr(torch, card.description.dtype)
        fusion = load_fusion(*self._folders, dtype, device)
        self.fingerprint, self.feature_size = fusion.fingerprint, fusion.config.hidden_size
        check_taps(fusion.config.taps, num_layers)
        if not self._drafts:
            return FeatureUser(FeatureSource(fusion.config.taps, fusion.fuse), 0, self.resize)
        head = self._head = load_head(*self._folders, self._cache_tokens, dtype, str(device))
        return FeatureUser(FeatureSource(head.config.taps, head.fuse), head.token_bytes, self.resize)

    @property
    def names(self) -> tuple[str, ...]:
        """The strategy by which it drafts inside the verifier, if it does."""
        return () if self._head is None else (self._head.config.kind.value,)

    def resize(self, cache_tokens: int) -> None:
        """Resizes its cache, if it has one."""
        if self._head is not None:
            self._head.resize(cache_tokens)

    def drafters(self, model: SequenceModel) -> dict[str, HeadDrafts]:
        """Returns what drafts beside a target that was loaded with it, by strategy."""
        if self._head is None:
            return {}
        assert isinstance(model, FeatureModel), "it was loaded with a head"
        drafts = HeadDrafts(HeadDrafter(self._head, model, LOCAL_QUANTIZATION), model.vocab_size)
        return dict.fromkeys(self.names, drafts)

"""A head as a drafting strategy of `draftwire.local_loop`: beside the target, in the loop's process."""

from collections.abc import Sequence

from draftwire.drafting.strategy import Draft, Drafting, DraftStep
from draftwire.errors import DraftwireError
from draftwire.models.kv_cache import CachedSequence
from draftwire.options.heads.head_drafter import HeadDrafter, HeadDrafting, HeadSequence
from draftwire.options.heads.taps import FeatureModel
from draftwire.requests.session_parameters import SessionParameters


class HeadText:
    """The text that a head drafts for."""

    num_unread = num_reused = 0

    def __init__(self, drafter: HeadDrafter[CachedSequence], token_ids: list[int]) -> None:
        self._drafter = drafter
        self.sequence: HeadSequence = drafter.open()
        self.committed = list(token_ids)

    def calibrate(self, base_len: int, token_ids: list[int]) -> None:
        """Sets the committed tokens."""
        self.committed[base_len:] = token_ids

    def close(self) -> None:
        """Frees what the head keeps of the text."""
        self._drafter.close(self.sequence)


class HeadStrategy:
    """Drafts with a head for the one text that its target reads, as of the second round: then the prompt is read."""

    def __init__(self, drafter: HeadDrafter[CachedSequence], target: FeatureModel, context_length: int) -> None:
        self.context_length = context_length
        self._drafter = drafter
        self._target = target

    def open(self, token_ids: list[int], parameters: SessionParameters) -> HeadText:
        """Starts the text; the head shares nothing between texts."""
        return HeadText(self._drafter, token_ids)

    def step(self, draftings: Sequence[Drafting]) -> DraftStep:
        """Drafts for the text, once the target has read all of it but the last token."""
        (drafting,), (read,) = draftings, self._target.cache.sequences
        text, request = drafting.sequence, drafting.request
        assert isinstance(text, HeadText), "it was opened here"
        if request is None or read.length < len(text.committed) - 1:
            return DraftStep([None])
        draft: Draft | DraftwireError | None = None
        while draft is None:  # until all that is committed is read
            (draft,) = self._drafter.draft([HeadDrafting(text.sequence, read, text.committed, request)])
        return DraftStep([draft])

"""The sources of what a verifier drafts by itself: by a head, by a model, from texts, and by sources of users' own."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from draftwire.engine.own_sources import OpenSource, own_sources
from draftwire.engine.step_drafts import OrderedSource
from draftwire.engine.target_session import LocalSource
from draftwire.errors import InvalidRequestError
from draftwire.method.rounds import LocalDraft, TargetSessionSpec
from draftwire.options.model_free.local_texts import LocalText
from draftwire.options.model_free.registry import TextDrafters
from draftwire_verifier.config import VerifierConfig
from draftwire_verifier.target_loader import LoadedEngine


@dataclass(frozen=True, slots=True)
class LocalSources:
    """All sources that sessions may have."""

    kinds: Sequence[OpenSource]
    """Kinds of sources, in the order in which they are asked."""
    names: tuple[str, ...] = ()
    """Names of their strategies, as requests have them."""

    @classmethod
    def load(cls, config: VerifierConfig, loaded: LoadedEngine, may_draft: Callable[[str], bool]) -> "LocalSources":
        """Loads what is configured; `may_draft` says whether what is drafted beside the target is to be used, by its
        strategy.

        Raises:
            InvalidRequestError: a source cannot be loaded; the message is one line.
        """
        texts, description = config.texts, loaded.card.description
        drafters = TextDrafters.load(texts.retrieval_store, texts.shared_tokens, description.vocabulary_fingerprint)
        beside = [partial(OrderedSource.open, name, partial(may_draft, name)) for name in loaded.drafts_by]
        own = own_sources(config.own_sources, description.vocab_size, (*loaded.drafts_by, *drafters.names))
        of_texts = partial(LocalText.open, drafters, description.vocab_size)  # asked last: it knows why none is
        return cls([*own.values(), *beside, of_texts], (*loaded.drafts_by, *drafters.names, *own))

    def find(self, draft: LocalDraft, spec: TargetSessionSpec, known: Iterable[LocalSource] = ()) -> list[LocalSource]:
        """Returns the sources of a session that a draft names, some of which it may have; see `FindSources`."""
        by_name, names = {source.strategy: source for source in known}, filter(None, (draft.strategy, draft.instead))
        sources = [by_name.get(name) or self._open(spec, name) for name in names]
        most = spec.parameters.max_draft_tokens
        if not 1 <= draft.num_draft_tokens <= most:
            raise InvalidRequestError(f"a local draft has 1 to {most} tokens here, not {draft.num_draft_tokens}")
        return sources

    def _open(self, spec: TargetSessionSpec, strategy: str) -> LocalSource:
        for open_source in self.kinds:
            source = open_source(spec, strategy)
            if source is not None:
                return source
        raise InvalidRequestError(f"nothing drafts by the name {strategy!r}")

"""Composition of what plugs into sessions."""

from collections.abc import Sequence

from draftwire_gateway.options.confident_drafts import ConfidentDrafts
from draftwire_gateway.options.drafts_ahead import DraftsAhead
from draftwire_gateway.options.local_drafting import LocalDrafting
from draftwire_gateway.options.mask_allowance import MaskAllowance
from draftwire_gateway.options.tree_drafts import TreeDrafts
from draftwire_gateway.session.generation import Generation
from draftwire_gateway.session.loop import SessionPlugs
from draftwire_gateway.session.policy import FixedPolicy, Policy
from draftwire_gateway.session.round_times import RoundObserver
from draftwire_gateway.session.session_option import SessionOption
from draftwire_gateway.session.session_state import SessionState, SessionTrace
from draftwire_gateway.speculation.adaptive_policy import AdaptivePolicy
from draftwire_gateway.speculation.pairs import Pairs


def plugs_of(
    generation: Generation, pairs: Pairs, observers: Sequence[RoundObserver] = (), trace: SessionTrace | None = None
) -> SessionPlugs:
    """Returns what plugs into the loop of a generation; `pairs` choose the lengths of its drafts, if it adapts them."""
    return SessionPlugs(policy_of(generation, pairs), options_of, observers, trace)


def policy_of(generation: Generation, pairs: Pairs) -> Policy:
    """Returns what chooses the lengths of a generation's drafts."""
    if generation.adapts_length:
        return AdaptivePolicy(generation, pairs)
    return FixedPolicy(generation.num_speculative_tokens)


def options_of(session: SessionState) -> tuple[SessionOption, ...]:
    """Returns the options of a session, each only if its generation asks for it."""
    generation = session.generation
    asked_for = (
        (TreeDrafts, generation.num_draft_nodes > 0),
        (MaskAllowance, generation.sampling.structured_output is not None),
        (LocalDrafting, bool(generation.local_strategies)),
        (ConfidentDrafts, generation.stop_below > 0.0),
        (DraftsAhead, generation.num_speculative_tokens > 0),  # the last: begun rounds are requested as they were begun
    )
    return tuple(option(session) for option, is_asked_for in asked_for if is_asked_for)

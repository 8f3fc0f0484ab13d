"""Specs of sessions for tests: whatever is said, also of what both services are told, by its name."""

from dataclasses import fields, replace
from typing import Any

from draftwire.method.keys import KEY_BYTES
from draftwire.method.rounds import DraftSessionSpec, Permit, TargetSessionSpec
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.rules import RuleFacts
from draftwire.requests.session_parameters import ALONE, SessionParameters
from draftwire.verification import RULES
from draftwire.verification.rule import facts_of

SHARED = frozenset(field.name for field in fields(SessionParameters))
FACTS = {name: facts_of(rule) for name, rule in RULES.items()}
"""What the product's rules say of themselves."""


def _with_parameters(given: dict[str, Any]) -> dict[str, Any]:
    """Puts what both services are told in its place. A rule may be said by its name, of one that nobody knows too."""
    shared: dict[str, Any] = {
        "prompt_len": len(given["token_ids"]),
        "sampling": SamplingParams(),
        "rule": "block",
        "max_draft_tokens": 8,
    }
    shared |= {name: given.pop(name) for name in SHARED & given.keys()}
    if isinstance(shared["rule"], str):
        shared["rule"] = FACTS.get(shared["rule"], RuleFacts(shared["rule"]))
    return {**given, "parameters": SessionParameters(**shared)}


def target_spec(*, token_ids: list[int], **given: Any) -> TargetSessionSpec:
    """Returns a session for a verifier: new, with room for 100 tokens more, judged by `block`."""
    own = {"session_id": 1, "epoch": 0, "first_round": 0, "verifying_key": bytes(KEY_BYTES), "plain_rounds": 0}
    return TargetSessionSpec(
        **_with_parameters({**own, "token_ids": token_ids, "max_len": len(token_ids) + 100, **given})
    )


def draft_spec(*, token_ids: list[int], **given: Any) -> DraftSessionSpec:
    """Returns the same for a drafter."""
    own = {"session_id": 1, "epoch": 0, "drafting_key": bytes(KEY_BYTES), "verifier_address": "v:1"}
    own |= {"target_vocab_size": 320, "permit": Permit.make(bytes(KEY_BYTES), 0), "max_len": len(token_ids) + 100}
    return DraftSessionSpec(**_with_parameters({**own, "token_ids": token_ids, **given}))


def changed(spec: Any, **changes: Any) -> Any:
    """Returns a spec in which something is another, of what both services are told too."""
    shared = {name: changes.pop(name) for name in SHARED & changes.keys()}
    if isinstance(rule := shared.get("rule"), str):
        shared["rule"] = FACTS.get(rule, RuleFacts(rule))
    return replace(spec, **changes, parameters=replace(spec.parameters, **shared))


def salted(salt: str, **changes: Any) -> SessionParameters:
    """Returns what a text is opened with that shares its cache with others of the same salt alone."""
    return replace(ALONE, cache_salt=salt, **changes)

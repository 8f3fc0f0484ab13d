"""Audit: a statistical test, run by the verifier, of whether a drafter samples from the distributions it declares."""

from importlib import import_module

from draftwire.audit.audit_sums import AuditSums, Statistic, audit_sums

OF_TESTS = {"Alarm": "sequential", "DrafterAudit": "sequential", "FirstUses": "first_uses"}
"""Names that users import from here, and the modules that they are loaded from when they are asked for: a round sums,
and whoever trusts drafters tests the sums."""


def __getattr__(name: str) -> object:
    if name not in OF_TESTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{OF_TESTS[name]}"), name)


__all__ = ["AuditSums", "Statistic", "audit_sums", *OF_TESTS]

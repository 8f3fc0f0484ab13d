"""Audit: a statistical test, run by the verifier, of whether a drafter samples from the distributions it declares."""

from draftwire.audit.audit_sums import AuditSums, Statistic, audit_sums, audit_sums_of_trees
from draftwire.audit.first_uses import FirstUses
from draftwire.audit.sequential import Alarm, DrafterAudit

__all__ = ["Alarm", "AuditSums", "DrafterAudit", "FirstUses", "Statistic", "audit_sums", "audit_sums_of_trees"]

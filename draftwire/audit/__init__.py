"""The audit: tells from the verifier's side whether a drafter draws from the distributions that it declares."""

from draftwire.audit.first_uses import FirstUses
from draftwire.audit.sequential import Alarm, DrafterAudit
from draftwire.audit.statistics import AuditSums, Statistic, audit_sums

__all__ = ["Alarm", "AuditSums", "DrafterAudit", "FirstUses", "Statistic", "audit_sums"]

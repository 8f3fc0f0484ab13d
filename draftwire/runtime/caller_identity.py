"""Identifies callers of a service, as far as connections prove it: by the certificate with its role, or by the host."""

from __future__ import annotations  # the generics of grpc exist for the type checker only

import hashlib
from enum import Enum
from functools import lru_cache
from typing import Any

import grpc
import structlog

from draftwire.errors import WrongRoleError
from draftwire.runtime.addresses import host_of_peer, network_of

log = structlog.get_logger()

ROLE_PREFIX = "urn:draftwire:role:"
"""Beginning of the URIs among the alternative names of a certificate that say what its holder is."""


class CallerRole(Enum):
    """A role that a caller's certificate may state."""

    GATEWAY = "gateway"
    DRAFTER = "drafter"


def origin_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Returns what all connections of one caller have alike: its certificate or, if it shows none, its host.

    Hosts of IPv6 are told apart by their networks of 64 bits.
    """
    for certificate in context.auth_context().get("x509_pem_cert", ()):
        return f"certificate {hashlib.sha256(certificate).hexdigest()}"
    return f"host {network_of(host_of_peer(context.peer()))}"


def require_role(context: grpc.aio.ServicerContext[Any, Any], role: CallerRole) -> None:
    """Refuses a caller whose certificate says that it is something else.

    A certificate without any role passes, and is logged once; so does a caller without a certificate: where it needs
    none, nothing proves who it is.

    Raises:
        WrongRoleError: the certificate has roles, and not this one.
    """
    names = context.auth_context()
    if not names.get("x509_pem_cert"):
        return
    uris = [uri.decode("utf-8", "replace") for uri in names.get("peer_uri", ())]
    roles = {uri.removeprefix(ROLE_PREFIX) for uri in uris if uri.startswith(ROLE_PREFIX)}
    if not roles:
        _warn_once(origin_of(context), role)
    elif role.value not in roles:
        raise WrongRoleError(f"the caller's certificate is of a {' and '.join(sorted(roles))}, not of a {role.value}")


@lru_cache(maxsize=1024)
def _warn_once(origin: str, role: CallerRole) -> None:
    log.warning("rpc.role_missed", origin=origin, role=role.value, reason=f"no {ROLE_PREFIX}{role.value} in it")

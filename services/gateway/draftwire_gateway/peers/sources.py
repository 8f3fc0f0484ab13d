"""Discovery sources from a gateway's configuration."""

from dataclasses import dataclass
from functools import partial

from draftwire_gateway.config import DNS_PREFIX, GatewayConfig
from draftwire_gateway.peers import endpoint_slices
from draftwire_gateway.peers.discovery import DnsSource, Source, StaticSource


@dataclass(frozen=True, slots=True)
class Sources:
    """Discovery sources of verifiers and drafters."""

    verifiers: Source
    drafters: Source


async def sources_of(config: GatewayConfig) -> Sources:
    """Makes the sources, without querying them.

    Raises:
        InvalidRequestError: Kubernetes is configured, but no cluster or namespace can be determined.
    """
    settings = config.discovery
    if settings.verifier_service is None:
        return Sources(_listed(config.verifiers), _listed(config.drafters))
    namespace = settings.namespace or endpoint_slices.own_namespace()
    configuration = await endpoint_slices.read_configuration()

    follow = partial(endpoint_slices.EndpointSliceSource, configuration, namespace)
    drafters = follow(settings.drafter_service) if settings.drafter_service is not None else StaticSource(())
    return Sources(follow(settings.verifier_service), drafters)


def _listed(addresses: tuple[str, ...]) -> Source:
    names = tuple(address.removeprefix(DNS_PREFIX) for address in addresses if address.startswith(DNS_PREFIX))
    return DnsSource(names) if names else StaticSource(addresses)

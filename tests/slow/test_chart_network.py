"""Who may call whom: exactly those who have to."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import yaml
from chart import COMPONENT, SERVICES, VALUES, Rendered, render

Arrow = tuple[str, str, int | None]
"""Who, to whom, on which port; None is any."""

COMPONENTS = (*SERVICES, "test")
USERS = 'networkPolicy.clients=[{"podSelector":{"matchLabels":{"app":"web"}}}]'
ARROWS = {
    ("web", "gateway", 50051),
    ("web", "gateway", 8000),
    ("test", "gateway", 50051),
    ("gateway", "verifier", 50052),
    ("gateway", "drafter", 50053),
    ("drafter", "verifier", 50052),
}


def name_of(peer: dict[str, Any]) -> str:
    """Names a peer by what selects it."""
    labels = peer.get("podSelector", {}).get("matchLabels", {})
    if "ipBlock" in peer:
        return str(peer["ipBlock"]["cidr"])
    if "namespaceSelector" in peer:
        (namespace,) = peer["namespaceSelector"]["matchLabels"].values()
        return "/".join([namespace, *labels.values()])
    return str(labels.get(COMPONENT) or labels.get("app") or "everybody")


def arrows(rendered: Rendered, side: str) -> Iterator[Arrow]:
    """Yields what policies of the services allow on one side, "ingress" or "egress"."""
    for component in COMPONENTS:
        specs = [each["spec"] for each in rendered.all("NetworkPolicy")]
        (spec,) = [each for each in specs if each["podSelector"]["matchLabels"].get(COMPONENT) == component]
        assert spec["policyTypes"] == ["Ingress", "Egress"]  # what is not allowed is forbidden
        for rule in spec[side]:
            peers, ports = rule["from" if side == "ingress" else "to"], rule["ports"]
            assert peers
            assert ports
            for peer, port in product(map(name_of, peers), ports):
                yield (peer, component, port["port"]) if side == "ingress" else (component, peer, port["port"])


def test_services_take_calls_of_those_alone_who_have_to_call() -> None:
    scrapes = {("monitoring", service, port) for service, port in zip(SERVICES, (9051, 9052, 9053), strict=True)}
    assert set(arrows(render("tp8", USERS), "ingress")) == ARROWS | scrapes


def test_services_call_nobody_but_whom_they_have_to() -> None:
    names = {(component, "kube-system/kube-dns", 53) for component in COMPONENTS}
    private = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
    watching = {("gateway", cidr, port) for cidr in private for port in (443, 6443)}
    between = {arrow for arrow in ARROWS if arrow[0] != "web"}
    assert set(arrows(render("tp8"), "egress")) == between | names | watching


def test_models_are_fetched_by_those_who_load_them() -> None:
    added = set(arrows(render("single-gpu"), "egress")) - set(arrows(render("tp8"), "egress"))
    assert added == {("verifier", "0.0.0.0/0", 443), ("drafter", "0.0.0.0/0", 443)}
    for service in ("verifier", "drafter"):
        rules = render("single-gpu").at(f"NetworkPolicy/{service}.spec.egress")
        (hub,) = [rule["to"] for rule in rules if "ipBlock" in rule["to"][0]]
        assert "10.0.0.0/8" in hub[0]["ipBlock"]["except"]  # the hub is not inside


def test_gateway_with_a_list_does_not_call_the_api_server() -> None:
    assert not [arrow for arrow in arrows(render("hpa-off"), "egress") if arrow[2] in (443, 6443)]


def test_traces_go_where_values_say() -> None:
    collector = 'networkPolicy.traces.to=[{"namespaceSelector":{"matchLabels":{"name":"tracing"}}}]'
    added = set(arrows(render("tp8", collector), "egress")) - set(arrows(render("tp8"), "egress"))
    assert added == {(component, "tracing", 4317) for component in COMPONENTS}


def test_names_are_asked_for_over_udp_and_tcp() -> None:
    for component in COMPONENTS:
        rules = render("tp8").at(f"NetworkPolicy/{component}.spec.egress")
        (dns,) = [rule["ports"] for rule in rules if {"protocol": "UDP", "port": 53} in rule["ports"]]
        assert dns == [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]


@pytest.mark.parametrize("values", VALUES)
def test_no_rule_is_open_to_everybody(values: str) -> None:
    """A rule without peers, or with an empty one, allows all."""
    for policy in render(values).all("NetworkPolicy"):
        for side, way in (("ingress", "from"), ("egress", "to")):
            for rule in policy["spec"][side]:
                assert rule[way], yaml.safe_dump(rule)
                assert all(rule[way]), yaml.safe_dump(rule)


def test_empty_lists_let_nobody_through() -> None:
    rendered = render("tp8", "networkPolicy.clients=[]", "networkPolicy.scrapers=[]", "networkPolicy.dns=[]")
    assert {arrow for arrow in arrows(rendered, "ingress") if arrow[1] == "gateway"} == {("test", "gateway", 50051)}
    assert rendered.at("NetworkPolicy/verifier.spec.egress") == []


def test_metrics_are_closed_where_nobody_reads_them() -> None:
    assert not [arrow for arrow in arrows(render("prometheus-off"), "ingress") if arrow[2] in (9051, 9052, 9053)]


def test_ranks_of_one_group_call_each_other_and_no_other_group() -> None:
    rendered = render("multi-node-tp", "verifier.replicas=2")
    (group,) = rendered.all("LeaderWorkerSet")
    policies = [
        each for each in rendered.all("NetworkPolicy") if not each["spec"]["podSelector"]["matchLabels"].get(COMPONENT)
    ]
    assert len({each["metadata"]["name"] for each in policies}) == len(policies) == 2
    for index, policy in enumerate(policies):
        members = {
            "matchLabels": {
                "leaderworkerset.sigs.k8s.io/name": group["metadata"]["name"],
                "leaderworkerset.sigs.k8s.io/group-index": str(index),
            }
        }
        assert policy["spec"]["podSelector"] == members
        assert policy["spec"]["ingress"] == [{"from": [{"podSelector": members}]}]  # on any port
        assert policy["spec"]["egress"] == [{"to": [{"podSelector": members}]}]


def test_ranks_of_one_pod_need_no_network() -> None:
    assert len(render("tp8").all("NetworkPolicy")) == len(COMPONENTS)


def test_policies_can_be_left_to_others() -> None:
    assert not render("no-network-policy").all("NetworkPolicy")

"""Certificates: whose they are, where they lie, and who has to show one."""

import pytest
from chart import SERVICES, container_of, environment_of, expect, render

FOLDER = "/etc/draftwire/tls"


@pytest.mark.parametrize("service", SERVICES)
def test_services_read_their_certificates_from_their_own_secret(service: str) -> None:
    """With a subPath it would never change with the Secret."""
    variable = f"environment/{service}.DRAFTWIRE_{service.upper()}_"
    secret = {"secretName": f"prod-draftwire-{service}-tls", "defaultMode": 0o440}
    expect(
        "tp8",
        {
            f"{variable}TLS_CERT": f"{FOLDER}/tls.crt",
            f"{variable}TLS_KEY": f"{FOLDER}/tls.key",
            f"{variable}TLS_CA": f"{FOLDER}/ca.crt",
            f"{variable}ALLOW_PLAINTEXT": None,
            f"container/{service}.volumeMounts.tls": {"name": "tls", "mountPath": FOLDER, "readOnly": True},
            f"template/{service}.spec.volumes.tls.secret": secret,
        },
    )


def test_secrets_may_have_names_of_their_own() -> None:
    paths = ("template/gateway.spec.volumes.tls.secret.secretName", "Certificate/gateway.spec.secretName")
    expect("mtls", dict.fromkeys(paths, "public"), "tls.secrets.gateway=public")


def test_callers_look_for_the_one_name_that_all_certificates_carry() -> None:
    expect(
        "tp8",
        {
            "environment/gateway.DRAFTWIRE_GATEWAY_TLS_TARGET_NAME": "draftwire.internal",
            "environment/drafter.DRAFTWIRE_DRAFTER_TLS_TARGET_NAME": "draftwire.internal",
            "environment/verifier.DRAFTWIRE_VERIFIER_TLS_TARGET_NAME": None,  # it calls nobody
        },
    )


@pytest.mark.parametrize(("values", "required"), [("tp8", "false"), ("mtls", "true")])
def test_users_show_certificates_where_values_say_so(values: str, required: str) -> None:
    """By default verifier and drafter ask for one."""
    expect(
        values,
        {
            "environment/gateway.DRAFTWIRE_GATEWAY_TLS_REQUIRE_CLIENT_CERT": required,
            "environment/verifier.DRAFTWIRE_VERIFIER_TLS_REQUIRE_CLIENT_CERT": None,
            "environment/drafter.DRAFTWIRE_DRAFTER_TLS_REQUIRE_CLIENT_CERT": None,
        },
    )


@pytest.mark.parametrize("service", SERVICES)
def test_plaintext_is_said_to_be_meant(service: str) -> None:
    rendered = render("cpu-demo")
    environment = rendered.environment(service)
    assert environment[f"DRAFTWIRE_{service.upper()}_ALLOW_PLAINTEXT"] == "true"
    assert not [name for name in environment if "TLS" in name]
    assert not [volume for volume in rendered.at(f"template/{service}.spec.volumes") if "secret" in volume]


@pytest.mark.parametrize("service", SERVICES)
def test_cert_manager_makes_what_grpc_takes(service: str) -> None:
    public = ["prod-draftwire-gateway", "prod-draftwire-gateway.llm", "prod-draftwire-gateway.llm.svc"]
    own = [*public, "draftwire.example.com"] if service == "gateway" else []
    secret, certificate = f"prod-draftwire-{service}-tls", f"Certificate/{service}.spec"
    expect(
        "mtls",
        {
            f"template/{service}.spec.volumes.tls.secret.secretName": secret,
            f"{certificate}.secretName": secret,
            f"{certificate}.privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
            f"{certificate}.issuerRef": {"group": "cert-manager.io", "kind": "Issuer", "name": "draftwire-ca"},
            f"{certificate}.duration": "720h",
            f"{certificate}.renewBefore": "240h",
            f"{certificate}.uris": [f"urn:draftwire:role:{service}"],
            f"{certificate}.dnsNames": ["draftwire.internal", *own],
        },
    )
    assert {"server auth", "client auth"} <= set(render("mtls").at(f"{certificate}.usages"))


def test_nobody_makes_certificates_unless_asked() -> None:
    assert not render("tp8").all("Certificate")


ALL, CA = [None], [[{"key": "ca.crt", "path": "ca.crt"}]]


@pytest.mark.parametrize(
    ("values", "shows", "items"), [("tp8", False, CA), ("mtls", True, ALL), ("cpu-demo", False, [])]
)
def test_test_pod_shows_no_more_than_it_has_to(values: str, shows: bool, items: list[object]) -> None:
    spec = render(values).at("Pod/test.spec")
    assert ("DRAFTWIRE_TLS_KEY" in environment_of(container_of(spec))) is shows
    assert [volume["secret"].get("items") for volume in spec.get("volumes", [])] == items

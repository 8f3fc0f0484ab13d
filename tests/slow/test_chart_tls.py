"""Certificates: whose they are, where they lie, and who has to show one."""

import pytest
from chart import SERVICES, container_of, environment_of, render

FILES = {"TLS_CERT": "tls.crt", "TLS_KEY": "tls.key", "TLS_CA": "ca.crt"}


@pytest.mark.parametrize("service", SERVICES)
def test_services_read_their_certificates_from_their_own_secret(service: str) -> None:
    rendered = render("tp8")
    container, prefix = rendered.container(service), f"DRAFTWIRE_{service.upper()}_"
    environment = environment_of(container)
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "tls"]
    for option, file in FILES.items():
        assert environment[prefix + option] == f"{mount['mountPath']}/{file}"
    assert mount["readOnly"]
    assert "subPath" not in mount  # which would never change with the Secret
    (volume,) = [volume for volume in rendered.pod(service)["volumes"] if volume["name"] == "tls"]
    assert volume["secret"] == {"secretName": f"prod-draftwire-{service}-tls", "defaultMode": 0o440}
    assert prefix + "ALLOW_PLAINTEXT" not in environment


def test_secrets_may_have_names_of_their_own() -> None:
    rendered = render("mtls", "tls.secrets.gateway=public")
    (volume,) = [volume for volume in rendered.pod("gateway")["volumes"] if volume["name"] == "tls"]
    assert volume["secret"]["secretName"] == "public"
    assert rendered.one("Certificate", "gateway")["spec"]["secretName"] == "public"


def test_callers_look_for_the_one_name_that_all_certificates_carry() -> None:
    rendered = render("tp8")
    for service in ("gateway", "drafter"):
        assert rendered.environment(service)[f"DRAFTWIRE_{service.upper()}_TLS_TARGET_NAME"] == "draftwire.internal"
    assert "DRAFTWIRE_VERIFIER_TLS_TARGET_NAME" not in rendered.environment("verifier")  # it calls nobody


@pytest.mark.parametrize(("values", "required"), [("tp8", "false"), ("mtls", "true")])
def test_users_show_certificates_where_values_say_so(values: str, required: str) -> None:
    rendered = render(values)
    assert rendered.environment("gateway")["DRAFTWIRE_GATEWAY_TLS_REQUIRE_CLIENT_CERT"] == required
    for service in ("verifier", "drafter"):  # by default they ask for one
        assert f"DRAFTWIRE_{service.upper()}_TLS_REQUIRE_CLIENT_CERT" not in rendered.environment(service)


def test_plaintext_is_said_to_be_meant() -> None:
    rendered = render("cpu-demo")
    for service in SERVICES:
        environment = rendered.environment(service)
        assert environment[f"DRAFTWIRE_{service.upper()}_ALLOW_PLAINTEXT"] == "true"
        assert not [name for name in environment if "TLS" in name]
        assert not [volume for volume in rendered.pod(service)["volumes"] if "secret" in volume]


@pytest.mark.parametrize("service", SERVICES)
def test_cert_manager_makes_what_grpc_takes(service: str) -> None:
    rendered = render("mtls")
    spec = rendered.one("Certificate", service)["spec"]
    (volume,) = [volume for volume in rendered.pod(service)["volumes"] if volume["name"] == "tls"]
    assert spec["secretName"] == volume["secret"]["secretName"]
    assert spec["privateKey"] == {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"}
    assert {"server auth", "client auth"} <= set(spec["usages"])
    assert spec["issuerRef"] == {"group": "cert-manager.io", "kind": "Issuer", "name": "draftwire-ca"}
    assert (spec["duration"], spec["renewBefore"]) == ("720h", "240h")
    public = ["prod-draftwire-gateway", "prod-draftwire-gateway.llm", "prod-draftwire-gateway.llm.svc"]
    own = [*public, "draftwire.example.com"] if service == "gateway" else []
    assert spec["dnsNames"] == ["draftwire.internal", *own]


def test_nobody_makes_certificates_unless_asked() -> None:
    assert not render("tp8").all("Certificate")


@pytest.mark.parametrize(("values", "shows"), [("tp8", False), ("mtls", True), ("cpu-demo", False)])
def test_test_pod_shows_no_more_than_it_has_to(values: str, shows: bool) -> None:
    (pod,) = render(values).all("Pod")
    environment = environment_of(container_of(pod["spec"]))
    assert ("DRAFTWIRE_TLS_KEY" in environment) is shows
    volumes = pod["spec"].get("volumes", [])
    assert bool(volumes) is (values != "cpu-demo")
    for volume in volumes:
        items = volume["secret"].get("items")
        assert items == (None if shows else [{"key": "ca.crt", "path": "ca.crt"}])

"""Certificates made on the spot."""

import socket
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NAME = "draftwire.internal"
"""What the certificates of all services carry, whatever their addresses."""
YESTERDAY = datetime.now(UTC) - timedelta(days=1)


def write_identity(
    folder: Path, ca: trustme.CA, name: str = NAME, not_after: datetime | None = None, role: str = ""
) -> dict[str, Path]:
    """Writes cert.pem, key.pem and ca.pem into a folder, in the place of older ones, and returns their options."""
    folder.mkdir(exist_ok=True)
    issued = ca.issue_cert(name, not_after=not_after)
    chain, key = b"".join(blob.bytes() for blob in issued.cert_chain_pems), issued.private_key_pem.bytes()
    if role:
        chain, key = _issue_with_role(ca, name, role)
    contents = {
        "cert": chain,
        "key": key,
        "ca": ca.cert_pem.bytes(),
    }
    for stem, content in contents.items():
        replace_file(folder / f"{stem}.pem", content)
    return {f"tls_{stem}": folder / f"{stem}.pem" for stem in contents}


def _issue_with_role(ca: trustme.CA, name: str, role: str) -> tuple[bytes, bytes]:
    """Returns a certificate with the URI of a role, which trustme does not make, and its key."""
    issuer = x509.load_pem_x509_certificate(ca.cert_pem.bytes())
    signer = serialization.load_pem_private_key(ca.private_key_pem.bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    names = [x509.DNSName(name), x509.UniformResourceIdentifier(f"urn:draftwire:role:{role}")]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, role)]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(YESTERDAY)
        .not_valid_after(YESTERDAY + timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(signer, hashes.SHA256())
    )
    form = serialization.PrivateFormat.TraditionalOpenSSL
    plain = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    return certificate.public_bytes(serialization.Encoding.PEM), plain


def replace_file(path: Path, content: bytes) -> None:
    """Puts a file in the place of another at once, as a careful administrator does."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(content)
    fresh.replace(path)


def certificate_of(address: str) -> str:
    """Returns the certificate that a server shows to a new connection, base64."""
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with socket.create_connection((host, int(port)), timeout=5) as plain, context.wrap_socket(plain) as secure:
        certificate = secure.getpeercert(binary_form=True)
    assert certificate is not None
    return _body(ssl.DER_cert_to_PEM_cert(certificate))


def first_certificate(path: Path) -> str:
    """Returns the first certificate in a PEM file, base64."""
    return _body(path.read_text())


def _body(pem: str) -> str:
    return pem.partition("-----END")[0].rpartition("-----")[2].replace("\n", "")

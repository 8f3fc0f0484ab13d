"""Certificates made on the spot."""

import socket
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

NAME = "draftwire.internal"
"""What the certificates of all services carry, whatever their addresses."""
YESTERDAY = datetime.now(UTC) - timedelta(days=1)


def write_identity(
    folder: Path, ca: trustme.CA, name: str = NAME, not_after: datetime | None = None
) -> dict[str, Path]:
    """Writes cert.pem, key.pem and ca.pem into a folder, in the place of older ones, and returns their options."""
    folder.mkdir(exist_ok=True)
    issued = ca.issue_cert(name, not_after=not_after)
    contents = {
        "cert": b"".join(blob.bytes() for blob in issued.cert_chain_pems),
        "key": issued.private_key_pem.bytes(),
        "ca": ca.cert_pem.bytes(),
    }
    for stem, content in contents.items():
        replace_file(folder / f"{stem}.pem", content)
    return {f"tls_{stem}": folder / f"{stem}.pem" for stem in contents}


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

"""When certificates expire, as metrics say it."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from cryptography import x509

from draftwire.runtime.certificates import expiries
from draftwire.runtime.metrics import ServiceMetrics
from draftwire.runtime.settings import TlsSettings
from draftwire.runtime.tls import expiries_of, watch_tls
from tests.certificates import write_identity

NEVER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""By RFC 5280 the expiry of a certificate that has none, written as another type of time than those before 2050."""


def library_says(pem: bytes) -> list[float]:
    return [one.not_valid_after_utc.timestamp() for one in x509.load_pem_x509_certificates(pem)]


@pytest.mark.parametrize(
    "not_after", [datetime(2049, 12, 31, 23, 59, 59, tzinfo=UTC), NEVER, datetime(2031, 5, 6, tzinfo=UTC)]
)
def test_expiry_is_what_the_library_reads(tmp_path: Path, not_after: datetime) -> None:
    ca = trustme.CA()
    files = write_identity(tmp_path, ca, not_after=not_after)
    chain = files["tls_cert"].read_bytes() + files["tls_ca"].read_bytes()
    assert expiries(b"a comment\n" + chain) == library_says(chain) != []
    assert expiries(chain)[0] == not_after.timestamp()


def test_what_cannot_be_read_is_left_out() -> None:
    pem = trustme.CA().cert_pem.bytes()
    broken = b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
    assert expiries(broken + pem) == library_says(pem)
    lines = pem.splitlines()
    for kept in range(1, len(lines)):
        expiries(b"\n".join([*lines[:kept], lines[-1]]))  # raises nothing
    assert expiries(b"") == expiries(b"\xff\x00") == []


def test_gauge_follows_the_files(tmp_path: Path) -> None:
    ca, now = trustme.CA(), datetime.now(UTC).replace(microsecond=0)
    files = watch_tls(TlsSettings(**write_identity(tmp_path, ca, not_after=now + timedelta(days=9))))
    metrics = ServiceMetrics()
    metrics.watch_certificates(lambda: expiries_of(files))

    def read(option: str) -> float | None:
        name = "draftwire:certificate_expiry_timestamp_seconds"
        return metrics.registry.get_sample_value(name, {"option": option})

    assert read("tls_cert") == (now + timedelta(days=9)).timestamp()
    assert read("tls_ca") == library_says(ca.cert_pem.bytes())[0]
    write_identity(tmp_path, ca, not_after=now + timedelta(days=90))
    assert read("tls_cert") == (now + timedelta(days=90)).timestamp()


def test_of_a_chain_the_first_and_of_issuers_the_last_expiry_counts(tmp_path: Path) -> None:
    ca, other, now = trustme.CA(), trustme.CA(), datetime.now(UTC).replace(microsecond=0)
    soon, late = (write_identity(tmp_path / str(days), ca, not_after=now + timedelta(days=days)) for days in (9, 90))
    both = late["tls_cert"].read_bytes() + soon["tls_cert"].read_bytes()
    late["tls_cert"].write_bytes(both)
    late["tls_ca"].write_bytes(soon["tls_cert"].read_bytes() + other.cert_pem.bytes())
    files = watch_tls(TlsSettings(**late))
    assert expiries_of(files)["tls_cert"] == (now + timedelta(days=9)).timestamp()
    assert expiries_of(files)["tls_ca"] == library_says(other.cert_pem.bytes())[0]


def test_without_tls_there_is_none() -> None:
    assert expiries_of(watch_tls(TlsSettings())) == {}

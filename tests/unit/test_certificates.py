"""When certificates expire, as metrics say it."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography import x509
from structlog.testing import capture_logs

from draftwire.runtime.certificates import AGAIN_SECONDS, ExpiryLog, Validity, validities
from draftwire.runtime.metrics import ServiceMetrics
from draftwire.runtime.settings import TlsSettings
from draftwire.runtime.tls import expiries_of, watch_tls
from tests.certificates import write_identity

NEVER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""By RFC 5280 the expiry of a certificate that has none, written as another type of time than those before 2050."""


def library_reads(pem: bytes) -> list[Validity]:
    certificates = x509.load_pem_x509_certificates(pem)
    return [Validity(one.not_valid_before_utc.timestamp(), one.not_valid_after_utc.timestamp()) for one in certificates]


def library_says(pem: bytes) -> list[float]:
    return [one.end for one in library_reads(pem)]


@pytest.mark.parametrize(
    "not_after", [datetime(2049, 12, 31, 23, 59, 59, tzinfo=UTC), NEVER, datetime(2031, 5, 6, tzinfo=UTC)]
)
def test_expiry_is_what_the_library_reads(tmp_path: Path, not_after: datetime) -> None:
    ca = trustme.CA()
    files = write_identity(tmp_path, ca, not_after=not_after)
    chain = files["tls_cert"].read_bytes() + files["tls_ca"].read_bytes()
    assert validities(b"a comment\n" + chain) == library_reads(chain) != []
    assert validities(chain)[0].end == not_after.timestamp()


def test_what_cannot_be_read_is_left_out() -> None:
    pem = trustme.CA().cert_pem.bytes()
    broken = b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
    assert validities(broken + pem) == library_reads(pem)
    lines = pem.splitlines()
    for kept in range(1, len(lines)):
        validities(b"\n".join([*lines[:kept], lines[-1]]))  # raises nothing
    assert validities(b"") == validities(b"\xff\x00") == []


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


DAY = 86_400.0


def logged(lines: list[Any]) -> list[tuple[str, str, str]]:
    return [(line["log_level"], line["event"], line["option"]) for line in lines]


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        (timedelta(days=31), []),
        (timedelta(days=29), [("warning", "tls.certificate_expires", "tls_cert")]),
        (timedelta(seconds=-5), [("error", "tls.certificate_expired", "tls_cert")]),
    ],
    ids=["later", "soon", "over"],
)
def test_expiry_is_logged_at_the_start_and_when_files_are_read_again(
    tmp_path: Path, left: timedelta, expected: list[Any]
) -> None:
    ca, now = trustme.CA(), datetime.now(UTC)
    with capture_logs() as lines:
        files = watch_tls(TlsSettings(**write_identity(tmp_path, ca, not_after=now + left)))
        assert files is not None
        assert logged(lines) == expected
        for _ in range(3):
            files.current()
        assert logged(lines) == expected, "not at every handshake"
        write_identity(tmp_path, ca, not_after=now + timedelta(days=90))
        files.current()
        assert logged(lines[len(expected) + 1 :]) == []
        write_identity(tmp_path, ca, not_after=now + left)
        files.current()
    assert logged(lines[len(expected) + 2 :]) == expected


def test_expiry_of_running_services_is_logged_when_it_comes_and_every_day() -> None:
    now, validity = 0.0, Validity(0.0, 90 * DAY)
    expiry_log = ExpiryLog(lambda: now)
    found = []
    for _ in range(92 * 4):
        now += AGAIN_SECONDS / 4
        with capture_logs() as lines:
            expiry_log.check({"tls_ca": validity})
        found += [(now / DAY, line["log_level"]) for line in lines]
    assert found[:2] == [(60.0, "warning"), (61.0, "warning")]
    assert found[-3:] == [(90.0, "error"), (91.0, "error"), (92.0, "error")]
    assert len(found) == 33


def test_short_lived_certificates_are_warned_of_late() -> None:
    """Those of the chart live thirty days, and are renewed ten days before their end."""
    assert Validity(0.0, 30 * DAY).warned_from == 20 * DAY
    assert Validity(0.0, 365 * DAY).warned_from == 335 * DAY

"""Certificates for tests, and a Postgres that lets nobody in without them."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cdc_assets.embedded.binaries import own, server_user
from cdc_assets.embedded.postgres import EmbeddedPostgres

ROLE = "cdc"
TlsServer = Callable[[], str]
"""Starts the server if need be; the DSN of ``ROLE``, with its certificate."""


@dataclass(frozen=True, slots=True)
class Issued:
    """Files of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """A certificate authority of the test's own, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        folder.chmod(0o755)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, folder.name)])
        made = self._builder(self._name, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.root = folder / "root.crt"
        self.root.write_bytes(
            made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        )

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=30))
        )

    def issue(self, name: str, *hosts: str) -> Issued:
        """A certificate whose common name is ``name``."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key)
        if hosts:
            alternatives = [_general(host) for host in hosts]
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), False)
        made = Issued(self._folder / f"{name}.crt", self._folder / f"{name}.pem")
        made.certificate.write_bytes(
            builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        )
        made.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        made.key.chmod(0o600)
        return made


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


@contextmanager
def tls_server(folder: Path, bindir: Path, authority: Authority) -> Iterator[TlsServer]:
    """A server whose role ``cdc`` needs TLS, its password and its certificate.

    Its own certificate is for the name localhost only.
    """
    issued = authority.issue("server", "localhost")
    own(issued.key, server_user())
    rules = folder / "pg_hba.conf"
    rules.write_text(
        f"hostssl all {ROLE} 127.0.0.1/32 scram-sha-256 clientcert=verify-full\n"
        "host all postgres 127.0.0.1/32 scram-sha-256\n"
    )
    rules.chmod(0o644)
    settings = {
        "ssl": "on",
        "ssl_cert_file": str(issued.certificate),
        "ssl_key_file": str(issued.key),
        "ssl_ca_file": str(authority.root),
        "hba_file": str(rules),
        "fsync": "off",
    }
    mine = authority.issue(ROLE)
    with EmbeddedPostgres(folder / "pg", 15, bindir, settings) as server:

        def start() -> str:
            return make_conninfo(
                "",
                host="localhost",
                port=conninfo_to_dict(server.start())["port"],
                user=ROLE,
                password="p",
                dbname="postgres",
                sslmode="verify-full",
                sslrootcert=str(authority.root),
                sslcert=str(mine.certificate),
                sslkey=str(mine.key),
            )

        with psycopg.connect(server.start(), autocommit=True) as admin:
            admin.execute(f"create role {ROLE} superuser login password 'p'".encode())
        yield start

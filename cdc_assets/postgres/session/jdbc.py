"""A DSN's connection for PostgreSQL's JDBC driver, which isn't libpq.

Each parameter of libpq is decided here: it has a counterpart, means nothing to this driver, or is
refused, for some values or for all. An undecided one is refused, too: no demand of a DSN is dropped
in silence. Names of the driver's properties are those of its version 42.7.11.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from cdc_assets.errors import ConfigurationError
from cdc_assets.postgres.session.parameters import ROOT_CERTIFICATES, sslmode

# Carried along with the same values.
SAME: Mapping[str, str] = {
    "user": "user",
    "password": "password",
    "options": "options",
    "channel_binding": "channelBinding",
    "sslnegotiation": "sslNegotiation",
    "gssencmode": "gssEncMode",
    "gsslib": "gsslib",
    "krbsrvname": "kerberosServerName",
}
# Put into the address, or decided together.
PLACE = frozenset({"host", "port", "dbname"})
TLS = frozenset({"sslmode", "sslrootcert", "sslcert", "sslkey", "sslpassword"})
# They may be left out, because …
HARMLESS: Mapping[str, str] = {
    "connect_timeout": "the driver has its own: 10 s",
    "client_encoding": "the driver speaks UTF-8, whatever is asked for",
    "application_name": "a name for people",
    "fallback_application_name": "a name for people",
    "keepalives": "when a dead peer is noticed",
    "keepalives_idle": "when a dead peer is noticed",
    "keepalives_interval": "when a dead peer is noticed",
    "keepalives_count": "when a dead peer is noticed",
    "tcp_user_timeout": "when a dead peer is noticed",
    "sslcompression": "libpq ignores it, too: nobody compresses",
    "requirepeer": "of unix sockets, which the driver doesn't have",
    "sslkeylogfile": "libpq writes its own keys there; the driver writes none",
}
# The driver's properties for these values; every other value is refused.
VALUES: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    # Java disables TLS 1.1 and older ones, and speaks up to 1.3.
    "ssl_min_protocol_version": {"TLSv1": {}, "TLSv1.1": {}, "TLSv1.2": {}},
    "ssl_max_protocol_version": {"TLSv1.3": {}},
    # The driver speaks 3.0.
    "min_protocol_version": {"3.0": {}},
    "max_protocol_version": {"3.0": {}, "3.2": {}, "latest": {}},
    "sslcertmode": {"allow": {}},
    "sslsni": {"1": {}},
    "gssdelegation": {"0": {}},
    "target_session_attrs": {
        "any": {},
        "read-write": {"targetServerType": "primary"},
        "primary": {"targetServerType": "primary"},
    },
    "load_balance_hosts": {"disable": {}, "random": {"loadBalanceHosts": "true"}},
    "require_auth": {},  # and what _AUTHENTICATION matches
}
# Why not, and what to do instead.
REFUSED: Mapping[str, str] = {
    "hostaddr": "it connects by a host's name only; write the address as host",
    "service": "it reads no service files; write into the DSN what the service has",
    "passfile": "it reads no password from there; write password=${…}",
    "sslcrl": "it reads no revocation lists",
    "sslcrldir": "it reads no revocation lists",
    "ssl_min_protocol_version": "it can't be held to TLS 1.3; set ssl_min_protocol_version at the"
    " server, where it holds for everybody",
    "ssl_max_protocol_version": "it takes the newest version that both know",
    "min_protocol_version": "it speaks version 3.0 only",
    "max_protocol_version": "it speaks version 3.0 only",
    "sslcertmode": "it sends the certificate when the server asks; leave out sslcert for disable,"
    " and have pg_hba.conf demand it (clientcert) for require",
    "sslsni": "it always sends the host's name",
    "gssdelegation": "it delegates no credentials",
    "target_session_attrs": "the catalog is written to: primary or read-write",
    "load_balance_hosts": "it knows disable and random",
    "require_auth": "it knows the methods password, md5, gss, sspi, scram-sha-256 and none",
    "replication": "the catalog takes ordinary sessions",
    "scram_client_key": "it takes a password only",
    "scram_server_key": "it takes a password only",
    "oauth_issuer": "it knows no OAuth",
    "oauth_client_id": "it knows no OAuth",
    "oauth_client_secret": "it knows no OAuth",
    "oauth_scope": "it knows no OAuth",
}
_AUTHENTICATION = re.compile(r"\s*!?(password|md5|gss|sspi|scram-sha-256|none)\s*")
_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+")


def jdbc(params: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """The driver's address and properties for libpq's parameters; the password is a property.

    Files of certificates have to be on Spark's machine. Raises ConfigurationError for a parameter
    that the driver can't honour.
    """
    given = {key: value for key, value in params.items() if value}
    properties = _tls(given)
    for key, value in given.items():
        if key in SAME:
            properties[SAME[key]] = value
        elif key in VALUES:
            properties |= _of_value(key, value)
        elif key == "passfile" and "password" in given:
            pass  # libpq doesn't look into it then
        elif key not in PLACE | TLS and key not in HARMLESS:
            raise refused(key)
    return f"jdbc:postgresql://{_hosts(given)}/{quote(_database(given), safe='')}", properties


def refused(key: str, why: str = "") -> ConfigurationError:
    """The error for a parameter that the driver can't honour, with the way out."""
    reason = why or REFUSED.get(key, "it is newer than this program")
    return ConfigurationError(
        f"{key} can't be had of Spark's connection to the SQL catalog, which is by JDBC: {reason}.",
        f"Take {key} (or PG{key.upper().replace('_', '')}) out of the address of the catalog alone:"
        " state.postgres_url or lake.catalog.uri; postgres.dsn may keep it.",
    )


def _of_value(key: str, value: str) -> Mapping[str, str]:
    if key == "require_auth" and all(_AUTHENTICATION.fullmatch(m) for m in value.split(",")):
        return {"requireAuth": value}
    found = {known.lower(): meant for known, meant in VALUES[key].items()}.get(value.lower())
    if found is None:
        raise refused(key)
    return found


def _database(given: Mapping[str, str]) -> str:
    return given.get("dbname") or given.get("user") or ""


def _hosts(given: Mapping[str, str]) -> str:
    names = given.get("host", "localhost").split(",")
    ports = given.get("port", "").split(",")
    if len(ports) == 1:
        ports *= len(names)
    if len(ports) != len(names):
        raise ConfigurationError(
            f"the SQL catalog's address has {len(names)} hosts and {len(ports)} ports.",
            "Give one port for all hosts, or one for each.",
        )
    return ",".join(_host(name, port) for name, port in zip(names, ports, strict=True))


def _host(name: str, port: str) -> str:
    if not name or name.startswith(("/", "@")):
        raise ConfigurationError(
            "the SQL catalog can't be reached over a unix socket: JDBC has none.",
            "Set lake.catalog.uri to the database's TCP address.",
        )
    if not _HOST.fullmatch(name):  # it might end the address, and begin properties
        raise refused("host", "it doesn't take such a name")
    return f"{f'[{name}]' if ':' in name else name}:{port or 5432}"


def _tls(given: Mapping[str, str]) -> dict[str, str]:
    mode, root = sslmode(given), given.get("sslrootcert")
    found = {key: given[key] for key in ("sslcert", "sslkey", "sslpassword") if key in given}
    if "sslmode" in given or root is not None or mode != "prefer":
        found["sslmode"] = mode
    if "sslkey" in given:
        found |= jdbc_key(given["sslkey"])
        if "sslpassword" in given and given["sslkey"].endswith(".pem"):
            raise refused("sslpassword", "it reads encrypted keys in DER (*.pk8) only")
    if root == "system":
        if "sslcert" in given:
            raise refused("sslrootcert", "with system it sends no sslcert; name the file")
        found["sslfactory"] = "org.postgresql.ssl.DefaultJavaSSLFactory"
    elif root is not None:
        found["sslrootcert"] = root
    elif mode == "verify-ca" and given.get("sslmode") == "require":
        found["sslrootcert"] = str(Path(ROOT_CERTIFICATES).expanduser())
    return found


# The algorithm of an elliptic curve's key, at the beginning of a PKCS-8 file.
_EC = bytes.fromhex("2a8648ce3d0201")


def jdbc_key(path: str) -> dict[str, str]:
    """The parameters by which the JDBC driver reads the key file that libpq reads, too.

    Raises ConfigurationError for a name by which the driver doesn't recognise the format.
    """
    if not path.endswith((".pem", ".pk8")):
        raise ConfigurationError(
            f"the key {path} (sslkey) can't be read by Spark: the JDBC driver goes by the name.",
            "Name it *.pem (PKCS-8: openssl pkcs8 -topk8 -nocrypt), the same on Spark's machines.",
        )
    if path.endswith(".pem"):
        try:
            text = Path(path).read_text(encoding="ascii")
            lines = [line for line in text.splitlines() if line and not line.startswith("-----")]
            if _EC in base64.b64decode("".join(lines))[:40]:
                return {"sslkey": path, "pemKeyAlgorithm": "EC"}
        except (OSError, UnicodeDecodeError, binascii.Error):
            pass  # libpq reports what is wrong with it
    return {"sslkey": path}

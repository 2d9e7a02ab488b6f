"""A folder with a certificate authority and the certificates that it issues: begin one, issue, renew, replace the authority.

    ca.pem           the authorities that processes trust, one or two
    ca.key           private key of the authority that issues
    ca.next.key      private key of the next authority, while it replaces the present one
    trainer.pem      certificate of one process, and trainer.key
    principals.toml  who may call what, known by certificate

Who has ca.key can pose as any process. A process needs ca.pem, and its own certificate and key. Authorities are told apart by their keys, so
the folder holds no other state. Private keys have mode 0600. Files are replaced in one step, so that running processes may read them at
any moment (`sluice.rpc.from_files`).
"""

from __future__ import annotations

import ipaddress
import re
import secrets
import shutil
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import tomli_w
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from sluice.config import ConfigError
from sluice.rpc.principals import NAME, Role, locked_folder, replace_files

AUTHORITIES, SIGNING_KEY, NEXT_KEY, PRINCIPALS = "ca.pem", "ca.key", "ca.next.key", "principals.toml"

ROLES_OF: dict[str, Role | None] = {
    "agents": "agent",
    "envserver": None,
    "gateway": "gateway",
    "operator": "admin",
    "orchestrator": "admin",
    "rollout": "replica",
    "trainer": "trainer",
    "weightsync": "trainer",
}
"""The processes that get a certificate, and the roles in which they call others; `operator` is for commands. A weight service calls
others as a relay, and an environment server calls nobody."""

LEAF_DAYS = 7.0
AUTHORITY_DAYS = 3650.0

ONCE_DAYS = 400.0
"""Life of certificates that cannot be renewed: longer than one start of a run lasts."""

RENEW_AT = 2 / 3
"""Fraction of a certificate's life after which it is renewed. A daily job may fail twice before a certificate of one week expires."""

_SLACK = timedelta(minutes=5)
"""Certificates are valid from this long before their issue, for machines whose clock is behind."""

_DOMAIN = re.compile(r"[a-z0-9][a-z0-9._-]{0,254}")


@dataclass(frozen=True, slots=True)
class Leaf:
    """A certificate of a process.

    Attributes:
        name: Its common name, and the name of its files.
        hosts: Host names and addresses that it is valid for.
        uri: URI by which principals know it; empty without one.
        begins: When its validity begins.
        expires: When its validity ends.
        issuer: Name of the authority that issued it.
    """

    name: str
    hosts: tuple[str, ...]
    uri: str
    begins: datetime
    expires: datetime
    issuer: str

    def is_due(self, now: datetime) -> bool:
        """Return whether it should be renewed."""
        return now >= self.begins + (self.expires - self.begins) * RENEW_AT


def begin(directory: Path, hosts: Sequence[str], *, domain: str, days: float, now: datetime) -> list[Leaf]:
    """Make a folder with an authority, a certificate for each kind of process, and a principals file that lists these.

    Args:
        directory: The folder; it is made if it does not exist.
        hosts: Host names and addresses, besides `usual_hosts`, that all certificates are valid for.
        domain: First part of the URIs: ``spiffe://DOMAIN/trainer``.
        days: Life of the certificates.
        now: The present time.

    Raises:
        ConfigError: if the folder has an authority already, or cannot be written to.
    """
    if not _DOMAIN.fullmatch(domain):
        raise ConfigError(f"the trust domain {domain!r} must be lower-case letters, digits, `.`, `_` and `-`")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {directory}: {error.strerror}") from error
    with locked_folder(directory):
        for name in (AUTHORITIES, SIGNING_KEY, PRINCIPALS):
            _refuse_existing(directory / name)
        key, authority = _new_authority(now)
        _write(
            {
                directory / SIGNING_KEY: (_key_pem(key), 0o600),
                directory / AUTHORITIES: (_pem([authority]), 0o644),
                directory / PRINCIPALS: (_principals(domain), 0o644),
            }
        )
    return [
        issue(directory, name, [*usual_hosts(name), *hosts], uri=_uri(domain, name), days=days, now=now)
        for name in ROLES_OF
    ]


def issue_once(directory: Path, hosts: Sequence[str], now: datetime) -> None:
    """Make a folder as `begin` does, for one start of a run, and replace an existing one. Its authority's key is not kept.

    Raises:
        ConfigError: if the folder cannot be written to.
    """
    shutil.rmtree(directory, ignore_errors=True)
    begin(directory, hosts, domain="sluice", days=ONCE_DAYS, now=now)
    (directory / SIGNING_KEY).unlink()


def usual_hosts(name: str) -> list[str]:
    """Return the names of a process on its own machine, and its host name under compose, which is the name of the service."""
    return ["localhost", "127.0.0.1", "::1", name, socket.gethostname()]


def issue(
    directory: Path,
    name: str,
    hosts: Sequence[str],
    *,
    uri: str = "",
    days: float = LEAF_DAYS,
    now: datetime,
    overwrite: bool = False,
) -> Leaf:
    """Issue a certificate with a new key.

    Args:
        directory: The folder.
        name: Common name, and the name of the two files.
        hosts: Host names and addresses that it is valid for.
        uri: URI by which principals know it.
        days: Its life.
        now: The present time.
        overwrite: Whether to replace a certificate of that name.

    Raises:
        ConfigError: if it exists and `overwrite` is False, a host is neither a name nor an address, or the folder has no authority.
    """
    if not re.fullmatch(NAME, name) or name in {"ca", "ca.next"}:
        raise ConfigError(
            f"a certificate cannot be called {name!r}: use lower-case letters, digits, `.`, `_`, `-`; not `ca`"
        )
    with locked_folder(directory):
        for path in _paths(directory, name):
            if not overwrite:
                _refuse_existing(path)
        _issue(directory, name, [_general(host) for host in hosts], uri=uri, life=timedelta(days=days), now=now)
    return read_leaf(_paths(directory, name)[0])


def renew(directory: Path, now: datetime, *, every: bool = False) -> list[Leaf]:
    """Issue certificates again, with new keys and the same names and length of life, by the authority that issues at present.

    Args:
        directory: The folder.
        now: The present time.
        every: Whether to renew certificates that are not due, too.

    Returns:
        The renewed certificates.

    Raises:
        ConfigError: if a file cannot be used.
    """
    with locked_folder(directory):
        return _renew(directory, now, every=every)


def leaves(directory: Path) -> list[Leaf]:
    """Return the certificates of a folder, by name.

    Raises:
        ConfigError: if one cannot be read.
    """
    found = sorted(path for path in directory.glob("*.pem") if path.name != AUTHORITIES)
    return [read_leaf(path) for path in found]


def read_leaf(path: Path) -> Leaf:
    """Read the first certificate of a file.

    Raises:
        ConfigError: if it cannot be read or holds no certificate.
    """
    certificate = _read_certificates(path)[0]
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    addresses = map(str, names.get_values_for_type(x509.IPAddress))
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    return Leaf(
        name=_common_name(certificate.subject) or path.stem,
        hosts=(*names.get_values_for_type(x509.DNSName), *addresses),
        uri=uris[0] if uris else "",
        begins=certificate.not_valid_before_utc,
        expires=certificate.not_valid_after_utc,
        issuer=_common_name(certificate.issuer),
    )


def authorities(directory: Path) -> list[tuple[str, datetime]]:
    """Return name and expiry of each authority that processes trust."""
    found = _read_certificates(directory / AUTHORITIES)
    return [(_common_name(each.subject), each.not_valid_after_utc) for each in found]


def add_authority(directory: Path, now: datetime) -> str:
    """Make the next authority, so that processes trust both. The present authority still issues.

    Returns:
        Name of the new authority.

    Raises:
        ConfigError: if the folder has a next authority already.
    """
    with locked_folder(directory):
        present = _authorities(directory)
        if (directory / NEXT_KEY).exists():
            raise ConfigError(
                f"{directory / NEXT_KEY} exists: an authority is being replaced; `authority use` is the next step"
            )
        if len(present) > 1:
            raise ConfigError(f"{directory / AUTHORITIES} has an old authority: remove it first with `authority drop`")
        key, authority = _new_authority(now)
        _write(
            {
                directory / NEXT_KEY: (_key_pem(key), 0o600),
                directory / AUTHORITIES: (_pem([*present, authority]), 0o644),
            }
        )
        return _common_name(authority.subject)


def use_authority(directory: Path, now: datetime) -> list[Leaf]:
    """Let the next authority issue, and have it renew all certificates. Every process must trust it by now.

    Returns:
        The renewed certificates.

    Raises:
        ConfigError: if there is no next authority.
    """
    with locked_folder(directory):
        following = directory / NEXT_KEY
        if not following.exists():
            raise ConfigError(f"there is no {following}: make the next authority with `authority add` first")
        following.replace(directory / SIGNING_KEY)
        return _renew(directory, now, every=True)


def drop_authority(directory: Path) -> list[str]:
    """Trust only the authority that issues. By now every process must show a certificate that this authority issued.

    Returns:
        Names of the authorities that were removed.

    Raises:
        ConfigError: if the next authority is not in use yet, or another authority issued a certificate of the folder.
    """
    with locked_folder(directory):
        if (directory / NEXT_KEY).exists():
            raise ConfigError("the next authority does not issue yet: `authority use` comes first")
        issuing, *others = _authorities(directory)
        behind = [each.name for each in leaves(directory) if each.issuer != _common_name(issuing.subject)]
        if behind:
            raise ConfigError(
                f"{', '.join(behind)} would be refused, being issued by an authority that is to go: `sluice certs renew --all` first"
            )
        _write({directory / AUTHORITIES: (_pem([issuing]), 0o644)})
        return [_common_name(each.subject) for each in others]


def _renew(directory: Path, now: datetime, *, every: bool) -> list[Leaf]:
    renewed = []
    for path in sorted(directory.glob("*.pem")):
        if path.name == AUTHORITIES:
            continue
        leaf = read_leaf(path)
        if every or leaf.is_due(now):
            life = leaf.expires - leaf.begins - _SLACK
            _issue(directory, path.stem, [_general(host) for host in leaf.hosts], uri=leaf.uri, life=life, now=now)
            renewed.append(read_leaf(path))
    return renewed


def _issue(
    directory: Path, name: str, hosts: Sequence[x509.GeneralName], *, uri: str, life: timedelta, now: datetime
) -> None:
    authority = _authorities(directory)[0]
    signing = _read_key(directory / SIGNING_KEY)
    key = ec.generate_private_key(ec.SECP256R1())
    names = [*dict.fromkeys(hosts), *([x509.UniformResourceIdentifier(uri)] if uri else [])]
    uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    certificate = (
        _builder(name, authority.subject, key.public_key(), now, min(now + life, authority.not_valid_after_utc))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(uses, critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False)
        .sign(signing, hashes.SHA256())
    )
    certificate_path, key_path = _paths(directory, name)
    # Replace both at once: a process that reads a new key with the old certificate, or the reverse, cannot use them.
    _write({key_path: (_key_pem(key), 0o600), certificate_path: (_pem([certificate]), 0o644)})


def _new_authority(now: datetime) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = f"sluice authority {now:%Y-%m-%d} {secrets.token_hex(4)}"
    certificate = (
        _builder(name, _subject(name), key.public_key(), now, now + timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return key, certificate


def _builder(
    name: str, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_subject(name))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SLACK)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _authorities(directory: Path) -> list[x509.Certificate]:
    """Return the trusted authorities, the one that issues first.

    Raises:
        ConfigError: if the signing key belongs to none of them.
    """
    found = _read_certificates(directory / AUTHORITIES)
    signing = _read_key(directory / SIGNING_KEY).public_key()
    issuing = [each for each in found if each.public_key() == signing]
    if not issuing:
        raise ConfigError(
            f"{directory / SIGNING_KEY} belongs to no authority in {directory / AUTHORITIES}: restore them"
        )
    return [*issuing, *(each for each in found if each not in issuing)]


def _read_certificates(path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; `sluice certs init` begins a folder") from error
    except ValueError as error:
        raise ConfigError(f"{path} holds no certificate in PEM: {error}") from error


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; certificates are issued where the authority's key is"
        ) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path} holds no private key in PEM without a password") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path} holds a key of another kind than `sluice certs` makes (elliptic curve P-256)")
    return key


def _paths(directory: Path, name: str) -> tuple[Path, Path]:
    return directory / f"{name}.pem", directory / f"{name}.key"


def _refuse_existing(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise ConfigError(
            f"{path} exists: choose another folder or name, or replace it on purpose with --overwrite where there is that flag"
        )


def _write(contents: Mapping[Path, tuple[bytes, int]]) -> None:
    try:
        replace_files(contents)
    except OSError as error:
        raise ConfigError(f"cannot write {' and '.join(map(str, contents))}: {error.strerror}") from error


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _pem(certificates: Collection[x509.Certificate]) -> bytes:
    return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in certificates)


def _subject(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _common_name(name: x509.Name) -> str:
    found = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if found else ""


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host.encode("idna").decode() if not host.isascii() else host)
    except (UnicodeError, ValueError) as error:
        raise ConfigError(f"{host!r} is no host name and no address") from error


def _uri(domain: str, name: str) -> str:
    return f"spiffe://{domain}/{name}"


def _principals(domain: str) -> bytes:
    tables = [
        "[[principal]]\n" + tomli_w.dumps({"name": name, "role": role, "certificate": _uri(domain, name)})
        for name, role in ROLES_OF.items()
        if role is not None
    ]
    return "\n".join(tables).encode()


def now_utc() -> datetime:
    """Return the time from which certificates are valid."""
    return datetime.now(UTC)

"""An authority and certificates that it signed, made for one test."""

from __future__ import annotations

import datetime as dt
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """Signs certificates for 127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = _name("test authority")
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        certificate = _builder(self.name, self.name, self.key).add_extension(constraints, critical=True)
        self.path = folder / "ca.pem"
        self.path.write_bytes(_pem(certificate.sign(self.key, hashes.SHA256())))

    def issue(
        self,
        name: str,
        uri: str | None = None,
        *,
        address: str | Sequence[str] = "127.0.0.1",
        hosts: Sequence[str] = (),
        days: int = 1,
    ) -> tuple[Path, Path]:
        """Certificate and key files, valid for addresses, hosts and so many days; `uri` is one of its alternative names."""
        key = ec.generate_private_key(ec.SECP256R1())
        addresses = [address] if isinstance(address, str) else address
        names: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address(each)) for each in addresses]
        names += [] if uri is None else [x509.UniformResourceIdentifier(uri)]
        names += map(x509.DNSName, hosts)
        alternatives = x509.SubjectAlternativeName(names)
        certificate = _builder(_name(name), self.name, key, days).add_extension(alternatives, critical=False)
        certificate_path, key_path = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        certificate_path.write_bytes(_pem(certificate.sign(self.key, hashes.SHA256())))
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return certificate_path, key_path


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int = 1
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=9))
        .not_valid_after(now + dt.timedelta(days=days))
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)

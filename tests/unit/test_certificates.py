"""`sluice certs`: a folder of certificates is begun, renewed, and its authority replaced in three steps."""

from __future__ import annotations

import json
import stat
from datetime import timedelta
from pathlib import Path

import pytest

from sluice import certificates
from sluice.certificates import ROLES_OF
from sluice.cli import certs
from sluice.config import ConfigError, SecurityConfig, load_run
from sluice.doctor.settings import handshake_problem
from sluice.rpc.access import Access
from sluice.rpc.principals import add_token, read_principals

NOW = certificates.now_utc()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    directory = tmp_path / "certs"
    assert certs.run(["init", "--dir", str(directory), "--host", "train.example.org", "--host", "10.1.2.3"]) == 0
    return directory


def problem(folder: Path, name: str, trusted: Path | None = None) -> str:
    return handshake_problem(folder / f"{name}.pem", folder / f"{name}.key", trusted or folder / "ca.pem")


def test_every_service_and_the_operator_get_a_certificate_that_the_authority_vouches_for(folder: Path) -> None:
    assert {leaf.name for leaf in certificates.leaves(folder)} == set(ROLES_OF)
    for leaf in certificates.leaves(folder):
        assert problem(folder, leaf.name) == ""
        assert {"localhost", "127.0.0.1", "::1", leaf.name, "train.example.org", "10.1.2.3"} <= set(leaf.hosts)
        assert leaf.uri == f"spiffe://sluice/{leaf.name}"
        assert leaf.expires - certificates.now_utc() < timedelta(days=7, minutes=5)


def test_private_keys_can_be_read_by_their_owner_alone(folder: Path) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert {mode for name, mode in modes.items() if name.endswith(".key")} == {0o600}
    assert {mode for name, mode in modes.items() if name.endswith(".pem")} == {0o644}
    certs.run(["renew", "--all", "--dir", str(folder)])
    assert stat.S_IMODE((folder / "trainer.key").stat().st_mode) == 0o600


def test_nothing_is_overwritten_unless_that_is_asked_for(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for words in (["init"], ["issue", "trainer"]):
        with pytest.raises(ConfigError, match="exists"):
            certs.run([*words, "--dir", str(folder)])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    certs.run(["issue", "trainer", "--overwrite", "--uri", "spiffe://sluice/trainer", "--dir", str(folder)])
    assert (folder / "trainer.pem").read_bytes() != before["trainer.pem"]
    assert (folder / "rollout.pem").read_bytes() == before["rollout.pem"]


@pytest.mark.parametrize("name", ["../x", "ca", "ca.next", "Upper", ""])
def test_a_certificate_cannot_have_the_name_of_another_file(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be called"):
        certs.run(["issue", name, "--dir", str(folder)])


def test_one_is_renewed_when_two_thirds_of_its_life_are_over(folder: Path) -> None:
    certs.run(["issue", "longer", "--days", "30", "--host", "gpu-7", "--dir", str(folder)])
    old = (folder / "trainer.pem").read_bytes()
    assert certificates.renew(folder, NOW + timedelta(days=4)) == []
    renewed = certificates.renew(folder, NOW + timedelta(days=5))
    assert {leaf.name for leaf in renewed} == set(ROLES_OF)
    assert (folder / "trainer.pem").read_bytes() != old
    longer = {leaf.name: leaf for leaf in certificates.renew(folder, NOW + timedelta(days=22))}["longer"]
    assert (longer.name, "gpu-7" in longer.hosts, longer.uri) == ("longer", True, "")
    assert (
        timedelta(days=30) - timedelta(seconds=2) <= longer.expires - (NOW + timedelta(days=22)) <= timedelta(days=30)
    )


def test_the_list_says_what_expires_and_fails_if_something_has(folder: Path, monkeypatch, capsys) -> None:
    assert certs.run(["list", "--dir", str(folder)]) == 0
    assert "spiffe://sluice/trainer" in capsys.readouterr().out
    monkeypatch.setattr(certificates, "now_utc", lambda: NOW + timedelta(days=8))
    assert certs.run(["list", "--dir", str(folder)]) == 1
    assert "expired, renew" in capsys.readouterr().out
    (folder / "ca.key").unlink()
    assert certs.run(["list", "--json", "--dir", str(folder)]) == 1
    assert {each["name"] for each in json.loads(capsys.readouterr().out)} == set(ROLES_OF)


def test_the_authority_is_replaced_in_three_steps_in_this_order_alone(folder: Path, tmp_path: Path) -> None:
    step = lambda word: certs.run(["authority", word, "--dir", str(folder)])  # noqa: E731 - a name for one step
    first, both = tmp_path / "first.pem", tmp_path / "both.pem"
    first.write_bytes((folder / "ca.pem").read_bytes())
    with pytest.raises(ConfigError, match="`authority add` first"):
        step("use")

    step("add")
    both.write_bytes((folder / "ca.pem").read_bytes())
    with pytest.raises(ConfigError, match="`authority use` is the next step"):
        step("add")
    with pytest.raises(ConfigError, match="`authority use` comes first"):
        step("drop")
    certs.run(["renew", "--all", "--dir", str(folder)])
    assert problem(folder, "trainer", first) == "", (
        "a daily renewal must not use the next authority before all trust it"
    )

    step("use")
    assert problem(folder, "trainer", both) == ""
    assert problem(folder, "trainer", first) != ""
    with pytest.raises(ConfigError, match="`authority drop`"):
        step("add")

    step("drop")
    assert problem(folder, "trainer") == ""
    assert len(certificates.authorities(folder)) == 1
    step("add")


def test_an_old_certificate_keeps_its_authority_from_being_dropped(folder: Path) -> None:
    old = (folder / "trainer.pem").read_bytes()
    certificates.add_authority(folder, NOW)
    certificates.use_authority(folder, NOW)
    (folder / "trainer.pem").write_bytes(old)
    with pytest.raises(ConfigError, match="trainer would be refused"):
        certificates.drop_authority(folder)


def test_the_principals_have_the_roles_of_their_services_and_take_tokens_too(folder: Path) -> None:
    entries = {entry.certificate: entry.role for entry in read_principals(folder / "principals.toml")}
    assert entries == {f"spiffe://sluice/{name}": role for name, role in ROLES_OF.items() if role is not None}
    add_token(folder / "principals.toml", "agent-7", "agent")
    assert not Access(SecurityConfig(certs_dir=folder)).open


# `security.certs_dir`.


def test_each_process_shows_the_certificate_of_its_service_and_commands_that_of_the_operator(folder: Path) -> None:
    words = ["--security.certs-dir", str(folder)]
    for service, name in ((None, "operator"), ("trainer", "trainer"), ("rollout", "rollout")):
        security = load_run(words, service=service).security
        assert (security.tls_cert, security.tls_key) == (folder / f"{name}.pem", folder / f"{name}.key")
        assert (security.tls_ca, security.require_client_cert) == (folder / "ca.pem", True)
        assert security.principals_file == folder / "principals.toml"


def test_settings_that_were_resolved_once_give_each_service_its_own_certificate(folder: Path) -> None:
    """`sluice rl` writes what it resolved to a file that its services read."""
    resolved = SecurityConfig(certs_dir=folder)
    again = SecurityConfig.model_validate(resolved.model_dump(exclude_none=True)).of_service("trainer")
    assert again.tls_cert == folder / "trainer.pem"


def test_a_folder_and_a_certificate_of_its_own_contradict_each_other(folder: Path) -> None:
    with pytest.raises(ConfigError, match="certs_dir stands for tls_cert"):
        load_run(["--security.certs-dir", str(folder), "--security.tls-cert", "a.pem", "--security.tls-key", "a.key"])

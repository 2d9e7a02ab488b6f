"""Where a replica that announces itself may be: the orchestrator connects to addresses that others name."""

from __future__ import annotations

import asyncio
import socket

import pytest
from pydantic import ValidationError

from orchestrator_svc.announcements import AllowedAddresses, Announcements
from orchestrator_svc.config import FoundReplicasConfig
from sluice.config import ConfigError, SecurityConfig
from sluice.rpc import SluiceError
from sluice.rpc.access import is_local_peer
from sluice.sampling.addresses import canonical, is_fixed, resolve_targets
from sluice.sampling.config import ReplicasConfig
from sluice.sampling.pool import ReplicaPool


def allowed(target: str, *networks: str, from_here: bool = False) -> bool:
    try:
        AllowedAddresses(networks).check_address(target, from_here=from_here)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    "target", ["127.0.0.1:22", "127.9.9.9:7103", "[::1]:7103", "[::ffff:127.0.0.1]:80", "unix:/var/run/docker.sock"]
)
def test_only_a_process_of_this_machine_names_a_port_or_a_socket_of_it(target: str) -> None:
    assert not allowed(target)
    assert not allowed(target, "10.0.0.0/8")
    assert allowed(target, from_here=True)
    assert allowed(target, "10.0.0.0/8", from_here=True)


@pytest.mark.parametrize("target", ["169.254.169.254:80", "[fe80::1]:80", "224.0.0.1:80", "0.0.0.0:80", "[::]:80"])
def test_addresses_that_no_replica_has_are_refused(target: str) -> None:
    assert not allowed(target)
    assert not allowed(target, from_here=True)
    assert not allowed(target, "10.0.0.0/8", from_here=True)


@pytest.mark.parametrize(
    "target",
    [
        "0.0.0.0:80",
        "[::]:80",
        "[::ffff:0.0.0.0]:80",
        "169.254.169.254:80",
        "[fe80::1]:80",
        "224.0.0.1:80",
        "[ff02::1]:80",
    ],
)
def test_no_network_allows_an_address_that_no_replica_has(target: str) -> None:
    assert not allowed(target, "0.0.0.0/0", "::/0")


def test_networks_leave_out_all_others() -> None:
    assert all(allowed(each) for each in ("10.1.2.3:7103", "8.8.8.8:7103", "[2001:db8::1]:7103"))
    assert allowed("10.1.2.3:7103", "10.1.0.0/16", "fd00::/8")
    assert allowed("[fd00::1]:7103", "10.1.0.0/16", "fd00::/8")
    assert not allowed("10.2.2.3:7103", "10.1.0.0/16", "fd00::/8")
    assert not allowed("[2001:db8::1]:7103", "10.1.0.0/16", "fd00::/8")
    with pytest.raises(ValidationError, match="has host bits set"):
        FoundReplicasConfig(networks=["10.1.2.3/8"])


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("ipv4:127.0.0.1:48122", True),
        ("ipv6:%5B::1%5D:48122", True),
        ("ipv6:[::ffff:127.0.0.1]:48122", True),
        ("unix:", True),
        ("ipv4:10.0.0.5:48122", False),
        ("ipv6:%5B2001:db8::1%5D:48122", False),
        ("ipv4:", False),
        ("", False),
    ],
)
def test_a_caller_is_of_this_machine_if_its_connection_is(peer: str, local: bool) -> None:
    assert is_local_peer(peer) is local


def announced(**settings) -> Announcements:
    """Announcements to a pool that calls nobody: it does not run."""
    config = FoundReplicasConfig(**settings)
    return Announcements(ReplicaPool([], SecurityConfig(), config, lambda _: None), config)


async def resolved(target: str, *, from_here: bool) -> list[str]:
    """The addresses that a pool would call for an announced name."""
    announcements = announced()
    announcements.register("r", target, from_here=from_here)
    await announcements.look_up()
    return list(announcements.targets)


async def test_a_name_is_judged_by_what_it_stands_for() -> None:
    for name in ("localhost:7103", "2130706433:7103", "dns:///localhost:7103"):
        assert await resolved(name, from_here=False) == []
        assert any(each.startswith("127.0.0.1:") for each in await resolved(name, from_here=True))


@pytest.mark.parametrize(
    ("spelt", "form"),
    [
        ("[2001:DB8:0:0::1]:07103", "[2001:db8::1]:7103"),
        ("[::ffff:10.0.0.1]:7103", "10.0.0.1:7103"),
        ("dns:///10.0.0.1:7103", "10.0.0.1:7103"),
        ("2001:db8::1:7103", "[2001:db8::1]:7103"),
        ("dns:///Node-1.example:7103", "node-1.example:7103"),
        ("unix:///run/r.sock", "unix:/run/r.sock"),
        ("unix:r.sock", "unix:r.sock"),
    ],
)
async def test_an_address_has_one_form(spelt: str, form: str) -> None:
    assert canonical(spelt) == canonical(form) == form
    if is_fixed(form):
        assert await resolve_targets([spelt, form]) == [form]


def test_another_principal_cannot_announce_an_address_that_is_spelt_differently() -> None:
    announcements = announced()
    announcements.register("a", "[2001:db8::1]:7103", "one")
    for spelt in ("[2001:DB8::0:1]:7103", "dns:///[2001:db8::1]:7103"):
        with pytest.raises(SluiceError, match=r"ADDRESS_TAKEN.*'a'"):
            announcements.register("b", spelt, "two")
    announcements.register("b", "[2001:DB8::0:1]:7103", "one")
    assert announcements.owner("a") is None, "one process serves at an address"
    with pytest.raises(ValueError, match="zone"):
        announcements.register("c", "[2001:db8::1%1]:7103", "two")


async def test_a_name_takes_no_address_that_another_principal_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look_up(_: object, host: str, port: int, **__: object) -> list[object]:
        found = {"theirs": "10.0.0.1", "own": "10.0.0.2"}[host]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found, port))]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", look_up)
    announcements = announced()
    announcements.register("b", "theirs:7103", "two")
    announcements.register("c", "own:7103", "two")
    announcements.register("a", "10.0.0.1:7103", "one")
    await announcements.look_up()
    assert announcements.targets == {"10.0.0.1:7103": "a", "10.0.0.2:7103": "c"}
    with pytest.raises(SluiceError, match=r"ADDRESS_TAKEN.*'c'"):
        announcements.register("d", "10.0.0.2:7103", "one")
    announcements.leave("a")
    await announcements.look_up()
    assert announcements.targets == {"10.0.0.1:7103": "b", "10.0.0.2:7103": "c"}


def test_no_more_replicas_are_announced_than_the_settings_allow() -> None:
    announcements = announced(most_announced=2)
    announcements.register("a", "10.0.0.1:1")
    announcements.register("b", "10.0.0.2:1")
    with pytest.raises(SluiceError, match="TOO_MANY_REPLICAS"):
        announcements.register("c", "10.0.0.3:1")
    announcements.register("a", "10.0.0.4:1")


def test_an_orchestrator_with_tokens_but_none_for_replicas_is_told_what_to_do(tmp_path) -> None:
    for setting in ("token_file", "admin_token_file"):
        with pytest.raises(ConfigError, match=r"sluice token new dispatcher --role dispatcher"):
            ReplicaPool([], SecurityConfig(**{setting: tmp_path / "t"}), ReplicasConfig(), lambda _: None)

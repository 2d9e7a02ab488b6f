"""Values that follow their files: made again when one changes, kept when the new ones are broken."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from prometheus_client import generate_latest

import sluice.rpc.server  # noqa: F401 - it serves the metric
from sluice.config import ConfigError, SecurityConfig
from sluice.rpc.access import Access
from sluice.rpc.errors import SluiceError
from sluice.rpc.from_files import LOOK_S, FromFiles, unusable_files
from sluice.rpc.principals import OVERLAP_S, Principals, add_token, now_utc, read_token

# Contents differ in length: a file that is written twice within one tick of the kernel's clock shows it by its size alone.


WHAT = "the token of a test"


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("first\n")
    return path


@pytest.fixture
def token(file: Path, clock: Clock) -> FromFiles[str]:
    return FromFiles(WHAT, [file], lambda _: read_token(file), clock)


def later(clock: Clock, token: FromFiles[str]) -> str:
    clock.now_s += LOOK_S
    return token.current()


def test_a_changed_file_is_read_again_at_the_next_look(file: Path, clock: Clock, token: FromFiles[str]) -> None:
    file.write_text("second\n")
    assert token.current() == "first"
    assert later(clock, token) == "second"


def test_a_replaced_link_is_a_change(tmp_path: Path, clock: Clock, file: Path) -> None:
    """A Kubernetes secret is a link to a folder that is exchanged."""
    link, other = tmp_path / "link", tmp_path / "other"
    link.symlink_to(file)
    token = FromFiles("the token", [link], lambda _: read_token(link), clock)
    other.write_text("other\n")
    link.unlink()
    link.symlink_to(other)
    assert later(clock, token) == "other"


@pytest.mark.parametrize("text", ["", "two words\n", None])
def test_a_broken_file_keeps_the_last_good_value_and_warns_once(
    file: Path, clock: Clock, token: FromFiles[str], text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    file.unlink() if text is None else file.write_text(text)
    assert later(clock, token) == "first"
    assert not caplog.records, "one of several files may be written a moment after the other"
    assert [later(clock, token) for _ in range(3)] == ["first"] * 3
    (line,) = caplog.records
    assert line.levelname == "WARNING"
    assert WHAT in line.getMessage()
    assert str(file) in line.getMessage()
    assert unusable_files()[WHAT] == 1
    assert b'sluice_security_files_unusable{what="token of a test"} 1.0' in generate_latest()
    file.write_text("second\n")
    assert later(clock, token) == "second"
    assert WHAT not in unusable_files()
    assert b'what="token of a test"' not in generate_latest()


def test_what_is_written_while_it_is_read_is_read_again(file: Path, clock: Clock) -> None:
    def read_and_lose_a_race(before: str | None) -> str:
        value = read_token(file)
        if before == "first" and value == "second":
            file.write_text("the-third\n")
        return value

    token = FromFiles("the token", [file], read_and_lose_a_race, clock)
    file.write_text("second\n")
    assert later(clock, token) == "first"
    assert later(clock, token) == "the-third"


@pytest.mark.parametrize("fails", [True, False])
def test_files_that_are_replaced_while_a_process_starts_are_read_again(tmp_path: Path, fails: bool) -> None:
    """For example a key and a certificate, if one is read before a renewal and the other after it."""
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    states = ["other", "third"]
    for path in (key, certificate):
        path.write_text("first")

    def read_and_lose_a_race(_before: tuple[str, str] | None) -> tuple[str, str]:
        read = key.read_text()
        if states:
            state = states.pop(0)
            for path in (key, certificate):
                path.write_text(state * len(states or "."))  # each state has a size of its own
        found = (read, certificate.read_text())
        if fails and found[0] != found[1]:
            raise ConfigError("the key belongs to another certificate")
        return found

    assert FromFiles("the pair", [key, certificate], read_and_lose_a_race).current() == ("third", "third")


def test_the_first_value_must_be_good(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing"):
        FromFiles("the token", [], lambda _: read_token(tmp_path / "nothing"))


def identified(access: Access, token: str) -> str:
    return access.identify(f"Bearer {token}", ()).name


def test_a_server_knows_a_new_token_at_once_and_the_old_one_for_a_while(tmp_path: Path) -> None:
    """Server and callers of a machine read one file, not at the same moment."""
    file = tmp_path / "admin"
    file.write_text("old\n")
    access = Access(SecurityConfig(admin_token_file=file))
    file.write_text("newer\n")
    assert [identified(access, each) for each in ("newer", "old", "newer")] == ["admin"] * 3
    file.write_text("the-newest\n")
    assert [identified(access, each) for each in ("the-newest", "newer", "old")] == ["admin"] * 3
    with pytest.raises(SluiceError, match="no principal with this token"):
        identified(access, "wrong")


def test_the_old_token_of_a_file_expires(tmp_path: Path) -> None:
    file = tmp_path / "admin"
    security = SecurityConfig(admin_token_file=file, dispatcher_token_file=tmp_path / "dispatcher")
    file.write_text("old\n")
    (tmp_path / "dispatcher").write_text("d-old\n")
    first = Principals.of(security)
    file.write_text("new\n")
    (tmp_path / "dispatcher").write_text("d-new\n")
    second = Principals.of(security, first)
    assert second is not None
    now, end = now_utc(), now_utc() + timedelta(seconds=OVERLAP_S)
    for token, name in (("old", "admin"), ("new", "admin"), ("d-old", "dispatcher"), ("d-new", "dispatcher")):
        assert second.identify(f"Bearer {token}", (), now).name == name
    assert second.identify("Bearer new", (), end).name == "admin"
    with pytest.raises(SluiceError, match="expired"):
        second.identify("Bearer old", (), end)


def test_a_principal_that_is_removed_from_the_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "principals.toml"
    gone = add_token(file, "gone", "agent")
    before = file.read_text()
    stays = add_token(file, "stays", "agent")
    access = Access(SecurityConfig(principals_file=file))
    assert identified(access, gone) == "gone"
    file.write_text(file.read_text().removeprefix(before))
    assert identified(access, stays) == "stays"
    with pytest.raises(SluiceError):  # a token that is not known lets the server look at the file
        identified(access, "wrong")
    with pytest.raises(SluiceError):
        identified(access, gone)
    file.write_text("[[principal]]\nname = 3\n")
    assert identified(access, stays) == "stays"

"""Principals: the format of their file, and who a call is from."""

from __future__ import annotations

import contextlib
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from sluice.cli import token as token_command
from sluice.config import ConfigError, SecurityConfig
from sluice.rpc import SluiceError
from sluice.rpc.principals import ROLES, Principals, add_token, digest_of, parse_principals, read_principals

NOW = datetime(2026, 11, 22, tzinfo=UTC)


def principals(*tables: dict[str, object]) -> Principals:
    return Principals(parse_principals(tomli_w.dumps({"principal": list(tables)}), "test"))


def table(name: str, role: str = "agent", token: str | None = None, **more: object) -> dict[str, object]:
    return {"name": name, "role": role, **({} if token is None else {"token_sha256": digest_of(token)}), **more}


def refusal(known: Principals, authorization: str | bytes | None, certificate=frozenset(), now: datetime = NOW) -> str:
    with pytest.raises(SluiceError) as caught:
        known.identify(authorization, certificate, now)
    assert caught.value.code is grpc.StatusCode.UNAUTHENTICATED
    return caught.value.reason


class TestIdentify:
    def test_a_token_names_its_principal(self):
        known = principals(table("a", "agent", "first"), table("b", "replica", "second"))
        assert [known.identify(f"Bearer {token}", (), NOW).name for token in ("first", "second")] == ["a", "b"]
        assert known.identify("bearer second", (), NOW).role == "replica"

    @pytest.mark.parametrize(
        "header", ["first", "Basic first", "Bearer", "Bearer ", "Bearer first x", "Bearer  first", None]
    )
    def test_anything_else_is_refused(self, header):
        assert refusal(principals(table("a", "agent", "first")), header) == "TOKEN_REQUIRED"

    def test_the_digest_of_a_token_is_no_token(self):
        assert refusal(principals(table("a", "agent", "first")), f"Bearer {digest_of('first')}") == "TOKEN_REQUIRED"

    def test_a_certificate_names_its_principal_by_common_name_or_uri(self):
        known = principals(table("a", certificate="client-a"), table("b", "replica", certificate="spiffe://site/b"))
        assert known.identify(None, {"client-a"}, NOW).name == "a"
        assert known.identify(None, {"other", "spiffe://site/b"}, NOW).name == "b"
        assert refusal(known, None, {"other"}) == "TOKEN_REQUIRED"

    def test_a_wrong_token_is_not_made_good_by_a_certificate(self):
        known = principals(table("a", certificate="client-a"), table("b", token="t"))
        assert refusal(known, "Bearer wrong", {"client-a"}) == "TOKEN_REQUIRED"

    def test_a_token_that_is_bound_to_a_certificate_needs_it(self):
        known = principals(table("a", token="t", certificate="client-a"))
        assert known.identify("Bearer t", {"client-a"}, NOW).name == "a"
        assert refusal(known, "Bearer t", {"client-b"}) == "CERTIFICATE_REQUIRED"
        assert refusal(known, None, {"client-a"}) == "TOKEN_REQUIRED"

    def test_an_entry_is_valid_until_it_expires(self):
        known = principals(table("a", token="t", expires=NOW))
        assert known.identify("Bearer t", (), NOW - timedelta(seconds=1)).name == "a"
        assert refusal(known, "Bearer t") == "PRINCIPAL_EXPIRED"

    def test_two_tokens_of_one_principal_are_valid_side_by_side(self):
        known = principals(table("a", token="old"), table("a", token="new"))
        assert known.identify("Bearer old", (), NOW) is known.identify("Bearer new", (), NOW)

    def test_one_file_for_both_roles_is_the_admin(self, tmp_path):
        (tmp_path / "t").write_text("one")
        known = Principals.of(SecurityConfig(token_file=tmp_path / "t", admin_token_file=tmp_path / "t"))
        assert known is not None
        assert known.identify("Bearer one", (), NOW).role == "admin"

    @pytest.mark.parametrize("has_file", [True, False])
    def test_a_dispatcher_is_known_by_its_token_file_alone(self, tmp_path, has_file):
        for name in ("admin", "to-replicas"):
            (tmp_path / name).write_text(f"the-{name}")
        settings = {"admin_token_file": tmp_path / "admin", "dispatcher_token_file": tmp_path / "to-replicas"}
        if has_file:
            add_token(tmp_path / "principals.toml", "op", "admin")
            settings["principals_file"] = tmp_path / "principals.toml"
        known = Principals.of(SecurityConfig(**settings))
        assert known is not None
        assert known.identify("Bearer the-to-replicas", (), NOW).role == "dispatcher"
        assert known.names == {"op" if has_file else "admin", "dispatcher"}

    def test_the_dispatchers_token_is_of_its_role_alone(self, tmp_path):
        file, token = tmp_path / "principals.toml", tmp_path / "token"
        security = SecurityConfig(principals_file=file, dispatcher_token_file=token)
        token.write_text(add_token(file, "op", "admin"))
        with pytest.raises(ConfigError, match="holds the token of principal 'op' with the role admin"):
            Principals.of(security)
        with pytest.raises(ConfigError, match="holds the token of principal 'admin' with the role admin"):
            Principals.of(SecurityConfig(admin_token_file=token, dispatcher_token_file=token))
        token.write_text(add_token(file, "to-replicas", "dispatcher"))
        known = Principals.of(security)
        assert known is not None
        assert known.identify(f"Bearer {token.read_text()}", (), NOW).name == "to-replicas"
        add_token(file, "dispatcher", "agent")
        token.write_text("another")
        with pytest.raises(ConfigError, match="has a principal 'dispatcher' with another token"):
            Principals.of(security)

    @given(st.one_of(st.text(), st.binary()), st.sets(st.text()))
    def test_no_header_and_no_name_gets_in_by_accident(self, header, names):
        known = principals(table("a", "admin", "the-token"), table("b", certificate="the certificate"))
        assert refusal(known, header, names - {"the certificate"}) == "TOKEN_REQUIRED"

    @given(st.text(alphabet=st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1))
    def test_every_printable_token_is_found_again(self, token):
        assert principals(table("a", "trainer", token)).identify(f"BEARER {token}", (), NOW).role == "trainer"


class TestFile:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "principal: Field required"),
            ("principal = []", "principal: "),
            ("[[principal]]\nname = 'a'\nrole = 'agent'", "give token_sha256, certificate or both"),
            ("[[principal]]\nname = 'A b'\nrole = 'agent'\ncertificate = 'x'", "principal.1.name: must be lower-case"),
            ("[[principal]]\nname = 'a'\nrole = 'boss'\ncertificate = 'x'", "principal.1.role"),
            ("[[principal]]\nname = 'a'\nrole = 'agent'\ntoken = 'SECRET'", "principal.1.token: unknown key"),
            ("[[principal]]\nname = 'a'\nrole = 'agent'\ntoken_sha256 = 'SECRET'", "must be 64 hexadecimal digits"),
            ("[[principal]]\nname = 'a'\nrole = 'agent'\ncertificate = 'x'\nexpires = 2027-01-01T00:00:00", "expires"),
            (
                "[[principal]]\nname = 'a'\nrole = 'agent'\ncertificate = 'x'\nquota = {burst = 2}",
                "needs requests_per_s",
            ),
            ("[[principal]]\nname = 'a'\nrole = 'agent'\ncertificate = 'x'\nquota = {in_flight = 0}", "in_flight"),
            ("SECRET", "is not TOML"),
        ],
    )
    def test_a_mistake_is_named_and_no_value_is_repeated(self, text, message):
        with pytest.raises(ConfigError) as caught:
            parse_principals(text, "the file")
        assert message in str(caught.value)
        assert "SECRET" not in str(caught.value)

    def test_tables_of_one_name_must_agree(self):
        with pytest.raises(ConfigError, match="must agree in role and quota"):
            principals(table("a", "agent", "one"), table("a", "admin", "two"))

    def test_two_principals_cannot_share_a_token(self):
        with pytest.raises(ConfigError, match="the same token_sha256"):
            principals(table("a", token="one"), table("b", token="one"))

    @given(st.text())
    def test_a_text_without_tables_is_refused_with_an_error_of_ours(self, text):
        with pytest.raises(ConfigError, match=r"\Athe file"):
            parse_principals(text, "the file")

    @given(
        st.recursive(
            st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
            max_leaves=8,
        ).map(lambda value: {"principal": [{"name": "a", "role": "agent", "certificate": "x", "quota": value}]})
    )
    def test_any_value_of_a_key_is_read_or_refused(self, document):
        with contextlib.suppress(ConfigError):
            assert parse_principals(tomli_w.dumps(document), "the file")[0].name == "a"

    def test_a_file_that_any_user_may_write_to_is_refused(self, tmp_path):
        path = tmp_path / "p.toml"
        add_token(path, "a", "agent")
        path.chmod(0o646)
        with pytest.raises(ConfigError, match="any user may write"):
            read_principals(path)

    def test_a_certificate_that_nobody_would_be_asked_for_is_refused(self, tmp_path):
        path = tmp_path / "p.toml"
        path.write_text(tomli_w.dumps({"principal": [table("a", certificate="client-a")]}))
        with pytest.raises(ConfigError, match="require_client_cert"):
            Principals.of(SecurityConfig(principals_file=path))


class TestAddToken:
    def test_the_token_is_known_and_lies_nowhere(self, tmp_path):
        path = tmp_path / "p.toml"
        token = add_token(path, "a", "replica")
        assert len(token) == 43  # 256 bits in base64
        assert token not in path.read_text()
        assert path.stat().st_mode & 0o777 == 0o600
        assert Principals(read_principals(path)).identify(f"Bearer {token}", (), NOW).role == "replica"
        assert list(tmp_path.iterdir()) == [path]

    def test_what_the_file_says_already_stays(self, tmp_path):
        path = tmp_path / "p.toml"
        path.write_text("# by hand\n" + tomli_w.dumps({"principal": [table("a", token="one", expires=NOW)]}).rstrip())
        before = path.read_text()
        add_token(path, "b", "trainer", NOW)
        assert path.read_text().startswith(before)
        assert [(entry.name, entry.expires) for entry in read_principals(path)] == [("a", NOW), ("b", NOW)]

    def test_a_name_that_is_taken_is_refused(self, tmp_path):
        add_token(tmp_path / "p.toml", "a", "replica")
        before = (tmp_path / "p.toml").read_text()
        with pytest.raises(ConfigError, match="has a principal 'a'"):
            add_token(tmp_path / "p.toml", "a", "admin")
        assert (tmp_path / "p.toml").read_text() == before

    def test_a_symbolic_link_is_refused(self, tmp_path):
        (tmp_path / "real.toml").write_text("")
        (tmp_path / "p.toml").symlink_to("real.toml")
        with pytest.raises(ConfigError, match="symbolic link"):
            add_token(tmp_path / "p.toml", "a", "agent")
        assert (tmp_path / "real.toml").read_text() == ""

    def test_a_file_with_a_mistake_is_not_made_worse(self, tmp_path):
        (tmp_path / "p.toml").write_text("[[principal]\n")
        with pytest.raises(ConfigError, match="is not TOML"):
            add_token(tmp_path / "p.toml", "a", "agent")
        assert (tmp_path / "p.toml").read_text() == "[[principal]\n"

    def test_tokens_that_are_made_at_once_are_all_kept(self, tmp_path):
        path = tmp_path / "p.toml"
        makers = [threading.Thread(target=add_token, args=(path, f"p{number}", "agent")) for number in range(8)]
        for maker in makers:
            maker.start()
        for maker in makers:
            maker.join()
        assert {entry.name for entry in read_principals(path)} == {f"p{number}" for number in range(8)}

    def test_a_folder_that_cannot_be_written_is_told(self, tmp_path):
        path = (
            tmp_path / f"{250 * 'p'}.toml"
        )  # root may write anywhere, but no file has the longer name of a temporary one
        with pytest.raises(ConfigError, match="cannot write"):
            add_token(path, "a", "agent")


class TestCommand:
    def test_new_prints_the_token_once_and_nothing_else_on_stdout(self, tmp_path, capsys):
        path = tmp_path / "p.toml"
        assert token_command.run(["new", "op", "--role", "admin", "--file", str(path)]) == 0
        printed = capsys.readouterr().out
        assert Principals(read_principals(path)).identify(f"Bearer {printed.strip()}", (), NOW).name == "op"

    def test_new_writes_a_file_that_only_its_owner_may_read(self, tmp_path, capsys):
        path, out = tmp_path / "p.toml", tmp_path / "rep.token"
        token_command.run(["new", "rep", "--role", "replica", "--file", str(path), "--out", str(out)])
        assert capsys.readouterr().out == ""
        assert out.stat().st_mode & 0o777 == 0o600
        assert Principals(read_principals(path)).identify(f"Bearer {out.read_text().strip()}", (), NOW).name == "rep"

    def test_a_failure_leaves_no_token_file_and_never_replaces_one(self, tmp_path):
        path, out = tmp_path / "p.toml", tmp_path / "rep.token"
        path.write_text("[")
        with pytest.raises(ConfigError):
            token_command.run(["new", "rep", "--role", "replica", "--file", str(path), "--out", str(out)])
        assert not out.exists()
        path.unlink()
        out.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ConfigError, match="does not exist yet"):
            token_command.run(["new", "rep", "--role", "replica", "--file", str(path), "--out", str(out)])
        assert not path.exists()
        assert not (tmp_path / "elsewhere").exists()

    def test_list_shows_names_and_no_whole_digest(self, tmp_path, capsys):
        path = tmp_path / "p.toml"
        for role in ROLES:
            add_token(path, f"p-{role}", role, datetime(2020, 1, 1, tzinfo=UTC) if role == "agent" else None)
        token_command.run(["list", "--file", str(path)])
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[:2] for line in lines[1:]] == [[f"p-{role}", role] for role in ROLES]
        assert [line.endswith("(expired)") for line in lines[1:]] == [role == "agent" for role in ROLES]
        assert not any(entry.token_sha256 in line for entry in read_principals(path) for line in lines)


def test_the_token_of_a_service_replaces_the_common_one(tmp_path: Path):
    from sluice.config import load_run

    settings = ["--security.principals-file", "p.toml", "--security.token-file", "own"]
    settings += ["--security.service-token-files", '{"trainer": "trainer.token"}']
    assert load_run(settings, service="trainer").security.token_file == Path("trainer.token")
    assert load_run(settings, service="rollout").security.token_file == Path("own")
    assert load_run(settings).security.token_file == Path("own")

"""The port of the metrics: who may read them, over what, and until when."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from wsgiref.simple_server import WSGIServer

import pytest
from certificates import Authority
from prometheus_client import Counter, generate_latest

from sluice.config import SecurityConfig
from sluice.rpc.metrics_server import start_metrics_server
from sluice.rpc.principals import add_token

THINGS = Counter("sluice_test_things", "Things.")


@contextmanager
def served(security: SecurityConfig, host: str = "127.0.0.1") -> Iterator[WSGIServer]:
    server = start_metrics_server(0, host, security)
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def read(url: str, token: str | None = None, context: ssl.SSLContext | None = None) -> bytes:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10, context=context).read()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_metrics_are_served_until_stopped(host):
    THINGS.inc(3)
    with served(SecurityConfig(), host) as server:
        url = f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/metrics"
        assert b"sluice_test_things_total" in read(url)
        assert b"sluice_test_things_total" in generate_latest()
    with pytest.raises(urllib.error.URLError):
        read(url)


def test_any_principal_may_read_them_and_nobody_else(tmp_path: Path):
    file = tmp_path / "principals.toml"
    token = add_token(file, "prometheus", "viewer")
    with served(SecurityConfig(principals_file=file)) as server:
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        assert b"sluice_test_things" in read(url, token)
        for wrong in (None, "wrong"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                read(url, wrong)
            assert refused.value.code == 401
            assert b"security.principals_file" in refused.value.read()


def test_with_a_certificate_they_are_served_by_tls(tmp_path: Path):
    authority = Authority(tmp_path / "a")
    certificate, key = authority.issue("server")
    with served(SecurityConfig(tls_cert=certificate, tls_key=key)) as server:
        context = ssl.create_default_context(cafile=authority.path)
        assert b"sluice_test_things" in read(f"https://127.0.0.1:{server.server_port}/metrics", context=context)

"""A hub id that names nothing, or nothing that can be reached, is told at once; the hub is a server of the test's own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from sluice.config import ConfigError
from sluice.models import check_hub, check_hub_dataset


class Hub(BaseHTTPRequestHandler):
    """Answers every request alike, and counts them."""

    status = 200
    code = ""
    asked = 0

    def do_HEAD(self) -> None:
        type(self).asked += 1
        self.send_response(self.status)
        for name, value in (("X-Error-Code", self.code), ("X-Repo-Commit", "0" * 40), ("ETag", '"1"')):
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def point_to(endpoint: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[Hub]]:
    class Own(Hub):
        pass

    server = HTTPServer(("127.0.0.1", 0), Own)
    point_to(f"http://127.0.0.1:{server.server_port}", tmp_path, monkeypatch)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield Own
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "code", "told"),
    [
        (404, "RepoNotFound", "teacher: nobody/nothing is not a directory here, and the hub has no such model"),
        (403, "GatedRepo", "is gated: request access on its page"),
        (404, "EntryNotFound", r"has no config\.json"),
    ],
)
def test_what_the_hub_refuses_is_reported_after_one_request(hub: type[Hub], status: int, code: str, told: str) -> None:
    hub.status, hub.code = status, code
    with pytest.raises(ConfigError, match=told):
        check_hub("nobody/nothing", "teacher")
    assert hub.asked == 1


def test_an_existing_model_and_a_busy_hub_are_left_to_the_loader(hub: type[Hub]) -> None:
    check_hub("somebody/something")
    hub.status = 503
    check_hub("somebody/something")
    assert hub.asked == 2


def test_the_hub_is_not_asked_about_a_directory_or_a_cached_model(hub: type[Hub], tmp_path: Path) -> None:
    repository = tmp_path / "models--somebody--something"
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "snapshots" / "abc" / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    check_hub("somebody/something")
    check_hub(str(tmp_path))
    assert hub.asked == 0


def test_a_dataset_needs_no_readme_but_must_exist(hub: type[Hub]) -> None:
    hub.status, hub.code = 404, "EntryNotFound"
    check_hub_dataset("nobody/rows")
    hub.code = "RepoNotFound"
    with pytest.raises(ConfigError, match="data: nobody/rows is not a directory here, and the hub has no such dataset"):
        check_hub_dataset("nobody/rows")
    assert hub.asked == 2


def test_an_unreachable_hub_is_reported_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    point_to("http://127.0.0.1:1", tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:1 cannot be reached .*check the network"):
        check_hub("nobody/nothing")
    with pytest.raises(ConfigError, match="is neither a directory nor a hub id"):
        check_hub("no--body/nothing")

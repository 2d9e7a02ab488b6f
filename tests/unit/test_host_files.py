"""Files of a host: locks end with their process, sweeps follow no symbolic link, a peer's file is opened without waiting."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest

from sluice import host_files
from sluice.host_files import PeerFileError, open_peer_file, owned_directory, remove_tree, remove_unlocked


def named(path: Path) -> tuple[str, int, int, int]:
    status = path.lstat()
    return str(path), status.st_dev, status.st_ino, status.st_size


def test_a_locked_file_stays_and_an_unlocked_one_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    holder = host_files.open_private(path, os.O_RDWR | os.O_CREAT)
    assert host_files.lock_now(holder, fcntl.LOCK_SH)
    assert not remove_unlocked(path)
    host_files.close(holder)
    assert remove_unlocked(path)
    assert not path.exists()


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_only_regular_files_are_removed(tmp_path: Path, kind: str) -> None:
    path, target = tmp_path / "path", tmp_path / "target"
    target.write_bytes(b"kept")
    {"link": lambda: path.symlink_to(target), "pipe": lambda: os.mkfifo(path), "directory": path.mkdir}[kind]()
    assert not remove_unlocked(path)
    assert path.lstat()
    assert target.read_bytes() == b"kept"


def test_a_link_to_a_directory_is_not_opened_and_its_target_not_removed(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    (target / "inner").mkdir(parents=True)
    link.symlink_to(target)
    with owned_directory(link) as opened:
        assert opened is None
    assert not remove_tree(link)
    assert (target / "inner").is_dir()


def test_links_in_a_directory_are_removed_and_their_targets_stay(tmp_path: Path) -> None:
    target, tree = tmp_path / "target", tmp_path / "tree"
    target.mkdir()
    (target / "kept").touch()
    tree.mkdir()
    (tree / "link").symlink_to(target)
    assert remove_tree(tree)
    assert not tree.exists()
    assert (target / "kept").exists()


def test_two_threads_may_remove_one_directory(tmp_path: Path) -> None:
    gone = []
    for number in range(10):
        tree = tmp_path / str(number)
        for name in range(40):
            (tree / str(name)).mkdir(parents=True)
        start = threading.Barrier(2)

        def remove(tree: Path = tree, start: threading.Barrier = start) -> None:
            start.wait()
            gone.append(remove_tree(tree))

        threads = [threading.Thread(target=remove) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not tree.exists()
    assert len(gone) == 20
    assert remove_tree(tmp_path / "missing")


def test_a_file_that_a_peer_named_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"weights")
    descriptor = open_peer_file(*named(path), below=tmp_path)
    assert os.pread(descriptor, 100, 0) == b"weights"
    os.close(descriptor)


@pytest.mark.parametrize("kind", ["pipe", "link", "directory", "missing", "longer", "elsewhere", "other", "null byte"])
def test_a_file_that_differs_from_the_named_one_is_not_opened(tmp_path: Path, kind: str) -> None:
    """Reading a pipe would wait for a writer for ever; the other cases would read the wrong file."""
    path, below = tmp_path / "file", tmp_path
    path.write_bytes(b"weights")
    arguments = named(path)
    if kind in {"pipe", "link", "directory"}:
        path.unlink()
        {"pipe": lambda: os.mkfifo(path), "link": lambda: path.symlink_to(__file__), "directory": path.mkdir}[kind]()
        arguments = named(path)
    elif kind == "missing":
        path.unlink()
    elif kind == "longer":
        path.write_bytes(b"more weights")
    elif kind == "elsewhere":
        below = tmp_path / "below"
        below.mkdir()
        (below / "link").symlink_to(tmp_path)
        arguments = (str(below / "link" / "file"), *arguments[1:])
    elif kind == "other":
        arguments = (arguments[0], arguments[1], arguments[2] + 1, arguments[3])
    else:
        arguments = ("file\0", *arguments[1:])
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(PeerFileError):
        open_peer_file(*arguments, below=below)
    assert len(list(Path("/proc/self/fd").iterdir())) == before

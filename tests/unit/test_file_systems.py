"""A run's directory on a file system of a network is named: what breaks there, and what to do."""

from __future__ import annotations

from pathlib import Path, PurePath

import pytest

from sluice.file_systems import Mounted, check_file_system, mounted_at, problem_of

MOUNTINFO = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro
23 22 0:21 / /proc rw,nosuid - proc proc rw
30 22 0:40 / /home rw,relatime shared:7 - autofs systemd-1 rw,fd=42
31 30 0:41 / /home rw,relatime shared:8 master:2 - nfs4 filer:/home rw,vers=4.2,local_lock=none,addr=10.0.0.1
32 31 0:42 /sub /home/my\040data rw,relatime - nfs filer:/data\040two rw,vers=3,nolock,local_lock=all
33 22 0:43 / /scratch rw - lustre 10.0.0.2@tcp:/scratch rw,flock,lazystatfs
34 22 0:44 / /s3 rw,nosuid - fuse.s3fs s3fs rw,user_id=0
35 22 0:45 / /bucket rw,nosuid - fuse mountpoint-s3 rw,user_id=0
36 22 0:46 / /ssh rw - fuse.sshfs me@there:/ rw
37 22 0:47 / /box rw - fuse.fuse-overlayfs fuse-overlayfs rw
38 22 8:2 / /stick rw - fuseblk /dev/sdb1 rw
39 22 0:48 / /homeland rw - tmpfs tmpfs rw
a line that is none
"""


@pytest.mark.parametrize(
    ("path", "kind", "at"),
    [
        ("/", "ext4", "/"),
        ("/srv/outputs/run", "ext4", "/"),
        ("/home/me/outputs", "nfs4", "/home"),
        ("/home/my data/run", "nfs", "/home/my data"),
        ("/homeland/run", "tmpfs", "/homeland"),
        ("/scratch", "lustre", "/scratch"),
    ],
)
def test_the_mount_of_a_path_is_the_last_of_the_longest(path: str, kind: str, at: str) -> None:
    mounted = mounted_at(PurePath(path), MOUNTINFO)
    assert mounted is not None
    assert (mounted.kind, mounted.at) == (kind, PurePath(at))


def test_options_and_sources_are_read() -> None:
    mounted = mounted_at(PurePath("/home/my data"), MOUNTINFO)
    assert mounted == Mounted(
        "nfs",
        PurePath("/home/my data"),
        "filer:/data two",
        frozenset({"rw", "relatime", "vers=3", "nolock", "local_lock=all"}),
    )


def test_nothing_is_known_of_a_path_where_nothing_is_mounted() -> None:
    assert mounted_at(PurePath("/x"), "") is None


@pytest.mark.parametrize(
    ("path", "fatal"),
    [
        ("/srv", None),
        ("/homeland", None),
        ("/box", None),
        ("/stick", None),
        ("/home/me", False),
        ("/scratch", False),
        ("/ssh", False),
        ("/s3", True),
        ("/bucket", True),
    ],
)
def test_local_ones_are_fine_networks_are_doubtful_and_object_stores_refused(path: str, fatal: bool | None) -> None:
    directory = PurePath(path, "outputs", "run")
    mounted = mounted_at(directory, MOUNTINFO)
    assert mounted is not None
    problem = problem_of(directory, mounted)
    assert (None if problem is None else problem.fatal) is fatal
    if problem is not None:
        assert (
            f"{directory} is on {mounted.kind}, mounted at {path if path != '/home/me' else '/home'}" in problem.found
        )
        assert "output_dir" in problem.remedy


def test_locks_that_other_machines_do_not_see_are_named() -> None:
    directory = PurePath("/home/my data/run")
    mounted = mounted_at(directory, MOUNTINFO)
    assert mounted is not None
    problem = problem_of(directory, mounted)
    assert problem is not None
    assert (
        "mounted with local_lock=all, nolock: a second orchestrator on another machine would not be noticed"
        in problem.found
    )
    assert problem.remedy.endswith("mount it without local_lock=all, nolock")
    elsewhere = problem_of(directory, Mounted("nfs4", PurePath("/home"), options=frozenset({"local_lock=none"})))
    assert elsewhere is not None
    assert "second orchestrator" not in elsewhere.found


def test_the_root_of_a_sandbox_is_its_own_and_a_share_of_its_host_is_not() -> None:
    assert problem_of(PurePath("/run"), Mounted("9p", PurePath("/"))) is None
    assert problem_of(PurePath("/mnt/c/run"), Mounted("9p", PurePath("/mnt/c"))) is not None
    assert problem_of(PurePath("/run"), Mounted("nfs", PurePath("/"))) is not None


def test_a_directory_is_looked_for_where_its_links_lead(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"1 0 0:1 / / rw - ext4 a rw\n2 1 0:2 / {tmp_path.resolve()}/far rw - nfs4 b rw\n")
    (tmp_path / "far").mkdir()
    (tmp_path / "outputs").symlink_to("far")
    assert check_file_system(tmp_path / "near/run", mounts) is None
    found = check_file_system(tmp_path / "outputs/run", mounts)
    assert found is not None
    assert "nfs4" in found.found


def test_this_machines_mounts_can_be_read_and_a_system_without_them_says_nothing(tmp_path: Path) -> None:
    assert mounted_at(PurePath("/proc/self"), Path("/proc/self/mountinfo").read_text(encoding="utf-8")) is not None
    assert check_file_system(tmp_path, tmp_path / "none") is None

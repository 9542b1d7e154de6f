"""Publishing: whole or not at all, once, and nothing left behind."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bench.publish import LockTimeout, locked, publish, remove_stale

ID = "0123456789ab"


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_a_build_appears_whole(tmp_path: Path) -> None:
    def build(directory: Path) -> None:
        assert not (tmp_path / "run").exists()
        (directory / "file").write_text("content")

    publish(tmp_path / "run", ID, build)
    assert (tmp_path / "run" / "file").read_text() == "content"
    assert names(tmp_path) == {"run"}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_build_that_ends_early_leaves_nothing_and_keeps_what_was_there(
    tmp_path: Path, error: type[BaseException]
) -> None:
    publish(tmp_path / "run", ID, lambda directory: (directory / "old").touch())

    def build(directory: Path) -> None:
        (directory / "half").touch()
        raise error

    with pytest.raises(error):
        publish(tmp_path / "run", ID, build)
    with pytest.raises(error):
        publish(tmp_path / "other", ID, build)
    assert names(tmp_path) == {"run"}
    assert names(tmp_path / "run") == {"old"}


def test_a_rebuild_replaces_everything(tmp_path: Path) -> None:
    publish(tmp_path / "run", ID, lambda directory: (directory / "old").touch())
    publish(tmp_path / "run", ID, lambda directory: (directory / "new").touch())
    assert names(tmp_path / "run") == {"new"}
    assert names(tmp_path) == {"run"}


def test_the_lock_is_exclusive_and_leaves_no_file(tmp_path: Path) -> None:
    inside = threading.Event()
    leave = threading.Event()
    order: list[str] = []

    def hold() -> None:
        with locked(tmp_path, ID):
            inside.set()
            leave.wait(20)
            order.append("first")

    def waiting() -> None:
        order.append("waiting")
        leave.set()

    holder = threading.Thread(target=hold)
    holder.start()
    assert inside.wait(20)
    with locked(tmp_path, ID, on_wait=waiting):
        order.append("second")
    holder.join()
    assert order == ["waiting", "first", "second"]
    assert names(tmp_path) == set()


def test_other_ids_do_not_wait(tmp_path: Path) -> None:
    with locked(tmp_path, ID), locked(tmp_path, "ba9876543210", timeout_s=0.0):
        pass


def test_a_lock_held_too_long_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with locked(tmp_path, ID), pytest.raises(LockTimeout, match=rf"\.lock-{ID}"), locked(tmp_path, ID, timeout_s=0.0):
        pass


def test_a_lock_file_left_by_a_killed_process_does_not_block(tmp_path: Path) -> None:
    (tmp_path / f".lock-{ID}").touch()
    with locked(tmp_path, ID, timeout_s=0.0):
        pass
    assert names(tmp_path) == set()


def test_stale_builds_are_removed_and_live_ones_kept(tmp_path: Path) -> None:
    dead, live = "dddddddddddd", "eeeeeeeeeeee"
    for name in (f".tmp-{ID}-1", f".tmp-{ID}-1-old", f".tmp-{dead}-2", f".tmp-{live}-3", ".tmp-something", "run"):
        (tmp_path / name).mkdir()
    descriptor = os.open(tmp_path / f".lock-{live}", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with locked(tmp_path, ID):
        remove_stale(tmp_path, ID)
    os.close(descriptor)
    assert names(tmp_path) == {f".tmp-{live}-3", f".lock-{live}", ".tmp-something", "run"}


def test_equal_builds_in_two_processes_happen_once(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from bench.publish import locked, publish
root = Path(sys.argv[1])
with locked(root, "0123456789ab"):
    if (root / "run").exists():
        print("skipped")
    else:
        publish(root / "run", "0123456789ab", lambda directory: (directory / "file").touch())
        print("built")
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = sorted(process.communicate(timeout=60)[0].strip() for process in processes)
    assert said == ["built", "skipped", "skipped"]
    assert names(tmp_path) == {"run"}

"""Answers on disk: kept whole or not at all, and never a reason to fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import disk_cache


def test_equal_questions_share_a_file_whatever_the_order_of_their_keys(tmp_path: Path) -> None:
    one = disk_cache.path_of(tmp_path, {"a": 1, "b": [2.5, "x"]})
    assert one == disk_cache.path_of(tmp_path, {"b": [2.5, "x"], "a": 1})
    assert one != disk_cache.path_of(tmp_path, {"a": 1, "b": [2.5, "y"]})


def test_what_is_kept_is_read_again_and_leaves_no_draft(tmp_path: Path) -> None:
    path = disk_cache.path_of(tmp_path / "new", "question")
    assert disk_cache.read(path) is None
    disk_cache.write(path, {"step_s": 1.5, "plan": None})
    assert disk_cache.read(path) == {"step_s": 1.5, "plan": None}
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_half_a_file_is_none_and_a_folder_that_is_a_file_keeps_nothing(tmp_path: Path) -> None:
    path = tmp_path / "half.json"
    path.write_text('{"step_s": 1.')
    assert disk_cache.read(path) is None
    disk_cache.write(path / "below.json", 1)
    assert path.read_text() == '{"step_s": 1.'


def test_a_value_that_json_does_not_have_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        disk_cache.write(tmp_path / "x.json", float("nan"))
    assert not list(tmp_path.iterdir())

"""Ids: equal for equal runs, different for whatever can change a number."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import identity
from bench.identity import canonical, directory_name, identify, plain, source_digest
from tests.bench.helpers import config


def test_equal_runs_have_equal_ids() -> None:
    one = identify(config())
    assert one == identify(config())
    assert re.fullmatch(r"[0-9a-f]{12}", one.run_id)
    assert re.fullmatch(r"[0-9a-f]{12}", one.config_id)


@pytest.mark.parametrize(
    "changes",
    [
        {"seq": 1024},
        {"batch": 64},
        {"micro_batch": 1},
        {"skew": 1.5},
        {"stragglers": [[0, 1.5]]},
        {"systems": "tutel"},
        {"system": {"tutel": {"degree": 2}}},
        {"transport": "native"},
        {"uniform_transport": "nccl"},
        {"merge": "rank"},
        {"ep": 4},
        {"contention_scale": 0},
        {"plans_from": "default_batch"},
        {"study": {"kind": "sensitivity", "axes": {"skew": [2]}}},
        {"budget": 3},
        {"tag": "again"},
    ],
)
def test_what_changes_numbers_changes_both_ids(changes: dict[str, Any]) -> None:
    ours, theirs = identify(config()), identify(config(**changes))
    assert ours.run_id != theirs.run_id
    assert ours.config_id != theirs.config_id


def test_the_machine_counts_where_plans_are_run_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated, emulated = identify(config(transport="native")), identify(config(backend="emulate"))
    here = identity.machine(gpus=False)
    for other in (replace(here, device="other"), replace(here, host="other"), replace(here, torch="0.1")):
        monkeypatch.setattr(identity, "machine", lambda gpus, other=other: other)
        assert identify(config(transport="native")) == simulated
        elsewhere = identify(config(backend="emulate"))
        assert elsewhere.config_id != emulated.config_id
        assert elsewhere.run_id != emulated.run_id


def test_how_a_run_is_shown_or_stored_does_not_count() -> None:
    shown = config(Path("elsewhere"), artifacts="tables", force=True, debug=True, gantt_window="1:2", gantt_workers=[0])
    assert identify(shown) == identify(config())


def test_contents_of_the_data_files_count(tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text("a: 1\n")
    run = replace(config(), files=(file,))
    before = identify(run)
    file.write_text("a: 2\n")
    assert identify(run).config_id != before.config_id


def test_a_changed_source_changes_the_run_but_not_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    before = identify(config())
    monkeypatch.setattr(identity, "source_digest", lambda root: "changed")
    after = identify(config())
    assert after.run_id != before.run_id
    assert after.config_id == before.config_id


def test_source_digest_sees_content_names_and_nothing_else(tmp_path: Path) -> None:
    roots = [tmp_path / name for name in "abcde"]
    for root in roots:
        (root / "disagmoe" / "cost").mkdir(parents=True)
        (root / "disagmoe" / "cost" / "flops.py").write_text("x = 1\n")
    (roots[1] / "disagmoe" / "cost" / "__pycache__").mkdir()
    (roots[1] / "disagmoe" / "cost" / "__pycache__" / "flops.py").write_text("cache")
    (roots[1] / "disagmoe" / "notes.txt").write_text("not a source")
    (roots[2] / "disagmoe" / "cost" / "flops.py").write_text("x = 2\n")
    (roots[3] / "disagmoe" / "cost" / "flops.py").rename(roots[3] / "disagmoe" / "cost" / "bytes.py")
    (roots[4] / "baselines").mkdir()
    (roots[4] / "baselines" / "new.py").write_text("")
    digests = [source_digest(root) for root in roots]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


def test_a_system_from_outside_counts_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "outside_planner.py"
    shutil.copy(Path(identity.ROOT) / "baselines" / "tutel.py", module)
    monkeypatch.syspath_prepend(str(tmp_path))
    import outside_planner  # type: ignore[import-not-found]

    monkeypatch.setattr(identity, "system_class", lambda name: outside_planner.Tutel)
    identity.system_digest.cache_clear()
    first = identity.system_digest("outside")
    assert first is not None
    module.write_text(module.read_text() + "# changed\n")
    identity.system_digest.cache_clear()
    assert identity.system_digest("outside") not in (None, first)
    monkeypatch.undo()
    identity.system_digest.cache_clear()
    assert identity.system_digest("tutel") is None


def test_directory_names_are_flat_and_short() -> None:
    name = directory_name(config(tag="a/b c,d"), "0123456789ab")
    assert name == "tiny_512_simulate_0123456789ab"
    odd = config()
    object.__setattr__(odd.model, "name", "a/b " + "x" * 300)
    assert re.fullmatch(r"[A-Za-z0-9._=-]{1,199}", directory_name(odd, "0123456789ab"))


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Point:
    x: float
    tags: tuple[str, ...]


def test_plain_and_canonical() -> None:
    value = {
        "p": Point(1.5, ("a",)),
        "n": np.int64(3),
        "f": np.float64(0.5),
        "c": Colour.RED,
        "l": np.array([1, 2]),
        1: None,
    }
    assert plain(value) == {"p": {"x": 1.5, "tags": ["a"]}, "n": 3, "f": 0.5, "c": "red", "l": [1, 2], "1": None}
    assert canonical({"b": 1, "a": True}) == '{"a":true,"b":1}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical(float("nan"))
    with pytest.raises(TypeError, match="set"):
        plain({1, 2})

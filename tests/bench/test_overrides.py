"""Rewriting of the command line and Hydra's errors in one line."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from bench.overrides import rewrite


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["model=qwen3", "seq=32k"], ["model=qwen3", "seq=32k"]),
        (["model=a,b", "-m", "seq=1"], ["-m", "model=a,b", "seq=1"]),
        (["model=my/config.json"], ["model=hf", "model.path='my/config.json'"]),
        (["model=config.json"], ["model=hf", "model.path='config.json'"]),
        (["model='a b/c,d.yaml'"], ["model=hf", "model.path='a b/c,d.yaml'"]),
        (["model=a.json,b.json"], ["model=hf", "model.path='a.json','b.json'"]),
        (["cluster=./mine.yaml"], ["cluster=file", "cluster.path='./mine.yaml'"]),
        (["calibration=x/y.yml"], ["calibration=file", "calibration.path='x/y.yml'"]),
        (["system.tutel.degree=2,4"], ["++system.tutel.degree=2,4"]),
        (["seq=1", "--cfg", "job", "~tag"], ["--cfg", "job", "seq=1", "~tag"]),
    ],
)
def test_rewrite(given: list[str], expected: list[str]) -> None:
    assert rewrite(given) == expected


def test_a_sweep_takes_names_or_paths() -> None:
    with pytest.raises(ValueError, match="not both"):
        rewrite(["model=qwen3,my/config.json"])


def test_system_is_no_choice() -> None:
    with pytest.raises(ValueError, match=r"systems=\[tutel\]"):
        rewrite(["system=tutel"])


@pytest.mark.parametrize("path", ["a b/c=d.json", "it's/config.json", "x,y/[1]{2}.yaml", "tab\\name/m.json"])
def test_paths_survive_the_grammar(path: str) -> None:
    quoted = rewrite([f'cluster="{path}"'])[1]
    (override,) = OverridesParser.create().parse_overrides([quoted])
    assert override.value() == path

"""What a study asks: kinds, axes, models, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from bench.claims import points
from bench.config import RunConfig, resolve
from bench.study import AXES, study_from_mapping
from disagmoe.specs import load_model
from tests.bench.helpers import CONF, config

TINY = load_model("tiny")


def study(**changes: Any) -> Any:
    return study_from_mapping({"kind": "sensitivity", "axes": {"skew": [1, 1.5]}, **changes}, TINY)


def test_axes_come_in_one_order_and_numbers_are_numbers() -> None:
    made = study(axes={"head": ["next_a"], "skew": [1, 2], "contention_scale": [0], "merge": None})
    assert made.axes == (("contention_scale", (0.0,)), ("skew", (1.0, 2.0)), ("head", ("next_a",)))
    assert made.settings("merge") == ()


def test_models_beside_the_chosen_one() -> None:
    assert [model.name for model in study(also=["qwen3", "tiny", "qwen3"]).models] == ["tiny", "qwen3"]
    assert [model.name for model in study().models] == ["tiny"]


SHIPPED = ["sensitivity", "paper_claims", "ratio_sweep", "virtual_stages", "topk_ep", "microbatches"]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_studies_are_valid(name: str) -> None:
    mapping = yaml.safe_load((CONF / "experiment" / f"{name}.yaml").read_text(encoding="utf-8"))
    made = study_from_mapping(mapping["study"], load_model("qwen3"))
    assert [axis for axis, _ in made.axes] == list(AXES[made.kind])
    assert config(study=mapping["study"]).study is not None


def composed(name: str) -> RunConfig:
    """What `experiment=<name>` makes of the configuration, at full depth."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        made = compose("config", [f"experiment={name}", "depth=full"], return_hydra_config=True)
    choices = {str(key): value for key, value in made.hydra.runtime.choices.items()}
    plain = OmegaConf.to_container(OmegaConf.masked_copy(made, [key for key in made if key != "hydra"]), resolve=True)
    assert isinstance(plain, dict)
    return resolve({str(key): value for key, value in plain.items()}, choices)


@pytest.mark.parametrize(
    ("name", "model", "cluster", "count"),
    [
        ("ratio_sweep", "deepseek_moe", "h800_32", 10 * 2 * 4),  # ratios, rules for the NICs, lengths
        ("virtual_stages", "qwen3", "h800_128", 7 * 3),  # depths, models
        ("topk_ep", "deepseek_moe", "h800_128", 4 * 4),
        ("microbatches", "qwen3", "h800_128", 6 * 3),
        ("paper_claims", "qwen3", "h800_128", 3 * 5 * 2 + 4 * 3 + 3 * 8),
    ],
)
def test_presets_compose_to_their_points(name: str, model: str, cluster: str, count: int) -> None:
    run = composed(name)
    assert run.study is not None
    assert run.study.kind == name.replace("paper_", "")
    assert (run.model.name, run.cluster.name, run.views) == (model, cluster, ("native",))
    found = points(run)
    assert len(found) == count
    assert len({(p.config.model.name, p.config.workload.seq, p.axis, p.setting) for p in found}) == count


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "guess"}, "study.kind=guess: allowed: sensitivity, claims, ratio_sweep"),
        ({"more": 1}, "more"),
        ({"axes": {"colour": [1]}}, "study.axes.colour: axes of sensitivity: contention_scale, nic"),
        ({"axes": {"skew": [0.5]}}, "study.axes.skew=[0.5]: allowed: a list of different numbers of at least 1"),
        ({"axes": {"nic": [0]}}, "factors above 0"),
        ({"axes": {"nic": [1, 1]}}, "different factors"),
        ({"axes": {"skew": []}}, "study.axes.skew"),
        ({"axes": {"skew": [True]}}, "study.axes.skew"),
        ({"axes": {"merge": ["gpu"]}}, "any of none, rank, node"),
        ({"axes": {"compute_streams": [3]}}, "any of 2, 1"),
        ({"kind": "claims", "axes": {"ratio": ["16-10"]}}, "texts like 16:10"),
        ({"kind": "claims", "axes": {"top_k": [0]}}, "positive integers"),
        ({"kind": "topk_ep", "axes": {"depth": [1]}}, "axes of topk_ep: top_k, top_k_seq, ep"),
        ({"kind": "ratio_sweep", "axes": {"ratio_nics": ["mine"]}}, "any of halves, own, shared_nodes, free"),
        ({"axes": {"replay": ["never"]}}, "any of exposed, hidden"),
        ({"also": ["nobody"]}, "nobody"),
    ],
)
def test_refusals(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as refusal:
        study(**changes)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)

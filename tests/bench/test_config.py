"""What the values of a command line mean, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from baselines.registry import system_names
from bench.config import SETTINGS, resolve
from bench.overrides import settings
from disagmoe.specs import fields as read
from tests.bench.helpers import CHOICES, CONF, config, group, values


def test_settings_are_those_of_the_configuration_file() -> None:
    assert set(SETTINGS) == set(settings(CONF)) - {"experiment"}


def test_defaults() -> None:
    plain = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))
    del plain["defaults"], plain["hydra"]
    plain |= {"model": group("model", "qwen3"), "cluster": group("cluster", "h800_128")}
    run = resolve(plain, {"model": "qwen3", "cluster": "h800_128", "calibration": None})
    assert run.workload.seq == 32768
    assert run.workload.global_batch == 256  # 8,388,608 tokens / 32,768
    assert run.calibration == "h800"
    assert run.views == ("native", "uniform")
    assert run.systems == system_names()
    assert (run.ep, run.artifacts, run.backend) == (16, "all", "simulate")
    assert [path.name for path in run.files] == ["qwen3.yaml", "h800_128.yaml", "h800.yaml"]


@pytest.mark.parametrize(
    ("given", "seq"),
    [("32k", 32768), ("32K", 32768), (32768, 32768), (32768.0, 32768), ("32_768", 32768), ("3000", 3000), (1e4, 10000)],
)
def test_spellings_of_a_length(given: Any, seq: int) -> None:
    assert config(seq=given).workload.seq == seq


@pytest.mark.parametrize(
    ("given", "systems"),
    [
        ("all", system_names()),
        ("tutel", ("megatron_1f1b", "tutel")),
        ("disagmoe,tutel", ("megatron_1f1b", "tutel", "disagmoe")),
        (["tutel", "megatron_1f1b", "tutel"], ("megatron_1f1b", "tutel")),
    ],
)
def test_systems_come_in_one_order_with_the_reference_first(given: Any, systems: tuple[str, ...]) -> None:
    assert config(systems=given).systems == systems


def test_a_run_on_this_machine_shows_one_view_unless_told_otherwise() -> None:
    assert config().views == ("native", "uniform")
    assert config(backend="emulate").views == config(backend="measure", impl="both").views == ("native",)
    assert config(backend="emulate", transport="uniform", processes=8).views == ("uniform",)


def test_a_sweep_keeps_tables_only_unless_told_otherwise() -> None:
    assert resolve(values(), CHOICES, sweep=True).artifacts == "tables"
    assert resolve(values(artifacts="all"), CHOICES, sweep=True).artifacts == "all"
    assert resolve(values(artifacts="tables"), CHOICES).artifacts == "tables"


def test_a_batch_in_multiples_of_the_default() -> None:
    assert config(batch="4x").workload.global_batch == 4 * 16384  # 8,388,608 tokens / 512
    assert config(batch="1X").workload == config(batch=None).workload


def test_options_of_a_system() -> None:
    assert config(system={"tutel": {"degree": 4}}).system_options == {"tutel": {"degree": 4}}
    assert config().system_options == {}


def test_a_model_can_be_cut_in_depth_with_its_special_layers() -> None:
    mapping = {**group("model", "gpt_oss"), "layers": 7}
    run = resolve(values(model=mapping), {**CHOICES, "model": "gpt_oss"})
    assert run.model.layers == 7
    assert run.full_layers == 36
    assert run.model.windowed_layers == (0, 2, 4, 6)


def test_files_by_path(tmp_path: Path) -> None:
    for name in ("model", "cluster", "calibration"):
        option = {"model": "tiny", "cluster": "laptop", "calibration": "h800"}[name]
        (tmp_path / f"my_{name}.yaml").write_bytes((CONF / name / f"{option}.yaml").read_bytes())
    paths = {name: {"path": str(tmp_path / f"my_{name}.yaml")} for name in ("model", "cluster", "calibration")}
    run = resolve(values(**paths), {"model": "hf", "cluster": "file", "calibration": "file"})
    assert run.model.layers == 4
    assert run.cluster.gpus == 8
    assert Path(run.calibration).stem == "my_calibration"
    assert [path.name for path in run.files] == ["my_model.yaml", "my_cluster.yaml", "my_calibration.yaml"]


def test_a_length_beyond_the_model_warns() -> None:
    assert config().warnings == ()
    (line,) = config(seq=8192).warnings
    assert "8192" in line
    assert "4096" in line


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seq": 0}, ("seq=0", "positive")),
        ({"seq": "32kk"}, ("32kk", "32k")),
        ({"seq": ""}, ("seq=''", "positive")),
        ({"batch": -1}, ("batch=-1",)),
        ({"micro_batch": 0}, ("micro_batch=0", "positive integer")),
        ({"skew": 0.5}, ("skew", "at least 1")),
        ({"stragglers": [[0]]}, ("stragglers", "[gpu, slowdown]")),
        ({"stragglers": [[0, 1.1], [8, 1.2]]}, ("straggler on GPU 8", "GPUs 0 to 7")),
        ({"systems": "foo"}, ("foo", "known are megatron_1f1b, ")),
        ({"systems": []}, ("systems=[]", "megatron_1f1b")),
        ({"systems": "tutel,"}, ("systems=tutel,", "megatron_1f1b")),
        ({"system": {"tutel": {"speed": 1}}}, ("speed", "degree")),
        ({"system": {"nope": {"degree": 1}}}, ("nope", "tutel")),
        ({"system": {"tutel": {"degree": 3}}}, ("degree=3",)),
        ({"systems": "disagmoe", "system": {"tutel": {"degree": 2}}}, ("tutel does not run", "disagmoe")),
        ({"transport": "rdma"}, ("transport=rdma", "native, uniform, both")),
        ({"uniform_transport": "ib"}, ("uniform_transport=ib", "deepep")),
        ({"merge": "gpu"}, ("merge=gpu", "none, rank, node")),
        ({"ep": 0}, ("ep=0", "auto")),
        ({"contention_scale": -1}, ("contention_scale=-1", "at least 0")),
        ({"plans_from": "elsewhere"}, ("plans_from=elsewhere", "default_batch")),
        ({"batch": "0x"}, ("batch='0x'", "positive")),
        ({"study": {"kind": "x", "axes": {}}}, ("study.kind=x", "sensitivity")),
        ({"gantt_window": "9:1"}, ("gantt_window=9:1", "start:stop")),
        ({"gantt_workers": []}, ("gantt_workers", "[0,1,2]")),
        ({"ep": "many"}, ("ep=many", "auto")),
        ({"depth": "half"}, ("depth=half", "full, common")),
        ({"backend": "guess"}, ("backend=guess", "simulate, emulate, measure")),
        ({"impl": "theirs"}, ("impl=theirs", "equivalent, native, both")),
        ({"impl": "native"}, ("impl=native", "backend=measure")),
        ({"impl": "both", "backend": "emulate"}, ("impl=both", "backend=measure")),
        ({"processes": 4}, ("processes=4", "emulate and measure")),
        ({"processes": 6, "backend": "emulate"}, ("processes=6", "4, 8")),
        ({"processes": 0, "backend": "measure"}, ("processes=0", "positive")),
        ({"repeats": 0}, ("repeats=0", "positive")),
        ({"repeats": 1000}, ("repeats=1000", "1 to 100")),
        ({"backend": "emulate", "study": {"kind": "sensitivity", "axes": {}}}, ("backend=emulate", "simulate")),
        ({"budget": 0}, ("budget=0",)),
        ({"artifacts": "some"}, ("artifacts=some", "all, tables, auto")),
        ({"force": "yes"}, ("force", "true or false")),
        ({"results_dir": ""}, ("results_dir",)),
        ({"tag": ["a", "b"]}, ("tag=", "printable")),
        ({"tag": "x" * 300}, ("tag=", "200")),
        ({"tag": "two\nlines"}, ("tag=", "printable")),
    ],
)
def test_refusals_are_one_line_that_says_what_is_allowed(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"\S") as refusal:
        config(**changes)
    line = str(refusal.value)
    assert "\n" not in line.replace("two\nlines", "")
    for word in words:
        assert word in line


def test_unknown_settings_and_changed_calibration_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="no setting 'foo'"):
        resolve({**values(), "foo": 1}, CHOICES)
    with pytest.raises(ValueError, match="no value for 'seq'"):
        resolve({key: value for key, value in values().items() if key != "seq"}, CHOICES)
    changed = {**group("calibration", "h800"), "device": "h100"}
    with pytest.raises(ValueError, match="calibration=<path>"):
        resolve(values(calibration=changed), {**CHOICES, "calibration": "h800"})
    assert resolve(values(calibration=group("calibration", "h800")), {**CHOICES, "calibration": "h800"})


def test_a_path_must_be_given_where_one_is_meant() -> None:
    with pytest.raises(ValueError, match="model=<path>"):
        resolve(values(model={"path": "???"}), {**CHOICES, "model": "hf"})


def test_a_preset_of_a_system_stands_under_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preset = tmp_path / "tutel.yaml"
    preset.write_text("degree: 4\npp: 2\n")
    shipped = read.shipped
    monkeypatch.setattr(read, "shipped", lambda name: {"tutel": preset} if name == "system" else shipped(name))
    assert config().system_options == {"tutel": {"degree": 4, "pp": 2}}
    assert config(system={"tutel": {"degree": 8}}).system_options == {"tutel": {"degree": 8, "pp": 2}}


@pytest.mark.parametrize(
    ("cluster", "calibration", "line"),
    [
        ("h200_64", "h800", "calibration h800 is of H800, cluster h200_64 has H200: rates are an extrapolation"),
        ("h200_64", None, "calibration h100 is of H100, cluster h200_64 has H200: rates are an extrapolation"),
        ("h800_128", "paper-profile", None),
        ("h800_128", None, None),
    ],
)
def test_a_calibration_of_another_device_is_said(cluster: str, calibration: str | None, line: str | None) -> None:
    choices = {"model": "tiny", "cluster": cluster, "calibration": calibration}
    run = resolve(values(cluster=group("cluster", cluster)), choices)
    assert run.warnings == (() if line is None else (line,))

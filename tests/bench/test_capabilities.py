"""The table of peers says what the adapters say, and loads none of them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from baselines.native.peers import MEGATRON, PEERS, TUTEL, peer_of
from baselines.registry import SHIPPED
from bench.capabilities import COLUMNS, main, markdown, models_table, peers_table
from disagmoe.specs import model_names


def test_every_peer_stands_beside_systems_of_ours() -> None:
    beside = [system for peer in PEERS for system in peer.systems]
    assert len(set(beside)) == len(beside)
    assert set(beside) <= set(SHIPPED)
    assert peer_of("megatron_1f1b_overlap") is MEGATRON
    assert peer_of("tutel") is TUTEL
    assert peer_of("disagmoe") is None


def test_tables_are_complete(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    printed = capsys.readouterr().out
    assert all(len(row) == len(COLUMNS) for row in peers_table())
    assert [row[0] for row in models_table()] == list(model_names())
    cells = {row[0]: row[1:] for row in models_table()}
    assert cells["tiny"] == ("yes", "yes")
    assert cells["gpt_oss"][0].startswith("no: attention biases, attention sinks")
    for peer in PEERS:
        assert (peer.installed or peer.missing) in printed
    assert markdown(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_a_missing_peer_says_what_to_install() -> None:
    absent = replace(MEGATRON, module="no_such_package.core")
    assert absent.installed is None
    with pytest.raises(ValueError, match=r"^Megatron-Core is not installed: pip install -e '\.\[megatron\]' "):
        absent.require()


def test_asking_what_is_here_imports_no_peer() -> None:
    script = (
        "import sys; from bench.capabilities import main; main();"
        "print('LOADED', {'tutel', 'megatron.core.transformer'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "LOADED set()" in done.stdout

"""`python -m placement`."""

from __future__ import annotations

import json

import pytest

from placement.cli import COMMANDS, main
from placement.measuring.log import CostLog, Key
from placement.measuring.protocol import Measurement

MODEL = """
import torch

def make():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), (torch.randn(2, 8),)
"""


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help_is_there(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    assert end.value.code == 0
    assert "usage: python -m placement" in capsys.readouterr().out


def test_every_backend_is_a_line_whether_it_is_there_or_not(capsys):
    assert main(["backends"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines[1:]]
    for name in ("aten", "inductor", "onnxruntime", "openvino", "onednn-graph"):
        assert name in names
    assert all(line.split()[3:] for line in lines[1:])


def test_a_model_from_a_file_is_optimized(tmp_path, capsys):
    (tmp_path / "model.py").write_text(MODEL)
    arguments = [
        "--backends",
        "aten-prepacked",
        "--budget",
        "10",
        "--level",
        "op",
        "--log",
        str(tmp_path / "log"),
    ]
    files = [
        "--json",
        str(tmp_path / "r.json"),
        "--save",
        str(tmp_path / "m.pt2"),
        "--draw",
        str(tmp_path / "g.png"),
    ]
    assert main(["optimize", f"{tmp_path}/model.py:make", *arguments, *files]) == 0
    assert "end to end:" in capsys.readouterr().out
    assert json.loads((tmp_path / "r.json").read_text())["rows"]
    assert (tmp_path / "m.pt2").exists()
    assert (tmp_path / "g.png").exists()
    assert main(["log", "--log", str(tmp_path / "log"), "--backend", "aten-prepacked"]) == 0
    assert "linear" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optimize", "nothing"], "is not FILE.py:FUNCTION"),
        (["optimize", "no_such_file.py:make"], "no_such_file.py cannot be loaded"),
        (["optimize", "no_such_module:make"], "no_such_module cannot be loaded"),
        (["optimize", "json:make"], "json has no function make"),
        (["optimize", "json:dumps", "--threads", "0"], "--threads is 0"),
        (["log"], "there is no cost log"),
    ],
)
def test_bad_input_is_said_and_the_status_is_2(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_the_log_is_shown_and_pruned(log_path, capsys):
    log = CostLog(log_path)
    log.put(Key("a" * 32, "one", "1", 1, "cpu", "wall"), Measurement("ok", 1e-3, 1e-3, 2e-3, 30), "conv2d")
    log.put(
        Key("b" * 32, "two", "1", 1, "cpu", "wall"),
        Measurement("hung", detail="no answer within 60 s"),
        "add",
    )
    assert main(["log"]) == 0
    out = capsys.readouterr().out
    assert "conv2d" in out
    assert "no answer within 60 s" in out
    assert main(["log", "--older-than", "1"]) == 2
    assert main(["log", "--prune", "--status", "hung"]) == 0
    assert "1 entries deleted" in capsys.readouterr().out
    assert [e.key.backend for e in log.entries()] == ["one"]
    assert main(["log", "--limit", "0"]) == 2

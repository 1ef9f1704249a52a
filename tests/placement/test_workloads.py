"""The workloads of `bench placement`, and the command on tiny ones."""

from __future__ import annotations

import json

import pytest
import torch
from torch.fx import GraphModule

from bench.cli import main
from bench.placing_report import groups_of, summary
from bench.workloads import WORKLOADS
from placement.capture import capture, capture_graph
from placement.registry import REGISTRY
from placement.search.candidates import blocks, offers

FULL_PARAMETERS = {"dcgan": 3_576_704, "nasnet": 5_289_978, "resnet3d": 47_018_576, "resnext": 25_028_904}
"""Of the published models, classifiers of 1000 (3D-ResNet50: 400) classes. NASNet's stem differs."""


pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def made(name: str, size: str = "tiny", batch: int = 2):
    if name == "bert":
        pytest.importorskip("transformers")
    return WORKLOADS[name].make(size, batch, 0)


def captured_of(model, inputs):
    return capture_graph(model) if isinstance(model, GraphModule) else capture(model, inputs)


@pytest.mark.parametrize("name", WORKLOADS)
@torch.no_grad()
def test_a_workload_is_captured_as_it_is(name):
    model, inputs = made(name)
    captured = captured_of(model, inputs)
    result = captured.unflatten(captured.graph.module(*inputs))
    torch.testing.assert_close(result, model(*inputs), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(made(name)[0](*inputs), model(*inputs), rtol=0, atol=0)


@pytest.mark.parametrize("name", WORKLOADS)
def test_backends_find_what_they_run_in_every_workload(name):
    model, inputs = made(name)
    graph = captured_of(model, inputs).graph
    found = offers(graph, list(REGISTRY), REGISTRY)
    assert found.notes == []
    assert found.masks["aten"].keys() == {1 << i for i in range(len(graph))}
    for masks in found.masks.values():
        assert all(graph.is_convex(mask) for mask in masks)
    for mask in blocks(graph):
        assert graph.is_convex(mask)


@pytest.mark.parametrize("name", FULL_PARAMETERS)
def test_the_full_models_are_as_large_as_the_published_ones(name):
    model, _ = made(name, "full", 1)
    count = sum(p.numel() for p in model.parameters())
    assert count == pytest.approx(FULL_PARAMETERS[name], rel=1e-3 if name == "nasnet" else 0)


@pytest.mark.slow
def test_the_command_records_every_mode_and_shows_a_record(tmp_path, capsys):
    pytest.importorskip("deap", reason="the graph-level search needs DEAP")
    out, plot, lines = tmp_path / "r.json", tmp_path / "speed.png", tmp_path / "convergence.png"
    run = [
        "placement",
        "--workloads",
        "dcgan",
        "--size",
        "tiny",
        "--budget",
        "10",
        "--compile-modes",
        "",
        "--ablation",
    ]
    assert main([*run, "--backends", "aten-prepacked,onednn-graph", "--out", str(out)]) == 0
    capsys.readouterr()
    results = json.loads(out.read_text())["results"]
    modes = groups_of(results)["dcgan", 1]
    assert {
        "eager",
        "single:aten",
        "single:onednn-graph",
        "placement:op",
        "placement:two-level",
    } <= modes.keys()
    assert any(mode.startswith("ablation:") for mode in modes)
    assert all(r["equal"] and len(r["step_ms"]) >= 10 for r in results)
    assert modes["placement:op"]["search_with_log_s"] < 10
    assert main(["placement", "--show", str(out), "--plot", str(plot), "--convergence", str(lines)]) == 0
    assert capsys.readouterr().out.strip() == summary(results).strip()
    assert plot.stat().st_size > 1000
    assert lines.stat().st_size > 1000


def test_unknown_workloads_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["placement", "--workloads", "vgg"])
    assert "'vgg' is not one of" in capsys.readouterr().err

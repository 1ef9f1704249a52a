"""A backend that an installed package brings: found, used where it wins, contained where it fails."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import placement
from placement.backends.aten import Aten
from placement.measuring.log import CostLog
from placement.registry import Registry
from tests.placement.third_party import write_distribution


class Absolute(nn.Module):
    def forward(self, x):
        return torch.relu(x) + torch.relu(-x)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    folder = tmp_path / "site"
    folder.mkdir()
    write_distribution(folder)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    sys.modules.pop("tests_placement_third_party", None)


def optimize(quick, log=None, **options):
    registry = Registry([Aten()])
    x = torch.randn(1 << 16)
    placed = placement.optimize(
        Absolute(), (x,), registry=registry, protocol=quick, log=log, level="op", **options
    )
    torch.testing.assert_close(placed(x), x.abs())
    return placed


def test_it_is_found_by_its_entry_point_and_used_where_it_wins(installed, quick):
    placed = optimize(quick)
    assert placed.placement.backends() == ("third-party",)
    (row,) = placed.report().rows
    assert row.title == "relu+neg+relu+add"
    assert row.cost.ok
    assert "op-level" in str(placed.report())


@pytest.mark.parametrize(
    ("fault", "status", "detail"),
    [
        ("crash", "crashed", "signal 11"),
        ("exit", "crashed", "exit status 3"),
        ("wrong", "wrong", "off by 1.0e-02"),
        ("hang", "hung", "no answer within 20 s"),
    ],
)
def test_its_crash_wrong_result_or_hang_is_contained_and_reported(
    installed, quick, log_path, monkeypatch, fault, status, detail
):
    monkeypatch.setenv("THIRD_PARTY_FAULT", fault)
    log = CostLog(log_path)
    placed = optimize(quick, log, timeout_s=20 if fault == "hang" else 100)
    assert placed.placement.backends() == ("aten",)
    (entry,) = log.entries(backend="third-party", status=status)
    assert detail in entry.measurement.detail
    assert f"third-party: 1 {status}" in str(placed.report())


def test_an_entry_point_that_fails_is_a_line_and_no_crash(tmp_path, monkeypatch, quick, capsys):
    folder = tmp_path / "broken"
    folder.mkdir()
    write_distribution(folder, "no_such_module:Backend")
    monkeypatch.syspath_prepend(str(folder))
    registry = Registry([Aten()])
    registry.load_entry_points()
    assert "No module named 'no_such_module'" in registry.broken["third-party"]


def test_a_backend_of_a_taken_name_is_refused():
    registry = Registry([Aten()])
    with pytest.raises(placement.PlacementError, match=r"already a backend 'aten'.*replace=True"):
        registry.register(Aten())
    registry.register(Aten(), replace=True)


def test_what_is_no_pattern_or_rule_or_backend_is_refused():
    registry = Registry([Aten()])
    with pytest.raises(placement.PlacementError, match="is no pattern"):
        registry.add_pattern("aten", "relu")
    with pytest.raises(placement.PlacementError, match="Pass an instance"):
        registry.add_rule("aten", placement.PatternRule)
    with pytest.raises(placement.PlacementError, match=r"no backend 'atem'.*Did you mean 'aten'"):
        registry.get("atem")

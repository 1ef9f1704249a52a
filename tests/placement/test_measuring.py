"""How times are summed up, kept and compared; trials in a child process."""

from __future__ import annotations

import multiprocessing
import sqlite3
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from placement.errors import CostLogError
from placement.graph import TensorSpec
from placement.measuring.log import CostLog, Key
from placement.measuring.protocol import Measurement, Protocol, compare, is_tie, measure, summarize
from placement.measuring.trial import conforming

KEY = Key("segment", "aten", "2.13", 1, "a processor", "wall")


def measured(low: float, cost: float, median: float) -> Measurement:
    return Measurement("ok", cost, low, median, 30)


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=60))
def test_the_cost_lies_between_the_minimum_and_the_median(samples):
    found = summarize(samples, 0.5)
    assert found.min_s <= found.cost_s <= found.median_s or len(samples) < 3
    assert found.samples == len(samples)
    assert found.load == 0.5


def test_costs_that_noise_could_explain_are_ties():
    assert is_tie(measured(1.0, 1.0, 1.05), measured(1.05, 1.08, 1.1))
    assert not is_tie(measured(1.0, 1.0, 1.01), measured(1.5, 1.5, 1.51))
    assert is_tie(measured(1.0, 1.0, 2.0), measured(0.9, 1.3, 2.1))
    assert is_tie(measured(1.0, 1.0, 1.2), measured(1.3, 1.3, 1.4))
    assert not is_tie(measured(1.0, 1.0, 1.0), Measurement("wrong"))


def test_a_cell_whose_median_is_far_above_its_cost_is_unstable():
    assert summarize([1.0] * 5 + [3.0] * 5, 0).unstable
    assert not summarize([1.0] * 9 + [2.0], 0).unstable


def test_functions_take_turns_and_each_gets_its_samples():
    calls: list[str] = []
    protocol = Protocol(rounds=4, samples=8, seconds=0.0, warmup=1)
    taken = compare([lambda: calls.append("a"), lambda: calls.append("b")], protocol)
    assert [len(t) for t in taken] == [8, 8]
    after_warmup = calls[2:]
    assert sorted(after_warmup) == ["a"] * 8 + ["b"] * 8
    for round_ in range(4):
        assert sorted(after_warmup[4 * round_ : 4 * round_ + 4]) == ["a", "a", "b", "b"]


def test_unstable_cells_are_measured_again(monkeypatch):
    from placement.measuring import protocol as module

    series = iter([[[1.0] * 5 + [9.0] * 5, [1.0] * 10], [[1.0] * 10]])
    monkeypatch.setattr(module, "compare", lambda functions, protocol: next(series))
    first, second = measure([lambda: None, lambda: None], Protocol())
    assert not first.unstable
    assert not second.unstable


def test_the_log_gives_back_what_was_put_in_and_tells_keys_apart(tmp_path):
    log = CostLog(tmp_path / "log.sqlite")
    one, other = measured(1.0, 1.5, 2.0), Measurement("wrong", detail="off by 1")
    log.put(KEY, one, "relu")
    for field, value in (
        ("segment", "x"),
        ("backend", "y"),
        ("version", "3"),
        ("threads", 2),
        ("machine", "m"),
    ):
        assert log.get(replace(KEY, **{field: value})) is None
    log.put(replace(KEY, clock="cpu"), other)
    log.close()
    again = CostLog(tmp_path / "log.sqlite")
    assert again.get(KEY) == one
    assert again.get(replace(KEY, clock="cpu")) == other
    assert [e.title for e in again.entries(status="ok")] == ["relu"]
    assert again.prune(status="wrong") == 1
    assert again.prune(older_than_s=3600) == 0
    assert len(list(again.entries())) == 1


def _write(path: str, number: int) -> None:
    log = CostLog(path)
    for i in range(25):
        log.put(replace(KEY, segment=f"{number}-{i}"), measured(1.0, 1.0, 1.0))
        log.put(KEY, measured(number, number, number))


def test_processes_write_to_one_log_at_the_same_time(tmp_path):
    path = str(tmp_path / "log.sqlite")
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(path, n)) for n in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [w.exitcode for w in writers] == [0, 0, 0]
    log = CostLog(path)
    assert len(list(log.entries())) == 76
    assert log.get(KEY).cost_s in (0.0, 1.0, 2.0)


def test_a_file_that_is_no_log_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "text").write_text("no database, but long enough to be looked at" * 100)
    with pytest.raises(CostLogError, match="cannot be used as a cost log"):
        CostLog(tmp_path / "text")
    sqlite3.connect(tmp_path / "newer").execute("PRAGMA user_version = 99").connection.close()
    with pytest.raises(CostLogError, match="version 99"):
        CostLog(tmp_path / "newer")


def test_outputs_get_the_strides_of_the_graph_even_where_it_repeats_elements():
    graph = torch.arange(3.0)[:, None].expand(3, 4)
    run = conforming(lambda: (graph.contiguous(),), [graph.contiguous()], [TensorSpec.of(graph)])

    [output] = run()

    assert output.stride() == graph.stride() == (1, 0)
    assert torch.equal(output, graph)

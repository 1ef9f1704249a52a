"""optimize() from end to end: results, promises, options, errors, files."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
from torch import nn

import placement
from placement.backends.aten import Aten
from placement.backends.base import Backend
from placement.backends.inductor import Inductor
from placement.backends.prepacked import ChannelsLast, Prepacked
from placement.capture import capture
from placement.measuring.log import CostLog
from placement.measuring.protocol import Measurement
from placement.placements import Part, Placement
from placement.registry import Registry
from placement.search.costs import Costs
from placement.searching import NOISE, simplest_of_the_best
from placement.segments import cut
from placement.switching import switch_cost
from placement.values import record
from tests.placement.graphs import Attention, Block, TwoOutputs, seeded


def registry(*more: Backend) -> Registry:
    return Registry([Aten(), ChannelsLast(), Prepacked(), *more])


@pytest.fixture
def block():
    return seeded(Block()), (torch.randn(1, 16, 8, 8),)


def test_the_result_is_called_as_the_model_and_equals_it(quick):
    model = seeded(TwoOutputs())
    index, y = torch.tensor([3, 1]), torch.randn(2, 8)
    placed = placement.optimize(model, (index, y), registry=registry(Inductor()), protocol=quick, level="op")
    expected = model(index, y)
    for result in (placed(index, y), placed(index, y=y)):
        assert result.keys() == expected.keys()
        torch.testing.assert_close(result["sum"], expected["sum"])
        torch.testing.assert_close(result["out"], expected["out"])


def test_without_any_optional_backend_aten_and_inductor_do_it(quick, block):
    model, examples = block
    found = Registry([Aten(), Inductor()])
    placed = placement.optimize(model, examples, registry=found, protocol=quick, level="op")
    torch.testing.assert_close(placed(*examples), model(*examples), rtol=1e-4, atol=1e-4)
    assert set(placed.report().measured) >= {"op-level", "single aten", "single inductor"}


def test_nothing_measured_in_the_end_is_faster_than_what_is_returned(quick, block):
    model, examples = block
    report = placement.optimize(model, examples, registry=registry(), protocol=quick, level="op").report()
    assert report.measured_s <= NOISE * min(m.cost_s for m in report.measured.values())
    assert {"single aten", "single aten-channels-last", "single aten-prepacked"} <= set(report.measured)


@pytest.mark.parametrize(("single_ms", "winner"), [(1.02, "single inductor"), (1.05, "op-level")])
def test_what_noise_cannot_tell_apart_is_decided_by_the_fewest_parts(single_ms, winner, block):
    graph = capture(*block).graph
    singles = Placement.single(graph, "inductor")
    mixed = Placement.of(graph, [Part(1, "inductor"), Part(graph.all & ~1, "aten-prepacked")])
    times = {"op-level": 1.0, "single inductor": single_ms}
    measured = {name: Measurement("ok", ms, ms, ms, 30) for name, ms in times.items()}

    assert simplest_of_the_best(measured, {"op-level": mixed, "single inductor": singles}) == winner


def test_an_input_that_was_expanded_has_to_be_one_again(quick):
    class Add(torch.nn.Module):
        def forward(self, x):
            return x * 2 + 1

    x = torch.randn(1, 6).expand(4, 6)
    placed = placement.optimize(Add(), (x,), registry=registry(), protocol=quick, level="op", log=None)

    torch.testing.assert_close(placed(x.contiguous()), x * 2 + 1)
    with pytest.raises(placement.PlacementError, match="was expanded"):
        placed(torch.randn(4, 6))


def test_a_second_search_takes_its_costs_from_the_log(quick, block, log_path):
    model, examples = block
    first = placement.optimize(model, examples, registry=registry(), protocol=quick, level="op")
    assert first.report().times.measured > 0
    assert log_path.exists()
    again = placement.optimize(model, examples, registry=registry(), protocol=quick, level="op")
    assert again.report().times.measured == 0
    assert again.report().times.from_log > 0
    assert again.report().predicted_s == first.report().predicted_s


def test_fuel_limits_how_many_parts_leave_aten(quick, block):
    model, examples = block
    log = CostLog(None)
    options = {"registry": registry(), "protocol": quick, "level": "op", "log": log}
    for fuel in (0, 1):
        placed = placement.optimize(model, examples, fuel=fuel, **options)
        assert sum(p.backend != "aten" for p in placed.placement.parts) <= fuel
        torch.testing.assert_close(placed(*examples), model(*examples), rtol=1e-4, atol=1e-4)
    assert "fuel" in str(placed.report())


def test_named_backends_are_the_only_ones(quick, block):
    model, examples = block
    placed = placement.optimize(
        model, examples, backends=["aten-prepacked"], registry=registry(), protocol=quick, level="op"
    )
    assert set(placed.report().measured) == {
        "op-level",
        "graph-level",
        "single aten",
        "single aten-prepacked",
    }


def test_the_graph_level_search_runs_within_its_time(quick, block):
    pytest.importorskip("deap", reason="the graph-level search needs DEAP")
    model, examples = block
    report = placement.optimize(model, examples, registry=registry(), protocol=quick, budget_s=20).report()
    assert report.stopped in ("saturated", "time", "generations")
    assert report.steps[-1].best <= 1.0


def test_once_the_time_is_up_no_further_backend_compiles_for_the_segment_at_hand(quick, block, monkeypatch):
    late, real = [0.0], time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: real() + late[0])

    class Slow(ChannelsLast):
        def compile(self, lowered, segment):
            late[0] += 1000.0
            return super().compile(lowered, segment)

    class AsSlow(Slow):
        name = "as-slow"

    report = placement.optimize(
        *block,
        protocol=quick,
        registry=Registry([Aten(), Slow(), AsSlow()]),
        log=None,
        level="op",
        budget_s=100,
    ).report()
    assert 1000.0 < report.times.op_level_s < 2000.0  # one compilation
    assert any("the time was up" in note for note in report.notes)
    assert {"single aten-channels-last", "single as-slow"} <= set(report.measured)  # never worse than these


def test_inputs_of_a_graph_are_searched_with_in_the_strides_that_it_was_made_for(quick):
    rows = torch.arange(8 * 65).view(8, 65)[:, :64] % 7
    graph = capture(seeded(nn.Embedding(7, 4)), (rows,)).graph.module
    seen = []

    class Watching(ChannelsLast):
        name = "watching"

        def supports(self, segment):
            return None

        def compile(self, lowered, segment):
            def run(*inputs):
                seen.extend(t.stride() for t in inputs if t.dtype is torch.int64)
                return segment.module(*inputs)

            return run

    options = {"protocol": quick, "registry": Registry([Aten(), Watching()]), "log": None, "level": "op"}
    placement.optimize(graph, [rows.clone(memory_format=torch.contiguous_format)], **options)
    assert set(seen) == {rows.stride()}


def test_inputs_of_another_shape_than_the_graphs_are_refused_before_the_search(quick):
    graph = capture(seeded(nn.Embedding(7, 4)), (torch.zeros(8, 2, dtype=torch.int64),)).graph.module
    with pytest.raises(
        placement.PlacementError, match=r"input 0 is int64\[1, 2\].*optimized for int64\[8, 2\]"
    ):
        placement.optimize(graph, [torch.zeros(1, 2, dtype=torch.int64)], protocol=quick, log=None)


def test_example_values_lie_in_memory_as_the_models_own_do():
    rows = torch.arange(8 * 65).view(8, 65)[:, :64] % 7
    captured = capture(seeded(nn.Embedding(7, 4)), (rows,))
    examples = record(captured.graph, [rows])
    (indices,) = examples.inputs(cut(captured.graph, captured.graph.all))
    assert indices.stride() == rows.stride()
    assert torch.equal(indices, rows)


def test_a_switch_of_backends_is_not_measured_beside_what_hides_it():
    long = Costs({("aten-channels-last", 1): Measurement("ok", 1.0, 1.0, 1.0, 30)})
    untouched: Any = None
    assert switch_cost(ChannelsLast(), long, untouched) == 0.0


def test_without_deap_the_search_ends_at_op_level_and_says_so(quick, block, monkeypatch):
    from placement import searching

    monkeypatch.setattr(searching, "missing_packages", lambda name: f"{name} is not installed")
    model, examples = block
    report = placement.optimize(model, examples, registry=registry(), protocol=quick).report()
    assert report.stopped == ""
    assert "there was no graph-level search: deap is not installed" in report.notes


def test_a_saved_placement_is_loaded_and_runs(quick, tmp_path, block):
    model, examples = block
    placed = placement.optimize(model, examples, registry=registry(), protocol=quick, level="op")
    placed.save(tmp_path / "block.pt2")
    loaded = placement.load(tmp_path / "block.pt2", registry=registry())
    assert loaded.placement == placed.placement
    torch.testing.assert_close(loaded(*examples), placed(*examples))
    with pytest.raises(placement.PlacementError, match="no report"):
        loaded.report()
    torch.export.save(torch.export.export(model, examples), tmp_path / "plain.pt2")
    with pytest.raises(placement.PlacementError, match="without a placement"):
        placement.load(tmp_path / "plain.pt2")
    with pytest.raises(placement.PlacementError, match="is no placed model"):
        placement.load(tmp_path / "missing.pt2")


def test_a_saved_placement_whose_backend_is_gone_says_so(quick, tmp_path):
    model, x = seeded(nn.Sequential(nn.Linear(64, 64), nn.ReLU())), torch.randn(64, 64)
    placed = placement.optimize(model, (x,), registry=registry(), protocol=quick, level="op")
    graph = placed.captured.graph
    placed.placement = Placement.single(graph, "aten-prepacked")
    placed.save(tmp_path / "linear.pt2")
    with pytest.raises(placement.PlacementError, match="no backend 'aten-prepacked'"):
        placement.load(tmp_path / "linear.pt2", registry=Registry([Aten()]))


def test_a_picture_shows_each_backend(quick, tmp_path, block):
    pytest.importorskip("matplotlib")
    model, examples = block
    placed = placement.optimize(model, examples, registry=registry(), protocol=quick, level="op", fuel=1)
    placed.draw(tmp_path / "block.svg")
    assert (tmp_path / "block.svg").read_text().startswith("<?xml")
    with pytest.raises(placement.PlacementError, match="no suffix for a picture"):
        placed.draw(tmp_path / "block.nothing")


def test_the_report_is_plain_data_too(quick, block):
    model, examples = block
    report = placement.optimize(model, examples, registry=registry(), protocol=quick, level="op").report()
    data = json.loads(json.dumps(report.to_json()))
    assert data["chosen"] == report.chosen
    assert sum(row["ops"] for row in data["rows"]) == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget_s": 0}, "budget_s is 0; the search needs a positive number"),
        ({"budget_s": float("nan")}, "budget_s is nan"),
        ({"level": "both"}, "level is 'both'"),
        ({"fuel": -1}, "fuel is -1"),
        ({"allocator": "mine"}, "allocator is 'mine'"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"backends": ["onnxrunime"]}, "there is no backend 'onnxrunime'"),
        ({"backends": "aten"}, "must be a list of names"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message, block):
    model, examples = block
    with pytest.raises(placement.PlacementError, match=message):
        placement.optimize(model, examples, **options)


def test_a_missing_backend_that_was_asked_for_is_an_error(block):
    class Absent(Inductor):
        name = "absent"

        def missing(self):
            return "absent is not installed (pip install absent)"

    model, examples = block
    with pytest.raises(placement.PlacementError, match="absent cannot be used here: absent is not installed"):
        placement.optimize(model, examples, backends=["absent"], registry=registry(Absent()))


def test_a_rule_that_raises_is_named(block, quick):
    class Rule(placement.PatternRule):
        def op_rule(self, node):
            return node.attr("no_such_attribute")

    found = registry()
    found.add_rule("aten-prepacked", Rule())
    model, examples = block
    with pytest.raises(placement.PlacementError, match=r"Rule.op_rule raised KeyError"):
        placement.optimize(model, examples, registry=found, protocol=quick)


def test_a_rule_that_explodes_is_a_note_and_the_search_goes_on(quick):
    class Rule(placement.PatternRule):
        max_groups = 3

        def op_rule(self, node):
            return True

        def fusion_rule(self, kind, source, sink):
            return True

    found = registry()
    found.add_rule("aten-prepacked", Rule())
    model, x = seeded(Attention()), torch.randn(1, 4, 32)
    placed = placement.optimize(model, (x,), registry=found, protocol=quick, level="op")
    assert any("Rule allows more than 3 subgraphs" in note for note in placed.report().notes)


def test_inputs_that_do_not_fit_are_refused_and_strides_are_put_right(quick, block):
    model, (x,) = block
    placed = placement.optimize(model, (x,), registry=registry(), protocol=quick, level="op")
    with pytest.raises(placement.PlacementError, match=r"input 0 is float32\[2, 16, 8, 8\].*optimized for"):
        placed(torch.randn(2, 16, 8, 8))
    with pytest.raises(placement.PlacementError, match="float64"):
        placed(x.double())
    with pytest.raises(placement.PlacementError, match="nested as"):
        placed(x, x)
    with pytest.raises(placement.PlacementError, match="requires gradients"):
        placed(x.clone().requires_grad_())
    other = x.to(memory_format=torch.channels_last)
    torch.testing.assert_close(placed(other), model(x), rtol=1e-4, atol=1e-4)


def test_a_model_without_operations_is_refused():
    with pytest.raises(placement.PlacementError, match="no operations to place"):
        placement.optimize(nn.Identity(), (torch.ones(2),))
    with pytest.raises(placement.PlacementError, match="must be a tuple of arguments, not a Tensor"):
        placement.optimize(nn.ReLU(), torch.ones(2))


def test_random_operations_stay_on_aten_and_draw_eagers_numbers(quick):
    class Noisy(nn.Module):
        def forward(self, x):
            return torch.relu(x) + torch.rand_like(x)

    x = torch.randn(64)
    placed = placement.optimize(
        Noisy(), (x,), registry=Registry([Aten(), Inductor()]), protocol=quick, level="op"
    )
    torch.manual_seed(0)
    expected = Noisy()(x)
    torch.manual_seed(0)
    torch.testing.assert_close(placed(x), expected)


def test_the_public_names_are_these():
    assert sorted(placement.__all__) == [
        "Backend",
        "PatternRule",
        "Placed",
        "PlacementError",
        "Report",
        "Segment",
        "Site",
        "Unsupported",
        "add_backend_pattern",
        "add_backend_pattern_rule",
        "check_path",
        "constant",
        "dominates",
        "is_op",
        "load",
        "optimize",
        "outputs",
        "register_backend",
        "wildcard",
    ]

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from pipeline.capture import capture
from pipeline.errors import GraphError
from pipeline.memory import memory_traces
from pipeline.passes import add_communication, bpipe
from pipeline.plans import StageCost
from pipeline.profiles import profile_from_json, profile_to_json
from pipeline.profiling import profile
from pipeline.program import chain
from pipeline.runtime.stage import StageRunner
from pipeline.runtime.weights import Weights
from pipeline.schedules import one_f_one_b
from tests.pipeline.runtime.models import make_data, make_stage


class Branches(nn.Module):
    """Two branches that part and join."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.left = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.right = nn.Linear(8, 8)

    def forward(self, x):
        x = self.stem(x)
        return self.left(x) + self.right(x)


X = torch.linspace(-1, 1, 12).view(3, 4)


def test_children_become_nodes_and_data_flow_becomes_edges():
    graph = capture(Branches(), [X])
    assert [node.id for node in graph.nodes] == ["stem", "left", "right", "add"]
    assert graph.edges == (("stem", "left"), ("stem", "right"), ("left", "add"), ("right", "add"))
    assert graph.nodes[1].description == "2 linear, gelu"


def test_deeper_nodes_are_the_children_of_children():
    graph = capture(Branches(), [X], depth=2)
    assert [node.id for node in graph.nodes] == ["stem", "left.0", "left.1", "left.2", "right", "add"]


def test_without_a_depth_each_operator_is_a_node():
    graph = capture(Branches(), [X], depth=None)
    assert len(graph.nodes) == 6


def test_a_module_that_is_called_twice_is_two_nodes():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return self.inner(self.inner(x).relu())

    graph = profile(Twice(), [X], repeat=1)
    assert len(graph.model.nodes) == 3
    assert graph.total().parameter_bytes == (4 * 4 + 4) * 4


def test_what_cannot_be_exported_is_an_error_that_says_so():
    class Branching(nn.Module):
        def forward(self, x):
            return x + 1 if x.sum() > 0 else x

    with pytest.raises(GraphError, match="Branching can't be captured"):
        capture(Branching(), [X])


def test_bytes_are_those_of_the_tensors():
    graph = profile(Branches(), [X], repeat=2)
    stem, left, right, add = graph.costs
    assert graph.samples == 3
    assert (stem.output_bytes, stem.parameter_bytes, stem.saved_bytes) == (3 * 8 * 4, (4 * 8 + 8) * 4, 0)
    # Its input, what gelu reads, and what gelu gives.
    assert left.saved_bytes == 3 * (8 + 16 + 16) * 4
    assert right.saved_bytes == 0  # its input, which the other branch has saved already
    assert (add.parameter_bytes, add.saved_bytes) == (0, 0)
    assert all(cost.forward_ms > 0 for cost in graph.costs)
    assert all(cost.backward_ms > 0 for cost in graph.costs)


@pytest.mark.parametrize("depth", [1, 2, None])
def test_saved_bytes_add_up_to_what_the_whole_module_saves(depth):
    module = nn.Sequential(
        nn.LayerNorm(4),
        nn.Linear(4, 9),
        nn.Tanh(),
        nn.Dropout(0.3),
        nn.Sequential(nn.Linear(9, 4), nn.GELU()),
    )
    total = profile(module, [X], depth=depth, repeat=1).total().saved_bytes
    x = X.clone()
    stage = StageRunner(Weights(module, None), lambda k: nullcontext(), torch.device("cpu"))
    _, sizes = stage.trial((x,), ())
    # A stage holds its input, which it was sent; a whole model reads it where it is.
    assert total == sum(sizes) - X.nbytes


def test_a_profile_can_be_written_and_read():
    graph = profile(Branches(), [X], repeat=1)
    assert profile_from_json("Branches", profile_to_json(graph)) == graph


def test_measuring_changes_neither_buffers_nor_generators():
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout())
    before = [b.clone() for b in module.buffers()]
    torch.manual_seed(3)
    profile(module, [X], repeat=2)
    after = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(2))
    assert all(torch.equal(a, b) for a, b in zip(before, module.buffers(), strict=True))


def test_a_profile_of_stages_predicts_the_bytes_that_a_run_holds(four):
    program = add_communication(bpipe(one_f_one_b(chain(8, [1, 1, 1, 1], sizes=[2, 2, 2, 2]))))
    layout = program.layout
    data = make_data(layout)
    x, costs = None, []
    for s in range(4):
        module = make_stage(layout, s, tokens=False).module
        inputs = [*([] if x is None else [x]), *(t[:2] for t in data.get(s, []))]
        cost = profile(module, inputs, depth=0, repeat=1).total()
        received = 0 if x is None else x.nbytes
        with torch.no_grad():
            x = module(*inputs)
        output = x.nbytes if layout.successors[s] else 0
        costs.append(
            StageCost(
                output_bytes=output,
                parameter_bytes=cost.parameter_bytes,
                saved_bytes=cost.saved_bytes + received,
            )
        )
    results = four.run("train_with", str(program), 1, {"tokens": False})
    predicted = memory_traces(program, costs)
    assert [result["held"][0] for result in results] == list(predicted)

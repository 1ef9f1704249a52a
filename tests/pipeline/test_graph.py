from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.errors import GraphError
from pipeline.graph import Cost, ModelGraph, Node, ProfiledGraph, chain_graph, without
from pipeline.profiles import profile_from_json, profile_to_json, read_profile, read_profiles

DATA = Path(__file__).parent / "data"


def test_published_profiles_are_read_as_they_are():
    profiles = read_profiles(DATA / "profiles.json")
    raw = json.loads((DATA / "profiles.json").read_text())
    assert set(profiles) == {"vgg16", "resnet50", "resnet101", "gnmt"}
    for name, graph in profiles.items():
        total = graph.total()
        assert total.forward_ms == pytest.approx(raw[name]["total_fwd_ms"])
        assert total.backward_ms == pytest.approx(raw[name]["total_bwd_ms"])
        assert total.parameter_bytes == pytest.approx(raw[name]["param_MB"] * 1e6, rel=1e-5)
        assert len(graph.model.edges) == len(raw[name]["edges"])


def test_a_profile_survives_writing_and_reading():
    graph = read_profile(DATA / "profiles.json", "gnmt")
    assert profile_from_json("gnmt", json.loads(json.dumps(profile_to_json(graph)))) == graph


def test_a_file_of_one_model_needs_no_name(tmp_path):
    graph = chain_graph("m", {"a": Cost(1), "b": Cost(2)}, samples=3)
    (tmp_path / "m.json").write_text(json.dumps({"m": profile_to_json(graph)}))
    assert read_profile(tmp_path / "m.json") == graph
    (tmp_path / "bare.json").write_text(json.dumps(profile_to_json(graph)))
    assert read_profile(tmp_path / "bare.json").costs == graph.costs


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "object of models"),
        ('{"m": {"nodes": []}}', "lacks the key 'edges'"),
        ('{"m": {"nodes": [{"id": "a"}], "edges": []}}', "lacks the key 'fwd_ms'"),
        ('{"m": {"nodes": 3, "edges": []}}', "malformed"),
        ('{"a": {"nodes": [], "edges": []}, "b": {"nodes": [], "edges": []}}', "no model was named"),
    ],
)
def test_a_bad_profile_is_an_error_that_says_what_is_wrong(tmp_path, content, message):
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(GraphError, match=message):
        read_profile(tmp_path / "bad.json")


def test_a_missing_file_is_named():
    with pytest.raises(GraphError, match=r"nowhere\.json"):
        read_profiles("nowhere.json")


def nodes(*ids: str) -> tuple[Node, ...]:
    return tuple(Node(i) for i in ids)


def test_a_graph_with_a_cycle_is_refused_and_the_cycle_printed():
    with pytest.raises(GraphError, match="a -> b -> a"):
        ModelGraph("m", nodes("a", "b"), (("a", "b"), ("b", "a")))


def test_a_graph_with_a_dangling_edge_or_a_repeated_node_is_refused():
    with pytest.raises(GraphError, match="'z', which is no node"):
        ModelGraph("m", nodes("a"), (("a", "z"),))
    with pytest.raises(GraphError, match="'a' appears twice"):
        ModelGraph("m", nodes("a", "a"), ())


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_cost_must_be_a_number_that_is_not_negative(value):
    with pytest.raises(GraphError, match="forward_ms"):
        ProfiledGraph(ModelGraph("m", nodes("a"), ()), (Cost(value),))


def test_every_node_needs_a_cost():
    with pytest.raises(GraphError, match="1 costs for 2 nodes"):
        ProfiledGraph(ModelGraph("m", nodes("a", "b"), ()), (Cost(),))


def test_removing_nodes_keeps_the_rest_in_order():
    graph = chain_graph("m", {"a": Cost(1), "b": Cost(2), "c": Cost(3)})
    rest = without(graph, ["a"])
    assert [n.id for n in rest.model.nodes] == ["b", "c"]
    assert rest.model.edges == (("b", "c"),)
    assert rest.total().forward_ms == 5

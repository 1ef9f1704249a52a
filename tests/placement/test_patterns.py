"""The pattern language and its matcher, against exhaustive search and on what is easy to get wrong."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from placement.capture import capture
from placement.errors import PatternError
from placement.patterns.language import constant, dominates, is_op, outputs, wildcard
from placement.patterns.matcher import match
from tests.placement.graphs import Block, aten, op_graph, op_graphs, seeded

relu, neg, exp = aten.relu.default, aten.neg.default, aten.exp.default
add, mul, sub = aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor


def masks(graph, pattern) -> set[int]:
    return set(match(graph, pattern))


def diamond():
    """relu -> (neg, exp) -> add."""
    return op_graph([(relu, [-1]), (neg, [0]), (exp, [0]), (add, [1, 2])], [3])


def test_a_diamond_matches_when_its_top_is_one_pattern_object():
    top = is_op("relu")(wildcard())
    assert masks(diamond(), is_op("add")(is_op("neg")(top), is_op("exp")(top))) == {0b1111}


def test_two_pattern_objects_that_look_alike_may_still_be_the_same_value():
    pattern = is_op("add")(is_op("neg")(is_op("relu")(wildcard())), is_op("exp")(is_op("relu")(wildcard())))
    assert masks(diamond(), pattern) == {0b1111}


def test_half_a_diamond_does_not_match_since_its_top_is_read_elsewhere():
    assert masks(diamond(), is_op("neg")(is_op("relu")(wildcard()))) == set()


def test_one_pattern_object_used_twice_means_one_value():
    x = wildcard()
    square = is_op("mul")(x, x)
    assert masks(op_graph([(relu, [-1]), (mul, [0, 0])], [1]), square) == {0b10}
    assert masks(op_graph([(relu, [-1]), (neg, [-1]), (mul, [0, 1])], [2]), square) == set()


def test_commutative_operations_match_either_way_and_others_do_not():
    def pattern(name):
        return is_op(name)(is_op("relu")(wildcard()), is_op("neg")(wildcard()))

    for target, name, swapped in ((add, "add", True), (mul, "mul", True), (sub, "sub", False)):
        straight = op_graph([(relu, [-1]), (neg, [-1]), (target, [0, 1])], [2])
        crossed = op_graph([(relu, [-1]), (neg, [-1]), (target, [1, 0])], [2])
        assert masks(straight, pattern(name)) == {0b111}
        assert bool(masks(crossed, pattern(name))) == swapped


def test_an_early_choice_of_argument_order_is_undone_when_it_turns_out_wrong():
    # add(mul(a, b), a): the wildcard that occurs twice decides which way round mul's arguments go.
    graph = op_graph([(relu, [-1]), (neg, [-1]), (mul, [1, 0]), (add, [2, 0])], [3])
    shared = wildcard()
    assert masks(graph, is_op("add")(is_op("mul")(shared, wildcard()), shared)) == {0b1100}


def test_alternatives_and_optional_parts():
    chain = op_graph([(relu, [-1]), (neg, [0]), (exp, [1])], [2])
    either = is_op("neg")(wildcard()) | is_op("exp")(wildcard())
    assert masks(chain, either) == {0b010, 0b100}
    maybe = is_op("relu")(wildcard()).optional(lambda x: is_op("neg")(x))
    assert masks(chain, is_op("exp")(maybe)) == {0b111}
    assert masks(op_graph([(relu, [-1]), (exp, [0])], [1]), is_op("exp")(maybe)) == {0b11}


def test_several_outputs_leave_together():
    graph = op_graph([(relu, [-1]), (neg, [0]), (exp, [0])], [1, 2])
    top = is_op("relu")(wildcard())
    assert masks(graph, outputs(is_op("neg")(top), is_op("exp")(top))) == {0b111}
    assert masks(graph, is_op("neg")(top)) == set()


class Halves(torch.nn.Module):
    def forward(self, x):
        first, second = x.split(2)
        return torch.relu(first) * second


def test_an_operation_with_several_results_is_one_operation():
    graph = capture(Halves(), (torch.ones(4, 2),)).graph
    split = is_op("split")(wildcard())
    assert [op.name for op in graph.ops] == ["split", "relu", "mul"]
    assert masks(graph, split) == {0b001}
    assert masks(graph, is_op("mul")(is_op("relu")(split), split.get(1))) == {0b111}
    assert masks(graph, is_op("relu")(split.get(1))) == set()


class Norm(torch.nn.Module):
    def forward(self, x):
        y, mean, rstd = torch.ops.aten.native_layer_norm(x, [4], None, None, 1e-5)
        return torch.relu(y), mean * rstd


def test_results_of_one_operation_can_leave_by_different_ways():
    graph = capture(Norm(), (torch.ones(3, 4),)).graph
    norm = is_op("native_layer_norm")(wildcard())
    both = outputs(is_op("relu")(norm), is_op("mul")(norm.get(1), norm.get(2)))
    assert masks(graph, both) == {0b111}
    assert masks(graph, is_op("relu")(norm)) == set()


def test_dominator_paths_take_all_that_lies_between():
    graph = op_graph([(relu, [-1]), (neg, [0]), (exp, [0]), (neg, [2]), (add, [1, 3]), (mul, [4, -1])], [5])
    pattern = dominates(is_op("relu")(wildcard()), is_op("neg", "exp"), is_op("add"))
    assert masks(graph, pattern) == {0b11111}
    assert masks(graph, dominates(is_op("relu")(wildcard()), is_op("neg"), is_op("add"))) == set()


def test_a_path_that_escapes_the_dominator_does_not_match():
    graph = op_graph([(relu, [-1]), (neg, [0]), (exp, [1]), (add, [1, 2])], [3, 1])
    assert masks(graph, dominates(is_op("relu")(wildcard()), is_op("neg", "exp"), is_op("add"))) == set()


def test_constants_attributes_shapes_and_dtypes_are_checked():
    graph = capture(seeded(Block()), (torch.ones(1, 16, 8, 8),)).graph
    conv = is_op("conv2d")(wildcard(), constant(), wildcard())
    assert len(masks(graph, conv)) == 2
    assert len(masks(graph, conv.has_attr(groups=4, padding=1))) == 1
    assert len(masks(graph, conv.has_attr(groups=lambda g: g < 3, stride=[1, 1]))) == 1
    assert masks(graph, conv.has_attr(groups=3)) == set()
    assert len(masks(graph, conv.has_shape(1, None, 8, 8))) == 2
    assert masks(graph, conv.has_shape(1, 16, 8)) == set()
    assert masks(graph, conv.has_dtype(torch.float64)) == set()
    assert masks(graph, is_op("conv2d")(wildcard(), wildcard(), constant())) == {
        *masks(graph, conv.has_attr(groups=4))
    }


class Halved(torch.nn.Module):
    def forward(self, x):
        return x * 0.5 + 1


def test_numbers_match_constants_of_their_value():
    graph = capture(Halved(), (torch.ones(3),)).graph
    assert masks(graph, is_op("add")(is_op("mul")(wildcard(), constant(0.5)), constant())) == {0b11}
    assert masks(graph, is_op("mul")(wildcard(), constant(0.25))) == set()


def test_the_pattern_of_a_whole_block_matches_it():
    graph = capture(seeded(Block()), (torch.ones(1, 16, 8, 8),)).graph
    x = wildcard()
    conv1 = is_op("conv2d")(x, constant())
    middle = is_op("relu")(is_op("batch_norm")(conv1))
    conv2 = is_op("conv2d")(middle, constant(), constant())
    assert masks(graph, is_op("relu")(is_op("add")(is_op("batch_norm")(conv2), x))) == {graph.all}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: is_op("conv2dd"), "no operation 'conv2dd'.*Did you mean conv2d"),
        (lambda: is_op("add.Nothing"), "no overload.*add has"),
        (lambda: is_op(), "needs the name"),
        (lambda: is_op("relu")(wildcard(), wildcard()), "relu takes at most 1 tensors"),
        (lambda: is_op("add")(wildcard(), 1.0), "no pattern. Use constant"),
        (lambda: is_op("conv2d").has_attr(group=1), "no attribute 'group'; it has .*groups"),
        (lambda: outputs(), "at least one"),
        (lambda: dominates(wildcard(), wildcard(), is_op("add")), "the path of dominates"),
        (lambda: dominates(wildcard(), is_op("add")(wildcard()), is_op("add")), "give it no arguments"),
        (lambda: match(diamond(), is_op("add")(outputs(wildcard()))), "only be the whole pattern"),
    ],
)
def test_a_pattern_that_makes_no_sense_is_refused_with_what_to_do(build, message):
    with pytest.raises(PatternError, match=message):
        build()


def brute_force(graph, names: tuple[str, ...]) -> set[int]:
    """Chains of unary operations by these names, last name first in the pattern, by trying all tuples."""
    found = set()
    for indices in itertools.product(range(len(graph)), repeat=len(names)):
        ops = [graph.ops[i] for i in indices]
        if any(op.name != name for op, name in zip(ops, names, strict=True)):
            continue
        if any(later.inputs[0] is not op.node for op, later in itertools.pairwise(ops)):
            continue
        mask = sum(1 << i for i in set(indices))
        if not graph.sinks(mask) & ~(1 << indices[-1]) and graph.is_convex(mask):
            found.add(mask)
    return found


@given(op_graphs(), st.lists(st.sampled_from(["relu", "neg", "exp"]), min_size=1, max_size=3))
def test_chains_match_where_brute_force_finds_them(graph, names):
    pattern = wildcard()
    for name in names:
        pattern = is_op(name)(pattern)
    assert masks(graph, pattern) == brute_force(graph, tuple(names))


@given(op_graphs())
def test_every_match_is_convex_and_leaves_only_by_its_root(graph):
    x = wildcard()
    y = is_op("relu", "neg")(x)
    for pattern in (is_op("add", "mul")(y, wildcard()), is_op("add", "mul", "sub")(y, y)):
        for mask in match(graph, pattern):
            assert graph.is_convex(mask)
            assert graph.sinks(mask).bit_count() == 1

"""The figures of Terra as golden text."""

from __future__ import annotations

import re
from types import SimpleNamespace

import torch

from coexec.tracegraph.cases import Case, SwitchCase, assign_cases
from coexec.tracegraph.graph import END, START
from coexec.tracegraph.text import format_cases
from tests.coexec.harness import coexecuted, compare


def op1(x, value):
    return x * value


def op2(x):
    return x.exp()


def op3(x):
    return x + 1


def op4(x):
    return x.tanh()


def figure_3_2(s, k, tape):
    """The imperative program of figure 3.2(a): a branch on a Python value, a fetch, a loop."""
    value = torch.tensor([1.0, 2.0])
    with tape():
        x = s.x
        if k % 2 == 0:
            x1 = op1(x, value)
            x2 = op2(x1)
        else:
            x2 = op2(x)
        x2 = op3(x2)
        print(x2.tolist())
        for _ in range(3):
            x2 = op4(x2)
    return x2


def without_lines(text):
    return re.sub(r":\d+", "", text)


def test_the_program_of_figure_3_2_gives_the_merged_graph_that_the_text_describes():
    report = compare(lambda: SimpleNamespace(x=torch.zeros(2)), figure_3_2, 8)

    assert coexecuted(report, 4)
    assert without_lines(report.graph_text) == without_lines(
        """\
start -> %0, %2
%0 = Tensor.mul(c0, feed)  # test_golden_graphs.py
%1 = Tensor.exp(%0)  # test_golden_graphs.py  -> %3
%2 = Tensor.exp(c0)  # test_golden_graphs.py
%3 = Tensor.add(%1|%2)  # test_golden_graphs.py
fetch Tensor.tolist(%3)  # test_golden_graphs.py
loop figure_3_2 x3:
    %5 = Tensor.tanh(%3)  # test_golden_graphs.py  -> %5, end"""
    )
    assert [[len(case.block) for case in s.cases] for s in report.switch_cases] == [[2, 1], [5]]


def test_an_operation_of_another_branch_is_another_node_and_the_branches_merge_back():
    report = compare(lambda: SimpleNamespace(x=torch.zeros(2)), figure_3_2, 4)
    names = [(n.name, len(n.alternatives)) for n in report.graph.nodes]

    assert names.count(("Tensor.exp", 1)) == 2  # at two places, so two nodes
    assert names.count(("Tensor.add", 2)) == 1  # one node that binds to the output of either branch
    assert report.graph.traces == 3


FIGURE_3_6 = {
    START: (1,),  # edge a
    1: (2, 4, 6),  # edges b, c, d
    2: (3,),
    4: (5,),
    3: (7,),  # edge g
    5: (7,),  # edge h
    6: (8,),  # edge i
    7: (8,),  # edge j
    8: (9,),
    9: (END,),
}


def test_the_graph_of_figure_3_6_gives_the_switch_cases_of_figure_3_7():
    assert assign_cases(FIGURE_3_6) == (
        SwitchCase((Case((1,), ((START, 1),)),)),
        SwitchCase((Case((2, 3), ((1, 2),)), Case((4, 5), ((1, 4),)), Case((6,), ((1, 6),)))),
        SwitchCase((Case((7,), ((3, 7), (5, 7))), Case((), ((6, 8),)))),
        SwitchCase((Case((8, 9), ((7, 8), (6, 8))),)),
    )


def test_switch_cases_print_one_a_line():
    assert format_cases(assign_cases(FIGURE_3_6)) == (
        "switch 0: %1\n"
        "switch 1: %2..%3 if %1->%2 | %4..%5 if %1->%4 | %6 if %1->%6\n"
        "switch 2: %7 if %3->%7, %5->%7 | pass if %6->%8\n"
        "switch 3: %8..%9"
    )


def test_a_path_that_ends_early_is_carried_along_as_an_empty_case():
    edges = {START: (0,), 0: (1, END), 1: (2,), 2: (END,)}

    assert assign_cases(edges) == (
        SwitchCase((Case((0,), ((START, 0),)),)),
        SwitchCase((Case((1, 2), ((0, 1),)), Case((), ((0, END),)))),
    )


def test_a_loop_of_varying_length_prints_its_trip_counts():
    def step(s, k, tape):
        x = torch.randn(2)
        with tape():
            x = x + 1
            for _ in range(1 + k % 3):
                x = x * 1.5
            return x.exp()

    report = compare(lambda: SimpleNamespace(), step, 9)

    assert "x1|2|3:" in report.graph_text
    assert coexecuted(report, 3)

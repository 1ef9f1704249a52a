"""Programs as text."""

from __future__ import annotations

import torch

from coexec.tracegraph.program import (
    Call,
    Commit,
    Compiled,
    Feed,
    Fetch,
    Jump,
    Move,
    Program,
    Reg,
    Switch,
    When,
)
from coexec.tracegraph.text import format_program
from coexec.tracegraph.trace import TensorMeta

aten = torch.ops.aten


def test_a_program_has_a_line_for_each_instruction():
    meta = TensorMeta((2, 3), (3, 1), 0, torch.float32, torch.device("cpu"), False, True)
    program = Program(
        instructions=(
            Feed(1, meta, -1),
            Feed(2, 0.5, -1, When.COMMIT),
            Call(aten.stack.default, ((Reg(0), torch.ones(2)), 0), (3,), When.NOW, -1, release=(1,)),
            Call(aten.max.dim, (Reg(3), 0, False), (4, None), When.NOW, -1),
            Fetch(0, 4, copy=False, location=-1),
            Fetch(1, 4, copy=True, location=-1),
            Switch((7, 9), "case"),
            Move((5, 6), (3, 4), release=(3, 4)),
            Jump(10),
            Move((), ()),
            Compiled(None, (5,), (7, None), release=(5,)),
            Call(aten.mul_.Tensor, (Reg(0), Reg(2)), (None,), When.COMMIT, -1),
            Call(aten.copy_.default, (Reg(0), Reg(6), False), (None,), When.COMMIT_LAST, -1, release=(6,)),
            Call(aten._assert_async.default, (Reg(7),), (), When.NOW, -1),
            Commit(),
        ),
        registers=8,
        captured={0: 0},
        plans=(),
        edges={},
        fetch_slots=2,
        copied=frozenset({1}),
        rebased={},
        shadowed=frozenset(),
        written=frozenset(),
        seen=frozenset(),
        random=False,
        metas={},
        kept=frozenset({7}),
    )

    lines = [" ".join(line.split()) for line in format_program(program).splitlines()]

    assert lines == [
        "r0 = c0",
        "0 r1 = feed float32[2, 3]",
        "1 r2 = feed number commit",
        "2 r3 = aten.stack.default([r0, tensor], 0) release r1",
        "3 r4, _ = aten.max.dim(r3, 0, False)",
        "4 fetch 0: r4",
        "5 fetch 1: r4 copied",
        "6 switch case: 7, 9",
        "7 r5 = r3, r6 = r4 release r3, r4",
        "8 jump 10",
        "9 nothing",
        "10 r7, _ = compiled(r5) release r5",
        "11 _ = aten.mul_.Tensor(r0, r2) commit",
        "12 _ = aten.copy_.default(r0, r6, False) commit_last; release r6",
        "13 aten._assert_async.default(r7)",
        "14 commit",
    ]

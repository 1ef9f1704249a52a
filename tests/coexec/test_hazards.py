"""Schedules of random accesses, executed on simulated memory, equal program order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from coexec import program_state
from coexec.tracegraph.calls import meta_of
from coexec.tracegraph.failing import may_fail
from coexec.tracegraph.hazards import Access, schedule
from coexec.tracegraph.hoist import Movable, behind_makers, early
from coexec.tracegraph.program import Call, Fetch, Reg, When
from tests.coexec.harness import coexecuted, compare, linear, train

EXTERNAL = (0, 1, 2)


@dataclass(frozen=True)
class Step:
    """An access, and the memory of the register it defines: of its own, or of one that it uses."""

    access: Access
    memory: int | None


@st.composite
def programs(draw, fetches=True):
    memory_of = {100 + m: m for m in EXTERNAL}  # registers of the external tensors
    steps = []
    for number in range(draw(st.integers(1, 10))):
        used = draw(st.sets(st.sampled_from(sorted(memory_of)), max_size=3))
        fetch = fetches and bool(used) and draw(st.integers(0, 4)) == 0
        reads = {memory_of[u] for u in used}
        writes, defined, memory = set(), set(), None
        if not fetch:
            writes = draw(st.sets(st.sampled_from(sorted(reads)), max_size=2)) if reads else set()
            if draw(st.booleans()):
                memory = draw(st.sampled_from([10 + number, *sorted(reads)]))
                memory_of[number] = memory
                defined = {number}
        access = Access(
            frozenset(reads), frozenset(writes), frozenset(used), frozenset(defined), immediate=fetch
        )
        steps.append(Step(access, memory))
    return tuple(steps)


def execute(steps, order, memory):
    """Runs steps in an order; returns what each computed from what it read."""
    seen = {}
    for i in order:
        access = steps[i].access
        value = seen[i] = (i, tuple((m, memory.get(m)) for m in sorted(access.reads, key=lambda m: m % 1000)))
        for m in access.writes:
            memory[m] = ("written", i, value)
        if access.defines and steps[i].memory not in access.reads:
            memory[steps[i].memory] = ("made", i, value)
    return seen


def memory_before():
    return {m: ("before", m) for m in EXTERNAL}


def renamed(step, shadow):
    """The step on shadows instead of the external memory."""

    def name(memory):
        return frozenset(shadow.get(m, m) for m in memory)

    a = step.access
    return Step(replace(a, reads=name(a.reads), writes=name(a.writes)), shadow.get(step.memory, step.memory))


def plain(value, names):
    """A value that was computed on shadows, with the names of the external memory."""
    if isinstance(value, tuple):
        return tuple(plain(v, names) for v in value)
    return names.get(value, value) if isinstance(value, int) else value


@given(programs(), st.booleans())
@settings(max_examples=300)
def test_executing_a_schedule_equals_program_order(steps, defer):
    expected_memory = memory_before()
    expected = execute(steps, range(len(steps)), expected_memory)

    plan = schedule([s.access for s in steps], frozenset(EXTERNAL), defer=defer)

    shadow = {m: 1000 + m for m in plan.shadowed}
    names = {1000 + m: m for m in plan.shadowed}
    memory = memory_before()
    memory |= {shadow[m]: memory[m] for m in plan.shadowed}
    mine = [renamed(s, shadow) for s in steps]
    now = [i for i, d in enumerate(plan.deferred) if not d]
    later = [i for i, d in enumerate(plan.deferred) if d]
    seen = execute(mine, now, memory)
    assert {m: memory[m] for m in EXTERNAL} == memory_before(), (
        "nothing external is written before the commit"
    )
    seen |= execute(mine, later, memory)
    memory |= {m: memory[shadow[m]] for m in plan.shadowed}

    assert not any(plan.deferred[i] for i, s in enumerate(steps) if s.access.immediate)
    assert defer or not later
    assert plain(dict_items(seen), names) == dict_items(expected)
    assert plain(dict_items({m: memory[m] for m in EXTERNAL}), names) == dict_items(
        {m: expected_memory[m] for m in EXTERNAL}
    )


def dict_items(mapping):
    return tuple((k, mapping[k]) for k in sorted(mapping))


@given(programs())
def test_nothing_is_shadowed_that_nothing_writes(steps):
    plan = schedule([s.access for s in steps], frozenset(EXTERNAL))

    assert plan.shadowed <= {m for s in steps for m in s.access.writes}


def test_a_program_that_looks_at_nothing_needs_no_shadow():
    write = Access(frozenset({0}), frozenset({0}), frozenset({100}), frozenset())
    read = Access(frozenset({0}), frozenset(), frozenset({100}), frozenset({1}))

    plan = schedule([read, write, read], frozenset({0}))

    assert plan.shadowed == frozenset()
    assert plan.deferred == (False, True, True)


def test_a_value_that_depends_on_a_write_is_looked_at_through_a_shadow():
    write = Access(frozenset({0}), frozenset({0}), frozenset({100}), frozenset())
    fetch = Access(frozenset({0}), frozenset(), frozenset({100}), frozenset(), immediate=True)

    plan = schedule([write, fetch], frozenset({0}))

    assert plan == type(plan)((False, False), frozenset({0}))


def test_what_is_looked_at_does_not_pass_a_write_that_stays():
    def access(writes, immediate=False):
        return Access(frozenset({0}), frozenset(writes), frozenset({100}), frozenset(), immediate)

    read, write, fetch = access(()), access((0,)), access((), True)
    movable = [Movable(a, allowed=True, fetch=a.immediate) for a in (read, write, fetch)]

    assert early(movable, frozenset({100})) in ([], [0, 1, 2])


@given(programs(), st.data())
@settings(max_examples=300)
def test_running_what_is_looked_at_early_first_equals_program_order(steps, data):
    movable = [Movable(s.access, allowed=data.draw(st.booleans()), fetch=s.access.immediate) for s in steps]

    first = early(movable, frozenset({100, 101}))

    assert first == sorted(set(first))
    assert all(movable[i].allowed for i in first)
    rest = [i for i in range(len(steps)) if i not in first]
    mine, theirs = memory_before(), memory_before()
    assert execute(steps, [*first, *rest], mine) == execute(steps, range(len(steps)), theirs)
    assert mine == theirs
    known = {100, 101}
    for i in first:
        assert steps[i].access.uses <= known
        known |= steps[i].access.defines


@given(programs(), st.data())
@settings(max_examples=300)
def test_fetches_behind_what_makes_their_values_equal_program_order(steps, data):
    n = len(steps)
    cuts = sorted(data.draw(st.sets(st.integers(0, n))) | {0, n})
    stretches = [c for c in itertools.pairwise(cuts) if data.draw(st.booleans())]
    fetches = {i for i, s in enumerate(steps) if s.access.immediate}
    movable = {i for i, s in enumerate(steps) if not s.access.writes and data.draw(st.booleans())}
    staying = {i for i in range(n) if i not in fetches | movable and data.draw(st.booleans())}

    order = behind_makers([s.access for s in steps], fetches, movable, staying, stretches)

    mine, theirs = memory_before(), memory_before()
    assert execute(steps, order, mine) == execute(steps, range(n), theirs)
    assert mine == theirs
    place = {i: p for p, i in enumerate(order)}
    for i in range(n):
        first, end = next((s for s in stretches if s[0] <= i < s[1]), (i, i + 1))
        assert first <= place[i] < end
        assert all((place[i] < place[j]) == (i < j) for j in staying)
    unmoved = [i for i in order if i not in fetches | movable]
    assert unmoved == sorted(unmoved)
    known = {100 + m for m in EXTERNAL}
    for i in order:
        assert steps[i].access.uses <= known
        known |= steps[i].access.defines


def test_a_fetch_comes_directly_behind_what_makes_its_value():
    def access(uses, defines, immediate=False):
        return Access(frozenset(uses), frozenset(), frozenset(uses), frozenset(defines), immediate)

    make, other, small, fetch = access({0}, {1}), access({0}, {2}), access({1}, {3}), access({3}, (), True)

    def order(movable, staying=()):
        return behind_makers([make, other, other, small, fetch], {4}, movable, staying, [(0, 5)])

    assert order({3}) == [0, 3, 4, 1, 2]
    assert order({0, 1, 3}) == [0, 3, 4, 1, 2], "what is there early enough is not moved"
    assert behind_makers([other, make, small, fetch], {3}, {1, 2}, {0}, [(0, 4)]) == [0, 1, 2, 3]
    assert order(()) == [0, 1, 2, 3, 4]
    assert order({3}, {1}) == [0, 1, 3, 4, 2]


def test_a_loss_that_is_looked_at_after_the_step_is_there_before_the_backward_pass(monkeypatch):
    programs = []

    def make_program(*args, **options):
        made = original(*args, **options)
        programs.append(made.program)
        return made

    original = program_state.make_program
    monkeypatch.setattr(program_state, "make_program", make_program)

    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            loss = nn.functional.mse_loss(s.model(x), torch.zeros(5, 3))
            train(s, loss)
            s.log.append((loss.detach() + 1).item())

    assert coexecuted(compare(linear, step, 8), 4)
    program = programs[-1]
    at = {str(i.target): p for p, i in enumerate(program.instructions) if isinstance(i, Call)}
    [fetch] = [p for p, i in enumerate(program.instructions) if isinstance(i, Fetch)]
    assert at["aten.mse_loss.default"] < fetch < at["aten.mse_loss_backward.default"]


def test_powers_fail_on_values_of_integers_only():
    def may(dtype):
        meta = meta_of(torch.ones(2, dtype=dtype))
        call = Call(torch.ops.aten.pow.Tensor_Scalar, (Reg(0), -1), (1,), When.NOW, -1)
        return may_fail(call, {0: meta, 1: meta}.get)

    assert may(torch.int64)
    assert not may(torch.float32)


def test_operations_that_never_fail_are_operations():
    from coexec.tracegraph.failing import _NEVER_FAIL

    names = {name.removeprefix("aten::") for name in _NEVER_FAIL}
    unknown = {n for n in names if not hasattr(torch.ops.aten, n) and not hasattr(torch.ops.aten, f"{n}_")}
    newer = {"_fused_rms_norm", "_fused_rms_norm_backward"}
    assert unknown <= newer

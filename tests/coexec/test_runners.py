"""GraphRunners: the native one, and the interpreted one that is its reference."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import MISSING, fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import coexec
from coexec._native import core
from coexec.runners import graph_runner
from coexec.runners.graph_runner import make_graph_runner
from coexec.runners.interpreter import InterpretedRunner
from coexec.tracegraph.program import Call, Commit, Feed, Fetch, Jump, Move, Program, Reg, Switch, When
from tests.coexec import stepped
from tests.coexec.harness import nothing, run

aten = torch.ops.aten

RUNNERS = {"interpreted": InterpretedRunner, "stepped": stepped.graph_first}
if core is not None:
    RUNNERS["native"] = make_graph_runner
EACH_RUNNER = pytest.mark.parametrize("make", RUNNERS.values(), ids=RUNNERS)


def program(*instructions, registers=10, captured=(), slots=4, kept=()):
    given = {
        "instructions": (*instructions, Commit()),
        "registers": registers,
        "captured": dict(enumerate(captured)),
        "plans": (),
        "edges": {},
        "fetch_slots": slots,
        "rebased": {},
        "random": False,
        "metas": {},
        "kept": frozenset(kept),
    }
    rest = {f.name: frozenset() for f in fields(Program) if f.name not in given and f.default is MISSING}
    return Program(**given, **rest)


def call(target, *args, out=None, when=When.NOW, release=()):
    return Call(target=target, args=args, outs=(out,), when=when, location=-1, release=release)


def add(a, b, out, when=When.NOW):
    return call(aten.add.Tensor, Reg(a), Reg(b), 1, out=out, when=when)


@EACH_RUNNER
def test_it_computes_fetches_and_keeps(make):
    runner = make()
    runner.begin(
        program(Feed(1, None, -1), add(0, 1, 2), Fetch(0, 2, False, -1), captured=(0,), kept=(2,)),
        [torch.ones(2)],
        True,
    )
    runner.send(torch.full((2,), 3.0))

    assert runner.fetch(0).tolist() == [4, 4]
    runner.commit()
    runner.wait()
    assert runner.value(2).tolist() == [4, 4]
    assert not runner.times()[0] < 0
    runner.finish()


@EACH_RUNNER
def test_the_case_that_python_names_is_executed(make):
    code = program(
        Switch((1, 3), "case"),
        call(aten.mul.Tensor, Reg(0), 2, out=1),
        Jump(4),
        call(aten.mul.Tensor, Reg(0), 5, out=1),
        Move((2,), (1,)),
        Fetch(0, 2, False, -1),
        captured=(0,),
    )
    runner = make()
    for case, expected in ((0, 2), (1, 5), (0, 2)):
        runner.begin(code, [torch.ones(1)], True)
        runner.send(case)
        assert runner.fetch(0).item() == expected
        runner.commit()
        runner.wait()
        runner.finish()


@EACH_RUNNER
def test_what_is_put_off_runs_at_the_commit_in_order(make):
    x = torch.zeros(1)
    runner = make()
    runner.begin(
        program(
            call(aten.add_.Scalar, Reg(0), 1, 1, when=When.COMMIT),
            call(aten.mul_.Scalar, Reg(0), 10, when=When.COMMIT),
            Feed(3, None, -1, When.COMMIT),
            call(aten.add_.Tensor, Reg(0), Reg(3), 1, when=When.COMMIT),
            call(aten.clone.default, Reg(1), None, out=2),
            captured=(0, 1),
        ),
        [x, torch.ones(1)],
        True,
    )
    assert x.item() == 0
    assert not runner.committing()
    runner.send(torch.full((1,), 0.5))
    runner.commit()
    runner.wait()
    assert x.item() == 10.5
    assert runner.committing()
    runner.finish()


@EACH_RUNNER
def test_a_cancelled_iteration_writes_nothing_and_another_one_begins(make):
    x = torch.zeros(1)
    code = program(
        Feed(1, None, -1), call(aten.add_.Tensor, Reg(0), Reg(1), 1, when=When.COMMIT), captured=(0,)
    )
    runner = make()
    for send in (False, True):
        runner.begin(code, [x], True)
        if send:
            runner.send(torch.ones(1))
        runner.cancel()
        runner.finish()
    assert x.item() == 0
    runner.begin(code, [x], True)
    runner.send(torch.ones(1))
    runner.commit()
    runner.wait()
    runner.finish()
    assert x.item() == 1


@EACH_RUNNER
@pytest.mark.parametrize("argument", ["a tensor", "a list"])
def test_a_value_of_another_path_is_missed_before_anything_is_written(make, argument):
    write = (
        call(aten.add_.Tensor, Reg(0), Reg(1), 1, when=When.COMMIT)
        if argument == "a tensor"
        else replace(call(aten._foreach_add_.List, (Reg(0),), (Reg(1),), 1, when=When.COMMIT), outs=())
    )
    code = program(
        Switch((1, 3), "case"),
        call(aten.clone.default, Reg(0), None, out=1),
        Jump(4),
        call(aten.clone.default, Reg(0), None, out=2),
        call(aten.mul_.Scalar, Reg(0), 10, when=When.COMMIT),
        write,
        captured=(0,),
    )
    x, runner = torch.ones(1), make()
    runner.begin(code, [x], True)
    runner.send(1)
    runner.commit()
    with pytest.raises(RuntimeError, match="would read a value of another path"):
        runner.wait()

    assert not runner.committing()
    assert x.item() == 1
    runner.finish()

    runner.begin(code, [x], True)
    runner.send(0)
    runner.commit()
    runner.wait()
    assert x.item() == 11
    runner.finish()


@EACH_RUNNER
def test_a_failing_operation_names_itself_where_python_waits(make):
    runner = make()
    runner.begin(
        program(add(0, 1, 2), Fetch(0, 2, False, -1), captured=(0, 1)), [torch.ones(2), torch.ones(3)], True
    )

    with pytest.raises(RuntimeError, match=r"aten[.:]+add.* failed in the GraphRunner"):
        runner.fetch(0)
    runner.cancel()
    runner.finish()


@EACH_RUNNER
def test_a_lazy_iteration_starts_with_the_first_fetch(make):
    generator = torch.Generator()
    before = generator.get_state()
    code = program(
        call(aten.rand.generator, (2,), generator, None, None, None, None, out=0),
        Fetch(0, 0, False, -1),
    )
    runner = make()
    runner.begin(code, [], False)
    assert torch.equal(generator.get_state(), before)
    runner.fetch(0)
    assert not torch.equal(generator.get_state(), before)
    runner.commit()
    runner.wait()
    runner.finish()


@EACH_RUNNER
def test_a_fetched_copy_is_none_of_the_memory_that_is_written_later(make):
    runner = make()
    runner.begin(
        program(
            call(aten.clone.default, Reg(0), None, out=1),
            Fetch(0, 1, True, -1),
            Fetch(1, 1, False, -1),
            call(aten.zero_.default, Reg(1)),
            captured=(0,),
        ),
        [torch.ones(1)],
        True,
    )
    runner.commit()
    runner.wait()
    assert (runner.fetch(0).item(), runner.fetch(1).item()) == (1, 0)
    runner.finish()


@EACH_RUNNER
@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        (torch.int8, 3),
        (torch.int8, 0.5),
        (torch.float16, 2.5),
        (torch.bool, 2),
        (torch.complex64, 0.5),
        (torch.float32, 7),
    ],
)
def test_a_number_in_a_tensors_place_promotes_as_a_number(make, dtype, number):
    x = torch.ones(2).to(dtype)
    runner = make()
    runner.begin(
        program(
            Feed(1, None, -1),
            call(aten.mul.Tensor, Reg(0), Reg(1), out=2),
            call(aten.mul.Tensor, Reg(0), number, out=3),
            Fetch(0, 2, False, -1),
            Fetch(1, 3, False, -1),
            captured=(0,),
        ),
        [x],
        True,
    )
    runner.send(number)
    for slot in (0, 1):
        assert runner.fetch(slot).dtype == (x * number).dtype
        assert torch.equal(runner.fetch(slot), x * number)
    runner.commit()
    runner.wait()
    runner.finish()


@pytest.mark.skipif(core is None, reason="the native module was not built")
@given(st.data())
def test_the_runners_agree_on_random_programs(data):
    instructions, known = [], [0, 1]
    for out in range(2, data.draw(st.integers(3, 12))):
        target, arity = data.draw(
            st.sampled_from(
                [
                    (aten.add.Tensor, 2),
                    (aten.mul.Tensor, 2),
                    (aten.neg.default, 1),
                    (aten.detach.default, 1),
                    (aten.t.default, 1),
                    (aten.mul_.Scalar, 1),
                ]
            )
        )
        args = [Reg(data.draw(st.sampled_from(known))) for _ in range(arity)]
        extra = {aten.add.Tensor: (1,), aten.mul_.Scalar: (2,)}.get(target, ())
        instructions.append(call(target, *args, *extra, out=out))
        known.append(out)
        if data.draw(st.booleans()):
            instructions.append(Fetch(len([i for i in instructions if isinstance(i, Fetch)]), out, True, -1))
    slots = sum(isinstance(i, Fetch) for i in instructions)
    code = program(*instructions, registers=16, captured=(0, 1), slots=max(slots, 1), kept=known)
    results = []
    for make in (InterpretedRunner, make_graph_runner):
        runner = make()
        tensors = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.5, -1.0], [0.25, 2.0]])]
        runner.begin(code, tensors, True)
        fetched = [runner.fetch(slot).tolist() for slot in range(slots)]
        runner.commit()
        runner.wait()
        results.append((fetched, [runner.value(r).tolist() for r in known], [t.tolist() for t in tensors]))
        runner.finish()
    assert results[0] == results[1]


def test_a_program_without_a_compiler_runs_on_the_reference(monkeypatch):
    monkeypatch.setattr(graph_runner, "core", None)

    assert isinstance(graph_runner.make_graph_runner(), InterpretedRunner)


def test_two_runs_of_a_program_observe_the_same():
    def step(s, k, tape):
        with tape():
            print(torch.rand(2))

    observed = []
    for _ in range(2):
        coexec.reset()
        observed.append([(o.printed, o.random) for o in run(nothing, step, 6, coexec.GradientTape)])
    assert observed[0] == observed[1]


@pytest.mark.skipif(core is None, reason="the native core is not built")
def test_the_kernel_threads_of_the_thread_that_waits_can_be_released():
    script = (
        "import os, torch\n"
        "from coexec._native import core\n"
        "torch.set_num_threads(3)\n"
        "threads = lambda: len(os.listdir('/proc/self/task'))\n"
        "a = torch.randn(1 << 20)\n"
        "before = threads()\n"
        "first = a.exp()\n"
        "working = threads()\n"
        "core.release_kernel_threads()\n"
        "released = threads()\n"
        "assert torch.equal(first, a.exp())\n"
        "print(working - before, working - released, threads() - released)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["2", "2", "2"], done.stdout + done.stderr

import functools
import json
from pathlib import Path

import pytest
import torch

from bench.apart import ApartError, run_apart
from bench.cases import Observed, case_files, difference, load_case, run_case
from bench.cli import main

CASES = Path(__file__).parents[1] / "cases" / "programs"
HEAD = """
import itertools, os, time, weakref
import torch

def make():
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), itertools.repeat(torch.ones(3, 2))
"""
GOOD = (
    HEAD
    + """
def step(state, batch, tape=None):
    loss = state.model(batch).sum()
    loss.backward()
    state.opt.step()
    return loss.item()
"""
)
# A placeholder lives until the block ends, which is a known difference.
DIFFERENT = (
    HEAD
    + """
def step(state, batch, tape=None):
    product = batch * 2
    reference = weakref.ref(product)
    del product
    state.log.append(reference() is None)

def extra(state):
    return state.log
"""
)
DYING = HEAD + "\ndef step(state, batch, tape=None):\n    os._exit(3)\n"
HANGING = HEAD + "\ndef step(state, batch, tape=None):\n    time.sleep(600)\n"
FAILING = HEAD + "\ndef step(state, batch, tape=None):\n    raise ValueError('a bad batch')\n"
INCOMPLETE = HEAD


def run(folder, programs, *options):
    for name, source in programs.items():
        (folder / f"{name}.py").write_text(source)
    out = folder / "cases.json"
    status = main(["cases", str(folder), "--out", str(out), *options])
    record = json.loads(out.read_text())
    return status, {result["program"]: result for result in record["results"]}


def test_each_case_has_one_result(tmp_path, capsys):
    status, results = run(tmp_path, {"1_good": GOOD, "2_good": GOOD})

    assert status == 0
    assert list(results) == ["1_good", "2_good"]
    for result in results.values():
        assert (result["mode"], result["executor"], result["equal"]) == ("coexec", "aten", True)
        assert len(result["step_ms"]) == len(result["eager_step_ms"]) == 12
        assert result["coexec_share_after_5"] == 1
        assert sum(result["phases"].values()) == 12
    assert "2 of 2 cases equal eager" in capsys.readouterr().out


def test_what_differs_is_named_and_is_the_exit_status(tmp_path):
    status, results = run(tmp_path, {"1_different": DIFFERENT, "2_good": GOOD})

    assert status == 1
    assert results["1_different"]["equal"] is False
    assert results["1_different"]["first_difference"] == "side effects"
    assert results["2_good"]["equal"] is True


@pytest.mark.parametrize(
    ("source", "error"),
    [
        (DYING, "its process died with exit status 3"),
        (HANGING, "it gave no answer for 9 s and was ended"),
        (FAILING, "the case fails in eager: ValueError: a bad batch"),
        (INCOMPLETE, "1_bad.py is no case: it has no step"),
    ],
    ids=["dying", "hanging", "failing", "incomplete"],
)
def test_a_case_that_cannot_be_compared_leaves_the_others_alone(source, error, tmp_path, capsys):
    status, results = run(tmp_path, {"1_bad": source, "2_good": GOOD}, "--timeout", "9")

    assert status == 1
    assert results["1_bad"]["equal"] is False
    assert error in results["1_bad"]["error"]
    assert results["2_good"]["equal"] is True
    assert error in capsys.readouterr().out


def test_a_folder_without_cases_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["cases", str(tmp_path)])

    assert "has no cases: no Python file whose name begins with a digit" in capsys.readouterr().err


def test_two_eager_runs_of_a_case_are_equal_and_another_seed_is_seen():
    case = load_case(case_files(CASES)[0])
    eager, again = run_case(case), run_case(case)

    assert difference(again, eager, None).equal
    again.values["loss 3"] = eager.values["loss 3"] + 1
    assert difference(again, eager, None).first == "loss 3"


@pytest.mark.parametrize(
    ("ours", "eager", "equal"),
    [
        (0.0, -0.0, False),
        (float("nan"), float("nan"), True),
        (1, True, False),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), False),
        (torch.zeros(2), [0.0, 0.0], False),
        ([1, torch.ones(1)], [1, torch.ones(1)], True),
        (None, None, True),
    ],
)
def test_values_are_compared_with_their_bits_and_types(ours, eager, equal):
    assert difference(Observed({"x": ours}), Observed({"x": eager}), None).equal is equal


def test_a_tolerance_is_for_floats_only():
    near = Observed({"x": torch.tensor([1.00001])}), Observed({"x": torch.tensor([1.0])})
    whole = Observed({"x": torch.tensor([2])}), Observed({"x": torch.tensor([1])})

    assert difference(*near, (1e-4, 1e-5)).equal
    assert not difference(*whole, (10.0, 10.0)).equal


def test_an_exception_that_only_one_run_raises_is_a_difference():
    assert difference(Observed(error=ValueError("a")), Observed(), None).first == "exception"


def test_work_apart_returns_its_answer_and_its_error():
    assert run_apart(functools.partial(list, (1, 2)), 60) == [1, 2]
    assert run_apart(torch.get_num_threads, 60) == torch.get_num_threads()
    with pytest.raises(ApartError, match="ZeroDivisionError"):
        run_apart(functools.partial(divmod, 1, 0), 60)

import json

import pytest
import torch
from torch import nn

from bench.cli import main
from bench.commands.coverage import outcome
from bench.peers import CapturedForward
from bench.records import Result, record, result_from_json

CASE = """
import itertools
import torch

def make():
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), itertools.repeat(torch.ones(3, 2))

def step(state, batch, tape=None):
    state.opt.zero_grad()
    loss = {loss}
    loss.backward()
    state.opt.step()
    return loss.item()
"""
PLAIN = "state.model(batch).sum()"
# The model is not what the loss is computed by.
AROUND = "(batch @ state.model.weight.t()).sum()"


@pytest.fixture
def cover(tmp_path):
    """Runs the command over cases, and returns the results by case and peer."""

    def run(sources, *options):
        for name, loss in sources.items():
            (tmp_path / f"{name}.py").write_text(CASE.replace("{loss}", loss))
        out = tmp_path / "coverage.json"
        main(["coverage", "--cases", str(tmp_path), "--backend", "aot_eager", "--out", str(out), *options])
        written = json.loads(out.read_text())["results"]
        return {(fields["program"], fields["mode"]): result_from_json(fields) for fields in written}

    return run


def test_every_peer_has_a_result_for_a_case(cover, capsys):
    results = cover({"1_plain": PLAIN}, "--only", "1_plain")

    assert [peer for _, peer in results] == ["compile", "fullgraph", "trace", "export", "coexec"]
    for peer in ("compile", "trace", "export", "coexec"):
        assert results["1_plain", peer].equal is True
    assert results["1_plain", "compile"].details["graph_breaks"] > 0  # loss.item()
    assert results["1_plain", "fullgraph"].equal is False
    assert results["1_plain", "fullgraph"].error
    assert results["1_plain", "coexec"].details["coexec_share_after_5"] == 1
    assert "1_plain" in capsys.readouterr().out


def test_a_model_that_is_never_called_is_no_success_of_its_capture(cover):
    results = cover({"1_around": AROUND}, "--only", "1_around", "--peers", "trace")

    assert outcome(results["1_around", "trace"]) == "-"


def test_a_program_of_the_suite_is_covered(cover):
    options = ("--only", "digits", "--peers", "trace,coexec", "--preset", "tiny", "--steps", "8")

    results = cover({"1_plain": PLAIN}, *options)

    assert list(results) == [("digits", "trace"), ("digits", "coexec")]
    assert results["digits", "coexec"].equal is True
    assert results["digits", "coexec"].details["phases_after_5"] == {"co-execution": 3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "compile,script"], "'script' is not a peer; choose from compile,fullgraph,trace"),
        (["--only", "no_such"], "no case and no program is called no_such"),
    ],
)
def test_bad_input_is_refused_with_a_reason(arguments, message, capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["coverage", *arguments])

    assert message in capsys.readouterr().err + str(leaving.value.code)


@pytest.mark.filterwarnings("ignore")  # jit warns of much
@pytest.mark.parametrize("peer", ["trace", "export"])
def test_capturing_a_model_leaves_its_buffers_and_random_numbers_as_they_were(peer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
    other = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
    other.load_state_dict(model.state_dict())
    x = torch.randn(5, 2)
    CapturedForward(model, peer)
    states = []

    for each in (model, other):
        torch.manual_seed(1)
        states.append([each(x), each(x), each[1].running_mean, torch.get_rng_state()])

    assert all(map(torch.equal, *states))


def test_a_result_is_read_back_as_it_was_written():
    result = Result("digits", "compile", step_ms=(1.0,), equal=True, details={"graph_breaks": 2})

    [fields] = record([], [result])["results"]

    assert result_from_json(json.loads(json.dumps(fields))).details == result.details


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (Result("a", "trace", equal=True), "equal"),
        (Result("a", "trace", equal=False), "differs"),
        (Result("a", "export", equal=False, error="RuntimeError: no"), "fails"),
        (
            Result("a", "compile", equal=True, details={"graph_breaks": 1, "recompilations": 2}),
            "equal, 1 breaks, 2 recompilations",
        ),
        (
            Result(
                "a",
                "coexec",
                equal=True,
                traces=3,
                fallbacks=0,
                details={"phases_after_5": {"tracing": 1, "co-execution": 3}},
            ),
            "equal, 3 traces, 0 fallbacks, 75% co-execution, 25% tracing",
        ),
    ],
)
def test_an_outcome_is_said_in_a_few_words(result, text):
    assert outcome(result) == text

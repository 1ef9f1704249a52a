from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.actions import (
    Compute,
    Kind,
    Message,
    Transfer,
    Wait,
    Weights,
    parse_action,
)
from pipeline.errors import ProgramError

COMPUTE_KINDS = frozenset(
    {Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.RECOMPUTE}
)
MESSAGE_KINDS = frozenset({Kind.SEND, Kind.RECEIVE})
TRANSFER_KINDS = frozenset({Kind.EVICT, Kind.ACCEPT, Kind.LOAD, Kind.RETURN})
WEIGHT_KINDS = frozenset({Kind.STASH, Kind.REDUCE, Kind.UPDATE})

number = st.integers(0, 10**6)


def one_of(kinds):
    return st.sampled_from(sorted(kinds, key=lambda kind: kind.value))


started = st.builds(
    Message, one_of(MESSAGE_KINDS), st.booleans(), number, number, number, number, number
) | st.builds(Transfer, one_of(TRANSFER_KINDS), number, number, number)
actions = (
    st.builds(Compute, one_of(COMPUTE_KINDS), number, number, number)
    | started
    | st.builds(Weights, one_of(WEIGHT_KINDS), number, number)
    | st.builds(Wait, started)
)


@given(actions)
def test_every_action_survives_its_text(action):
    assert parse_action(str(action)) == action


@given(st.text(alphabet="FBRCISENDWAIT 0123456789w@><[,)actgrd", max_size=24))
def test_whatever_text_is_accepted_prints_the_same(text):
    try:
        action = parse_action(text)
    except ProgramError:
        return
    assert str(action) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F 0 0",
        "F 0 0 0",
        "F 0 00 w0",
        "F  0 0 w0",
        " F 0 0 w0",
        "F 0 0 w0 ",
        "f 0 0 w0",
        "F -1 0 w0",
        "F 0 0 w0\n",
        "SEND act 0>1 [0,1] @1",
        "SEND x 0>1 [0,1) @1",
        "EVICT 0 1",
        "UPDATE 0 1",
        "WAIT F 0 0 w0",
        "WAIT WAIT EVICT 0 1 @3",
    ],
)
def test_text_that_is_nearly_an_action_is_refused(text):
    with pytest.raises(ProgramError, match="is no action"):
        parse_action(text)


def test_the_kinds_are_complete_and_disjoint():
    groups = [COMPUTE_KINDS, MESSAGE_KINDS, TRANSFER_KINDS, WEIGHT_KINDS]
    assert set().union(*groups) == set(Kind)
    assert sum(map(len, groups)) == len(Kind)

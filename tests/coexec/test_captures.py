"""Captured tensors are found again in each iteration, and those that are gone are noticed."""

from __future__ import annotations

import weakref

import pytest
import torch

from coexec._native import core
from coexec.runners import captures
from coexec.runners.captures import Captures
from coexec.tracegraph.graph import Captured

NAMES = tuple(map(Captured, range(3)))
BOUND = (0, 2)


@pytest.fixture(params=["native", "python"], autouse=True)
def _implementation(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(captures, "core", None)
    elif core is None:
        pytest.skip("the native module was not built")


def some():
    tensors = [torch.zeros(2) for _ in NAMES]
    return tensors, Captures(tuple(map(weakref.ref, tensors)), NAMES, BOUND)


def test_each_is_found_by_its_place_and_by_its_object():
    tensors, made = some()
    found = made.find()

    assert list(map(id, found.tensors)) == list(map(id, tensors))
    assert found.externals == {id(t): name for t, name in zip(tensors, NAMES, strict=True)}
    assert list(map(id, found.bound)) == [id(tensors[i]) for i in BOUND]


def test_what_an_iteration_adds_is_not_in_the_next_one():
    tensors, made = some()
    fed = torch.zeros(1)
    made.find().externals[id(fed)] = NAMES[0]

    assert made.find().externals.keys() == set(map(id, tensors))


def test_one_that_only_some_paths_use_may_be_gone():
    tensors, made = some()
    assert made.find().tensors[1] is not None
    tensors[1] = None

    found = made.find()
    assert found.tensors[1] is None
    assert found.externals == {id(tensors[i]): NAMES[i] for i in BOUND}


@pytest.mark.parametrize("position", BOUND)
def test_there_is_no_iteration_without_one_that_is_needed(position):
    tensors, made = some()
    assert made.find() is not None
    tensors[position] = None

    assert made.find() is None


def test_nothing_keeps_them_alive():
    tensors, made = some()
    made.find()
    references = list(map(weakref.ref, tensors))
    tensors.clear()

    assert [r() for r in references] == [None] * 3
    assert made.find() is None


def test_a_reference_to_none_from_the_first_is_one_that_is_gone():
    tensors, _ = some()
    references = (weakref.ref(tensors[0]), lambda: None, weakref.ref(tensors[2]))

    found = Captures(references, NAMES, BOUND).find()

    assert found.tensors[1] is None
    assert len(found.externals) == 2

"""Goes through a backward pass in pieces, as PyTorch's engine would.

In:  the events of a running iteration, and the node that begins the pass.
Out: the pieces that the pass is made of, matched with nodes of the TraceGraph one after the other; a
     `Mismatch` if one of them is not there, or where eager execution would raise.

Python makes one call for all of it. Nothing is sent before all of it has been matched: an iteration that
leaves the graph here has not begun the pass.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from coexec.runners.iteration import Mismatch
from coexec.runners.records import EventRecord, Token
from coexec.runners.sizes import Sizes
from coexec.tracegraph.callbacks import is_callback
from coexec.tracegraph.calls import hooks_of
from coexec.tracegraph.graph import Alternative, Node, NodeBinding, node_of
from coexec.tracegraph.in_pieces import is_shared, memory_of
from coexec.tracegraph.tape import Begun, Passed, Reached, Unknown, route
from coexec.tracegraph.trace import Produced

if TYPE_CHECKING:
    from coexec.runners.python_runner import PythonRunner

#: Where a gradient goes: to an event and one of its entries, or to a leaf: one of the iteration by what made
#: it, another one by its `id`.
Target = Hashable

_NONE: frozenset[int] = frozenset()

#: Passes that are kept for iterations on the same path.
MAX_PASSES = 1024


class Pieces:
    """One backward pass that is gone through."""

    def __init__(self, runner: PythonRunner, begin: Node, ambient: Hashable, root: torch.Tensor) -> None:
        it = runner.iteration
        self._runner = runner
        self._begin = begin
        self._ambient = ambient
        self._root = it.token_of(root)
        self._graph = runner.skeleton.graph
        self._at = begin.id
        self._before: frozenset[int] = frozenset()  # nodes
        self._events: list[EventRecord] = []
        self._number: dict[int, int] = {}  # of each event, by its node
        self._gradients: dict[Target, Produced] = {}
        self._memory: dict[Target, Hashable] = {}
        self._tokens: dict[Target, Token] = {}  # of leaves
        self._passed: set[int] = set()
        self._steps: list[tuple[Node, int, list[Token], Sizes]] = []
        self._sizes = self._new_sizes()  # as the latest piece that fitted has shown them

    def _new_sizes(self) -> Sizes:
        return Sizes(self._runner.graph_runner, self._graph.symbols)

    def refused(self) -> tuple[str, str] | None:
        """Finds the pieces; returns a reason if the graph does not have one of them."""
        passes = self._runner.skeleton.passes
        key = (self._begin.id, self._ambient, tuple(self._runner.iteration.path))
        known = passes.get(key)
        try:
            if known is not None and self._repeats(known):
                return None
            self._match()
        except Mismatch as mismatch:
            return mismatch.id, mismatch.detail
        if len(passes) < MAX_PASSES:
            passes[key] = tuple([(node, index) for node, index, _, _ in self._steps])
        return None

    def _repeats(self, known: Sequence[tuple[Node, int]]) -> bool:
        """Takes the pieces of an iteration that came here on the same path, if nothing else is against it.

        The steps of a path say what every call was given, and so what every piece is.
        """
        runner, steps = self._runner, []
        for node, index in known:
            alternative = node.alternatives[index]
            if not self._may_run(node, alternative):
                return False
            tokens: list[Token] = []
            if isinstance(node.piece, Reached):
                leaf = runner.iteration.object_of(alternative.bindings[1])
                if leaf is None:
                    return False
                self._check_leaf(runner.iteration.token_of(leaf))
                implicit = runner.implicit(node, alternative.bindings, 1)
                gradient = alternative.bindings[0]
                if implicit is None or not isinstance(gradient, Produced):
                    return False
                tokens = [gradient, *implicit]
            else:
                assert isinstance(node.piece, Passed)
                self._passed.add(node.piece.of)
            steps.append((node, index, tokens, self._sizes))
        self._steps = steps
        return True

    def _match(self) -> None:
        it = self._runner.iteration
        self._before = frozenset(map(node_of, it.path))
        self._events = [r for r in it.records if isinstance(r, EventRecord)]
        self._number = {r.node.id: i for i, r in enumerate(self._events)}
        if any(r.node.by_path and r.node.backward for r in self._events):
            raise Mismatch("CX0001", "another backward pass came before, which is not in pieces")
        if any(is_callback(r.node.function) for r in self._events):
            raise Mismatch("CX0001", "a backward pass may call code of the user as in no trace")
        try:
            root = self._target(self._root)
            if not isinstance(root, tuple):
                raise Mismatch("CX0001", "a backward pass begins at a leaf")
            way = route([r.node.tape for r in self._events], self._target_of, root)
        except Unknown:
            raise Mismatch("CX0001", "a backward pass goes through a call as in no trace") from None
        self._steps.clear()
        self._passed = {self._events[number].node.id for number in way.events}
        if self._passed & it.freed:
            raise Mismatch("CX0001", "a second backward pass goes through the same calls")
        self._gradients[root] = Produced(self._begin.id, 0)
        self._memory[root] = None
        leaves: dict[int, list[Target]] = {}
        for leaf, number in way.last.items():
            leaves.setdefault(number, []).append(leaf)
        for number in way.events:
            self._pass(number)
            for leaf in leaves.get(number, ()):
                if leaf in self._gradients:
                    self._reach(leaf)

    def go(self) -> None:
        """Goes on with what has been found, from where the pass begins."""
        runner = self._runner
        assert isinstance(self._begin.piece, Begun)
        found = runner.iteration.pieces.setdefault(self._begin.id, [])
        for node, index, tokens, sizes in self._steps:
            sizes.keep()
            if isinstance(node.piece, Reached):
                runner.go_to(node, index, tokens, ())
                runner.results(node, [], tokens)
                found.append((node, tokens))
            else:  # everything that it takes is on the way already
                runner.step_to(node, index)
                if len(node.alternatives) > 1:
                    bindings = node.alternatives[index].bindings
                    found.append((node, [b if isinstance(b, Produced) else None for b in bindings]))
        if self._begin.piece.frees:
            runner.iteration.freed |= self._passed

    # --- pieces ---

    def _pass(self, number: int) -> None:
        record = self._events[number]
        of = record.node.id
        assert record.node.tape is not None
        count = len(record.node.tape.leads)
        entries = tuple(e for e in range(count) if (number, e) in self._gradients)
        taken = [self._gradients.pop((number, e)) for e in entries]
        memory = [self._memory.pop((number, e)) for e in entries]
        for node in self._following():
            piece = node.piece
            if not isinstance(piece, Passed) or piece.of != of or piece.entries != entries:
                continue
            targets = [self._target_of(number, argument) for argument in piece.gives]
            if any((t in self._gradients) != adds for t, adds in zip(targets, piece.adds, strict=True)):
                continue
            added = [t for t, adds in zip(targets, piece.adds, strict=True) if adds]
            tokens: list[Token] = [*taken, *(self._gradients[t] for t in added)]
            tokens += [record.tokens[argument] for argument in piece.saved]
            index = self._alternative(node, tokens)
            if index is None:
                continue
            if not self._runner.skeleton.program.overwritten.get(node.id, _NONE).isdisjoint(self._before):
                raise Mismatch("CX0001", f"what {record.node.name} has saved has been written to")
            self._take(node, index, tokens)
            memory += [self._memory[t] for t in added]
            for output, (target, place) in enumerate(zip(targets, piece.memory, strict=True)):
                self._gradients[target] = Produced(node.id, output)
                self._memory[target] = memory_of(place, memory, node.id)
            return
        raise Mismatch("CX0001", f"no trace went back through {record.node.name} like this")

    def _reach(self, leaf: Target) -> None:
        gradient, memory = self._gradients.pop(leaf), self._memory.pop(leaf)
        shared = is_shared(memory, self._memory.values())
        token = self._tokens[leaf]
        self._check_leaf(token)
        binding = self._binding(token)
        for node in self._following():
            if not isinstance(node.piece, Reached) or (node.piece.steals and shared):
                continue
            for index, alternative in enumerate(node.alternatives):
                if alternative.bindings[1] != binding or not self._fits(node, alternative, [gradient]):
                    continue
                implicit = self._runner.implicit(node, alternative.bindings, 1)
                if implicit is not None:
                    self._take(node, index, [gradient, *implicit])
                    return
        raise Mismatch("CX0001", "a backward pass gives a leaf a gradient as in no trace")

    def _check_leaf(self, token: Token) -> None:
        if not isinstance(token, torch.Tensor):
            return
        if any(hooks_of(token)):
            raise Mismatch("CX0112", "a leaf tensor has other hooks than in the traces")
        if id(token) not in self._runner.iteration.grads:
            self._runner.catch_up()  # the gradient that it has may come from the iteration before

    def _take(self, node: Node, index: int, tokens: list[Token]) -> None:
        self._steps.append((node, index, tokens, self._sizes))
        self._at = node.id

    # --- matching ---

    def _following(self) -> Sequence[Node]:
        return self._runner.skeleton.children.get(self._at, ())

    def _alternative(self, node: Node, tokens: Sequence[Token]) -> int | None:
        for index, alternative in enumerate(node.alternatives):
            if self._fits(node, alternative, tokens):
                return index
        return None

    def _fits(self, node: Node, alternative: Alternative, tokens: Sequence[Token]) -> bool:
        """Whether a node takes these arguments."""
        if alternative.bindings[: len(tokens)] != tuple(map(self._binding, tokens)):
            return False
        key: Any = node.key
        return key[1] == self._ambient and self._may_run(node, alternative)

    def _may_run(self, node: Node, alternative: Alternative) -> bool:
        """Whether a node does what it says for the numbers and the sizes of this iteration."""
        runner = self._runner
        self._sizes = sizes = self._new_sizes()
        key: Any = node.key
        for binding, meta in zip(alternative.bindings, key[2], strict=False):
            if isinstance(binding, Produced):
                made = self._graph.nodes[binding.event].outputs[binding.output].meta
                if made is not meta and not sizes.fit(meta, made):
                    return False
        return (
            alternative.path is None  # pieces depend on what they take
            and runner.numbers_agree(node, alternative, [])
            and runner.holds(node, sizes)
        )

    def _binding(self, token: Token) -> NodeBinding:
        if isinstance(token, torch.Tensor):
            return self._runner.iteration.externals.get(id(token))
        return token

    # --- targets ---

    def _target_of(self, number: int, argument: int) -> Target:
        return self._target(self._events[number].tokens[argument])

    def _target(self, token: Token) -> Target:
        if isinstance(token, Produced):
            made = self._graph.nodes[token.event]
            entry = None if made.tape is None else made.tape.entries[token.output]
            if entry is not None:
                return self._number[token.event], entry
            if made.outputs[token.output].history is not None:
                raise Unknown
            self._tokens[token] = token
            return token
        assert token is not None
        self._tokens[id(token)] = token
        return id(token)

"""From a TraceGraph to the program of a whole iteration.

In:  a (live) TraceGraph.
Out: a `Program`: the switch-cases of Algorithm 1 in order, each basic block as a stretch of
     instructions with feeds where the program has them, and fetches where their values are there.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from coexec.tracegraph import functions
from coexec.tracegraph.calls import meta_of
from coexec.tracegraph.cases import Case, SwitchCase, assign_cases
from coexec.tracegraph.copies import COPIED
from coexec.tracegraph.failing import may_fail
from coexec.tracegraph.following import pairs_with_before, same_choice
from coexec.tracegraph.graph import (
    Captured,
    Fed,
    FedNumber,
    Node,
    NodeSource,
    NumberOrigin,
    TraceGraph,
    external_metas,
    is_shaped_by_data,
    meta_of_source,
    node_of,
)
from coexec.tracegraph.hazards import Access, schedule
from coexec.tracegraph.hoist import TINY, Movable, behind_makers, early
from coexec.tracegraph.in_pieces import saved_sources
from coexec.tracegraph.instructions import (
    at_commit,
    renamed,
    retargeted,
    shifted,
    straight_stretches,
    with_releases,
    writes,
)
from coexec.tracegraph.numbers import TRANSFORMS, fed_numbers
from coexec.tracegraph.order import Groups
from coexec.tracegraph.program import (
    Call,
    Commit,
    Feed,
    Fetch,
    Instruction,
    Jump,
    Move,
    NodePlan,
    Program,
    Rebase,
    Reg,
    Switch,
    When,
)
from coexec.tracegraph.sizes import Size, varies
from coexec.tracegraph.tape import Passed
from coexec.tracegraph.trace import (
    Computed,
    Constant,
    Dimension,
    Input,
    Kind,
    Local,
    Output,
    Produced,
    Result,
    TensorMeta,
    with_leaves,
)

RANDOM_STATE = -1  # stands for the default generators' state among memory


class SharedShadow(Exception):
    """External tensors that may share memory, or whose size is not known yet, would need shadows (CX0115)."""


def lower(graph: TraceGraph, *, defer: bool = True, compiled: bool = False) -> Program:
    """Translates a TraceGraph into a program.

    Args:
        graph: what to execute.
        defer: whether operations that write external memory may be put off to the commit. If not,
            everything is computed on copies at once.
        compiled: whether blocks will be compiled. What they return is on memory of its own, and they take it
            for granted that no two of their inputs share memory.

    Raises:
        SharedShadow: if memory that several external tensors share is written and looked at; for a compiler,
            if it is written at all.
    """
    return _Lowering(graph, defer, compiled).run()


@dataclass
class _Emitted:
    """An instruction with what the hazard analysis has to know about it."""

    instruction: Instruction
    uses: frozenset[int] = frozenset()  # registers
    defines: frozenset[int] = frozenset()  # registers
    writes: frozenset[int] = frozenset()  # registers whose memory it writes
    random: bool = False
    view: bool = False  # looks at memory and computes nothing
    always: bool = False  # executed on every path


@dataclass
class _Lowering:
    graph: TraceGraph
    defer: bool
    compiled: bool
    registers: int = 0
    values: dict[NodeSource, int] = field(default_factory=dict)
    emitted: list[_Emitted] = field(default_factory=list)
    captured: dict[int, int] = field(default_factory=dict)
    externals: dict[Captured | Fed, int] = field(default_factory=dict)  # -> register
    plans: dict[int, NodePlan] = field(default_factory=dict)
    edges: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    numbers: dict[NumberOrigin, int] = field(default_factory=dict)  # -> register
    register_metas: dict[int, TensorMeta] = field(default_factory=dict)
    fetch_slots: int = 0
    random: bool = False
    writers: list[tuple[int, int]] = field(default_factory=list)  # nodes, and registers that they write
    sources: dict[int, list[int]] = field(default_factory=dict)  # registers that each node reads
    saved: dict[int, frozenset[int]] = field(default_factory=dict)  # registers, by piece of a backward pass

    def run(self) -> Program:
        self.union: Groups[object] = Groups()  # what may share memory
        self.views: Groups[object] = Groups()  # what does, whichever alternatives are taken
        self.shadow: dict[int, int] = {}  # of the register of an external tensor: that of its copy
        for group in self.graph.shared:
            self.union.join(*group)
        self.needed = {
            s for n in self.graph.nodes for a in n.alternatives for s in a.sources if isinstance(s, Fed)
        }
        self.metas = external_metas(self.graph)
        self.fed_numbers = dict.fromkeys(
            f.origins[0]
            for n in self.graph.nodes
            if n.alternatives
            for o in n.operations
            for f in fed_numbers(o.args)
        )
        for source in dict.fromkeys(s for n in self.graph.nodes for a in n.alternatives for s in a.sources):
            if isinstance(source, Constant):  # a copy, which operations may write to
                self.values[source] = self._register(meta_of(source.value))
                call = Call(
                    torch.ops.aten.clone.default, (source.value, None), (self.values[source],), When.NOW, -1
                )
                self.emitted.append(_Emitted(call, defines=frozenset({self.values[source]})))
        for switch_case in assign_cases(self.graph.edges):
            self._switch_case(switch_case)
        return self._finish()

    # --- control flow ---

    def _switch_case(self, switch_case: SwitchCase) -> None:
        start = len(self.emitted)
        for case in switch_case.cases:
            self._case(case)
        straight = all(isinstance(e.instruction, Fetch) for e in self.emitted[start:])
        if len(switch_case.cases) == 1 or straight:
            if not any(isinstance(e.instruction, (Switch, Jump)) for e in self.emitted[start:]):
                for emitted in self.emitted[start:]:
                    emitted.always = True
            return
        # Emitted in a row so far: put the switch in front and a jump behind each case.
        rows, self.emitted[start:] = self.emitted[start:], []
        boundaries = self.boundaries[-len(switch_case.cases) :]
        cases = [rows[a - start : b - start] for a, b in boundaries]
        shift = start + 1
        targets = []
        end = shift + sum(len(c) + 1 for c in cases)
        body: list[_Emitted] = []
        for index, (case, rows_of_case) in enumerate(zip(switch_case.cases, cases, strict=True)):
            targets.append(shift + len(body))
            offset = shift + len(body) - boundaries[index][0]
            body += [replace(e, instruction=shifted(e.instruction, offset)) for e in rows_of_case]
            body.append(_Emitted(Jump(end)))
            for edge in case.control_edges:
                self.edges.setdefault(edge, []).append(index)
        self.emitted.append(_Emitted(Switch(tuple(targets), "case")))
        self.emitted += body

    boundaries: list[tuple[int, int]] = field(default_factory=list)

    def _case(self, case: Case) -> None:
        first = len(self.emitted)
        for node in case.block:
            self._node(self.graph.nodes[node])
        self.boundaries.append((first, len(self.emitted)))

    # --- nodes ---

    def _node(self, node: Node) -> None:
        sources, select, feeds = self._sources(node)
        numbers = self._numbers(node)
        if node.kind is Kind.FETCH:
            slots = []
            for value in node.result:
                slots.append(self.fetch_slots)
                register = sources[value.index]
                fetch = Fetch(self.fetch_slots, register, False, node.location)
                self.emitted.append(_Emitted(fetch, uses=frozenset({register})))
                self.fetch_slots += 1
            self.plans[node.id] = NodePlan(select, feeds, frozenset(), numbers, tuple(slots), ())
            return
        if isinstance(node.piece, Passed):
            self.saved[node.id] = frozenset(sources[i] for i in saved_sources(self.graph, node))
        locals_: dict[tuple[int, int], int] = {}
        for index, operation in enumerate(node.operations):
            for number, result in enumerate(operation.results):
                if result is not None:
                    register = self._register(result.meta)
                    locals_[index, number] = register
                    self.values[Computed(node.id, index, number)] = register
            self._operation(node, index, sources, locals_)
        outputs = tuple(self._resolve(o.value, sources, locals_) for o in node.outputs)
        for number, register in enumerate(outputs):
            self.values[Produced(node.id, number)] = register
        asks = tuple(map(self._ask, node.outputs, outputs)) if is_shaped_by_data(node) else ()
        self.plans[node.id] = NodePlan(select, feeds, frozenset(), numbers, (), outputs, asks)

    def _ask(self, output: Output, register: int) -> tuple[int, ...]:
        """Publishes the sizes of an output, which only the GraphRunner knows."""
        slots = []
        for dimension in range(len(output.meta.shape)):
            size = self._register()
            target = torch.ops.aten.sym_size.int
            call = Call(target, (Reg(register), dimension), (size,), When.NOW, -1, shapes=(None,))
            self.emitted.append(_Emitted(call, frozenset({register}), frozenset({size})))
            fetch = Fetch(self.fetch_slots, size, False, -1)
            self.emitted.append(_Emitted(fetch, uses=frozenset({size})))
            slots.append(self.fetch_slots)
            self.fetch_slots += 1
        return tuple(slots)

    def _sources(self, node: Node) -> tuple[list[int], tuple[int, ...] | None, tuple[tuple[int, ...], ...]]:
        """Registers of the node's sources, binding what has to be bound first."""
        feeds = tuple(
            tuple(i for i, b in enumerate(a.bindings) if b == Fed(node.id, i) and b in self.needed)
            for a in node.alternatives
        )
        for alternative in node.alternatives:
            for source in alternative.sources:
                self._bind_captured(source)
        select = None
        if len({(a.sources, f) for a, f in zip(node.alternatives, feeds, strict=True)}) == 1:
            for argument in feeds[0]:
                self._feed(Fed(node.id, argument), node.location)
            sources = [self._source(s) for s in node.alternatives[0].sources]
        else:
            shared = self._as_before(node, feeds)
            sources = self._phi(node, feeds) if shared is None else shared
            select = tuple(range(len(node.alternatives))) if shared is None else None
        self.sources[node.id] = sources
        return sources, select, feeds

    def _as_before(self, node: Node, feeds: tuple[tuple[int, ...], ...]) -> list[int] | None:
        """What a node reads whose arguments are those of an earlier node; None if it is not like that."""
        found = pairs_with_before(node, self.graph.nodes)
        if found is None or len(set(feeds)) > 1:
            return None
        before, pairs = found
        for argument in feeds[0]:
            self._feed(Fed(node.id, argument), node.location)
        registers = []
        for i, source in enumerate(pairs[0][0].sources):
            position = same_choice([(own.sources[i], theirs.sources) for own, theirs in pairs])
            assert position is not None  # see `following`
            registers.append(self._source(source) if position < 0 else self.sources[before][position])
        return registers

    def _phi(self, node: Node, feeds: tuple[tuple[int, ...], ...]) -> list[int]:
        merged = [
            self._register(meta_of_source(self.graph, node, i, self.metas))
            for i in range(len(node.alternatives[0].sources))
        ]
        switch = len(self.emitted)
        self.emitted.append(_Emitted(Switch((), "alternative")))
        targets = []
        jumps = []
        for alternative, arguments in zip(node.alternatives, feeds, strict=True):
            targets.append(len(self.emitted))
            for argument in arguments:
                self._feed(Fed(node.id, argument), node.location)
            registers = [self._source(s) for s in alternative.sources]
            for out, register in zip(merged, registers, strict=True):
                self.union.join(("r", out), ("r", register))
            move = Move(tuple(merged), tuple(registers))
            self.emitted.append(_Emitted(move, frozenset(registers), frozenset(merged)))
            jumps.append(len(self.emitted))
            self.emitted.append(_Emitted(Jump(-1)))
        self.emitted[switch] = _Emitted(Switch(tuple(targets), "alternative"))
        for jump in jumps:
            self.emitted[jump] = _Emitted(Jump(len(self.emitted)))
        return merged

    def _numbers(self, node: Node) -> tuple[tuple[int, str, bool], ...]:
        """Feeds the numbers of the node that its operations, or later ones, use."""
        fed = tuple(o for o in self.fed_numbers if o.node == node.id)
        for origin in fed:
            self.numbers[origin] = self._register()
            value = node.numbers[origin.slot].value
            assert not isinstance(value, Size)  # sizes are not fed
            example = TRANSFORMS[origin.transform](value)
            self.emitted.append(_Emitted(Feed(self.numbers[origin], example, node.location)))
        return tuple((o.slot, o.transform, False) for o in fed)

    def _operation(
        self,
        node: Node,
        index: int,
        sources: list[int],
        locals_: dict[tuple[int, int], int],
    ) -> None:
        operation = node.operations[index]
        used: set[int] = set()

        def encode(argument: Any) -> Any:
            if isinstance(argument, (Input, Local)):
                register = self._resolve(argument, sources, locals_)
                used.add(register)
                return Reg(register)
            if isinstance(argument, FedNumber):
                return Reg(self.numbers[argument.origins[0]])
            return argument

        args = with_leaves(operation.args, encode)
        used |= {self.numbers[f.origins[0]] for f in fed_numbers(operation.args)}
        outs: list[int | None] = []
        for number, result in enumerate(operation.results):
            register = locals_.get((index, number))
            outs.append(register)
            if register is not None and isinstance(result, Result) and result.alias is not None:
                self._same_memory(register, self._resolve(result.alias, sources, locals_))
        self.random |= operation.random
        writes = frozenset(self._resolve(w, sources, locals_) for w in operation.writes)
        self.writers += [(node.id, register) for register in writes]
        self.emitted.append(
            _Emitted(
                Call(
                    operation.target,
                    args,
                    tuple(outs),
                    When.NOW,
                    node.location,
                    grad_mode=operation.grad_mode,
                    shapes=tuple(_checked_shape(node, r) for r in operation.results),
                    random=operation.random,
                ),
                uses=frozenset(used),
                defines=frozenset(o for o in outs if o is not None),
                writes=writes,
                random=operation.random,
                view=bool(operation.results)
                and all(r is None or r.alias is not None for r in operation.results),
            )
        )

    # --- registers and memory ---

    def _register(self, meta: TensorMeta | None = None) -> int:
        if meta is not None:
            self.register_metas[self.registers] = meta
        self.registers += 1
        return self.registers - 1

    def _same_memory(self, a: int, b: int) -> None:
        self.union.join(("r", a), ("r", b))
        self.views.join(("r", a), ("r", b))

    def _class(self, register: int) -> Any:
        return self.union[("r", register)]

    def _resolve(self, value: Input | Local, sources: list[int], locals_: dict[tuple[int, int], int]) -> int:
        return sources[value.index] if isinstance(value, Input) else locals_[value.operation, value.result]

    def _source(self, source: NodeSource) -> int:
        return self.values[source]

    def _bind_captured(self, source: NodeSource) -> None:
        if isinstance(source, Captured) and source not in self.values:
            register = self._register(self.metas.get(source))
            self.values[source] = self.externals[source] = register
            self.captured[source.index] = register
            self.union.join(("r", register), source)

    def _feed(self, fed: Fed, location: int) -> None:
        if fed not in self.values:  # else another alternative feeds it: only one of them is taken
            register = self._register(self.metas[fed])
            self.values[fed] = self.externals[fed] = register
            self.union.join(("r", register), fed)
        self.emitted.append(_Emitted(Feed(self.values[fed], self.metas[fed], location)))

    # --- the end ---

    def _finish(self) -> Program:
        kept = self._kept()
        self._drop_dead(kept)
        classes = {self._class(r) for r in range(self.registers)}
        memory = {c: i for i, c in enumerate(sorted(classes, key=repr))}
        external = frozenset(memory[self._class(r)] for r in self.externals.values())
        accesses = self._fetch_early([self._access(e, memory) for e in self.emitted])
        plan = schedule(accesses, external, defer=self.defer)
        written_later: set[int] = set()
        for emitted, access, deferred in reversed(
            list(zip(self.emitted, accesses, plan.deferred, strict=True))
        ):
            if isinstance(emitted.instruction, Fetch) and access.reads & written_later:
                emitted.instruction = replace(emitted.instruction, copy=True)
            if deferred and isinstance(emitted.instruction, Call):
                emitted.instruction = replace(emitted.instruction, when=When.COMMIT)
            written_later |= access.writes
        shadowed = {ref for ref, r in self.externals.items() if memory[self._class(r)] in plan.shadowed}
        alone = written_later if self.compiled else plan.shadowed
        if any(len([r for r in group if self._is_on(r, memory, alone)]) > 1 for group in self.graph.shared):
            raise SharedShadow
        self._put_off_feeds()
        hoisted = self._hoisted(accesses)
        written = {ref for ref, r in self.externals.items() if memory[self._class(r)] in written_later}
        instructions = self._with_shadows(shadowed, hoisted)
        instructions.append(Commit())
        rebased = self._rebased(set(self.externals) if self.compiled else shadowed)
        kept |= {r.shadow for r in rebased.values() if r.shadow is not None}
        plans = tuple(
            self.plans.get(n.id, NodePlan(None, (), frozenset(), (), (), ())) for n in self.graph.nodes
        )
        return Program(
            instructions=with_releases(instructions, frozenset(kept)),
            registers=self.registers,
            captured=dict(self.captured),
            plans=plans,
            edges={e: tuple(m) for e, m in self.edges.items()},
            fetch_slots=self.fetch_slots,
            copied=frozenset(i.slot for i in instructions if isinstance(i, Fetch) and i.copy),
            rebased=rebased,
            shadowed=frozenset(shadowed),
            written=frozenset(written),
            seen=self._seen(kept),
            random=self.random,
            metas=self.register_metas,
            kept=frozenset(kept),
            symbols=self.graph.symbols,
            blocks=straight_stretches(instructions),
            overwritten=self._overwritten(),
        )

    def _overwritten(self) -> dict[int, frozenset[int]]:
        """Nodes that may write to what autograd has saved for a later piece, unless a trace had both.

        Eager execution refuses to go on after such a write, as a rule.
        """
        writers: dict[object, set[int]] = defaultdict(set)
        for node, register in self.writers:
            writers[self._class(register)].add(node)
        found = {}
        paths = [frozenset(map(node_of, steps)) for steps in self.graph.paths]
        for piece, registers in self.saved.items():
            of = self.graph.nodes[piece].piece
            assert isinstance(of, Passed)
            between = {w for r in registers for w in writers.get(self._class(r), ()) if of.of < w < piece}
            for path in paths:
                between -= path if piece in path else frozenset()
            if between:
                found[piece] = frozenset(between)
        return found

    def _is_on(self, ref: Captured | Fed, memory: dict[Any, int], some: Collection[int]) -> bool:
        return ref in self.externals and memory[self._class(self.externals[ref])] in some

    def _hoisted(self, accesses: list[Access]) -> list[int]:
        """Positions of the instructions that run before all others."""
        movable = [
            Movable(
                access,
                allowed=emitted.always and self._is_small(emitted),
                fetch=isinstance(emitted.instruction, Fetch),
            )
            for emitted, access in zip(self.emitted, accesses, strict=True)
        ]
        return early(movable, frozenset(self.captured.values()))

    def _is_small(self, emitted: _Emitted) -> bool:
        """Whether it takes no time: a call or a fetch that waits for nothing, and of tiny tensors."""
        instruction = emitted.instruction
        if not isinstance(instruction, (Call, Fetch)) or emitted.random or at_commit(instruction):
            return False
        if isinstance(instruction, Call) and varies(instruction.args):
            return False
        metas = [self.register_metas.get(r) for r in emitted.uses | emitted.defines]
        return all(m is not None and _numel(m) <= TINY for m in metas)

    def _put_off_feeds(self) -> None:
        """Feeds that only the commit needs are sent there, so that nothing waits for them before."""
        now = {u for e in self.emitted if not at_commit(e.instruction) for u in e.uses}
        late = set()
        for emitted in self.emitted:
            feed = emitted.instruction
            if isinstance(feed, Feed) and feed.out not in now:
                emitted.instruction = replace(feed, when=When.COMMIT)
                late.add(feed.out)
        for node, plan in self.plans.items():
            numbers = tuple(
                (s, t, self.numbers[NumberOrigin(node, s, t)] in late) for s, t, _ in plan.numbers
            )
            feeds = {a for alternative in plan.feeds for a in alternative}
            late_feeds = frozenset(a for a in feeds if self.values[Fed(node, a)] in late)
            self.plans[node] = replace(plan, numbers=numbers, late=late_feeds)

    def _rebased(self, externals: set[Captured | Fed]) -> dict[tuple[int, int], Rebase]:
        """Kept outputs that view one of these external tensors, or may do so."""
        rebased: dict[tuple[int, int], Rebase] = {}
        for node, plan in self.plans.items():
            for output, register in enumerate(plan.outputs):
                meta = self.graph.nodes[node].outputs[output].meta
                if not self.graph.nodes[node].outputs[output].kept:
                    continue
                viewed = [e for e in externals if self._class(self.externals[e]) == self._class(register)]
                if len(viewed) > 1:
                    raise SharedShadow
                if viewed and meta.dtype != self.metas[viewed[0]].dtype:
                    raise SharedShadow
                if viewed:
                    rebased[node, output] = self._rebase(register, meta, viewed[0])
        return rebased

    def _rebase(self, register: int, meta: TensorMeta, external: Captured | Fed) -> Rebase:
        bound = self.externals[external]
        always = self.views["r", register] == self.views["r", bound]
        if not always and bound not in self.shadow:
            raise SharedShadow  # nothing to tell by which it is
        offset, start = meta.offset, self.metas[external].offset
        if isinstance(offset, Size) or isinstance(start, Size):
            raise SharedShadow
        shift = offset - start
        return Rebase(external, shift, None if always else self.shadow[bound])

    def _seen(self, kept: set[int]) -> frozenset[Fed]:
        """Fed tensors whose memory is that of results, or of arrays, that Python gets."""
        source = {
            e.instruction.slot: e.instruction.source for e in self.emitted if isinstance(e.instruction, Fetch)
        }
        arrays = {
            source[slot]
            for node in self.graph.nodes
            if node.function in functions.SHARES_MEMORY and node.id in self.plans
            for slot in self.plans[node.id].fetches
        }
        memory = {self._class(register) for register in kept | arrays}
        return frozenset(
            ref for ref, r in self.externals.items() if isinstance(ref, Fed) and self._class(r) in memory
        )

    def _kept(self) -> set[int]:
        """Registers that Python may want when the iteration has ended."""
        return {
            plan.outputs[i]
            for node, plan in self.plans.items()
            for i, o in enumerate(self.graph.nodes[node].outputs)
            if o.kept or any(g.output == i for g in self.graph.nodes[node].grads)
        }

    def _drop_dead(self, kept: set[int]) -> None:
        """Takes calls out whose results nobody reads and that write nothing; jumps stay where they are."""
        alive = set(kept)
        numbers = set(self.numbers.values())
        for emitted in reversed(self.emitted):
            call = emitted.instruction
            if (
                isinstance(call, Call)
                # What computes may fail, and eager execution would say so; so may a place that varies.
                and emitted.view
                and not emitted.uses & numbers
                and not varies(call.args)
                and not emitted.writes
                and not emitted.random
                and not emitted.defines & alive
            ):
                emitted.instruction = Move((), ())
                emitted.uses = emitted.defines = frozenset()
            alive |= emitted.uses

    def _fetch_early(self, accesses: list[Access]) -> list[Access]:
        """Puts fetches, and tiny calls, behind what makes their values, but not before a call that may fail.

        What backward passes make does not: the forward pass has looked at these values.

        Returns:
            The accesses in the new order.
        """
        instructions = [e.instruction for e in self.emitted]
        *stretches, _ = straight_stretches([*instructions, Commit()])
        order = behind_makers(
            [replace(a, defines=frozenset(writes(i))) for a, i in zip(accesses, instructions, strict=True)],
            {p for p, i in enumerate(instructions) if isinstance(i, Fetch)},
            {p for p, e in enumerate(self.emitted) if not e.writes and self._is_small(e)},
            {p for p, e in enumerate(self.emitted) if accesses[p].immediate and _is_of_program(e)},
            stretches,
        )
        self.emitted = [self.emitted[position] for position in order]
        return [accesses[position] for position in order]

    def _access(self, emitted: _Emitted, memory: dict[Any, int]) -> Access:
        state = frozenset({RANDOM_STATE}) if emitted.random else frozenset()
        return Access(
            reads=frozenset(memory[self._class(u)] for u in emitted.uses) | state,
            writes=frozenset(memory[self._class(w)] for w in emitted.writes) | state,
            uses=emitted.uses,
            defines=emitted.defines,
            immediate=self._is_immediate(emitted),
        )

    def _is_immediate(self, emitted: _Emitted) -> bool:
        instruction = emitted.instruction
        looks_only = emitted.view and not emitted.writes
        if isinstance(instruction, Call) and not looks_only:
            return may_fail(instruction, self.register_metas.get)
        return isinstance(instruction, (Fetch, Move))

    def _with_shadows(self, shadowed: set[Captured | Fed], hoisted: list[int]) -> list[Instruction]:
        """Replaces shadowed external tensors by copies, made where they are bound; hoists."""
        self.shadow = shadow = {
            self.externals[ref]: self._register(self.register_metas[self.externals[ref]]) for ref in shadowed
        }
        rows = [renamed(e.instruction, shadow) for e in self.emitted]
        prologue: list[Instruction] = []
        groups: list[list[Instruction]] = [[i] for i in rows]
        bound_at: dict[int, list[int]] = {}
        for position, row in enumerate(rows):
            if isinstance(row, Feed):
                bound_at.setdefault(row.out, []).append(position)
        for register, copy in shadow.items():
            pair: list[Instruction] = [
                *_copied(register, copy, self.register_metas[register], compiled=self.compiled),
                Call(
                    torch.ops.aten.copy_.default,
                    (Reg(register), Reg(copy), False),
                    (None,),
                    When.COMMIT_LAST,
                    -1,
                ),
            ]
            for position in bound_at.get(register, ()):
                groups[position] += pair
            if register not in bound_at:
                if self.register_metas[register].is_symbolic:
                    raise SharedShadow  # Python says only later how large it is
                prologue += pair
        for position in hoisted:
            prologue.append(rows[position])
            groups[position] = [Move((), ())]
        starts = list(itertools.accumulate((len(g) for g in groups), initial=len(prologue)))
        return prologue + [retargeted(i, starts) for group in groups for i in group]


def _checked_shape(node: Node, result: Result | None) -> tuple[Dimension, ...] | None:
    """What a result has to have; where values decide about sizes, Python is told these later on."""
    if result is None or (is_shaped_by_data(node) and varies(result.meta.shape)):
        return None
    return result.meta.shape


def _is_of_program(emitted: _Emitted) -> bool:
    """Whether it is a call, and not one that only backward passes make."""
    instruction = emitted.instruction
    return isinstance(instruction, Call) and not instruction.target._schema.name.endswith("_backward")


def _numel(meta: TensorMeta) -> float:
    """How many elements a tensor has; infinitely many if that varies."""
    return math.prod(math.inf if isinstance(n, Size) else n for n in meta.shape)


def _copied(source: int, out: int, meta: TensorMeta, *, compiled: bool) -> tuple[Call, ...]:
    """A copy of a register with the very strides of the original; a compiler knows how to make one, too."""
    aten = torch.ops.aten
    if not compiled:
        return (Call(COPIED, (Reg(source),), (out,), When.NOW, -1),)
    empty = (Reg(source), meta.shape, meta.stride, None, None, None, None)
    return (
        Call(aten.new_empty_strided.default, empty, (out,), When.NOW, -1),
        Call(aten.copy_.default, (Reg(out), Reg(source), False), (None,), When.NOW, -1),
    )

"""The PythonRunner: runs the program as a skeleton, and every torch call is answered, not computed.

In:  every torch call that Python makes inside of the block.
Out: placeholders; messages to the GraphRunner; in the end a committed iteration, or a fallback
     after which the iteration is what it would have been in eager mode.

Each event is matched with a child of the node before it: function, location, attributes, metadata
and bindings of its tensors. Nothing outside of the iteration changes before the last event has been
matched, so giving up needs no undo: see `fallback`.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import ChainMap
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import FrameType
from typing import Any, TypeVar

import torch

from coexec._native import core
from coexec._native.entry import EnteredNatively
from coexec._private import StopRecomputing, WithoutModes, enter, is_exclusive, is_exposed, leave
from coexec.callbacks.iteration import Callbacks
from coexec.location import locate
from coexec.runners import random_state
from coexec.runners.captures import Found
from coexec.runners.difference import difference
from coexec.runners.graph_runner import GraphRunner
from coexec.runners.iteration import Iteration, Mismatch
from coexec.runners.native import NativeRunner
from coexec.runners.pending import Pending, is_pending
from coexec.runners.pieces import Pieces
from coexec.runners.placeholder import (
    Guard,
    Symbol,
    dressed,
    make_placeholder,
    realize,
)
from coexec.runners.records import EventRecord, FlagRecord, GradRecord, Token
from coexec.runners.results import Results, alive, announce, publish, results_of
from coexec.runners.sizes import Sizes
from coexec.runners.skeleton import Skeleton
from coexec.tracegraph import calls, functions
from coexec.tracegraph.ambient import ambient
from coexec.tracegraph.callbacks import UNRETURNED, Applied, Stopped, go_on, hooked, leaf_called_back
from coexec.tracegraph.copies import copied
from coexec.tracegraph.exposed import expose
from coexec.tracegraph.graph import (
    END,
    Alternative,
    Captured,
    Fed,
    Node,
    NodeBinding,
    is_shaped_by_data,
    node_of,
    step_of,
)
from coexec.tracegraph.live import Way, bound_of
from coexec.tracegraph.numbers import TRANSFORMS, agree, fit, same_number
from coexec.tracegraph.program import NodePlan
from coexec.tracegraph.random_state import rng_state
from coexec.tracegraph.tape import Begun
from coexec.tracegraph.trace import Kind, Number, Produced, TensorMeta

_T = TypeVar("_T")


class PythonRunner(EnteredNatively):
    """Runs one iteration as a skeleton. Enter it for the time of the block.

    `on_mismatch` is called with a `Mismatch` when the iteration leaves the graph. It has to make the
    iteration what eager execution would have made it, and returns how torch calls are answered from
    then on. With `exclusive`, what is fed is copied unless nobody else can reach its memory. The iteration
    `before` this one may be unfinished: it runs on while Python walks along the tensors that both use, and is
    waited for when something else of it is used, and before this one is committed.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        graph_runner: GraphRunner,
        captured: Found,
        outermost: FrameType,
        on_mismatch: Callable[[PythonRunner, Mismatch], Callable[..., Any]],
        callbacks: Callbacks,
        lazy: bool,
        exclusive: bool,
        before: Pending | None = None,
    ) -> None:
        super().__init__()
        self.skeleton = skeleton
        self.callbacks = callbacks
        self.graph_runner = graph_runner
        self.iteration = Iteration(captured=captured.tensors, externals=captured.externals)
        self.stall_s = 0.0
        self.outermost = outermost
        self._on_mismatch = on_mismatch
        self._eager: Callable[..., Any] | None = None
        self.entered = False
        self.restore_random_state = random_state.save(skeleton.generators)
        native = isinstance(graph_runner, NativeRunner)
        self._before = before
        if before is not None:
            before.abandon = self._abandon
        self._outcome: Results | None = None
        self._put_back: Callable[[], None] | None = None  # gradients that were announced
        self._interrupt: KeyboardInterrupt | None = None
        # What the iteration before holds was its own, and nobody has touched it since.
        self.exclusive = (
            exclusive and native and all(is_pending(t) or is_exclusive(t) for t in captured.bound)
        )
        self.graph_runner.begin(skeleton.program, captured.bound, not lazy)
        self._walker: Any = None
        self._made: Any = None  # by the walker, in this iteration
        if isinstance(graph_runner, NativeRunner):
            self._walker = skeleton.walker
            self._walker.begin(
                self.iteration,
                graph_runner.core,
                outermost,
                exclusive,
                graph_runner.watched,
                self._check_memory,
            )
            self._walker.run_ahead(before is not None)

    # --- torch calls ------------------------------------------------------------------------------

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._eager is not None:
            return self._eager(function, args, kwargs, locate(1, self.outermost))
        if function in functions.PASSIVE:
            return self._passive(function, args, kwargs)
        if function == functions.GET_GRAD:
            return self._get_grad(args[0])
        if function in _PASSED_ON or functions.is_annotation(function):
            return function(*args, **kwargs)
        if function in functions.INDEXING:
            args = functions.with_index_tensors(args)
        location = locate(1, self.outermost)
        if kwargs:
            item = torch.Tensor.item
            kwargs = functions.with_numbers(
                function, kwargs, lambda t: self._answer_or_fall_back(item, (t,), {}, location)
            )
        answer = self._answer_or_fall_back(function, args, kwargs, location)
        if answer.__class__ not in UNRETURNED:
            return answer
        if answer.__class__ is Stopped:
            raise StopRecomputing
        return self.callbacks.drive(
            function, args, kwargs, answer, lambda returned: self._go_on(returned, location), self._raised
        )

    def give_up(self, id_: str, what: str) -> None:
        """Makes the iteration eager, because something happens that no event shows."""
        if self._eager is None:
            self.fall_back(Mismatch(id_, what))

    def _answer_or_fall_back(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int
    ) -> Any:
        if self._eager is None:
            self.iteration.location = location
            try:
                return self._answer(function, args, kwargs, location)
            except Mismatch as mismatch:
                self.fall_back(mismatch)
        assert self._eager is not None
        return self._eager(function, args, kwargs, location)

    def _go_on(self, returned: Any, location: int) -> Any:
        """Lets a backward pass go on with what code of the user returned."""
        if self._eager is None:
            self.iteration.location = location
            try:
                return self._event(go_on, *calls.flatten((returned,), None), location)
            except Mismatch as mismatch:
                self.fall_back(mismatch)
        assert self._eager is not None
        return self._eager(go_on, (returned,), {}, location)

    def _raised(self) -> None:
        """Code of the user that the backward pass called has raised: the engine has to see that."""
        if self._eager is None:
            self.fall_back(Mismatch("CX0002", "a function that the backward pass called raised"))

    def fall_back(self, mismatch: Mismatch) -> None:
        """Makes the iteration eager; placeholders are real tensors when this returns."""
        self._let_go()
        self._made = None
        self._eager = self._call  # if the replay raises, the rest of the block runs as it is
        if self._put_back is not None:
            self._put_back()
        self._outcome = self._put_back = None
        before, self._before = self._before, None
        if before is not None:
            self._abandon()
            try:
                self.stalled(before.settle)
            except BaseException:
                self.graph_runner.finish()
                raise
        with torch._C.DisableTorchFunction():
            self._eager = self._on_mismatch(self, mismatch)

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
        return (self.callbacks.maker(function) or function)(*args, **kwargs)

    def _abandon(self) -> None:
        self.graph_runner.cancel()
        self.restore_random_state()

    def catch_up(self) -> None:
        """Waits for the iteration before this one.

        Raises:
            Mismatch: if it became an eager one, which this iteration did not expect.
        """
        before, self._before = self._before, None
        if before is None:
            return
        if self._walker is not None:
            self._walker.run_ahead(False)
        self.stalled(before.settle)
        if not before.committed:
            raise Mismatch("CX0005", "the iteration before became an eager one")

    def catch_up_or_fall_back(self) -> None:
        """Waits for the iteration before this one; what it did not expect makes this one eager."""
        try:
            self.catch_up()
        except Mismatch as mismatch:
            self.fall_back(mismatch)

    def holds_symbol(self, arguments: tuple[Any, ...]) -> bool:
        """Whether a placeholder is among the arguments of a call."""
        return any(id(t) in self.iteration.symbols for t in calls.tensors_in(arguments))

    def forget_gradients(self, tensors: list[torch.Tensor]) -> bool:
        """Does what `p.grad = None` does for each of these; False if that has to be done one by one."""
        return self._walks_natively and bool(self._walker.forget_gradients(tensors))

    def collect(
        self, parameters: list[torch.Tensor], states: Any, sources: list[Any], lists: list[Any]
    ) -> bool:
        """Collects parameters, gradients and states as `_init_group` does; False if nothing was done."""
        return self._walks_natively and bool(self._walker.collect(parameters, states, sources, lists))

    def show_gradients(self, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[Any]] | None:
        """Gives tensors the gradients that the iteration gave them, which may be placeholders.

        Returns:
            Tensors and the gradients that they had; None if nothing was done.
        """
        shown: tuple[list[torch.Tensor], list[Any]] | None = None
        if self._walks_natively:
            shown = self._walker.show_gradients(tensors)
        return shown

    @property
    def _walks_natively(self) -> bool:
        return self._walker is not None and self._eager is None

    @property
    def fell_back(self) -> bool:
        """Whether the iteration has become an eager one."""
        return self._eager is not None

    def __enter__(self) -> PythonRunner:
        super().__enter__()
        if self._walker is not None:
            self.lead(self._walker)
        self._guard = Guard(self._is_without_value, self._bypassed)
        enter(self._guard)
        self.entered = True
        return self

    def locate_below(self, frame: FrameType) -> None:  # noqa: D102  # as in the base class
        super().locate_below(frame)
        if self._walker is not None:
            self._walker.locate_below(frame)

    def leave(self) -> None:
        """Leaves the function mode and the guard, in the order in which they were entered."""
        self.entered = False
        leave(self._guard)
        leave(self)

    def come_apart(self) -> None:
        """Drops what refers back to this runner, when it is not used any more."""
        for part in ("_guard", "_on_mismatch", "outermost", "_eager"):
            vars(self).pop(part, None)

    def forget(self) -> None:
        """Drops everything that the iteration holds; what nobody refers to then, a later iteration uses."""
        self._let_go()
        self.iteration = Iteration()
        made, self._made = self._made, None
        if made is not None:
            self.skeleton.walker.reuse(made)

    def _let_go(self) -> None:
        if self._walker is not None:
            self.stall_s += self._walker.stall_s()
            self._made = self._walker.end()
            self._walker = None
            if self.entered:
                self.lead(None)

    def _is_without_value(self, tensor: torch.Tensor) -> bool:
        """Whether an operation that no function mode saw would find nothing in a tensor."""
        if self._before is not None and is_pending(tensor):
            self.catch_up_or_fall_back()
        return id(tensor) in self.iteration.symbols

    def _bypassed(self, function: Any) -> None:
        self.fall_back(Mismatch("CX0109", f"{function} does not pass through torch functions"))

    def _answer(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
        if self._before is not None:
            self._catch_up_before(function, calls.tensors_in((args, kwargs)))
        if function == functions.GET_GRAD_FN:
            return self._grad_fn(args[0])
        if function in (functions.SET_GRAD, functions.DELETE_GRAD):
            return self._set_grad(args[0], args[1] if len(args) > 1 else None)
        if function in functions.SET_REQUIRES_GRAD and id(args[0]) not in self.iteration.symbols:
            before = args[0].requires_grad
            returned = function(*args, **kwargs)
            self.iteration.records.append(FlagRecord(args[0], before, args[0].requires_grad))
            return returned
        if function is functions.REGISTER_HOOK and len(args) == 2 and self._has_history(args[0]):
            tensor, hook = args
            event = functools.partial(self._event, hooked, *calls.flatten((tensor,), None), location)
            return self.callbacks.register_hook(hook, event)
        tensors, numbers, key = calls.flatten(args, kwargs)
        if functions.is_data(function, tensors, key):
            return function(*args, **kwargs)
        return self._event(function, tensors, numbers, key, location)

    def _has_history(self, tensor: torch.Tensor) -> bool:
        symbol = self.iteration.symbols.get(id(tensor))
        return symbol is not None and symbol.history is not None

    def _catch_up_before(self, function: Any, tensors: Iterable[torch.Tensor]) -> None:
        """Waits for the iteration before if a call needs more of it than the tensors that both use."""
        known = () if function in _NEEDS_STATE else self.iteration.externals
        if any(is_pending(t) and id(t) not in known for t in tensors):
            self.catch_up()

    def _passive(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function == functions.IS_LEAF and id(args[0]) in self.iteration.symbols:
            return self.iteration.symbols[id(args[0])].meta.is_leaf
        return function(*args, **kwargs)

    # --- events -----------------------------------------------------------------------------------

    def _event(
        self, function: Any, tensors: list[torch.Tensor], numbers: list[Number], key: Hashable, location: int
    ) -> Any:
        it = self.iteration
        self._check_exposed()
        if it.inputs:
            self._check_inputs(function, tensors)
        state = ambient(own_modes=1)
        metas = tuple([self._meta(t) for t in tensors])
        whole_key = (key, state, metas)
        nearest, refused, unmatched = None, None, None
        for node in self.skeleton.children.get(it.at, ()):
            if node.location != location or node.function != function:
                continue
            nearest = node
            if node.backward:
                if node.by_path:
                    self.catch_up()  # it may have to add to gradients
                self._check_hooks()
                if not self._finds_callback(node):
                    continue
            sizes = Sizes(self.graph_runner, self.skeleton.graph.symbols)
            refused = None
            if self._fits(node, whole_key, numbers, sizes):
                chosen = self._alternative(node, tensors, numbers)
                if chosen is not None:
                    pieces = None
                    if isinstance(node.piece, Begun):
                        pieces = Pieces(self, node, state, tensors[0])
                        unmatched = pieces.refused()
                        if unmatched is not None:
                            continue
                    index, implicit = chosen
                    sizes.keep()
                    returned = self._take(node, index, tensors, implicit, numbers, key, state, location)
                    if pieces is not None:
                        pieces.go()
                    return returned
            refused = sizes.refused
        if unmatched is not None:
            raise Mismatch(*unmatched)
        raise Mismatch(
            "CX0001", difference(it, self.skeleton, function, nearest, whole_key, numbers, refused)
        )

    def _fits(self, node: Node, key: Any, numbers: list[Number], sizes: Sizes) -> bool:
        own: Any = node.key
        return (
            own[:2] == key[:2]
            and len(own[2]) == len(key[2])
            and all(map(sizes.fit, own[2], key[2]))
            and fit(node.numbers, numbers)
            and sizes.numbers_fit(node.numbers, numbers)
            and self.holds(node, sizes)
            and (is_shaped_by_data(node) or all(sizes.concrete(o.meta) is not None for o in node.outputs))
        )

    def holds(self, node: Node, sizes: Sizes) -> bool:
        """Whether a node does for the sizes of this iteration what it did in the traces."""
        holds = self.skeleton.unseen.holds(node, sizes.value)
        if not holds:
            sizes.refused = "sizes that no trace had"
        return holds

    def _check_exposed(self) -> None:
        """Arrays on memory of the graph have to be as they were, for the graph knows nothing of them."""
        exposed = self.iteration.exposed
        if not exposed:
            return
        exposed[:] = [e for e in exposed if e.alive]
        with WithoutModes():
            if any(e.written for e in exposed):
                raise Mismatch("CX0114", "an array that shares memory with a tensor was written")

    def _check_inputs(self, function: Any, tensors: list[torch.Tensor]) -> None:
        """What was fed of an array has to be in it still when it is used again, be it by a backward pass."""
        inputs = self.iteration.inputs
        passes = function in functions.BACKWARD or function is go_on
        used = inputs.values() if passes else [inputs.get(id(t)) for t in tensors]
        with WithoutModes():
            if any(e is not None and e.written for e in used):
                raise Mismatch("CX0114", "an array that a tensor was made of was written")

    def _check_hooks(self) -> None:
        """Leaves have the hooks that traces have called, and no others."""
        hooks = zip(self.iteration.captured, self.skeleton.graph.hooks, strict=True)
        fed = ((t, (0, 0)) for t in self.iteration.fed.values())
        for tensor, known in (*hooks, *fed):
            if tensor is not None and tensor.requires_grad and calls.hooks_of(tensor) != known:
                raise Mismatch("CX0112", "a leaf tensor has other hooks than in the traces")

    def _finds_callback(self, node: Node) -> bool:
        """Whether the hook that a backward pass calls next is that of a tensor which can be found."""
        uid = leaf_called_back(node)
        return uid is None or uid in self.hooked_leaves()

    def hooked_leaves(self) -> dict[int, torch.Tensor]:
        """Captured tensors with hooks, by what names them across traces."""
        graph = self.skeleton.graph
        leaves = zip(graph.captured, graph.hooks, self.iteration.captured, strict=True)
        return {uid: leaf for uid, hooks, leaf in leaves if any(hooks) and leaf is not None}

    def _alternative(
        self, node: Node, tensors: list[torch.Tensor], numbers: list[Number]
    ) -> tuple[int, list[Token]] | None:
        new: dict[int, Fed] = {}
        bindings = tuple([self._binding(t, node, i, new) for i, t in enumerate(tensors)])
        for index, alternative in enumerate(node.alternatives):
            if alternative.bindings[: len(bindings)] != bindings:
                continue
            if alternative.path is not None and alternative.path != tuple(self.iteration.path):
                continue
            if alternative.after is not None and alternative.after not in self.iteration.path:
                continue
            if not self.numbers_agree(node, alternative, numbers):
                continue
            if not node.implicit_metas:
                return index, []
            implicit = self.implicit(node, alternative.bindings, len(bindings))
            if implicit is not None:
                return index, implicit
        return None

    def _meta(self, tensor: torch.Tensor) -> TensorMeta:
        symbol = self.iteration.symbols.get(id(tensor))
        if symbol is not None:
            return symbol.meta
        if tensor.__class__ is not torch.Tensor and not isinstance(tensor, torch.nn.Parameter):
            raise Mismatch("CX0107", f"{type(tensor).__name__} is a tensor subclass")
        if not calls.is_strided(tensor):
            raise Mismatch("CX0107", f"a tensor is {calls.layout_of(tensor)}")
        if torch.nn.parameter.is_lazy(tensor):
            raise Mismatch("CX0107", "a parameter is not initialized yet")
        return calls.meta_of(tensor)

    def numbers_agree(self, node: Node, alternative: Alternative, numbers: list[Number]) -> bool:
        """Numbers that were the same in every trace have to be the same in this iteration."""
        agreements = self.skeleton.agreements.get(node.id)
        if not agreements and not alternative.pins:
            return True
        own: dict[int, Sequence[Number]] = {node.id: numbers}
        values = ChainMap(own, self.iteration.numbers())
        if any(not same_number(values[n][slot], value) for n, slot, value in alternative.pins):
            return False
        return all(agree(origins, values) for origins in agreements or ())

    def _binding(self, tensor: torch.Tensor, node: Node, argument: int, new: dict[int, Fed]) -> NodeBinding:
        symbol = self.iteration.symbols.get(id(tensor))
        if symbol is not None:
            return symbol.binding
        known = self.iteration.externals.get(id(tensor))
        return new.setdefault(id(tensor), Fed(node.id, argument)) if known is None else known

    def implicit(self, node: Node, bindings: tuple[NodeBinding, ...], explicit: int) -> list[Token] | None:
        """Checks the leaves that a backward pass reaches, and the gradients that they have."""
        tokens: list[Token] = []
        for position in range(explicit, len(bindings), 2):
            leaf = self.iteration.object_of(bindings[position])
            if leaf is None:
                return None
            grad = self._grad_token(leaf)
            meta = node.implicit_metas[position - explicit + 1]
            if grad is None:
                if bindings[position + 1] is not None:
                    return None
            elif isinstance(grad, Produced):
                if grad != bindings[position + 1]:
                    return None
            else:
                sizes = Sizes(self.graph_runner, self.skeleton.graph.symbols)
                if meta is None or not sizes.fit(meta, calls.meta_of(grad)):
                    return None
                if self._binding(grad, node, position + 1, {}) != bindings[position + 1]:
                    return None
            tokens += [self.iteration.token_of(leaf), grad]
        return tokens

    def _take(
        self,
        node: Node,
        index: int,
        tensors: list[torch.Tensor],
        implicit: list[Token],
        numbers: list[Number],
        key: Hashable,
        state: Hashable,
        location: int,
    ) -> Any:
        it, program = self.iteration, self.skeleton.program
        tokens = [self.iteration.token_of(t) for t in tensors] + implicit
        plan = program.plans[node.id]
        self.go_to(node, index, tokens, numbers)
        record = EventRecord(node, key, state, tokens, numbers, location)
        if node.kind is Kind.FETCH:
            if node.function in functions.SHARES_MEMORY and plan.fetches[0] in program.copied:
                raise Mismatch("CX0114", "a tensor that an array shares memory with is written later on")
            if len(it.fed) != it.checked:
                self._check_memory()
            values = [self._fetched(slot, t) for slot, t in zip(plan.fetches, tensors, strict=True)]
            it.records.append(record)  # not before: if the fetch fails, eager execution runs the call
            args, kwargs = calls.unflatten(key, values, numbers)
            with WithoutModes():
                returned = node.function(*args, **kwargs)
            if node.function in functions.SHARES_MEMORY:
                record.exposure = expose(returned, values[0])
                it.exposed.append(record.exposure)
            return returned
        if plan.asks:
            self._ask(node, plan)
        it.records.append(record)
        return self.results(node, tensors, tokens)

    def go_to(self, node: Node, index: int, tokens: Sequence[Token], numbers: Sequence[Number]) -> None:
        """Tells the GraphRunner that the iteration goes on with a node, in one of its alternatives."""
        it, send = self.iteration, self.graph_runner.send
        self.step_to(node, index)
        plan = self.skeleton.program.plans[node.id]
        bindings = node.alternatives[index].bindings
        for argument, binding in enumerate(bindings):
            token = tokens[argument]
            if isinstance(binding, Fed) and isinstance(token, torch.Tensor) and id(token) not in it.externals:
                it.externals[id(token)] = binding
                it.fed[binding] = token
        for argument in plan.feeds[index] if plan.feeds else ():
            put = it.late.append if argument in plan.late else send
            put(self._unshared(tokens[argument], Fed(node.id, argument)))
        for slot, transform, late in plan.numbers:
            (it.late.append if late else send)(TRANSFORMS[transform](numbers[slot]))

    def step_to(self, node: Node, index: int) -> None:
        """The same for a node that nothing is sent for."""
        it, program, send = self.iteration, self.skeleton.program, self.graph_runner.send
        for message in program.edges.get((it.at, node.id), ()):
            send(message)
        select = program.plans[node.id].select
        if select is not None:
            send(select[index])
        it.at = node.id
        it.path.append(step_of(node.id, node.alternatives[index].number))

    def _ask(self, node: Node, plan: NodePlan) -> None:
        """Waits for sizes that values decide about."""
        if len(self.iteration.fed) != self.iteration.checked:
            self._check_memory()
        for output, slots in zip(node.outputs, plan.asks, strict=True):
            sizes = Sizes(self.graph_runner, self.skeleton.graph.symbols)
            shape = [self._waited(slot) for slot in slots]
            if not sizes.sizes_fit(output.meta.shape, shape) or sizes.concrete(output.meta) is None:
                raise Mismatch("CX0001", f"{node.name} gave a tensor of shape {shape}")
            sizes.keep()

    def _waited(self, slot: int) -> Any:
        began = time.perf_counter()
        try:
            return self.graph_runner.fetch(slot)
        except RuntimeError as e:
            raise Mismatch("CX0005", str(e)) from e
        finally:
            self.stall_s += time.perf_counter() - began

    def _unshared(self, token: Token, ref: Fed) -> torch.Tensor:
        """The tensor to feed: a copy where somebody could write to its memory before it is read."""
        assert isinstance(token, torch.Tensor)
        program = self.skeleton.program
        written = ref in program.written
        if is_exposed(token):
            if ref in program.seen and not written:
                raise Mismatch("CX0114", "a result is on memory that an array shares with an input")
            self.iteration.inputs[id(token)] = exposure = expose(token, token)
            self.exclusive = self.exclusive and not written
            return token if written else exposure.contents
        if written or ref in program.seen:
            self.exclusive = self.exclusive and is_exclusive(token)
            return token
        return copied(token) if self.exclusive and not is_exclusive(token) else token

    def results(self, node: Node, tensors: list[torch.Tensor], tokens: list[Token]) -> Any:
        """What a node gives to Python: placeholders, and gradients of leaves."""
        it = self.iteration
        rebound = {output: argument for argument, output in node.rebinds}
        new: list[Any] = []
        for number, output in enumerate(node.outputs):
            binding = self.skeleton.outputs[node.id][number]
            if number in rebound:  # only placeholders are
                symbol = it.symbols[id(tensors[rebound[number]])]
                if symbol.meta != output.meta:
                    realize(symbol.tensor, self._placeholder(output.meta))
                symbol.binding, symbol.meta, symbol.history = binding, output.meta, output.history
            else:
                tensor = self._placeholder(output.meta)
                symbol = it.symbols[id(tensor)] = Symbol(tensor, binding, output.meta, output.history)
            it.placeholders[node.id, number] = symbol
            new.append(symbol.tensor)
        for grad in node.grads:
            leaf = tokens[grad.leaf]
            it.grads[self._leaf_id(leaf)] = (leaf, Produced(node.id, grad.output))
        return calls.build(node.result, new, tensors)

    def _placeholder(self, meta: TensorMeta) -> torch.Tensor:
        concrete = Sizes(self.graph_runner, self.skeleton.graph.symbols).concrete(meta)
        assert concrete is not None  # the event would not have fitted
        return make_placeholder(concrete)

    def _fetched(self, slot: int, tensor: torch.Tensor) -> torch.Tensor:
        value = self._waited(slot)
        symbol = self.iteration.symbols.get(id(tensor))
        if symbol is not None:
            if symbol.meta.requires_grad:
                return dressed(value, symbol.meta, symbol.history)
            plain: torch.Tensor = value.detach() if value.requires_grad else value
            return plain
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(value, tensor.requires_grad)
        return dressed(value, calls.meta_of(tensor), None) if tensor.requires_grad else value

    # --- gradients ----------------------------------------------------------------------------------

    def _leaf_id(self, leaf: Token) -> int:
        return id(self.iteration.symbol_of(leaf).tensor) if isinstance(leaf, Produced) else id(leaf)

    def _grad_token(self, leaf: torch.Tensor) -> Token:
        assigned = self.iteration.grads.get(id(leaf))
        if assigned is not None:
            return assigned[1]
        return None if id(leaf) in self.iteration.symbols else leaf.grad

    def _get_grad(self, leaf: torch.Tensor) -> Any:
        token = self._grad_token(leaf)
        return self.iteration.symbol_of(token).tensor if isinstance(token, Produced) else token

    def _set_grad(self, leaf: torch.Tensor, value: torch.Tensor | None) -> None:
        if value is not None:
            self._meta(leaf), self._meta(value)  # tensors that could be among the graph's
            if (leaf.shape, leaf.dtype, leaf.device) != (value.shape, value.dtype, value.device):
                raise Mismatch("CX0001", "a gradient of another shape or type was assigned")
        leaf_token, value_token = (
            self.iteration.token_of(leaf),
            None if value is None else self.iteration.token_of(value),
        )
        self.iteration.grads[id(leaf)] = (leaf_token, value_token)
        self.iteration.records.append(GradRecord(leaf_token, value_token))

    def _grad_fn(self, tensor: torch.Tensor) -> Any:
        symbol = self.iteration.symbols.get(id(tensor))
        if (tensor.grad_fn if symbol is None else symbol.history) is None:
            return None
        made = None if symbol is None else self.skeleton.graph.nodes[symbol.binding.event].function
        node = self.callbacks.node_of(tensor) if made.__class__ is Applied else None
        if node is None:
            raise Mismatch("CX0109", "the program looks at grad_fn")
        return node

    # --- the end --------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Checks the end of the iteration; the GraphRunner then has all that it needs to commit.

        Raises:
            Mismatch: if the iteration is not one of the graph's.
        """
        it, graph = self.iteration, self.skeleton.graph
        if it.records:
            last = it.records[-1]
            it.location = last.location if isinstance(last, EventRecord) else it.location
        if END not in graph.edges.get(it.at, ()):
            raise Mismatch("CX0001", "the iteration ended earlier than any trace")
        for message in self.skeleton.program.edges.get((it.at, END), ()):
            self.graph_runner.send(message)
        self._check_exposed()
        if it.checked != len(it.fed):
            self._check_memory()
        self.callbacks.forget()
        it.alive = alive(self.iteration)
        for binding in it.alive:
            if not graph.nodes[binding.event].outputs[binding.output].kept:
                raise Mismatch("CX0003", f"a result of {graph.nodes[binding.event].name} is still referenced")
        for late in it.late:
            self.graph_runner.send(late)
        self.graph_runner.commit()

    def way(self) -> Way:
        """How the iteration went through the graph."""
        bound = []
        for record in self.iteration.records:
            if isinstance(record, EventRecord) and len(record.node.alternatives) > 1:
                arguments = len(record.node.alternatives[0].bindings)
                bound.append(bound_of(record.node, record.tokens[:arguments]))
        for node, tokens in itertools.chain(*self.iteration.pieces.values()):
            if len(node.alternatives) > 1:
                bound.append(bound_of(node, tokens))
        return Way(tuple(map(node_of, self.iteration.path)), tuple(bound))

    def complete(self) -> None:
        """Waits for the GraphRunner and gives Python the results.

        An interrupt is kept for `raise_interrupt`.

        Raises:
            Mismatch: if the GraphRunner failed before it wrote anything.
        """
        forgotten = False
        while True:
            try:
                if not forgotten and self.stalled(self.graph_runner.wait_for_commit):
                    forgotten = True  # while the GraphRunner commits
                    self._outcome = self._outcome or self._find_results(announced=False)
                    self.forget()
                self.stalled(self.graph_runner.wait)
                break
            except KeyboardInterrupt as e:
                self._interrupt = e  # the commit may have begun: it is finished first
            except RuntimeError as e:
                if self.graph_runner.committing():
                    raise
                raise Mismatch("CX0005", str(e)) from e
        publish(self._outcome or self._find_results(announced=False), self.graph_runner)
        self._outcome = self._put_back = None

    def raise_interrupt(self) -> None:
        """Raises what interrupted the wait of `complete`, if anything did."""
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            raise interrupt

    def _find_results(self, *, announced: bool) -> Results:
        native = isinstance(self.graph_runner, NativeRunner)
        return results_of(self.iteration, self.skeleton, native=native, announced=announced)

    def announce(self) -> list[torch.Tensor]:
        """Sets gradients before they are computed; returns the placeholders that they are.

        The iteration does not need its walker any more, and the next one may take it.
        """
        self._let_go()
        self._outcome = self._find_results(announced=True)
        self._put_back = announce(self._outcome)
        return self._outcome.announced

    def stalled(self, wait: Callable[[], _T]) -> _T:
        """Waits, and counts the time."""
        began = time.perf_counter()
        try:
            return wait()
        finally:
            self.stall_s += time.perf_counter() - began

    def bound(self) -> list[torch.Tensor]:
        """The external tensors that the iteration reads or writes."""
        it = self.iteration
        captured = [it.captured[i] for i in self.skeleton.bound]
        return [t for t in (*captured, *it.fed.values()) if t is not None]

    def holds_random_state(self) -> bool:
        """Whether Python holds a state of the generator, which it may give to somebody who does not wait."""
        nodes = self.skeleton.graph.nodes
        return any(nodes[b.event].function is rng_state for b in self.iteration.alive)

    def held(self) -> list[torch.Tensor]:
        """The placeholders that somebody besides the iteration refers to."""
        return [self.iteration.symbol_of(b).tensor for b in self.iteration.alive]

    def _check_memory(self) -> None:
        """External tensors share memory only as traces have shown, where the program writes to it."""
        it, program = self.iteration, self.skeleton.program
        if program.written and not self._shares_as_known():
            raise Mismatch("CX0001", "tensors that are written share memory as in no trace")
        it.checked = len(it.fed)

    def _shares_as_known(self) -> bool:
        it, program = self.iteration, self.skeleton.program
        if core is not None and core.have_own_memory(it.captured, self.skeleton.bound, it.fed):
            return True
        bound: list[tuple[Captured | Fed, torch.Tensor | None]] = [
            *((self.skeleton.captured[i], it.captured[i]) for i in self.skeleton.bound),
            *it.fed.items(),
        ]
        by_memory: dict[int, list[Captured | Fed]] = {}
        for ref, tensor in bound:
            if tensor is not None:
                by_memory.setdefault(tensor.untyped_storage()._cdata, []).append(ref)
        return all(
            len(refs) == 1
            or program.written.isdisjoint(refs)
            or any(group.issuperset(refs) for group in self.skeleton.graph.shared)
            for refs in by_memory.values()
        )


_PASSED_ON = functions.AMBIENT | functions.MARKS

#: Calls that concern what an iteration leaves behind.
_NEEDS_STATE = {functions.GET_GRAD_FN, functions.SET_GRAD, *functions.SET_REQUIRES_GRAD}

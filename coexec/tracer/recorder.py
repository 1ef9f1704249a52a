"""Records one iteration while it runs eagerly, at both levels.

In:  events, through `Tracer.event`; ATen operations inside of them, through a `TorchDispatchMode`.
Out: a `Trace`, or the cause why the iteration cannot be described by one.

Tensors are known by their memory and geometry at the dispatcher level, and by object at the function
level. Nothing here keeps a tensor, a storage or a frame of the program alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from coexec._private import (
    ENGINE_CODE,
    HigherOrderOperator,
    OwnMode,
    StopRecomputing,
    WithoutModes,
    are_dispatch_modes_off,
    entered_elsewhere,
    is_exposed,
    is_transformed,
    next_sequence_number,
    run_seen,
    runs_python,
    transform_depth,
    without_own_modes,
)
from coexec.callbacks.stepped import SteppedBackward
from coexec.location import describe
from coexec.reasons import Cause, cause
from coexec.tracegraph import calls, functions
from coexec.tracegraph.ambient import ambient, float_control
from coexec.tracegraph.callbacks import Applied, CalledBack, Stopped, is_callback
from coexec.tracegraph.exposed import Exposure, expose
from coexec.tracegraph.optimizers import Update, reads_a_counter
from coexec.tracegraph.schema import VIEWS
from coexec.tracegraph.tape import Tape
from coexec.tracegraph.trace import (
    Binding,
    Computed,
    Constant,
    Event,
    External,
    ExternalTensor,
    Grad,
    Hooks,
    Input,
    Kind,
    Local,
    Number,
    Operation,
    Output,
    Produced,
    Result,
    Source,
    TensorMeta,
    Trace,
    Value,
)
from coexec.tracer.identities import Identities
from coexec.tracer.memory import Geometry, Memory, geometry_of, storage_id
from coexec.tracer.nodes import Edge, Nodes, Pass, edge_of, node_of, nodes_behind
from coexec.tracer.operations import (
    depends_on_data,
    encoded,
    frames_between,
    is_shaped_by_data,
    makes_nothing,
    operation,
    positional_arguments,
    reads_unseen,
    reads_values,
    with_dtype,
    written_positions,
    written_values,
)
from coexec.tracer.rounding import rounded_otherwise


class Untraceable(Exception):
    """The iteration cannot be described by a trace; carries the cause."""

    def __init__(self, id_: str, detail: str) -> None:
        super().__init__(detail)
        self.id = id_
        self.detail = detail


@dataclass
class _Known:
    """A tensor object that took part in the iteration."""

    reference: weakref.ref[torch.Tensor]
    binding: Binding
    meta: TensorMeta
    history: str | None


@dataclass
class _OpenEvent:
    """The event that is running."""

    index: int
    function: Callable[..., Any]
    arguments: list[torch.Tensor]
    backward: bool
    fetch: bool
    grad_mode: bool
    on_host: str | None = None  # which operation's result depends on data
    sources: list[Source] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    read: set[int] = field(default_factory=set)  # memory that operations had as an argument
    own: dict[Geometry, Computed] = field(default_factory=dict)  # what its operations made

    def is_differentiable(self) -> bool:
        """Whether what it computes may have a history; it cannot be computed on fetched values then."""
        return self.backward or (self.grad_mode and any(t.requires_grad for t in self.arguments))


class Recorder(OwnMode, TorchDispatchMode):
    """Records one iteration. Enter it for the time of the block; `event` runs each torch call."""

    supports_higher_order_operators = True

    def __init__(self, identities: Identities, own_modes: int = 1) -> None:
        """Starts a recording; `own_modes` dispatch modes of coexec are active while it runs."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._own_modes = own_modes
        self._identities = identities
        self._events: list[Event] = []
        self._externals: list[ExternalTensor] = []
        self._known: dict[int, _Known] = {}
        self._memory = Memory()
        self._exposed: list[Exposure] = []
        self._inputs: list[Exposure] = []  # external tensors on memory that NumPy may know
        self._open: _OpenEvent | None = None
        self._outputs: list[tuple[int, int]] = []
        self._consumed: set[Any] = set()
        self._unwritten: set[int] = set()  # memory that nothing has been written to
        self._nodes = Nodes()
        self._pass: Pass | None = None  # the backward pass that is running, if it is watched
        self._rounding: int | None = None  # how the processor did at the first event
        self._unwatched = False  # whether autograd must not see a dispatch mode any more
        self.cause: Cause | None = None
        self.location = -1

    # --- function level ---------------------------------------------------------------------

    def event(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        location: int,
        adopt: Callable[[Any], Any] = lambda returned: returned,
        make: Callable[..., Any] | None = None,
    ) -> Any:
        """Runs a torch call eagerly and records it.

        Args:
            function: what Python called.
            args: its positional arguments.
            kwargs: its keyword arguments.
            location: where it was called.
            adopt: what it returned, to be returned and recorded instead.
            make: makes the call; None if the function itself does.
        """
        watches = make is None and functions.runs_all(function, args, kwargs)
        make = make or function
        if self.cause is None:
            self.location = location
        if function in functions.BACKWARD and (node := rounded_otherwise(function, args, kwargs)):
            self._unwatched = True
            self.fail(
                "CX0109", f"{functions.name_of(function)} has other bits for {node} while it is recorded"
            )
        if self.cause is not None:
            with without_own_modes() if self._unwatched else nullcontext():
                return adopt(make(*args, **kwargs))
        try:
            prepared = self._prepare(function, args, kwargs)
        except Untraceable as e:
            self.fail(e.id, e.detail)
            return adopt(make(*args, **kwargs))
        try:
            with self._watched(prepared) if watches else nullcontext() as running:
                returned = adopt(make(*args, **kwargs))
            if self.cause is None:
                self._complete(prepared, returned, running)
                if function in functions.SHARES_MEMORY:
                    self._exposed.append(expose(returned, prepared.tensors[0]))
        except Untraceable as e:
            self.fail(e.id, e.detail)
        except StopRecomputing:  # it has computed, and something else has seen enough
            self._complete_stopped(prepared)
            raise
        except BaseException:
            self.fail("CX0002", f"{functions.name_of(function)} raised")
            raise
        finally:
            self._open = None
        return returned

    def fail(self, id_: str, detail: str) -> None:
        """Gives the recording up; the program goes on eagerly."""
        if self.cause is None:
            self.cause = cause(id_, detail, describe(self.location))

    def set_own_modes(self, own_modes: int) -> None:
        """Says how many dispatch modes of coexec are active from now on."""
        self._own_modes = own_modes

    def is_external(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor comes from outside of the iteration, as far as is known."""
        known = self._known.get(id(tensor))
        if known is not None and known.reference() is tensor:
            return isinstance(known.binding, External)
        if is_transformed(tensor) or not calls.is_strided(tensor):
            return False
        return not self._memory.is_computed(storage_id(tensor))

    def is_computed(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has a history that begins in the iteration."""
        known = self.known(tensor)
        return known is not None and known.history is not None

    def known(self, tensor: torch.Tensor) -> _Known | None:
        """What is known of a tensor object."""
        known = self._known.get(id(tensor))
        return known if known is not None and known.reference() is tensor else None

    def know_as(self, tensor: torch.Tensor, known: _Known) -> None:
        """Takes a tensor object for another name of one that is known."""
        with torch._C.DisableTorchFunction():  # the block's own mode may be active
            meta, history = calls.meta_of(tensor), _history(tensor)
        self._known[id(tensor)] = _Known(weakref.ref(tensor), known.binding, meta, history)

    def on_another_thread(self) -> AbstractContextManager[None]:
        """Records what another thread does, while this one waits for it."""
        return entered_elsewhere(self)

    def refresh(self, tensor: torch.Tensor) -> None:
        """Takes in that Python has changed the attributes of an external tensor."""
        known = self._known.get(id(tensor))
        if known is not None and known.reference() is tensor:
            known.meta = calls.meta_of(tensor)

    def _prepare(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Prepared:
        self._check_exposed()
        if transform_depth(0)[1]:
            raise Untraceable("CX0102", f"hooks of autograd around {functions.name_of(function)}")
        if function in functions.UNSUPPORTED:
            raise Untraceable("CX0109", functions.name_of(function))
        if are_dispatch_modes_off():
            raise Untraceable("CX0113", f"no mode sees what {functions.name_of(function)} does")
        if self._rounding is None:
            self._rounding = float_control()
        if self._rounding != float_control():
            raise Untraceable("CX0121", f"before {functions.name_of(function)}")
        tensors, numbers, key = calls.flatten(args, kwargs)
        if any(True for _ in calls.generators_in(key)):
            raise Untraceable("CX0118", f"{functions.name_of(function)} is given a generator")
        if calls.has_opaque_data(key):
            raise Untraceable(
                "CX0110", f"{functions.name_of(function)} got an object it could only compare by identity"
            )
        inputs = [self._bind(t, function) for t in tensors]
        metas = [calls.meta_of(t) for t in tensors]
        backward = function in functions.BACKWARD
        leaves = self._leaves() if backward else []
        if backward and not (kwargs.get("retain_graph") or kwargs.get("create_graph")):
            self._consume(tensors)
        fetch = functions.fetches(function, args)
        self._open = _OpenEvent(
            len(self._events), function, tensors, backward, fetch, torch.is_grad_enabled()
        )
        return _Prepared(
            function=function,
            kind=Kind.FETCH if fetch else Kind.COMPUTE,
            key=(key, ambient(self._own_modes), tuple(metas)),
            numbers=tuple(numbers),
            tensors=tensors,
            inputs=inputs,
            metas=metas,
            versions=[_version(t) for t in tensors],
            histories=[_history(t) for t in tensors],
            leaves=leaves,
            edges=[edge_of(t) for t in tensors],
            geometries=[geometry_of(t) for t in tensors],
            first_node=next_sequence_number(),
        )

    def _complete(self, p: _Prepared, returned: Any, running: Pass | None = None) -> None:
        event = self._open
        assert event is not None
        if isinstance(p.function, Update):
            self._check_update(p.function, event.operations, p.numbers)
        returns = p.function.__class__ is not Applied and returned.__class__ is not Stopped
        if returns and p.kind is not Kind.FETCH and event.on_host is None and self._reads_unseen(p, returned):
            event.on_host = f"an integer tensor inside of {self._name()}"
        if event.on_host is not None and p.kind is not Kind.FETCH:
            self._check_host_event(p, returned)
            p.kind = Kind.FETCH
            event.sources, event.operations = [], []
        if p.kind is Kind.FETCH:
            result: Any = tuple(self._value(t) for t in p.tensors)
            outputs: list[torch.Tensor] = []
            grads: list[Grad] = []
            rebinds: list[tuple[int, int]] = []
            implicit: list[Binding] = []
            metas: list[TensorMeta | None] = []
            places: dict[int, int] = {}
        else:
            outputs = []
            new: list[torch.Tensor] = []
            result = self._template(returned, p.tensors, new)
            outputs += new
            rebinds = self._rebinds(p, outputs)
            for argument, _ in rebinds:  # some are on other memory now, or look otherwise at theirs
                if geometry_of(p.tensors[argument]) != p.geometries[argument]:
                    self._known.pop(id(p.tensors[argument]), None)
            implicit, metas, grads, places = self._new_grads(p, outputs)
        if self._inputs and any(o.writes for o in event.operations):
            self._refresh_inputs()
        index = len(self._events)
        tape = self._tape(p, outputs)
        passages = None
        if running is not None:
            passages = self._nodes.passages(running, p.edges[0], places, event.operations)
        recorded_outputs = []
        for number, tensor in enumerate(outputs):
            value = self._value(tensor)
            meta = calls.meta_of(tensor)
            recorded_outputs.append(
                Output(meta, value, _history(tensor), kept=False, uid=self._identities.uid(tensor))
            )
            self._known[id(tensor)] = _Known(
                weakref.ref(tensor), Produced(index, number), meta, _history(tensor)
            )
            self._outputs.append((index, number))
        self._events.append(
            Event(
                kind=p.kind,
                function=p.function,
                name=functions.name_of(p.function),
                key=p.key,
                location=self.location,
                numbers=p.numbers,
                inputs=tuple(p.inputs) + tuple(implicit),
                implicit_metas=tuple(metas),
                sources=tuple(event.sources),
                operations=tuple(event.operations),
                outputs=tuple(recorded_outputs),
                grads=tuple(grads),
                rebinds=tuple(rebinds),
                result=result,
                backward=event.backward,
                tape=tape,
                passages=passages,
            )
        )

    def _tape(self, p: _Prepared, outputs: Sequence[torch.Tensor]) -> Tape | None:
        """How autograd goes back through the event that has just run."""
        event = self._open
        assert event is not None
        if event.backward or is_callback(p.function):
            return None
        arguments = [
            (tensor, binding, edge, geometry, self._source_of(binding))
            for tensor, binding, edge, geometry in zip(
                p.tensors, p.inputs, p.edges, p.geometries, strict=True
            )
            if binding is not None
        ]
        return self._nodes.tape(event.index, p.first_node, arguments, outputs, event.own)

    def _source_of(self, binding: Produced | External) -> Source:
        """What a tensor object is: an external tensor, or what an operation made."""
        if isinstance(binding, External):
            return binding
        return self._events[binding.event].made(binding.event, binding.output)

    @contextmanager
    def _watched(self, p: _Prepared) -> Iterator[Pass | None]:
        with self._nodes.watched(p.tensors, self) as running:
            self._pass = running
            try:
                yield running
            finally:
                self._pass = None

    def operations_so_far(self) -> int:
        """How many operations the event has by now."""
        assert self._open is not None
        return len(self._open.operations)

    def name(self, tensor: torch.Tensor) -> Value:
        """The event's name for a tensor."""
        return self._lookup(tensor)

    def _complete_stopped(self, p: _Prepared) -> None:
        try:
            if self.cause is None:
                self._complete(p, Stopped())
        except Untraceable as e:
            self.fail(e.id, e.detail)

    def _check_update(
        self, update: Update, operations: Sequence[Operation], numbers: Sequence[Number]
    ) -> None:
        strange = update.unexplained(operations, numbers)
        if strange is not None:  # from the next iteration on it is call by call
            raise Untraceable("CX0106", f"{self._name()} computes {strange} in a way that is not known")

    def _reads_unseen(self, p: _Prepared, returned: Any) -> bool:
        event = self._open
        assert event is not None
        was_read = [s in event.read for s in p.storages]
        geometries = (geometry_of(t) for t in calls.tensors_in(returned) if calls.is_strided(t))
        values = {self._memory.value(g) for g in geometries}
        outputs = {Local(v.operation, v.result) for v in values if isinstance(v, Computed)}
        return reads_unseen(p.function, p.tensors, was_read, event.operations, outputs, returned)

    def _check_exposed(self) -> None:
        """What Python writes through NumPy no event shows."""
        if not self._exposed and not self._inputs:
            return
        self._exposed = [e for e in self._exposed if e.alive]
        with WithoutModes():
            if any(e.written for e in (*self._exposed, *self._inputs)):
                raise Untraceable("CX0114", "an array that shares memory with a tensor was written")

    def _refresh_inputs(self) -> None:
        with WithoutModes():
            self._inputs = [expose(e.array(), e.memory) for e in self._inputs if e.alive]

    def _check_host_event(self, p: _Prepared, returned: Any) -> None:
        """A call whose result depends on data can be made on fetched values if it only computes."""
        event = self._open
        assert event is not None
        changed = any(o.writes or o.random for o in event.operations)
        changed = (
            changed
            or event.backward
            or any(
                calls.meta_of(t) != m or _version(t) != v
                for t, m, v in zip(p.tensors, p.metas, p.versions, strict=True)
            )
        )
        differentiable = any(isinstance(t, torch.Tensor) and t.requires_grad for t in calls.flat(returned))
        same = any(t is a for t in calls.flat(returned) for a in p.tensors)
        if changed or differentiable or same:
            raise Untraceable("CX0106", str(event.on_host))

    def _bind(self, tensor: torch.Tensor, function: Callable[..., Any]) -> Binding:
        known = self._known.get(id(tensor))
        if known is not None and known.reference() is tensor:
            if calls.meta_of(tensor) != known.meta:
                raise Untraceable("CX0103", "its metadata is not what the call that made it left")
            if function in functions.FETCH and _history(tensor) != known.history:
                # An in-place call gives views, and the base, another node, which `repr` shows.
                raise Untraceable("CX0103", "its autograd node is not the one that its call made")
            return known.binding
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and not isinstance(
            tensor, torch.nn.Parameter
        ):
            raise Untraceable("CX0107", f"{type(tensor).__name__} is a tensor subclass")
        if torch.nn.parameter.is_lazy(tensor):
            raise Untraceable("CX0107", "a parameter is not initialized yet")
        if is_transformed(tensor):
            raise Untraceable("CX0102", f"a torch.func transform runs around {functions.name_of(function)}")
        if not calls.is_strided(tensor):
            raise Untraceable("CX0107", f"a tensor is {calls.layout_of(tensor)}")
        if tensor.requires_grad and not tensor.is_leaf:
            raise Untraceable("CX0104", "a tensor with autograd history was made before the block")
        return self._external(tensor)

    def _external(self, tensor: torch.Tensor) -> External:
        if self._memory.is_computed(storage_id(tensor)):
            raise Untraceable("CX0101", "a tensor that shares memory with computed ones appeared")
        external = External(len(self._externals))
        self._memory.add(tensor, external, external=True)
        meta = calls.meta_of(tensor)
        parameter = isinstance(tensor, torch.nn.Parameter)
        uid = self._identities.uid(tensor)
        exposed = is_exposed(tensor)
        hooks = calls.hooks_of(tensor)
        self._externals.append(ExternalTensor(uid, storage_id(tensor), meta, parameter, exposed, hooks))
        if exposed:
            with WithoutModes():
                self._inputs.append(expose(tensor, tensor))
        self._known[id(tensor)] = _Known(weakref.ref(tensor), external, meta, None)
        return external

    def _template(self, returned: Any, arguments: list[torch.Tensor], new: list[torch.Tensor]) -> Any:
        if returned.__class__ is CalledBack:
            number, *gradients = returned
            items = [self._returned(g, arguments, new) for g in gradients]
            return calls.Container(CalledBack, (number, *items))
        if returned.__class__ is Stopped:
            return calls.Container(Stopped, ())
        return calls.template(returned, lambda leaf: self._returned(leaf, arguments, new))

    def _returned(self, leaf: Any, arguments: list[torch.Tensor], new: list[torch.Tensor]) -> Any:
        if not isinstance(leaf, torch.Tensor):
            if leaf is None:
                return None
            raise Untraceable("CX0109", f"{self._name()} returns a {type(leaf).__name__}")
        for index, argument in enumerate(arguments):
            if argument is leaf:
                return calls.SameTensor(index)
        for index, other in enumerate(new):
            if other is leaf:
                return calls.NewTensor(index)
        known = self._known.get(id(leaf))
        if known is not None and known.reference() is leaf:
            raise Untraceable("CX0109", f"{self._name()} returned a tensor that was not among its arguments")
        if type(leaf) is not torch.Tensor or not calls.is_strided(leaf):
            raise Untraceable(
                "CX0107", f"{self._name()} returns a {type(leaf).__name__} that is {calls.layout_of(leaf)}"
            )
        new.append(leaf)
        return calls.NewTensor(len(new) - 1)

    def _rebinds(self, p: _Prepared, outputs: list[torch.Tensor]) -> list[tuple[int, int]]:
        rebinds = []
        before = zip(p.metas, p.storages, p.histories, p.edges, strict=True)
        for index, (tensor, then) in enumerate(zip(p.tensors, before, strict=True)):
            if then == (calls.meta_of(tensor), storage_id(tensor), _history(tensor), edge_of(tensor)):
                continue
            if isinstance(p.inputs[index], External):
                raise Untraceable("CX0108", f"{self._name()} changes an external tensor's attributes")
            if not any(tensor is o for o in outputs):
                rebinds.append((index, len(outputs)))
                outputs.append(tensor)
        return rebinds

    # --- backward -----------------------------------------------------------------------------

    def _leaves(self) -> list[tuple[torch.Tensor, torch.Tensor | None, int]]:
        leaves = []
        for known in list(self._known.values()):
            tensor = known.reference()
            if tensor is not None and tensor.requires_grad and _node(tensor) is None:
                if calls.hooks_of(tensor) != self._hooks_of(known.binding):
                    raise Untraceable("CX0112", "a leaf tensor has got hooks in the block")
                grad = tensor.grad
                if grad is not None:
                    self._bind_grad(grad)  # the backward pass may add to it
                leaves.append((tensor, grad, -1 if grad is None else grad._version))
        return leaves

    def _hooks_of(self, binding: Binding) -> Hooks:
        """How many hooks a leaf has, as far as traces say."""
        return self._externals[binding.index].hooks if isinstance(binding, External) else (0, 0)

    def hooked_leaves(self) -> dict[int, torch.Tensor]:
        """External tensors with hooks, by what names them across traces."""
        leaves = {}
        for known in self._known.values():
            tensor = known.reference()
            if tensor is not None and isinstance(known.binding, External):
                external = self._externals[known.binding.index]
                if any(external.hooks):
                    leaves[external.uid] = tensor
        return leaves

    def _new_grads(
        self, p: _Prepared, outputs: list[torch.Tensor]
    ) -> tuple[list[Binding], list[TensorMeta | None], list[Grad], dict[int, int]]:
        implicit: list[Binding] = []
        metas: list[TensorMeta | None] = []
        grads: list[Grad] = []
        places: dict[int, int] = {}  # by `id` of a leaf
        for leaf, before, version in p.leaves:
            after = leaf.grad
            if after is before and (after is None or after._version == version):
                continue
            position = places[id(leaf)] = len(p.tensors) + len(implicit)
            implicit.append(self._known[id(leaf)].binding)
            implicit.append(None if before is None else self._bind_grad(before))
            metas += [calls.meta_of(leaf), None if before is None else calls.meta_of(before)]
            if after is not before and after is not None:
                grads.append(Grad(position, len(outputs)))
                outputs.append(after)
        return implicit, metas, grads, places

    def _bind_grad(self, grad: torch.Tensor) -> Binding:
        known = self._known.get(id(grad))
        return known.binding if known is not None and known.reference() is grad else self._external(grad)

    def _consume(self, roots: list[torch.Tensor]) -> None:
        self._consumed |= set(nodes_behind(roots, self._consumed))

    # --- dispatcher level -----------------------------------------------------------------------

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # the block's own mode may be active
            return self._operation(function, args, kwargs or {})

    def _operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(function, HigherOrderOperator):
            self.fail("CX0102", f"torch.{function.name()} calls functions of the user")
        if self.cause is not None or function.namespace in functions.ANNOTATING_NAMESPACES:
            return run_seen(function, args, kwargs)
        try:
            before = self._before_operation(function, args, kwargs)
        except Untraceable as e:
            self.fail(e.id, e.detail)
            return run_seen(function, args, kwargs)
        returned = run_seen(function, args, kwargs)
        if before is not None:
            try:
                self._after_operation(function, before, returned)
            except Untraceable as e:
                self.fail(e.id, e.detail)
        return returned

    def _before_operation(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], list[torch.Tensor], tuple[Any, ...]] | None:
        event = self._open
        if event is None:
            tracked = any(
                calls.is_strided(t) and storage_id(t) in self._memory
                for t in calls.tensors_in((args, kwargs))
            )
            draws = torch.Tag.nondeterministic_seeded in function.tags and kwargs.get("generator") is None
            if tracked or draws:
                raise Untraceable("CX0101", f"{function} ran outside of a call that coexec sees")
            return None
        if event.fetch:
            return None
        self._check_frames(event)
        if runs_python(function, (args, kwargs)):
            raise Untraceable("CX0102", f"{function} is implemented in Python")
        if torch.Tag.inplace_view in function.tags and not self._is_own_view(event, function, args[0]):
            raise Untraceable("CX0109", f"{function} changes a tensor's geometry in place")
        if reads_a_counter(event.function, function):
            return None
        shaped = is_shaped_by_data(function, args)
        if depends_on_data(function, args) and not (shaped and event.is_differentiable()):
            event.on_host = f"{function} inside of {self._name()}"
        if event.on_host is not None:
            return None
        positional = positional_arguments(function, args, kwargs)
        event.read |= {storage_id(t) for t in calls.tensors_in(positional) if t.layout is torch.strided}
        values = tuple(encoded(a, lambda t: self._lookup(t, function)) for a in positional)
        return values, list(calls.tensors_in(positional)), tuple(positional)

    def _after_operation(self, function: Any, before: Any, returned: Any) -> None:
        event = self._open
        assert event is not None
        args, tensors, given = before
        if function in VIEWS:
            self._view_in_place(event, VIEWS[function], args, returned)
            return
        self._check_written(function, given, returned)
        if not tensors:
            args = with_dtype(function, args, returned)
        if self._exposed and written_values(function, args):
            self._exposed = [e for e in self._exposed if e.alive]
            written = {storage_id(t) for t in tensors}
            if any(storage_id(e.memory) in written for e in self._exposed):
                raise Untraceable("CX0114", "a tensor that an array shares memory with was written")
        number = len(event.operations)
        results: list[Result | None] = []
        existing: list[tuple[tuple[int, ...], tuple[int, ...]] | None] = []
        fresh: list[tuple[torch.Tensor, Computed]] = []
        for index, tensor in enumerate(calls.flat(returned if function._schema.returns else ())):
            existing.append(None)
            if tensor is None:
                results.append(None)
                continue
            if not isinstance(tensor, torch.Tensor) or not calls.is_strided(tensor):
                raise Untraceable("CX0107", f"{function} returned a {type(tensor).__name__}")
            if self._exists(tensor, tensors):
                results.append(None)
                existing[-1] = (tuple(tensor.shape), tensor.stride())
                continue
            alias = None
            storage = storage_id(tensor)
            if storage in self._memory:
                base = next((t for t in tensors if storage_id(t) == storage), None)
                if base is None:
                    raise Untraceable("CX0111", f"{function} returned memory that was no argument")
                alias = self._lookup(base)
            results.append(Result(calls.meta_of(tensor), alias))
            fresh.append((tensor, Computed(event.index, number, index)))
        for tensor, computed in fresh:
            self._memory.add(tensor, computed)
            event.own[geometry_of(tensor)] = computed
            if self._pass is not None:
                self._pass.made(geometry_of(tensor), Local(number, computed.result))
        shaped = is_shaped_by_data(function, given)
        event.operations.append(operation(function, args, results, shaped_by_data=shaped, existing=existing))

    def _is_own_view(self, event: _OpenEvent, function: Any, tensor: torch.Tensor) -> bool:
        """Whether an operation turns a tensor that the event has made, and that Python never saw."""
        known = self._known.get(id(tensor))
        seen = known is not None and known.reference() is tensor
        return function in VIEWS and self._pass is None and not seen and geometry_of(tensor) in event.own

    def _view_in_place(
        self, event: _OpenEvent, view: Any, args: tuple[Any, ...], tensor: torch.Tensor
    ) -> None:
        """A tensor is another view of its memory from now on: what it was before is a value of its own."""
        if geometry_of(tensor) in event.own:
            return
        computed = Computed(event.index, len(event.operations), 0)
        self._memory.add(tensor, computed)
        event.own[geometry_of(tensor)] = computed
        event.operations.append(operation(view, args, [Result(calls.meta_of(tensor), args[0])]))

    def _exists(self, tensor: torch.Tensor, arguments: list[torch.Tensor]) -> bool:
        """Whether a result of an operation is a value that the event has already.

        That another event made the same view of the same memory is so in this trace only.
        """
        assert self._open is not None
        geometry = geometry_of(tensor)
        if any(geometry == geometry_of(a) for a in arguments if a.layout is torch.strided):
            return True
        if self._pass is not None:  # a piece of a backward pass knows nothing of what other pieces have
            return self._pass.has(geometry)
        return geometry in self._open.own or (
            self._open.backward and self._memory.value(geometry) is not None
        )

    def _check_written(self, function: Any, given: tuple[Any, ...], returned: Any) -> None:
        """What `empty` made has to be written before it is read; C++ may do that without any operation."""
        if makes_nothing(function):
            self._unwritten |= {storage_id(t) for t in calls.tensors_in(returned)}
            return
        if not self._unwritten:
            return
        written = written_positions(function, given)
        for position, argument in enumerate(given):
            for tensor in calls.tensors_in(argument):
                if not calls.is_strided(tensor) or storage_id(tensor) not in self._unwritten:
                    continue
                if position in written:
                    self._unwritten.discard(storage_id(tensor))
                elif reads_values(function):
                    raise Untraceable("CX0111", f"{function} reads what no operation has written")

    def _check_frames(self, event: _OpenEvent) -> None:
        """Python code that runs between an event's call and its operations is not ours to skip."""
        between = frames_between(_OUTERMOST)
        if between is None:
            return  # a thread of autograd's engine, straight from C++
        if event.backward:
            if not between.complete or (ENGINE_CODE in between.codes and between.codes[0] is not ENGINE_CODE):
                raise Untraceable("CX0102", f"Python code of {between.codes[0].co_name} in the backward pass")
            return
        stranger = between.outside_of_torch()
        if stranger is not None:
            raise Untraceable("CX0102", f"{stranger.co_name} inside of {self._name()}")

    # --- values -----------------------------------------------------------------------------------

    def _lookup(self, tensor: torch.Tensor, function: Any = None) -> Value:
        """The event's name for a tensor that one of its operations reads."""
        if not calls.is_strided(tensor):
            raise Untraceable("CX0107", f"{function} reads a tensor that is {calls.layout_of(tensor)}")
        if self._pass is not None and (found := self._found_in_pass(self._pass, tensor)) is not None:
            return found
        known = self._known.get(id(tensor))
        if known is not None and known.reference() is tensor and known.binding is not None:
            return self._refer(self._source_of(known.binding))  # others may be alike, but not always
        geometry = geometry_of(tensor)
        own = None if self._open is None else self._open.own.get(geometry)
        source = own or self._memory.value(geometry)
        if source is not None:
            return self._refer(source)
        root = self._memory.root(geometry[0])
        return self._constant(tensor, function) if root is None else self._view(tensor, geometry, *root)

    def _found_in_pass(self, running: Pass, tensor: torch.Tensor) -> Value | None:
        found = running.find(geometry_of(tensor))
        if found is None:
            known = self._known.get(id(tensor))
            running.strange = running.strange or not running.is_at_leaf or known is None
        return found if found is None or isinstance(found, (Input, Local)) else self._refer(found)

    def _view(self, tensor: torch.Tensor, geometry: Geometry, root: Geometry, source: Source) -> Value:
        """Memory that is known, in a geometry that no operation made: an `as_strided` of it."""
        event = self._open
        assert event is not None
        if root[4:] != geometry[4:]:
            raise Untraceable("CX0111", "memory is read with another dtype than it was made with")
        if isinstance(source, External):
            raise Untraceable("CX0111", "an external tensor's memory is read past the tensor")
        base = self._refer(source)
        number = len(event.operations)
        args = (base, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        meta = replace(calls.meta_of(tensor), requires_grad=False, is_leaf=True)
        target = torch.ops.aten.as_strided.default
        event.operations.append(Operation(target, args, (Result(meta, base),), (), False))
        self._memory.add(tensor, Computed(event.index, number, 0))
        return Local(number, 0)

    def _constant(self, tensor: torch.Tensor, function: Any) -> Value:
        event = self._open
        assert event is not None
        dense = torch.ops.aten.is_non_overlapping_and_dense.default(tensor)  # as its copies will be
        if event.backward or tensor.numel() > 65536 or tensor.requires_grad or not dense:
            raise Untraceable("CX0111", f"{function} inside of {self._name()}")
        constant = Constant(tensor.detach().clone())
        self._memory.add(tensor, constant)
        return self._refer(constant)

    def _refer(self, source: Source) -> Value:
        event = self._open
        assert event is not None
        if isinstance(source, Computed) and source.event == event.index:
            return Local(source.operation, source.result)
        if source not in event.sources:
            event.sources.append(source)
        return Input(event.sources.index(source))

    def _value(self, tensor: torch.Tensor) -> Value:
        return self._lookup(tensor, None)

    def _name(self) -> str:
        assert self._open is not None
        return functions.name_of(self._open.function)

    # --- the end ------------------------------------------------------------------------------------

    def finish(self) -> Trace | None:
        """The trace of the iteration, or None when `cause` says why there is none."""
        if self.cause is not None:
            return None
        kept: set[tuple[int, int]] = set()
        for known in self._known.values():
            tensor = known.reference()
            if tensor is None or not isinstance(known.binding, Produced):
                continue
            node = _node(tensor)
            if tensor.requires_grad and node is not None and node not in self._consumed:
                self.location = self._events[known.binding.event].location
                self.fail(
                    "CX0105", f"a result of {self._events[known.binding.event].name} is still differentiable"
                )
                return None
            made = self._events[known.binding.event]
            if _history(tensor) != made.outputs[known.binding.output].history:
                self.location = made.location
                self.fail("CX0103", f"a result of {made.name} has another autograd node at the end")
                return None
            kept.add((known.binding.event, known.binding.output))
        events = tuple(
            replace(e, outputs=tuple(replace(o, kept=(i, j) in kept) for j, o in enumerate(e.outputs)))
            for i, e in enumerate(self._events)
        )
        return Trace(events, tuple(self._externals))


#: Where the calls that are recorded are made.
_OUTERMOST = frozenset({Recorder.event.__code__, SteppedBackward.run.__code__})


@dataclass
class _Prepared:
    """What is known of an event before its function runs."""

    function: Callable[..., Any]
    kind: Kind
    key: Any
    numbers: tuple[Any, ...]
    tensors: list[torch.Tensor]
    inputs: list[Binding]
    metas: list[TensorMeta]
    versions: list[int]
    histories: list[str | None]
    leaves: list[tuple[torch.Tensor, torch.Tensor | None, int]]
    edges: list[Edge | None]
    geometries: list[Geometry]
    first_node: int

    @property
    def storages(self) -> list[int]:
        """The memory of each tensor, before the function runs."""
        return [geometry[0] for geometry in self.geometries]


def _history(tensor: torch.Tensor) -> str | None:
    node = _node(tensor)
    return None if node is None else type(node).__name__


def _node(tensor: torch.Tensor) -> Any:
    """The autograd node; of a view that may have none any more, whatever is no node."""
    return node_of(tensor, _NO_NODE)


_NO_NODE = object()


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version

"""What a stage keeps of one micro-batch between forward and backward: held by storage, so that it can move.

In:  tensors that autograd saves while `Saved.hooks()` is active.
Out: the same tensors when backward asks, also after their storages have been sent away and come back.

Each storage is held, counted and moved once, however many saved tensors share it. Parameters, buffers and
data are kept where they are. A storage of which little is used is replaced by a copy of that part.

Autograd does not check for in-place changes once hooks are there, so this does: every tensor is kept with its
version and compared before it is used or given away.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch.autograd.graph import saved_tensors_hooks

from pipeline.runtime.errors import InPlaceError, RunError
from pipeline.runtime.storages import as_bytes

SPARSE_USE = 0.5
"""A storage of which less than this is used is replaced by a copy of what is."""

_TORCH = os.path.dirname(torch.__file__)


@dataclass(slots=True)
class _Slot:
    """One storage; None while it is away."""

    storage: torch.UntypedStorage | None
    nbytes: int


@dataclass(slots=True)
class _View:
    """A saved tensor: part of a slot's storage.

    `alias` shares the version counter of what was saved; it is gone once nobody else can write to the
    storage. Without a slot, the tensor is kept where it is.
    """

    slot: _Slot | None
    alias: torch.Tensor | None
    address: int
    version: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    where: str


class Saved:
    """What one stage holds of one micro-batch."""

    def __init__(
        self, keep: Collection[int] = frozenset(), frozen: Mapping[int, int] = MappingProxyType({})
    ) -> None:
        """Hold nothing yet.

        Args:
            keep: Addresses of storages that stay where they are: parameters, buffers, data.
            frozen: Addresses of those that nobody writes to any more, although the tensor that they were of
                goes on with another storage; and the tensor's version at that time.
        """
        self._keep = keep
        self._frozen = frozen
        self._slots: dict[int, _Slot] = {}
        self._views: list[_View] = []
        self.away = False

    def hooks(self) -> saved_tensors_hooks:
        """While this is active, autograd saves into here."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Hold tensors that autograd does not save: the input of a stage that recomputes."""
        for tensor in tensors:
            self._pack(tensor)

    def tensors(self) -> list[torch.Tensor]:
        """All that is held, in the order in which it was saved."""
        return [self._unpack(view) for view in self._views]

    def storages(self) -> list[torch.Tensor]:
        """The storages that are here, as bytes."""
        return [as_bytes(slot.storage) for slot in self._slots.values() if slot.storage is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of the storages that are here."""
        return sum(slot.nbytes for slot in self._slots.values() if slot.storage is not None)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each storage, here or away, in the order in which they were saved."""
        return tuple(slot.nbytes for slot in self._slots.values())

    def finish(self, keep: Collection[int] = frozenset()) -> None:
        """Call when the forward pass is done: copies the used part of storages that are mostly unused.

        Args:
            keep: More addresses of storages that stay where they are. Fully sharded parameters have other
                storages after the pass than before; those that they had in between have been emptied.
        """
        gone = {a for a, slot in self._slots.items() if a in keep or as_bytes(_here(slot)).numel() == 0}
        by_slot: dict[int, list[_View]] = {id(slot): [] for slot in self._slots.values()}
        for view in self._views:
            if view.slot is not None and view.address in gone:
                view.slot = None
            elif view.slot is not None:
                by_slot[id(view.slot)].append(view)
        for address in gone:
            del self._slots[address]
        for slot in self._slots.values():
            self._shrink(slot, by_slot[id(slot)])

    def _shrink(self, slot: _Slot, views: Sequence[_View]) -> None:
        """Replace a storage that is mostly unused by a copy of the part that is used."""
        first = min(view.offset * view.dtype.itemsize for view in views)
        end = max(_end(view) for view in views)
        # Views of several types may share a storage; their offsets stay whole numbers of elements.
        first -= first % max(view.dtype.itemsize for view in views)
        if end - first >= SPARSE_USE * slot.nbytes:
            return
        for view in views:
            self._check(view)
            view.alias = None
            view.offset -= first // view.dtype.itemsize
        slot.storage = as_bytes(_here(slot))[first:end].clone().untyped_storage()
        slot.nbytes = slot.storage.nbytes()

    def give(self) -> list[torch.Tensor]:
        """The storages as bytes, to be sent away; call `release` when that is done."""
        self._check_versions()
        return [as_bytes(_here(slot)) for slot in self._slots.values()]

    def release(self) -> None:
        """Let go of the storages, which are now elsewhere."""
        self._check_versions()
        for view in self._views:
            if view.slot is not None:
                view.alias = None
        for slot in self._slots.values():
            slot.storage = None
        self.away = True

    def take(self, parts: Sequence[torch.Tensor]) -> None:
        """The storages are back, as bytes."""
        for slot, part in zip(self._slots.values(), parts, strict=True):
            slot.storage = part.untyped_storage()
        self.away = False

    def clear(self) -> None:
        """Let go of everything; backward is over."""
        self._slots.clear()
        self._views.clear()

    def _check_versions(self) -> None:
        for view in self._views:
            self._check(view)

    def _check(self, view: _View) -> None:
        if view.alias is None:
            return
        version = self._frozen.get(view.address, view.alias._version)
        if version != view.version:
            raise InPlaceError(_changed(view, version - view.version))

    def _pack(self, tensor: torch.Tensor) -> _View:
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        alias = tensor.detach()
        movable = tensor.layout == torch.strided and type(alias) is torch.Tensor
        address = alias.untyped_storage().data_ptr() if movable else 0
        slot = None
        if address and address not in self._keep:
            storage = alias.untyped_storage()
            slot = self._slots.setdefault(address, _Slot(storage, storage.nbytes()))
        view = _View(
            slot,
            alias,
            address,
            self._frozen.get(address, tensor._version),
            tensor.dtype,
            tensor.size(),
            tensor.stride() if movable else (),
            int(tensor.storage_offset()) if movable else 0,
            _line_of_user(),
        )
        self._views.append(view)
        return view

    def _unpack(self, view: _View) -> torch.Tensor:
        self._check(view)
        if view.alias is not None:
            return view.alias
        assert view.slot is not None
        storage = _here(view.slot)
        tensor = torch.empty(0, dtype=view.dtype, device=storage.device)
        return tensor.set_(storage, view.offset, view.size, view.stride)


def _here(slot: _Slot) -> torch.UntypedStorage:
    if slot.storage is None:
        raise RunError("a saved activation is used while it is on another rank; LOAD it first.")
    return slot.storage


def _end(view: _View) -> int:
    """The byte after the last one that a view uses."""
    if 0 in view.size:
        return view.offset * view.dtype.itemsize
    last = sum((n - 1) * step for n, step in zip(view.size, view.stride, strict=True))
    return (view.offset + last + 1) * view.dtype.itemsize


def _changed(view: _View, times: int) -> str:
    return (
        f"a tensor of shape {list(view.size)} saved for backward{_operation()} at {view.where} was changed in"
        f" place {times} time{'s' if times > 1 else ''} since; its gradient would be wrong. Use the"
        " out-of-place operation, or clone() the tensor before it is changed."
    )


def _operation() -> str:
    """The backward operation that autograd is in, if it is."""
    # autograd has no public name for it; without this, the message names the line only.
    current = getattr(torch._C, "_current_autograd_node", None)
    node = None if current is None else current()
    return "" if node is None else f" of {node.name()}"


def _line_of_user() -> str:
    """File and line of the innermost caller outside torch and this file."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        path = frame.f_code.co_filename
        if path != __file__ and not path.startswith(_TORCH):
            break
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"

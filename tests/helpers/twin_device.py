"""A device of its own, `twin`, which computes on the CPU and keeps the rules that a GPU has.

Tensors of both devices do not mix. What a GPU would have to finish its queue for is a wait:
`watching` lists them. A copy to the CPU that does not wait arrives late, when the event behind it
is done; until then the memory holds something else. What such a copy reads or writes has to lie in
pinned memory. Start it in a process of its own: torch cannot forget a device.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "twin"
LATE = 2  # queries of an event before it is done
NONSENSE = 77  # in memory whose copy has not arrived
aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
# Operators whose result has a size, or is a number, that only the device knows.
WAITS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.unique_dim.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
    aten.equal.default,
}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


class WrongDeviceError(Exception):
    """An operator took tensors of two devices."""


class Twin(Tensor):
    """A tensor of the device; `elem` holds its values."""

    elem: Tensor

    @staticmethod
    def __new__(cls, elem: Tensor) -> "Twin":
        made = Tensor._make_wrapper_subclass(
            cls,
            elem.shape,
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            device=torch.device(NAME, 0),
        )
        made.elem = elem.detach()
        return made

    def __repr__(self, **_: Any) -> str:
        return f"Twin({self.elem})"

    def tolist(self) -> Any:
        _wait("tolist")
        return self.elem.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class Event:
    """A place in the device's queue. It is done after a few queries, or after it was waited for."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._left = LATE
        self._before = 0

    def record(self, stream: Any = None) -> None:
        self._before = len(_queue)

    def query(self) -> bool:
        self._left -= 1
        if self._left < 0:
            _work_off(self._before)
        return self._left < 0

    def synchronize(self) -> None:
        if self._left >= 0:
            _wait(f"Event.synchronize in {_caller()}")
            self._left = -1
        _work_off(self._before)

    def elapsed_time(self, other: "Event") -> float:
        return 0.0


class Stream:
    def record_event(self) -> Event:
        event = Event()
        event.record()
        return event


class Module:
    """What stands at torch.twin."""

    Stream, Event = Stream, Event

    def current_stream(self, device: Any = None) -> Stream:
        return Stream()

    def synchronize(self, device: Any = None) -> None:
        _wait(f"synchronize in {_caller()}")
        _work_off(len(_queue))

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


# copies that the device has yet to make; None for those that are made
_queue: list[Callable[[], None] | None] = []
_pinned: dict[int, Tensor] = {}  # by the address of their storage
_waits: list[str] | None = None


@contextmanager
def twin_device() -> Iterator[torch.device]:
    """The device, for as long as the context lasts."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    # torch.tensor makes a tensor on the CPU, then copies it
    torch._C._set_only_lift_cpu_tensors(True)
    with _Mode():
        yield torch.device(NAME, 0)


@contextmanager
def watching() -> Iterator[list[str]]:
    """List what waits for the device meanwhile."""
    global _waits
    before, _waits = _waits, []
    try:
        yield _waits
    finally:
        _waits = before


def values(tensor: Tensor) -> Tensor:
    """The values of a tensor of either device."""
    return tensor.elem if isinstance(tensor, Twin) else tensor


def _wait(name: str) -> None:
    if _waits is not None:
        _waits.append(name)


def _caller() -> str:
    frame = sys._getframe(2)
    return frame.f_code.co_qualname


def _work_off(before: int) -> None:
    for number, copy in enumerate(_queue[:before]):
        if copy is not None:
            copy()
            _queue[number] = None


def _is_pinned(tensor: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in _pinned


def _pin(tensor: Tensor) -> Tensor:
    _pinned[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
    device = kwargs.get("device")
    is_made_here = device is not None and torch.device(device).type == NAME
    if func is aten.is_pinned.default:
        return _is_pinned(args[0])
    if func is aten._pin_memory.default:
        return _pin(args[0].clone())
    if not is_made_here and not any(isinstance(tensor, Twin) for tensor in tensors):
        pins = kwargs.pop("pin_memory", None)
        made = func(*args, **kwargs)
        return _pin(made) if pins else made
    if func in COPIES:
        return _copy(func, args, kwargs, is_made_here)
    if func in WAITS:
        _wait(str(func))
    if func in INDEXED:
        for index in filter(None.__ne__, args[1]):
            if index.dtype in (torch.bool, torch.uint8):
                _wait(f"{func} by a mask")
            elif not isinstance(index, Twin):
                _wait(f"{func} by numbers on the CPU")
    elif any(not isinstance(tensor, Twin) and tensor.dim() for tensor in tensors):
        raise WrongDeviceError(
            f"{func}: {[(str(tensor.device), tuple(tensor.shape)) for tensor in tensors]}"
        )
    if is_made_here:
        kwargs = kwargs | {"device": torch.device("cpu")}
    result = func(*tree_map_only(Twin, values, args), **tree_map_only(Twin, values, kwargs))
    return (
        return_and_correct_aliasing(func, args, kwargs, tree_map_only(Tensor, Twin, result))
        if tensors
        else Twin(result)
    )


def _copy(func: Any, args: Any, kwargs: dict[str, Any], is_made_here: bool) -> Any:
    is_in_place = func is aten.copy_.default
    target, source = (args[0], args[1]) if is_in_place else (None, args[0])
    to_device = isinstance(target, Twin) if is_in_place else is_made_here or "device" not in kwargs
    crosses = to_device != isinstance(source, Twin)
    is_late = bool(kwargs.pop("non_blocking", False) or (is_in_place and len(args) > 2 and args[2]))
    if is_in_place:
        if (
            crosses
            and source.dim()
            and not (is_late and _is_pinned(target if isinstance(source, Twin) else source))
        ):
            _wait(f"{func} {'to the device' if to_device else 'to the CPU'}")
        if crosses and is_late and not to_device:
            target.fill_(NONSENSE)
            seen = values(source).clone()
            _queue.append(lambda: target.copy_(seen))
        else:
            values(target).copy_(values(source))
        return target
    if crosses and not (is_late and to_device and _is_pinned(source)):
        _wait(f"{func} {'to the device' if to_device else 'to the CPU'}")
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    kwargs.pop("pin_memory", None)
    result = func(values(source), *args[1:], **kwargs)
    return Twin(result) if to_device else result

"""``staged``: a backend of torch.distributed for several ranks on one card, which NCCL refuses.

Tensors of the device are copied to pinned memory, exchanged by Gloo, and copied back, in the order
of the current stream:

    stream   ... copy to host | write number          | wait for flag | copy to device ...
    thread                    wait for number | Gloo | set flag

The host does not wait: a thread of the group does, and the stream waits until the thread has set a
flag in pinned memory (``cuStreamWaitValue32`` of the driver). The thread itself never calls the
driver, which may be waiting for the stream on another thread, to load a kernel or to copy a result.
If the driver refuses such writes and waits, the host waits (`flags_work`). Tensors on the CPU are
passed to Gloo at once.

The first launch of a kernel loads it, and waits until the device is idle, which it may never be
while a stream waits for a flag. A program therefore runs once in `host_waits`, to load its kernels.
"""

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future as ConcurrentFuture
from datetime import timedelta
from functools import cache, partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from torch.futures import Future

from shardwise.comm import backends

__all__ = ["StagedGroup", "flags_work", "host_waits", "register"]

_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
_AFTER_ALL = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: with a memory barrier
_ABORTED = 2**31 - 1  # a flag that every wait has reached
_PROBE_SECONDS = 5.0
_waits = False  # whether the host waits
_Move = Callable[[list[Tensor], list[Tensor]], None]  # from the inputs to the outputs


def register(*, is_stream_ordered: bool) -> None:
    """Add the backend to torch.distributed, and what it supports to shardwise's table."""
    backends._BACKENDS["staged"] = backends.Capabilities(is_stream_ordered, in_place=True)
    if "staged" not in dist.Backend.backend_list:
        dist.Backend.register_backend("staged", StagedGroup, devices=["cpu", "cuda"])


@contextlib.contextmanager
def host_waits() -> Iterator[None]:
    """Within this, collectives make the host wait, and no stream waits for a flag."""
    global _waits  # noqa: PLW0603
    _waits = True
    try:
        yield
    finally:
        _waits = False


class Done(dist.Work):
    """The work of a collective that is queued on the current stream."""

    def __init__(self, results: Sequence[Tensor]) -> None:
        super().__init__()
        self._results = list(results)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        devices = {one.device for one in self._results if one.is_cuda}
        future: Any = Future(devices=list(devices))
        future.set_result(self._results)
        return future


class Flag:
    """Two numbers in pinned memory: a stream waits for the first, and writes the second."""

    def __init__(self) -> None:
        self._memory = torch.zeros(2, dtype=torch.int32, pin_memory=True)
        self._words = (ctypes.c_int32 * 2).from_address(self._memory.data_ptr())

    def set(self, number: int) -> None:
        self._words[0] = number

    def wait(self, stream: torch.cuda.Stream, number: int) -> None:
        """Make ``stream`` wait until the flag is at least ``number``."""
        self._call("cuStreamWaitValue32", stream, 0, number, _AT_LEAST)

    def write(self, stream: torch.cuda.Stream, number: int) -> None:
        """Make ``stream`` write ``number``, once it has completed what comes before."""
        self._call("cuStreamWriteValue32", stream, 1, number, _AFTER_ALL)

    def is_written(self, number: int) -> bool:
        return self._words[1] >= number

    def _call(
        self, name: str, stream: torch.cuda.Stream, word: int, number: int, flags: int
    ) -> None:
        driver = ctypes.CDLL("libcuda.so.1")
        function = getattr(driver, f"{name}_v2", None) or getattr(driver, name)
        address = ctypes.c_uint64(ctypes.addressof(self._words) + word * 4)
        handle = ctypes.c_void_p(stream.cuda_stream)
        code = function(handle, address, ctypes.c_uint32(number), ctypes.c_uint(flags))
        if code:
            raise RuntimeError(f"{name}: error {code}")


@cache
def flags_work() -> bool:
    """Whether a stream of this device writes a number for the host, and waits for its flag."""
    flag, stream = Flag(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    try:
        flag.wait(stream, 1)
        flag.write(stream, 1)
    except (OSError, AttributeError, RuntimeError):
        return False
    waits = not stream.query() and not flag.is_written(1)
    flag.set(1)
    end = time.monotonic() + _PROBE_SECONDS
    while not stream.query() and time.monotonic() < end:
        time.sleep(0.001)
    return waits and stream.query() and flag.is_written(1)


_Base: Any = dist.ProcessGroup  # whose stub has signatures that torch does not use


class StagedGroup(_Base):  # type: ignore[misc]
    """The process group."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._own, self._size = rank, size
        self._is_aborted = False
        self._error: BaseException | None = None  # of the thread
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._flag: Flag | None = None
        self._number = 0  # of collectives that a flag ends
        # Done, with their pinned memory: to free it, torch records an event, for which the driver
        # may let the thread wait, with Python's lock.
        self._over: list[Callable[[], None]] = []
        self._name = ""

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "staged"

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def abort(self) -> None:
        """End running collectives, without results."""
        self._is_aborted = True
        with contextlib.suppress(Exception):
            self._gloo.abort()
        if self._flag is not None:
            self._flag.set(_ABORTED)

    # -- collectives -----------------------------------------------------------------------------

    def _allgather_base(self, output: Tensor, own: Tensor, _options: Any = None) -> Done:
        return self._run([own], [output], self._gather, is_moved=True)

    all_gather_single = _allgather_base

    def allgather(
        self, outputs: list[list[Tensor]], own: list[Tensor], _options: Any = None
    ) -> Done:
        return self._run(own, outputs[0], self._gather_list, is_moved=True)

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], _options: Any = None
    ) -> Done:
        for output, own in zip(outputs, inputs, strict=True):
            self._allgather_base(output, own)
        return Done(outputs)

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, options: Any = None) -> Done:
        return self._run([whole], [output], partial(self._scatter, _operator(options)))

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None
    ) -> Done:
        for output, whole in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, whole, options)
        return Done(outputs)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Done:
        return self._run(tensors, tensors, partial(self._reduce, _operator(options)))

    allreduce_coalesced = allreduce

    def alltoall_base(
        self,
        output: Any,
        own: Any,
        output_sizes: list[int],
        own_sizes: list[int],
        _options: Any = None,
    ) -> Done:
        outputs = list(output.split(output_sizes) if output_sizes else output.chunk(self._size))
        inputs = list(own.split(own_sizes) if own_sizes else own.chunk(self._size))
        return self._run(inputs, outputs, self._swap, is_moved=True)

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], _options: Any = None) -> Done:
        return self._run(inputs, outputs, self._swap, is_moved=True)

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Done:
        root = 0 if options is None else options.rootRank
        return self._run(tensors, tensors, partial(self._broadcast, root), is_moved=True)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """Send ``tensors``, which are on the CPU."""
        return self._gloo.send(tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """Receive ``tensors``, which are on the CPU."""
        return self._gloo.recv(tensors, peer, tag)

    def barrier(self, _options: Any = None) -> Done:
        self._run_on_host(lambda: self._gloo.barrier().wait())
        return Done([])

    # -- on the host -----------------------------------------------------------------------------

    def _gather(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        parts = list(outputs[0].view(-1).chunk(self._size))
        self._gather_list([inputs[0].view(-1).clone()], parts)

    def _gather_list(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        self._gloo.allgather([outputs], inputs).wait()

    def _scatter(self, operator: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        whole = inputs[0].clone()
        self._reduce(operator, [whole], [whole])
        outputs[0].view(-1).copy_(whole.view(-1).chunk(self._size)[self._own])

    def _reduce(self, operator: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        for own, output in zip(inputs, outputs, strict=True):
            numbers = own.to(torch.uint8) if own.dtype is torch.bool else own.clone()
            options = dist.AllreduceOptions()
            options.reduceOp = operator
            self._gloo.allreduce([numbers], options).wait()
            output.copy_(numbers)

    def _swap(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        works = []
        for peer, (sent, received) in enumerate(zip(inputs, outputs, strict=True)):
            if peer == self._own:
                received.copy_(sent)
                continue
            if received.numel():
                works.append(self._gloo.recv([received], peer, 0))
            if sent.numel():
                works.append(self._gloo.send([sent.contiguous()], peer, 0))
        for work in works:
            work.wait()

    def _broadcast(self, root: int, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._gloo.broadcast(inputs, options).wait()
        for own, output in zip(inputs, outputs, strict=True):
            if own is not output:
                output.copy_(own)

    # -- staging ---------------------------------------------------------------------------------

    def _run(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        move: _Move,
        *,
        is_moved: bool = False,
    ) -> Done:
        """Run ``move`` on host copies of ``inputs`` and ``outputs``; moved tensors are bytes."""
        if self._error is not None or self._is_aborted:
            raise RuntimeError("the group was aborted") from self._error
        inputs, results = [one.detach() for one in inputs], list(outputs)
        outputs = [one.detach() for one in outputs]
        if is_moved:
            inputs, outputs = ([_as_bytes(one) for one in some] for some in (inputs, outputs))
        device = next((one.device for one in (*inputs, *outputs) if one.is_cuda), None)
        if device is None:
            self._run_on_host(partial(move, list(inputs), list(outputs)))
            return Done(results)
        sent = [_pinned(one).copy_(one, non_blocking=True) for one in inputs]
        received = [_pinned(one) for one in outputs]
        stream = torch.cuda.current_stream(device)
        if _waits or not flags_work():
            stream.synchronize()
            move(sent, received)
        else:
            self._run_on_thread(partial(move, sent, received), stream)
        for output, copy in zip(outputs, received, strict=True):
            output.copy_(copy, non_blocking=True)
        return Done(results)

    def _run_on_host(self, action: Callable[[], None]) -> None:
        """Run ``action`` after all collectives before, and wait for it."""
        if self._flag is None:
            action()
            return
        done: ConcurrentFuture[None] = ConcurrentFuture()

        def job() -> None:
            try:
                done.set_result(action())  # type: ignore[func-returns-value]
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                done.set_exception(error)

        self._jobs.put(job)
        done.result()

    def _run_on_thread(self, action: Callable[[], None], stream: torch.cuda.Stream) -> None:
        if self._flag is None:
            self._flag = Flag()
            threading.Thread(target=self._work, name="staged", daemon=True).start()
        self._number += 1
        self._over.clear()
        flag, number = self._flag, self._number
        flag.write(stream, number)

        def job() -> None:
            try:
                while not flag.is_written(number):
                    time.sleep(1e-4)
                action()
            except BaseException as error:  # noqa: BLE001 - raised by the next collective
                self._error = self._error or error
            flag.set(_ABORTED if self._error or self._is_aborted else number)

        self._jobs.put(job)
        flag.wait(stream, number)

    def _work(self) -> None:
        """The main function of the thread: in the order of the stream."""
        while True:
            job = self._jobs.get()
            job()
            self._over.append(job)
            del job


def _pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)


def _as_bytes(tensor: Tensor) -> Tensor:
    """``tensor`` as bytes, for Gloo moves few dtypes."""
    assert tensor.is_contiguous()
    return tensor.view(-1).view(torch.uint8)


def _operator(options: Any) -> Any:
    return dist.ReduceOp.SUM if options is None else options.reduceOp

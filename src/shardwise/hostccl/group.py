"""The process group of the backend "hostccl": torch.distributed's collectives between CPUs.

Every collective is an exchange between pairs of ranks, and a sum is computed in the order of the
ranks, so all ranks get the same bits. Collectives run in order on one thread of the group. Messages
of `send` and `recv` are independent of them, and of messages with another rank or tag.
"""

# The stubs of torch list overloads that torch does not call on a group in Python.
# mypy: disable-error-code="override, assignment"

import contextlib
import itertools
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import Store

from shardwise.host.point_to_point import Add, PointToPoint, RankLostError, Run, parts_of
from shardwise.hostccl.works import HostWork, Lanes

__all__ = ["HostGroup"]

# Tags of collectives are below, and those of messages above. Each takes two numbers.
_FIRST_MESSAGE_TAG = 1 << 30
_NUM_TAGS = 1 << 29
_CPU = torch.device("cpu")
_OPERATORS: dict[Any, Add] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


class HostGroup(dist.ProcessGroup):
    """The ranks of one process group. Ranks are numbered within it.

    Arguments ``opts`` are torch's options of the collective. Tensors may have any strides.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg] # as torch's own groups in Python
        self._store = store
        self._rank, self._ranks = rank, range(size)
        self._others = [other for other in self._ranks if other != rank]
        self._name = ""
        self._is_made = False  # torch knows the group
        self._transport = PointToPoint(store, rank, size, timeout)
        self.lanes = Lanes()
        self._numbers = itertools.count()

    # -- what torch asks a process group ---------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802
        return "hostccl"

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        # None while torch makes the group: to one with devices, 2.15 would attach its flight
        # recorder, which groups in Python cannot have.
        if not self._is_made:
            with contextlib.suppress(ValueError):
                self._is_made = bool(dist.get_backend(self))
        return [_CPU] if self._is_made else []

    def _get_backend(self, device: torch.device) -> Any:
        """Return the backend for ``device``: this object, which has no other one inside."""
        if device.type != "cpu":
            raise RuntimeError(f"hostccl has no backend for {device}, only for the CPU")
        return self

    @property
    def options(self) -> SimpleNamespace:
        return SimpleNamespace(backend="hostccl", _timeout=self._transport.timeout)

    def supports_tensor_alloc(self, _device: torch.device) -> bool:
        return False

    def get_group_store(self) -> Store:
        return self._store

    def abort(self) -> None:
        """End all connections; works that are not complete raise an error, here and elsewhere."""
        self._transport.close()

    shutdown = abort

    # -- gathers ---------------------------------------------------------------------------------

    def broadcast(self, tensors: list[Tensor], opts: Any) -> HostWork:
        job = _Job(self, "broadcast")
        root, tensor = opts.rootRank, tensors[opts.rootTensor]
        if self._rank == root:
            sent = dict.fromkeys(self._others, job.input(tensor))
            job.add(partial(self._transport.send, sent))
        else:
            job.add(partial(self._transport.recv, {root: job.output(tensor)}))
        return job.launch(tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> HostWork:
        job = _Job(self, "all_gather")
        for slots, own in zip(outputs, inputs, strict=True):
            self._all_gather(job, [job.output(slot) for slot in slots], own)
        return job.launch([*itertools.chain(*outputs)], opts)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any) -> HostWork:
        return self.all_gather_single_coalesced([output], [own], opts)

    def all_gather_single_coalesced(
        self,
        outputs: list[Tensor],
        inputs: list[Tensor],
        opts: Any = None,  # torch 2.11 passes none
    ) -> HostWork:
        job = _Job(self, "all_gather_single")
        for output, own in zip(outputs, inputs, strict=True):
            self._all_gather(job, self._rows(job.output(output)), own)
        return job.launch(outputs, opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> HostWork:
        job, root = _Job(self, "gather"), opts.rootRank
        own = job.input(inputs[0])
        if self._rank != root:
            job.add(partial(self._transport.send, {root: own}))
            return job.launch([], opts)
        slots = [job.output(slot) for slot in outputs[0]]
        job.copy(slots[root], own)
        job.add(partial(self._transport.recv, {r: slots[r] for r in self._others}))
        return job.launch(outputs[0], opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> HostWork:
        job, root = _Job(self, "scatter"), opts.rootRank
        into = job.output(outputs[0])
        if self._rank != root:
            job.add(partial(self._transport.recv, {root: into}))
            return job.launch(outputs, opts)
        parts = [job.input(part) for part in inputs[0]]
        job.copy(into, parts[root])
        job.add(partial(self._transport.send, {r: parts[r] for r in self._others}))
        return job.launch(outputs, opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> HostWork:
        job = _Job(self, "all_to_all")
        sent, into = [job.input(one) for one in inputs], [job.output(one) for one in outputs]
        self._exchange(job, sent, into)
        return job.launch(outputs, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        own: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any,
    ) -> HostWork:
        """Exchange rows; the splits are numbers of rows, and equal for all ranks if empty."""
        job = _Job(self, "all_to_all_single")
        sent = self._split_rows(job.input(own), own, input_splits)
        into = self._split_rows(job.output(output), output, output_splits)
        self._exchange(job, sent, into)
        return job.launch([output], opts)

    # -- reductions ------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any) -> HostWork:
        job = _Job(self, "all_reduce")
        for tensor in tensors:
            flat = job.output(tensor)
            rows = self._reduce_in_parts(job, flat, flat, opts.reduceOp)
            if rows:
                self._all_gather(job, rows, rows[self._rank])
        return job.launch(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> HostWork:
        """Reduce to the root. The tensors of other ranks do not change."""
        job, root = _Job(self, "reduce"), opts.rootRank
        flat = job.output(tensors[0]) if self._rank == root else job.input(tensors[0])
        total = flat if self._rank == root else torch.empty_like(flat)
        rows = self._reduce_in_parts(job, flat, total, opts.reduceOp)
        if rows and self._rank != root:
            job.add(partial(self._transport.send, {root: rows[self._rank]}))
        elif rows:
            job.add(partial(self._transport.recv, {r: rows[r] for r in self._others}))
        return job.launch(tensors, opts)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any
    ) -> HostWork:
        job = _Job(self, "reduce_scatter")
        for output, parts in zip(outputs, inputs, strict=True):
            self._reduce(
                job, [job.input(part) for part in parts], job.output(output), opts.reduceOp
            )
        return job.launch(outputs, opts)

    def reduce_scatter_single(self, output: Tensor, own: Tensor, opts: Any) -> HostWork:
        return self.reduce_scatter_single_coalesced([output], [own], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> HostWork:
        job = _Job(self, "reduce_scatter_single")
        for output, own in zip(outputs, inputs, strict=True):
            self._reduce(job, self._rows(job.input(own)), job.output(output), opts.reduceOp)
        return job.launch(outputs, opts)

    # -- messages --------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], to: int, tag: int) -> HostWork:
        job = _Job(self, "send")
        sent = job.input(tensors[0])
        job.add(partial(self._transport.send, {to: sent}))
        return job.launch(tensors, message=("send", to, tag))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> HostWork:
        job = _Job(self, "recv")
        into = job.output(tensors[0])
        job.add(partial(self._transport.recv, {source: into}))
        return job.launch(tensors, message=("recv", source, tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> HostWork:
        raise NotImplementedError("hostccl receives from one rank: pass src= to recv")

    def barrier(self, opts: Any) -> HostWork:
        job, nothing = _Job(self, "barrier"), torch.empty(0, device="cpu")
        self._exchange(job, self._same(nothing), self._same(nothing))
        return job.launch([], opts)

    # -- the same by other names; those without "single" are of torch 2.11 and 2.12 ----------------

    allreduce_coalesced = allreduce
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- parts of collectives --------------------------------------------------------------------

    def next_tag(self) -> int:
        """The tag of the next collective; equal on all ranks."""
        return 2 * next(self._numbers) % _FIRST_MESSAGE_TAG

    def _rows(self, flat: Tensor) -> list[Tensor]:
        """Return the part [n / ranks] of ``flat`` [n] for each rank."""
        size, rest = divmod(flat.numel(), len(self._ranks))
        if rest:
            raise ValueError(
                f"{flat.numel()} elements cannot be split into {len(self._ranks)} parts"
            )
        return list(torch.split(flat, size)) if size else self._same(flat)

    def _same(self, flat: Tensor) -> list[Tensor]:
        """Return ``flat`` for each rank."""
        return [flat] * len(self._ranks)

    def _split_rows(self, flat: Tensor, tensor: Tensor, splits: list[int]) -> list[Tensor]:
        if not splits:
            return self._rows(flat)
        row = tensor[0].numel() if len(tensor) else 0
        return list(torch.split(flat, [num_rows * row for num_rows in splits]))

    def _exchange(self, job: "_Job", sent: list[Tensor], into: list[Tensor]) -> None:
        job.copy(into[self._rank], sent[self._rank])
        pairs = {rank: (sent[rank], into[rank]) for rank in self._others}
        job.add(partial(self._transport.exchange, pairs))

    def _all_gather(self, job: "_Job", slots: list[Tensor], own: Tensor) -> None:
        self._exchange(job, [job.input(own)] * len(slots), slots)

    def _reduce_in_parts(self, job: "_Job", flat: Tensor, total: Tensor, op: Any) -> list[Tensor]:
        """Leave one row of the result and its last elements, or all if it is small, in ``total``.

        Returns:
            The rows of ``total``, one for each rank, which then has this row.
        """
        rows, rest = parts_of(total, len(self._ranks))
        parts, own_rest = parts_of(flat, len(self._ranks))
        if rows:
            self._reduce(job, parts, rows[self._rank], op)
        if rest.numel():
            self._reduce(job, self._same(own_rest), rest, op)
        return rows

    def _reduce(self, job: "_Job", parts: list[Tensor], total: Tensor, op: Any) -> None:
        """Reduce the parts that all ranks have for this one."""
        operator = _OPERATORS.get(op.op)
        if operator is None:
            raise ValueError(
                f"hostccl has no {op}, only {', '.join(str(one) for one in _OPERATORS)}"
            )
        averages = op.op == ReduceOp.AVG
        if averages and not (total.is_floating_point() or total.is_complex()):
            raise ValueError(f"ReduceOp.AVG of {total.dtype}: expected a floating-point dtype")

        def finish(total: Tensor, _piece: slice) -> None:
            if averages:
                total.div_(len(self._ranks))

        run = self._transport.prepare_sum(self._ranks, parts, total, finish, add=operator)
        job.add(run)


class _Job:
    """The exchanges of one collective, and the copies before and after them.

    All exchanges have the same tag. Two ranks begin those between them in the same order, and
    messages with one tag arrive in the order in which they were sent.
    """

    def __init__(self, group: HostGroup, name: str) -> None:
        self._group = group
        self._name = name
        self._runs: list[Run] = []
        self._results: list[tuple[Tensor, Tensor]] = []

    def input(self, tensor: Tensor) -> Tensor:
        """Return the elements [n] of ``tensor``, to be read."""
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise ValueError(
                f"{self._name} of a tensor on {tensor.device} with {tensor.layout}: hostccl moves "
                "strided tensors of the CPU; use another backend for this device"
            )
        return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)

    def output(self, tensor: Tensor) -> Tensor:
        """Return the elements [n] of ``tensor``, to be read and written."""
        flat = self.input(tensor)
        if flat.data_ptr() != tensor.data_ptr():
            self._results.append((tensor.detach(), flat.view(tensor.shape)))
        return flat

    def copy(self, dst: Tensor, src: Tensor) -> None:
        """Copy what this rank sends to itself."""
        if dst.numel() != src.numel():
            raise ValueError(
                f"{self._name}: {src.numel()} elements for an output of {dst.numel()} elements"
            )

        def run(_tag: int) -> None:
            dst.copy_(src)

        if dst.data_ptr() != src.data_ptr():
            self._runs.append(run)

    def add(self, run: Run) -> None:
        """Add an exchange, which is called with the tag."""
        self._runs.append(run)

    def launch(
        self,
        tensors: Sequence[Tensor],
        opts: Any = None,
        *,
        message: tuple[str, int, int] | None = None,
    ) -> HostWork:
        """Run the job in the lane of collectives, or in that of messages of this kind.

        The result of the work are ``tensors``. A ``message`` has a direction, the other rank and a
        tag.
        """
        tag = self._group.next_tag() if message is None else _message_tag(message[2])

        def job() -> None:
            try:
                for run in self._runs:
                    run(tag)
                for tensor, flat in self._results:
                    tensor.copy_(flat)
            except RankLostError:  # the other ranks have lost it, too
                raise
            except Exception:  # the other ranks would wait for this one
                self._group.abort()
                raise

        timeout = timedelta(0) if opts is None else opts.timeout
        work = HostWork(self._name, job, tensors, timeout)
        lanes = self._group.lanes
        is_awaited = timeout <= timedelta(0) and not getattr(opts, "asyncOp", True)
        (lanes.run if is_awaited else lanes.submit)(message or "collectives", work)
        return work


def _message_tag(tag: int) -> int:
    if not 0 <= tag < _NUM_TAGS:
        raise ValueError(f"tag {tag}: expected a number from 0 to {_NUM_TAGS - 1}")
    return _FIRST_MESSAGE_TAG + 2 * tag

"""Exchanges between pairs of ranks, and sums over them: the basis of collectives on the CPU.

Ranks of one host use sockets and each other's memory (`Peer`); other pairs use Gloo.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store

from shardwise.host.gloo_waits import GlooWaits
from shardwise.host.handshake import find_peers
from shardwise.host.peers import INLINE_BYTES, Message, Offer

__all__ = [
    "Add",
    "Finish",
    "PointToPoint",
    "RankLostError",
    "Run",
    "Use",
    "check_memory",
    "parts_of",
]

_PIECE_BYTES = 1 << 19  # three of them fit into the cache of a processor
# Size of messages through Gloo. 64 MB between two ranks took 30 ms of CPU time in one message, 38
# in pieces of 16 MB and 44 in pieces of 4 MB.
_GLOO_PIECE_BYTES = 1 << 25
# A rank is lost if its connection or its process is gone. Any other error is one of this rank.
_GONE = (ConnectionError, EOFError, TimeoutError, ProcessLookupError)
_UNUSED_TAG = (1 << 31) - 1
_Pairs = Mapping[int, tuple[Tensor, Tensor]]
_T = TypeVar("_T")
Use = Callable[[slice], None]
Run = Callable[[int], None]  # called with a tag
Finish = Callable[[Tensor, slice], None]
Add = Callable[..., Tensor]


class RankLostError(ConnectionError, RuntimeError):
    """Another rank died or its connection broke. Gloo raises RuntimeErrors in this case."""


class PointToPoint:
    """Exchanges among ``num_ranks`` ranks, which create it together with a store of their own.

    ``wait`` returns when its argument is true, or raises. Without it, this rank waits for the
    others as long as the store allows.
    """

    def __init__(
        self,
        store: Store,
        own_rank: int,
        num_ranks: int,
        timeout: timedelta,
        wait: Callable[[Callable[[], bool]], None] | None = None,
    ) -> None:
        self.own_rank = own_rank
        self._num_ranks = num_ranks
        self.timeout = timeout

        def share(key: str, content: bytes) -> list[bytes]:
            store.set(f"{key}/{own_rank}", content)  # type: ignore[arg-type] # bytes do
            if wait is not None:  # for one key, because it may look often
                if store.add(f"{key}/number", 1) == num_ranks:
                    store.set(f"{key}/all", "")
                wait(lambda: store.check([f"{key}/all"]))
            return store.multi_get([f"{key}/{rank}" for rank in range(num_ranks)])

        self.host = find_peers(own_rank, num_ranks, share, timeout)
        self._window = torch.empty(0, dtype=torch.uint8, device="cpu")  # of sums
        self._gloo: Any = None
        self._is_closed = False
        if not self.host.all_read:
            self._gloo = ProcessGroupGloo(store, own_rank, num_ranks, timeout)
            self._waits = GlooWaits()

    def window_elements(self, ranks: Iterable[int], num_windows: int, itemsize: int) -> int:
        """The number of elements of each of the other ``ranks`` to sum at a time."""
        peers = self.host.peers
        all_read = all(rank in peers and peers[rank].can_read for rank in ranks)
        num_bytes = _PIECE_BYTES // num_windows if all_read else _GLOO_PIECE_BYTES
        return max(num_bytes, 2 * INLINE_BYTES) // itemsize  # more than fit into a message

    def exchange(self, pairs: _Pairs, tag: int, use: Use | None = None) -> None:
        """Send the first tensor of each pair to its rank and receive the second from it.

        Args:
            pairs: 1-D and contiguous. With ``use``, all sent tensors are [n], and all received ones
                are [n] or windows of `window_elements`.
            tag: the same on both sides, and of no other exchange between them.
            use: called with consecutive slices of [n]; the received elements of the slice are at
                the start of each window.

        Raises:
            RankLostError: a connection or a process is gone.
            Exception: an error on this rank.

        The first error is raised at the end, so the exchange ends for all other ranks as well.
        """
        peers = self.host.peers
        near = {r: p for r, p in pairs.items() if r in peers and peers[r].handles(*p)}
        far = {rank: pair for rank, pair in pairs.items() if rank not in near}
        expected = {r: (into if use is None else sent).nbytes for r, (sent, into) in near.items()}
        errors: list[Exception] = []
        each = partial(self._for_each, errors=errors)
        each(near, lambda rank: peers[rank].send_tensor(near[rank][0], tag))
        try:
            offers = each(
                near, lambda rank: peers[rank].recv_tensor(near[rank][1], expected[rank], tag)
            )
            if use is None:
                self._receive(offers, 0, far, tag, errors)
            else:
                own, window = next(iter(pairs.values()))
                for start in range(0, len(own), len(window)):
                    piece = slice(start, min(start + len(window), len(own)))
                    parts = {r: (s[piece], into[: len(s[piece])]) for r, (s, into) in far.items()}
                    self._receive(offers, start * own.itemsize, parts, tag, errors)
                    try:
                        if not errors:
                            use(piece)
                    except Exception as error:  # noqa: BLE001 - raised at the end
                        errors.append(error)
        finally:  # let all peers continue, and wait until none of them reads this rank's tensors
            each(near, lambda rank: peers[rank].release(expected[rank], tag))
            each(near, lambda rank: peers[rank].end(near[rank][0], tag))
        _raise_first(errors)

    def prepare_sum(
        self,
        ranks: Sequence[int],
        parts: Sequence[Tensor],
        total: Tensor,
        finish: Finish,
        *,
        keeps_total: bool = False,
        add: Add = torch.add,
    ) -> Run:
        """Prepare the sum over ``ranks`` of the parts for this rank.

        The thread that computes does this: to create a view, the thread of a stream would have to
        wait for the GIL. The stream then calls the result with the tag of an exchange.

        Neighbors are added, then neighboring sums: (0 + 1) + (2 + 3). One order gives replicas the
        same bits.

        Args:
            ranks: the ranks.
            parts: ``parts[i]`` is sent to ``ranks[i]``. It may be in the memory of ``total`` if it
                is sent inline.
            total: receives the sum.
            finish: called with the sum of each slice, and the slice; it may change the sum.
            keeps_total: ``total`` is not written, because ``finish`` writes the sum elsewhere.
            add: the binary operator that "sums"; called with ``out=``.
        """
        if not total.numel():
            return lambda _tag: None
        if len(ranks) == 1:
            return lambda _tag: finish(_copied(parts[0], total), slice(None))
        check_memory([*parts, total])
        own_index = ranks.index(self.own_rank)
        own, others = parts[own_index], [i for i in range(len(ranks)) if i != own_index]
        num_windows = len(others) + keeps_total
        other_ranks = [ranks[i] for i in others]
        size = self.window_elements(other_ranks, num_windows, own.itemsize)
        size = min(size, own.numel())
        windows = torch.split(self._windows(num_windows * size, own.dtype), size)
        received = dict(zip(others, windows, strict=False))

        def use(piece: slice) -> None:
            count = piece.stop - piece.start
            mine = own[piece]
            if keeps_total:
                # Half-precision numbers that are not in the processor's cache take three times as
                # long to add.
                mine = windows[-1][:count].copy_(mine)
            terms = [mine if i == own_index else received[i][:count] for i in range(len(ranks))]
            while len(terms) > 1:
                pairs = zip(terms[::2], terms[1::2], strict=False)
                if len(terms) == 2 and not keeps_total:  # noqa: PLR2004
                    terms = [add(*terms, out=total[piece])]
                    break
                # Windows may be overwritten; this rank's part may not.
                sums = [add(a, b, out=b if a is mine else a) for a, b in pairs]
                terms = sums + terms[2 * len(sums) :]
            finish(terms[0], piece)

        pairs = {ranks[i]: (parts[i], received[i]) for i in others}
        return partial(self.exchange, pairs, use=use)

    def _windows(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Scratch memory, shared by all exchanges, since a stream runs one at a time."""
        num_bytes = num_elements * dtype.itemsize
        with torch.inference_mode(mode=False):  # the stream's thread writes to it
            if self._window.numel() < num_bytes:
                self._window = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            return self._window[:num_bytes].view(dtype)

    def send(self, tensors: Mapping[int, Tensor], tag: int) -> None:
        """Send contiguous ``tensors`` [n], by rank, to ranks that call `recv`.

        A rank does not wait for the receivers of small tensors. ``tag`` and the next number are
        those of no other message between these ranks.

        Raises:
            RankLostError: as in `exchange`.
        """
        errors: list[Exception] = []
        each, (near, far) = partial(self._for_each, errors=errors), self._split(tensors)
        each(near, lambda rank: self.host.peers[rank].send_tensor(near[rank], tag))
        works = each(far, lambda rank: self._gloo_works("send", far[rank], rank, tag))
        each(near, lambda rank: self.host.peers[rank].end(near[rank], tag + 1))
        each(works, lambda rank: self._wait(works[rank]))
        _raise_first(errors)

    def recv(self, tensors: Mapping[int, Tensor], tag: int) -> None:
        """Receive what each of some ranks sends; see `send`."""
        errors: list[Exception] = []
        each, (near, far) = partial(self._for_each, errors=errors), self._split(tensors)
        works = each(far, lambda rank: self._gloo_works("recv", far[rank], rank, tag))
        each(near, lambda rank: self._recv_one(rank, near[rank], tag))
        each(works, lambda rank: self._wait(works[rank]))
        _raise_first(errors)

    def swap_messages(
        self, ranks: Collection[int], content: bytes, tag: int, descriptor: int = -1
    ) -> dict[int, Message]:
        """Send a short message to other ``ranks`` of this host, and return theirs; no exchange.

        An open file is passed with the message unless ``descriptor`` is negative.

        Raises:
            RankLostError: as in `exchange`.
        """
        peers = self.host.peers
        self._for_each(ranks, lambda rank: peers[rank].send(tag, content, descriptor))
        return self._for_each(ranks, lambda rank: peers[rank].recv(tag))

    def close(self) -> None:
        """End all connections: ranks that wait for each other raise an error."""
        self._is_closed = True
        peers = self.host.peers
        for peer in peers.values():
            peer.close()
        far = [r for r in range(self._num_ranks) if r not in peers or not peers[r].can_read]
        # Gloo's `abort` does not end waits, but a wait that times out closes all connections. On a
        # connection that is closed already, none times out.
        for rank in [rank for rank in far if rank != self.own_rank]:
            with contextlib.suppress(RuntimeError):
                nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                self._gloo.recv([nothing], rank, _UNUSED_TAG).wait(timedelta(milliseconds=1))

    def _split(self, tensors: Mapping[int, Tensor]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Return the tensors to or from ranks of this host, and those that Gloo moves."""
        peers = self.host.peers
        near = {r: one for r, one in tensors.items() if r in peers and peers[r].handles(one, one)}
        return near, {rank: one for rank, one in tensors.items() if rank not in near}

    def _recv_one(self, rank: int, into: Tensor, tag: int) -> None:
        peer = self.host.peers[rank]
        offer = peer.recv_tensor(into, into.nbytes, tag)
        try:
            if offer is not None:
                offer.read(0)
        finally:
            peer.release(into.nbytes, tag + 1)

    def _gloo_works(self, kind: str, tensor: Tensor, rank: int, tag: int) -> list[dist.Work]:
        launch = getattr(self._gloo, kind)
        with _gloo_errors():
            return [launch([piece], rank, tag) for piece in _pieces(tensor)]

    def _wait(self, works: Sequence[dist.Work]) -> None:
        self._waits.wait(works, lambda: self._is_closed)

    def _receive(
        self,
        offers: Mapping[int, Offer | None],
        start: int,
        far: _Pairs,
        tag: int,
        errors: list[Exception],
    ) -> None:
        """Read offers of this host from byte ``start`` on, and exchange ``far`` through Gloo.

        After an error this rank reads nothing, but other hosts still wait for what it sends.
        """

        def launch(rank: int) -> list[dist.Work]:
            sent, into = far[rank]
            works = self._gloo_works("recv", into, rank, tag)
            return works + self._gloo_works("send", sent, rank, tag)

        def finish(rank: int) -> None:
            if not errors and (offer := offers.get(rank)) is not None:
                offer.read(start)
            if rank in works:
                self._wait(works[rank])

        works = self._for_each(far, launch, errors)
        self._for_each([*offers, *works], finish, errors)

    def _for_each(
        self,
        ranks: Iterable[int],
        action: Callable[[int], _T],
        errors: list[Exception] | None = None,
    ) -> dict[int, _T]:
        """Call ``action`` for all ``ranks``, even after an error, so that none waits for this one.

        Returns the results. Errors are added to ``errors``; None: the first is raised at the end.
        """
        results: dict[int, _T] = {}
        found = [] if errors is None else errors
        for rank in ranks:
            try:
                results[rank] = action(rank)
            except _GONE as error:
                found.append(self._lost(rank, error))
            except Exception as error:  # noqa: BLE001 - raised at the end
                found.append(error)
        if errors is None:
            _raise_first(found)
        return results

    def _lost(self, rank: int, error: Exception) -> RankLostError:
        is_closed = isinstance(error, (ConnectionResetError, BrokenPipeError))
        reason = "it closed the connection" if is_closed else error
        lost = RankLostError(f"rank {self.own_rank} lost rank {rank}: {reason}")
        lost.__cause__ = error
        return lost


def check_memory(tensors: Iterable[Tensor]) -> None:
    """Raise the RuntimeError of a tensor without memory, before other ranks wait for it."""
    for tensor in tensors:
        tensor.data_ptr()


@contextlib.contextmanager
def _gloo_errors() -> Iterator[None]:
    """Gloo reports all errors of a connection as RuntimeErrors."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(str(error)) from error


def _raise_first(errors: Sequence[Exception]) -> None:
    if errors:
        raise errors[0]


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the bytes of ``tensor`` in pieces, since Gloo does not support all dtypes."""
    return torch.split(tensor.view(torch.uint8), _GLOO_PIECE_BYTES)


def parts_of(flat: Tensor, num_ranks: int) -> tuple[list[Tensor], Tensor]:
    """Cut ``flat`` [n] for an all-reduce: a row for each rank, which it sums, and the rest.

    Small tensors are only a rest: it is sent inline, and so copied before its sum is written.
    """
    size = 0 if flat.nbytes <= INLINE_BYTES else flat.numel() // num_ranks
    cut = size * num_ranks
    return list(torch.split(flat[:cut], size)) if cut else [], flat[cut:]


def _copied(part: Tensor, total: Tensor) -> Tensor:
    """Return ``total`` with the numbers of ``part``; they may be the same memory."""
    return total if total.data_ptr() == part.data_ptr() else total.copy_(part)

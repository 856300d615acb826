"""Exchanges between pairs of ranks: in memory, through sockets of one host, and through Gloo."""

import ctypes
import errno
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import PeerLost
from shardwise.transport.host import handshake, peers, process_memory
from shardwise.transport.host.channel import Channel, new_socket, recv_message
from shardwise.transport.host.point_to_point import _PIECE_BYTES, PointToPoint, _Errors, _Pairs
from tests.ranks import run_on
from tests.runtime.one_process import assert_equal_training, rank

SMALL = peers.INLINE_BYTES
SIZES = [0, 1, SMALL - 1, SMALL, SMALL + 1, 3 * _PIECE_BYTES + 5]  # bytes
WAYS = ["memory", "sockets", "gloo"]
SECRET = b"s" * 32


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_gets_what_the_others_send(way: str, world_size: int) -> None:
    run_on(world_size, _exchange_all, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sizes", [(0, 1 << 20), (1 << 20, 8), (1 << 20, 1 << 21)])
def test_what_is_sent_may_be_larger_than_what_comes(way: str, sizes: tuple[int, int]) -> None:
    run_on(2, _exchange_unlike, way, sizes)


@pytest.mark.parametrize("way", WAYS)
def test_each_pair_of_ranks_has_sizes_of_its_own(way: str) -> None:
    run_on(3, _exchange_unlike_among_three, way)


@pytest.mark.parametrize("way", WAYS)
def test_sums_are_made_piece_by_piece_of_what_has_come(way: str) -> None:
    run_on(3, _use_pieces, way)


def test_a_window_is_enough_for_what_is_read_from_memory() -> None:
    run_on(2, _use_windows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.bool])
def test_any_dtype_comes_as_it_is(dtype: torch.dtype) -> None:
    run_on(2, _exchange_dtype, dtype)


def test_a_rank_that_cannot_read_leaves_large_exchanges_to_gloo_on_both_sides() -> None:
    run_on(2, _forbid_on_one)


def test_exchanges_of_several_threads_find_each_other_by_tag() -> None:
    run_on(2, _cross_threads)


@pytest.mark.parametrize("num_bytes", [8, 1 << 20])
def test_a_rank_that_is_gone_is_named(num_bytes: int) -> None:
    run_on(2, _leave, num_bytes)


@pytest.mark.parametrize("sizes", [(8, 16), (1 << 20, 1 << 21)])
def test_other_sizes_than_expected_are_an_error(sizes: tuple[int, int]) -> None:
    run_on(2, _differ, sizes)


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_training_is_right_without_peers(strategy: str) -> None:
    run_on(3, _train_through_gloo, strategy)


def test_strangers_are_shut_out_and_not_waited_for() -> None:
    listener = handshake.listen(2)
    assert listener is not None
    own, other = (handshake.Identity(number, listener) for number in (0, 1))
    with listener, new_socket() as silent, new_socket() as guessing:
        for stranger in (silent, guessing):
            stranger.connect(listener.getsockname())
        guessing.sendall(handshake._GREETING.pack(1, b"x" * 32))
        called = handshake.connect(other, [own.pack(), b""])
        began = time.monotonic()
        greeted = handshake.accept(own, listener, {1}, [own.pack(), other.pack()])
        assert time.monotonic() - began < 5
        assert list(greeted) == [1]
        assert handshake.read_greeting(called[0], other.secret)[0] == 0
        one, two = (Channel(each, timedelta(seconds=9)) for each in (called[0], greeted[1][0]))
        one.send(7, b"hello")
        assert two.recv(7).content == b"hello"
        for stranger in (silent, guessing):
            assert stranger.recv(1) == b"", "it was shut out"


def test_processes_of_other_users_are_shut_out() -> None:
    listener = handshake.listen(2)
    assert listener is not None
    own, other = (handshake.Identity(number, listener) for number in (0, 1))
    with listener:
        called = handshake.connect(other, [own.pack(), b""])
        connection, _ = listener.accept()
        with mock.patch.object(os, "geteuid", return_value=os.geteuid() + 1):
            assert handshake.connect(other, [own.pack(), b""]) == {}
            assert handshake.read_greeting(connection, own.secret) == (-1, None)
        assert list(called) == [0]
        connection.close()
        called[0].close()


def test_no_socket_of_a_name_means_another_host() -> None:
    own, other = (handshake.Identity(number, None) for number in (0, 1))
    assert handshake.connect(other, [own.pack(), b""]) == {}


def test_a_process_is_read_only_if_it_has_the_secret() -> None:
    kept = ctypes.create_string_buffer(SECRET, len(SECRET))
    has_bytes = process_memory.has_bytes
    assert has_bytes(os.getpid(), ctypes.addressof(kept), SECRET)
    assert not has_bytes(os.getpid(), ctypes.addressof(kept), b"t" * 32)
    assert not has_bytes(os.getpid(), 0, SECRET)


@pytest.mark.parametrize(("start", "stop"), [(0, 65), (-1, 8), (32, 65), (8, 4)])
def test_nothing_outside_of_an_offer_is_read(start: int, stop: int) -> None:
    """Not by an assertion, which ``python -O`` removes."""
    source, into = torch.ones(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    offer = peers.Offer(os.getpid(), source.data_ptr(), 64, into, lambda: None)
    with mock.patch.object(peers, "read_memory") as read:
        with pytest.raises(ValueError, match="do not fit"):
            offer.read(start, stop)
        window = peers.Offer(os.getpid(), source.data_ptr(), 64, into[:16], lambda: None)
        with pytest.raises(ValueError, match="do not fit"):
            window.read(0, 17)
        read.assert_not_called()


def test_a_file_is_passed_with_a_message() -> None:
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender, receiver = (Channel(each, timedelta(seconds=9)) for each in (one, two))
    with tempfile.TemporaryFile() as file:
        file.write(b"content")
        file.flush()
        sender.send(1, b"first", file.fileno())
        sender.send(2, b"second")
        assert receiver.recv(2) == (b"second", None), "kept messages keep their files"
        content, passed = receiver.recv(1)
        assert content == b"first"
        assert passed is not None
        assert passed.number != file.fileno()
        assert os.pread(passed.number, 7, 0) == b"content"
        number = passed.number
        del passed
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)
    one.close()
    assert recv_message(two).content == b""
    two.close()


# -- in a rank -----------------------------------------------------------------------------------


@contextmanager
def only(way: str) -> Iterator[None]:
    """Ranks meet there as on a system that offers nothing better."""
    read = process_memory._process_vm_readv if way == "memory" else None
    listen = (lambda _: None) if way == "gloo" else handshake.listen
    with (
        mock.patch.object(process_memory, "_process_vm_readv", read),
        mock.patch.object(handshake, "listen", listen),
    ):
        yield


def _wire(way: str = "memory") -> "_Counting":
    with only(way):
        return _Counting()


class _Counting(PointToPoint):
    """The ranks of this test; counts what goes through Gloo."""

    def __init__(self) -> None:
        self.through_gloo: list[int] = []
        group = dist.distributed_c10d._get_default_group()
        super().__init__(group, rank(), dist.get_world_size(), timedelta(seconds=60))
        self.through_gloo.clear()

    def _start(self, tensors: _Pairs, tag: int, lost: _Errors) -> dict[int, list[Any]]:
        self.through_gloo += [sent.nbytes for sent, _ in tensors.values()]
        return super()._start(tensors, tag, lost)

    @property
    def peers(self) -> peers.HostPeers:
        return self._peers


def _is_forbidden(wire: PointToPoint) -> bool:
    """Whether the system lets no process read another one."""
    found, kept = ctypes.create_string_buffer(8), ctypes.create_string_buffer(8)
    place = torch.tensor([os.getpid(), ctypes.addressof(kept)])
    process, address = wire.swap(place, 1)[1 - rank() % 2].tolist()
    try:
        process_memory.read_memory(process, address, ctypes.addressof(found), 8)
        forbidden = False
    except OSError as error:
        forbidden = error.errno in {errno.EPERM, errno.ENOSYS}
    wire.swap(place, 2)  # nobody leaves before all have read
    return forbidden


def _message(sender: int, to: int, num_bytes: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * sender + 10 * to + num_bytes % 7)
    return torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, generator=generator)


def _exchange_all(way: str) -> None:
    wire, own = _wire(way), rank()
    others = [other for other in range(dist.get_world_size()) if other != own]
    assert set(wire.peers._peers) == (set() if way == "gloo" else set(others))
    reads = way == "memory" and not _is_forbidden(wire)
    assert set(wire.peers._readable) == (set(others) if reads else set())
    for tag, num_bytes in enumerate(SIZES):
        wire.through_gloo.clear()
        pairs = {
            other: (_message(own, other, num_bytes), torch.zeros(num_bytes, dtype=torch.uint8))
            for other in others
        }
        wire.exchange(pairs, tag)
        for other, (_, received) in pairs.items():
            assert torch.equal(received, _message(other, own, num_bytes)), num_bytes
        by_gloo = way == "gloo" or (num_bytes > SMALL and not reads)
        assert wire.through_gloo == [num_bytes] * len(others) * by_gloo


def _exchange_unlike_among_three(way: str) -> None:
    """To each rank another size, and none of them that of another pair."""
    wire, own = _wire(way), rank()
    pairs = {
        other: (
            _message(own, other, _unlike(own, other)),
            torch.zeros(_unlike(other, own), dtype=torch.uint8),
        )
        for other in range(3)
        if other != own
    }
    wire.exchange(pairs, 0)
    for other, (_, received) in pairs.items():
        assert torch.equal(received, _message(other, own, _unlike(other, own)))


def _unlike(sender: int, to: int) -> int:
    return (1 << 18) * (3 * sender + to)


def _exchange_unlike(way: str, sizes: tuple[int, int]) -> None:
    wire, own = _wire(way), rank()
    sent = _message(own, 1 - own, sizes[own])
    received = torch.zeros(sizes[1 - own], dtype=torch.uint8)
    wire.exchange({1 - own: (sent, received)}, 0)
    assert torch.equal(received, _message(1 - own, own, sizes[1 - own]))


def _use_pieces(way: str) -> None:
    wire, own = _wire(way), rank()
    for tag, num_elements in enumerate([1, 3 * _PIECE_BYTES // 8 + 5]):
        sent = torch.full((num_elements,), 10.0**own, dtype=torch.float64)
        pairs = {other: (sent, torch.zeros_like(sent)) for other in range(3) if other != own}
        total = torch.zeros_like(sent)
        wire.exchange(
            pairs, tag, partial(_add, total, [sent, *(into for _, into in pairs.values())])
        )
        assert torch.equal(total, torch.full_like(total, 111.0)), "each element once"


def _use_windows() -> None:
    wire, own = _wire(), rank()
    if _is_forbidden(wire):
        assert not wire.can_read([1 - own])
        return
    assert wire.can_read([1 - own])
    sent = torch.arange(3 * _PIECE_BYTES // 8 + 5, dtype=torch.float64) + own
    window, total = torch.zeros(_PIECE_BYTES // 8, dtype=torch.float64), sent.clone()

    def add(piece: slice) -> None:
        total[piece] += window[: piece.stop - piece.start]

    wire.exchange({1 - own: (sent, window)}, 1, add)
    assert torch.equal(total, 2 * sent + 1 - 2 * own)
    larger = torch.cat([sent, sent]) if own else sent
    with pytest.raises(PeerLost, match=f"bytes where {larger.nbytes} are expected"):
        wire.exchange({1 - own: (larger, window)}, 2, add)


def _add(total: Tensor, tensors: list[Tensor], piece: slice) -> None:
    for tensor in tensors:
        total[piece] += tensor[piece]


def _train_through_gloo(strategy: str) -> None:
    group = dist.new_group(list(range(dist.get_world_size())))  # one without links
    mesh = DeviceMesh.from_group(group, "cpu")
    with only("gloo"), mock.patch.object(handshake, "connect", side_effect=AssertionError):
        assert_equal_training("stack", strategy=strategy, mesh=mesh)


def _exchange_dtype(dtype: torch.dtype) -> None:
    wire, own = _wire(), rank()
    for tag, num_elements in enumerate([3, SMALL]):
        sent = [
            torch.randn(num_elements, generator=torch.Generator().manual_seed(n)) for n in (0, 1)
        ]
        own_one, other = (sent[n].to(dtype) for n in (own, 1 - own))
        received = torch.zeros_like(other)
        wire.exchange({1 - own: (own_one, received)}, tag)
        assert torch.equal(received, other)


def _forbid_on_one() -> None:
    wire = _wire("memory" if rank() else "sockets")
    assert not wire.peers._readable
    sent, received = torch.full((1 << 20,), float(rank())), torch.zeros(1 << 20)
    wire.exchange({1 - rank(): (sent, received)}, 0)
    assert torch.equal(received, torch.full_like(sent, 1.0 - rank()))
    assert wire.through_gloo == [sent.nbytes]


def _cross_threads() -> None:
    """One rank waits for the first tag before it comes to the second; the other has both open."""
    wire, own = _wire(), rank()
    received = {tag: torch.zeros(4) for tag in (1, 2, 3)}

    def exchange(tag: int) -> None:
        wire.exchange({1 - own: (torch.full((4,), float(10 * own + tag)), received[tag])}, tag)

    if own:
        for tag in (3, 2, 1):
            exchange(tag)
    else:
        threads = [threading.Thread(target=exchange, args=(tag,)) for tag in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {tag: one[0].item() for tag, one in received.items()} == {
        tag: 10.0 * (1 - own) + tag for tag in (1, 2, 3)
    }


def _leave(num_bytes: int) -> None:
    wire = _wire()
    if rank():
        wire.peers._peers[0].channel.connection.shutdown(socket.SHUT_RDWR)
        return
    sent = torch.zeros(num_bytes, dtype=torch.uint8)
    with pytest.raises(PeerLost, match="rank 0 lost rank 1"):
        wire.exchange({1: (sent, sent.clone())}, 0)


def _differ(sizes: tuple[int, int]) -> None:
    wire, own = _wire(), rank()
    sent = torch.zeros(sizes[own], dtype=torch.uint8)
    with pytest.raises(PeerLost, match=f"{sizes[1 - own]} bytes where {sizes[own]} are expected"):
        wire.exchange({1 - own: (sent, sent.clone())}, 0)

"""Exchanges between pairs of ranks: through memory, sockets of one host, and Gloo."""

import contextlib
import ctypes
import errno
import itertools
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore

from shardwise.host import handshake, peers
from shardwise.host.peers import INLINE_BYTES, Offer, Peer
from shardwise.host.point_to_point import _PIECE_BYTES, PointToPoint, RankLostError
from tests.forked import run_forked
from tests.host.ways import WAYS, only
from tests.ranks import on_ranks
from tests.runtime.one_process import assert_equal_training, rank, world_size as num_ranks
from tests.waiting import eventually

SIZES = [0, 1, INLINE_BYTES - 1, INLINE_BYTES, INLINE_BYTES + 1, 3 * _PIECE_BYTES + 5]  # bytes
SECRET = b"s" * 32
NAMES = itertools.count()  # of the `PointToPoint`s of a rank


def test_a_forked_process_has_no_part_in_the_connections_of_its_parent() -> None:
    """While it has, other ranks do not notice that the parent was killed."""
    assert run_forked(_fork_with_a_peer) == b""


def _fork_with_a_peer() -> bytes:
    """What the other side reads when its peer has ended, and a child of the peer has not."""
    own, other = socket.socketpair()
    peer = Peer(own, timedelta(seconds=60))
    until_read, read = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        other.close()
        os.read(until_read, 1)
        os._exit(0)
    peer.connection.close()  # as when its process ends
    other.settimeout(30.0)
    try:
        return other.recv(1)
    finally:
        os.close(read)
        os.waitpid(child, 0)


# -- exchanges -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2, 3)
def test_every_rank_gets_what_the_others_send(way: str) -> None:
    transport, own = _transport(way), rank()
    others = [other for other in range(num_ranks()) if other != own]
    by_rank = transport.host.peers
    assert set(by_rank) == (set() if way == "gloo" else set(others))
    reads = way == "memory" and not _is_forbidden()
    assert all(peer.can_read == reads for peer in by_rank.values())
    assert (transport._gloo is None) == reads, "Gloo is used only where it is needed"
    for tag, num_bytes in enumerate(SIZES):
        pairs = {
            other: (_message(own, other, num_bytes), torch.zeros(num_bytes, dtype=torch.uint8))
            for other in others
        }
        with _watch_gloo(transport) as through_gloo:
            transport.exchange(pairs, tag)
        for other, (_, received) in pairs.items():
            assert torch.equal(received, _message(other, own, num_bytes)), num_bytes
        by_gloo = way == "gloo" or (num_bytes > INLINE_BYTES and not reads)
        assert through_gloo == [num_bytes] * len(others) * by_gloo


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sizes", [(0, 1 << 20), (1 << 20, 8), (1 << 20, 1 << 21)])
@on_ranks(2)
def test_sent_and_received_tensors_may_differ_in_size(way: str, sizes: tuple[int, int]) -> None:
    transport, own = _transport(way), rank()
    sent = _message(own, 1 - own, sizes[own])
    received = torch.zeros(sizes[1 - own], dtype=torch.uint8)
    transport.exchange({1 - own: (sent, received)}, 0)
    assert torch.equal(received, _message(1 - own, own, sizes[1 - own]))


@pytest.mark.parametrize("way", WAYS)
@on_ranks(3)
def test_each_pair_of_ranks_may_have_other_sizes(way: str) -> None:
    transport, own = _transport(way), rank()
    pairs = {
        other: (
            _message(own, other, _size_of(own, other)),
            torch.zeros(_size_of(other, own), dtype=torch.uint8),
        )
        for other in range(3)
        if other != own
    }
    transport.exchange(pairs, 0)
    for other, (_, received) in pairs.items():
        assert torch.equal(received, _message(other, own, _size_of(other, own)))


@pytest.mark.parametrize("way", WAYS)
@on_ranks(3)
def test_each_element_is_used_once(way: str) -> None:
    transport, own = _transport(way), rank()
    for tag, num_elements in enumerate([1, 3 * _PIECE_BYTES // 8 + 5]):
        sent = torch.full((num_elements,), 10.0**own, dtype=torch.float64)
        pairs = {other: (sent, torch.zeros_like(sent)) for other in range(3) if other != own}
        total = torch.zeros_like(sent)
        tensors = [sent, *(into for _, into in pairs.values())]
        transport.exchange(pairs, tag, partial(_add, total, tensors))
        assert torch.equal(total, torch.full_like(total, 111.0))


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_large_tensors_pass_through_windows(way: str) -> None:
    transport, own = _transport(way), rank()
    sent = torch.arange(3 * _PIECE_BYTES // 8 + 5, dtype=torch.float64) + own
    window, total = torch.zeros(_PIECE_BYTES // 8, dtype=torch.float64), sent.clone()

    def add(piece: slice) -> None:
        total[piece] += window[: piece.stop - piece.start]

    transport.exchange({1 - own: (sent, window)}, 1, add)
    assert torch.equal(total, 2 * sent + 1 - 2 * own)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.bool])
@pytest.mark.parametrize("way", ["memory", "gloo"])
@on_ranks(2)
def test_any_dtype_is_exchanged(dtype: torch.dtype, way: str) -> None:
    transport, own = _transport(way), rank()
    for tag, num_elements in enumerate([3, INLINE_BYTES]):
        sent = [
            torch.randn(num_elements, generator=torch.Generator().manual_seed(n)) for n in (0, 1)
        ]
        own_one, other = (sent[n].to(dtype) for n in (own, 1 - own))
        received = torch.zeros_like(other)
        transport.exchange({1 - own: (own_one, received)}, tag)
        assert torch.equal(received, other)


@on_ranks(2)
def test_a_rank_that_cannot_read_leaves_large_exchanges_to_gloo_on_both_sides() -> None:
    transport = _transport("memory" if rank() else "sockets")
    assert not any(peer.can_read for peer in transport.host.peers.values())
    sent, received = torch.full((1 << 20,), float(rank())), torch.zeros(1 << 20)
    with _watch_gloo(transport) as through_gloo:
        transport.exchange({1 - rank(): (sent, received)}, 0)
    assert torch.equal(received, torch.full_like(sent, 1.0 - rank()))
    assert through_gloo == [sent.nbytes]


@on_ranks(2)
def test_exchanges_of_several_threads_find_each_other_by_tag() -> None:
    """One rank runs its exchanges one after the other; on the other rank they are concurrent."""
    transport, own = _transport(), rank()
    received = {tag: torch.zeros(4) for tag in (1, 2, 3)}

    def exchange(tag: int) -> None:
        sent = torch.full((4,), float(10 * own + tag))
        transport.exchange({1 - own: (sent, received[tag])}, tag)

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


@pytest.mark.parametrize("num_bytes", [8, 1 << 20])
@on_ranks(2, 3)
def test_a_rank_that_is_gone_is_named_by_all_others(num_bytes: int) -> None:
    """No rank waits for another one that has raised too."""
    transport, own, gone = _transport(), rank(), num_ranks() - 1
    if own == gone:
        for peer in transport.host.peers.values():
            peer.connection.shutdown(socket.SHUT_RDWR)
        return
    sent = torch.zeros(num_bytes, dtype=torch.uint8)
    pairs = {other: (sent, sent.clone()) for other in range(num_ranks()) if other != own}
    with pytest.raises(RankLostError, match=f"rank {own} lost rank {gone}"):
        transport.exchange(pairs, 0)


@pytest.mark.parametrize("in_windows", [False, True])
@on_ranks(3)
def test_a_rank_of_another_host_does_not_wait_for_ranks_that_lost_each_other(
    in_windows: bool,
) -> None:
    """Ranks 0 and 1 are of one host. Rank 2 exchanges large tensors with them through Gloo."""
    transport, own = _transport("memory" if rank() < 2 else "gloo"), rank()
    if own == 1:
        transport.host.peers[0].connection.shutdown(socket.SHUT_RDWR)
    sent = torch.full((1 << 20,), own, dtype=torch.uint8)
    pairs = {other: (sent, torch.zeros_like(sent)) for other in range(3) if other != own}
    use = (lambda _: None) if in_windows else None
    if own < 2:
        with pytest.raises(RankLostError, match=f"rank {own} lost rank {1 - own}"):
            transport.exchange(pairs, 0, use)
    else:
        transport.exchange(pairs, 0, use)
        assert all((into == other).all() for other, (_, into) in pairs.items())


@pytest.mark.parametrize("in_windows", [False, True])
@pytest.mark.parametrize("sizes", [(8, 16), (1 << 20, 1 << 21)])
@on_ranks(2)
def test_other_sizes_than_expected_are_an_error(sizes: tuple[int, int], in_windows: bool) -> None:
    transport, own = _transport(), rank()
    sent = torch.zeros(sizes[own], dtype=torch.uint8)
    use = (lambda _: None) if in_windows else None
    with pytest.raises(
        RankLostError, match=f"{sizes[1 - own]} bytes where {sizes[own]} are expected"
    ):
        transport.exchange({1 - own: (sent, sent.clone())}, 0, use)


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
@on_ranks(3)
def test_training_through_gloo_alone(strategy: str) -> None:
    group = dist.new_group(list(range(num_ranks())))  # has no communicator yet
    mesh = DeviceMesh.from_group(group, "cpu")
    with only("gloo"):
        assert_equal_training("stack", strategy=strategy, mesh=mesh)


@on_ranks(3)
def test_closing_ends_waits_between_two_ranks_after_a_third_has_closed() -> None:
    transport, own = _transport("gloo"), rank()
    pair = {2: (torch.ones(1), torch.zeros(1))}  # rank 2 never begins it
    with ThreadPoolExecutor(1) as pool:
        exchange = pool.submit(transport.exchange, pair, 1) if own == 1 else None
        if own == 0:
            transport.close()
        dist.barrier()
        transport.close()
        if exchange is not None:
            with pytest.raises(RankLostError):
                exchange.result(timeout=60)
        dist.barrier()


@on_ranks(2)
def test_closing_ends_an_exchange_in_the_middle_of_a_message() -> None:
    """Gloo itself waits for the rest of the message until the job's timeout."""
    transport, other = _transport("gloo"), 1 - rank()
    # What is neither written nor received takes no memory.
    sent, received = torch.zeros(2, 1 << 30, dtype=torch.uint8).unbind()
    sent[0] = 1
    pair = {other: (sent, received)}
    with ThreadPoolExecutor(1) as pool:
        exchange = pool.submit(transport.exchange, pair, 1)
        assert eventually(lambda: bool(received[0]))
        if rank() == 1:
            transport.close()
        dist.barrier()
        transport.close()
        with contextlib.suppress(RankLostError):  # unless all has arrived
            exchange.result(timeout=60)


@on_ranks(2)
def test_a_message_through_gloo_arrives_while_another_thread_waits_for_a_later_one() -> None:
    transport, other = _transport("gloo"), 1 - rank()
    early, answer, late = torch.zeros(3, 1).unbind()
    if rank() == 0:
        with ThreadPoolExecutor(1) as pool:
            receipt = pool.submit(transport.recv, {other: late}, 20)
            time.sleep(0.2)  # it waits first
            transport.recv({other: early}, 10)
            transport.send({other: early}, 30)
            receipt.result(timeout=60)
        assert early == late == 1
    else:
        transport.send({other: torch.ones(1)}, 10)
        transport.recv({other: answer}, 30)
        transport.send({other: answer}, 20)


# -- the handshake -------------------------------------------------------------------------------


def test_strangers_are_rejected_and_not_waited_for() -> None:
    listener = handshake.listen(2)
    assert listener is not None
    identity = handshake.Identity(0, SECRET, listener.getsockname())
    with listener, _new_socket() as silent, _new_socket() as guessing:
        for stranger in (silent, guessing):
            stranger.connect(listener.getsockname())
        guessing.sendall(handshake._GREETING.pack(1, b"x" * 32))
        called = handshake.connect(1, [identity])
        began = time.monotonic()
        accepted = handshake.accept(listener, SECRET, {1})
        assert time.monotonic() - began < 30, "it would wait for a minute"
        assert list(accepted) == [1]
        one, two = (Peer(each, timedelta(seconds=9)) for each in (called[0], accepted[1]))
        one.send(7, b"hello")
        assert two.recv(7).content == b"hello"
        for stranger in (silent, guessing):
            assert stranger.recv(1) == b"", "the connection was closed"


def test_processes_of_other_users_are_rejected() -> None:
    listener = handshake.listen(2)
    assert listener is not None
    identity = handshake.Identity(0, SECRET, listener.getsockname())
    with listener:
        called = handshake.connect(1, [identity])
        connection, _ = listener.accept()
        with mock.patch.object(os, "geteuid", return_value=os.geteuid() + 1):
            assert handshake.connect(1, [identity]) == {}
            assert handshake._read_greeting(connection, SECRET) == -1
        assert list(called) == [0]
        connection.close()
        called[0].close()


def test_no_socket_of_a_name_means_another_host() -> None:
    for name in (b"", b"\0no such socket"):
        assert handshake.connect(1, [handshake.Identity(0, SECRET, name)]) == {}


def test_a_process_is_read_only_if_it_has_the_secret() -> None:
    kept = ctypes.create_string_buffer(SECRET, len(SECRET))
    has_bytes = peers.has_bytes
    assert has_bytes(os.getpid(), ctypes.addressof(kept), SECRET)
    assert not has_bytes(os.getpid(), ctypes.addressof(kept), b"t" * 32)
    assert not has_bytes(os.getpid(), 0, SECRET)


def test_nothing_outside_of_an_offer_or_its_target_is_touched() -> None:
    """The check also runs with ``python -O``, which removes assertions."""
    source, into = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    with mock.patch.object(peers, "read_memory") as read:
        for start, target, size in (
            (0, into, 64),
            (48, into, 16),
            (64, into, 0),
            (8, into[:16], 16),
        ):
            Offer(os.getpid(), source.data_ptr(), 64, target).read(start)
            address = source.data_ptr() + start
            read.assert_called_once_with(os.getpid(), address, into.data_ptr(), size)
            read.reset_mock()
        for start in (-1, 65):
            with pytest.raises(ValueError, match="of a tensor of 64 bytes"):
                Offer(os.getpid(), source.data_ptr(), 64, into).read(start)
        read.assert_not_called()


def test_a_peer_that_is_dropped_closes_its_socket() -> None:
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer = Peer(one, timedelta(seconds=9))
    assert one.fileno() >= 0
    del peer
    assert one.fileno() == -1
    two.close()


def test_a_file_is_passed_with_a_message() -> None:
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender, receiver = (Peer(each, timedelta(seconds=9)) for each in (one, two))
    with tempfile.TemporaryFile() as file:
        file.write(b"content")
        file.flush()
        sender.send(1, b"first", file.fileno())
        sender.send(2, b"second")
        assert receiver.recv(2) == (2, b"second", None), "the other message is kept, with its file"
        _, content, passed = receiver.recv(1)
        assert content == b"first"
        assert passed is not None
        assert passed.number != file.fileno()
        assert os.pread(passed.number, 7, 0) == b"content"
        number = passed.number
        del passed
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)
    one.close()
    with pytest.raises(ConnectionResetError):
        receiver.recv(1)
    two.close()


# -- in a rank -----------------------------------------------------------------------------------


def _transport(way: str = "memory") -> PointToPoint:
    assert dist.group.WORLD is not None
    store = PrefixStore(f"test {next(NAMES)}", dist.group.WORLD.get_group_store())
    with only(way):
        return PointToPoint(store, rank(), num_ranks(), timedelta(minutes=5))


@contextlib.contextmanager
def _watch_gloo(transport: PointToPoint) -> Iterator[list[int]]:
    """Yield a list that has the bytes of each tensor sent through Gloo, after the block."""
    sent: list[int] = []
    watched = mock.Mock(wraps=transport._gloo)
    with mock.patch.object(transport, "_gloo", watched):
        yield sent
    sent += [call.args[0][0].nbytes for call in watched.send.call_args_list]


def _is_forbidden() -> bool:
    """Whether the system forbids to read the memory of other processes."""
    found, kept = ctypes.create_string_buffer(8), ctypes.create_string_buffer(8)
    places: list[tuple[int, int]] = [(0, 0)] * num_ranks()
    dist.all_gather_object(places, (os.getpid(), ctypes.addressof(kept)))
    process, address = places[1 - rank() % 2]
    try:
        peers.read_memory(process, address, ctypes.addressof(found), 8)
        forbidden = False
    except OSError as error:
        forbidden = error.errno in {errno.EPERM, errno.ENOSYS}
    dist.barrier()  # the memory stays valid until all ranks have read it
    return forbidden


def _message(sender: int, to: int, num_bytes: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * sender + 10 * to + num_bytes % 7)
    return torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, generator=generator)


def _size_of(sender: int, to: int) -> int:
    return (1 << 18) * (3 * sender + to)


def _add(total: Tensor, tensors: list[Tensor], piece: slice) -> None:
    for tensor in tensors:
        total[piece] += tensor[piece]


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

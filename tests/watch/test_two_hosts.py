"""Four ranks on two hosts: network namespaces of this machine, connected by a virtual cable."""

import atexit
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from tests.forked import start_forked
from tests.models import WIDTH, Block, Stack
from tests.runtime.one_process import assert_equal_training

pytestmark = pytest.mark.thorough

HOSTS = (0, 0, 1, 1)  # of each rank
CABLE = "veth"
ADDRESSES = "10.213.7.1", "10.213.7.2"
PORT = 29500
LIMIT_SECONDS = 15.0
DEADLINE_SECONDS = 90.0
_CLONE_NEWNET = 0x40000000

SILENT = r"rank \d lost rank 2: its process gave no sign of life"
ALONE = "no answer for 10 s from the process that holds the job's store"
# What happens, the ranks that are left, and the first words of what each of them raises.
FAULTS = {
    "rank 3 dies": dict.fromkeys((0, 1, 2), r"rank \d lost rank 3: "),
    "the cable is pulled": {0: SILENT, 1: SILENT, 2: ALONE, 3: ALONE},
    "the store dies": dict.fromkeys(
        (1, 2, 3), r"rank \d lost rank 0: |the process that holds the job's store is gone"
    ),
}


class Hosts:
    """Two network namespaces with a cable between them."""

    def __init__(self) -> None:
        self.names = [f"shardwise-{os.getpid()}-{host}" for host in range(2)]

    def build(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        ends = [["name", CABLE, "netns", name] for name in self.names]
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for name, address in zip(self.names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", CABLE)
            for device in ("lo", CABLE):
                ip("-n", name, "link", "set", device, "up")

    def pull_cable(self) -> None:
        ip("-n", self.names[0], "link", "set", CABLE, "down")

    def slow_down(self) -> None:
        """By latency, or by bandwidth where the kernel lacks netem."""
        add = ["tc", "-n", self.names[1], "qdisc", "add", "dev", CABLE, "root"]
        try:
            run(*add, "netem", "delay", "20ms")
        except subprocess.CalledProcessError:
            run(*add, "tbf", "rate", "2mbit", "burst", "32kbit", "latency", "1s")

    def remove(self) -> None:
        for name in self.names:
            ip("netns", "delete", name, check=False)


def run(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, capture_output=True)


def ip(*arguments: str, check: bool = True) -> None:
    run("ip", *arguments, check=check)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need Linux, root and the program ip")
    hosts = Hosts()
    try:
        hosts.build()
    except subprocess.CalledProcessError as error:
        hosts.remove()
        pytest.skip(f"this machine permits no network namespaces: {error.stderr}")
    yield hosts
    hosts.remove()


@pytest.fixture
def start(hosts: Hosts, tmp_path: Path) -> Iterator[Callable[..., list[BaseProcess]]]:
    started: list[BaseProcess] = []

    def start(body: Callable[[Path], None]) -> list[BaseProcess]:
        for rank, host in enumerate(HOSTS):
            started.append(start_forked(live, body, rank, hosts.names[host], tmp_path))
        return started

    yield start
    for process in started:
        process.kill()
        process.join()


def live(body: Callable[[Path], None], rank: int, host: str, folder: Path) -> None:
    """Run ``body`` on a rank of ``host``."""
    output = os.open(folder / f"{rank}.output", os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(output, number)
    with Path(f"/run/netns/{host}").open() as namespace:
        assert ctypes.CDLL(None).setns(namespace.fileno(), _CLONE_NEWNET) == 0
    os.environ["GLOO_SOCKET_IFNAME"] = CABLE
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{ADDRESSES[0]}:{PORT}",
        rank=rank,
        world_size=len(HOSTS),
        timeout=timedelta(seconds=DEADLINE_SECONDS),
    )
    body(folder)
    atexit._run_exitfuncs()  # as at the end of a program
    os._exit(0)


def train_equally(folder: Path) -> None:
    for number in range(2):
        assert_equal_training("stack")
        (folder / f"{dist.get_rank()}.{number}").touch()
        wait_until((folder / "slow").exists)


def train_until_an_error(folder: Path) -> None:
    rank = dist.get_rank()
    model = sw.fully_shard(Stack(), units={Block})
    try:
        while True:
            model(torch.ones(2, WIDTH)).sum().backward()
            (folder / f"{rank}.0").touch()
    except sw.PeerLost as error:
        part = folder / f"{rank}.part"
        part.write_text(f"{time.monotonic()}\n{error}")
        part.rename(folder / f"{rank}.error")


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_ranks_on_two_hosts_train_equally_also_on_a_slow_cable(
    hosts: Hosts, start: Callable[..., list[BaseProcess]], tmp_path: Path
) -> None:
    ranks = start(train_equally)
    wait_until(lambda: len(list(tmp_path.glob("?.0"))) == len(ranks) or not alive(ranks))
    hosts.slow_down()
    (tmp_path / "slow").touch()
    for rank in ranks:
        rank.join(DEADLINE_SECONDS)
    assert [rank.exitcode for rank in ranks] == [0] * len(ranks), outputs(tmp_path)
    assert len(list(tmp_path.glob("?.1"))) == len(ranks)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_rank_names_the_first_failure_within_15_s(
    fault: str, hosts: Hosts, start: Callable[..., list[BaseProcess]], tmp_path: Path
) -> None:
    ranks, expected = start(train_until_an_error), FAULTS[fault]
    wait_until(lambda: len(list(tmp_path.glob("?.0"))) == len(ranks) or not alive(ranks))
    assert alive(ranks), outputs(tmp_path)
    began = time.monotonic()
    if fault == "the cable is pulled":
        hosts.pull_cable()
    else:
        pid = ranks[3 if fault == "rank 3 dies" else 0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len(list(tmp_path.glob("?.error"))) == len(expected))
    for rank, pattern in expected.items():
        at, text = (tmp_path / f"{rank}.error").read_text().split("\n", 1)
        assert re.match(pattern, text), f"rank {rank}: {text}"
        assert float(at) - began < LIMIT_SECONDS, f"rank {rank}: {text}"


def alive(ranks: list[BaseProcess]) -> bool:
    return all(rank.is_alive() for rank in ranks)


def outputs(folder: Path) -> str:
    return "\n".join(f"{file.name}:\n{file.read_text()}" for file in folder.glob("*.output"))

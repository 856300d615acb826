import pytest

from shardwise.forecast.machines.hardware import parse_cluster
from shardwise.forecast.machines.machine import Group, Machine
from shardwise.forecast.work import Kind, Operation


def machine_of(cluster: str) -> Machine:
    return Machine.of(parse_cluster(cluster))


def rate_of(machine: Machine, m: int, n: int, k: int) -> float:
    return 2 * m * n * k / machine.matmul_seconds((1, m, n, k), 2, 2 * (m * n + n * k + m * k))


def attention(name: str, keys: int) -> Operation:
    shape = (1, 16, keys, keys, 128)
    return Operation(name, Kind.ATTENTION, 4 * 16 * keys * keys * 128, shape, 2, (), (), True)


def test_large_products_reach_the_sustained_rate_and_small_ones_do_not() -> None:
    machine = machine_of("8xA100")
    sustained = machine.device.peak_flops * machine.constants.matmul
    assert rate_of(machine, 16384, 12288, 12288) == pytest.approx(sustained, rel=0.05)
    assert rate_of(machine, 512, 512, 512) < 0.3 * sustained
    assert rate_of(machine, 16384, 12288, 64) < 0.6 * sustained  # memory-bound


def test_a_lower_power_limit_slows_products() -> None:
    full, limited = machine_of("8xH100"), machine_of("8xH100-96GB")
    ratio = rate_of(limited, 8192, 8192, 8192) / rate_of(full, 8192, 8192, 8192)
    assert ratio == pytest.approx((500 / 700) ** 0.75, rel=0.01)


def test_attention_is_faster_for_longer_sequences_and_slower_backward() -> None:
    machine = machine_of("8xH100")

    def rate(name: str, keys: int) -> float:
        operation = attention(name, keys)
        return operation.flops / machine.attention_seconds(operation)

    assert rate("flash", 16384) > 1.3 * rate("flash", 512)
    assert rate("flash", 16384) > rate("flash_backward", 16384)


def test_collectives_are_bound_by_links_within_a_node_and_by_the_network_between_nodes() -> None:
    machine = machine_of("64xH100:800")
    inside = machine.all_gather_seconds(8e9, Group(8))
    beyond = machine.all_gather_seconds(8e9, Group(64))
    constants = machine.constants
    assert inside == pytest.approx(7e9 / (450e9 * constants.link), rel=0.01)
    assert beyond == pytest.approx(63 / 64 * 8e9 / (100e9 * constants.network), rel=0.02)
    # Eight groups with one rank per node share the network.
    assert machine.all_gather_seconds(1e9, Group(8, 8)) == pytest.approx(
        7 / 8 * 8e9 / (100e9 * constants.network), rel=0.02
    )
    alone = (machine.all_gather_seconds, machine.all_reduce_seconds, machine.all_to_all_seconds)
    assert [predict(1e9, Group(1)) for predict in alone] == [0, 0, 0]


def test_latency_grows_linearly_for_rings_and_logarithmically_for_trees() -> None:
    machine = machine_of("16384xH100")
    rings = [machine.all_gather_seconds(1, Group(size)) for size in (512, 16384)]
    trees = [machine.all_reduce_seconds(1, Group(size)) for size in (512, 16384)]
    assert rings[1] / rings[0] > 20
    assert trees[1] / trees[0] < 2


def test_the_slowest_of_more_ranks_is_slower() -> None:
    machine = machine_of("8xH100")
    factors = [machine.straggler_factor(ranks) for ranks in (1, 8, 512, 16384)]
    assert factors[0] == 1
    assert factors == sorted(factors)
    assert factors[-1] < 1 + 5 * machine.constants.straggler

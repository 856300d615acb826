import pytest

from shardwise.errors import ConfigError
from shardwise.forecast.machines.hardware import (
    accelerator,
    accelerator_of_device,
    accelerators,
    parse_cluster,
)
from shardwise.forecast.machines.machine import Constants


@pytest.mark.parametrize(
    ("text", "name", "devices", "nodes", "gigabytes"),
    [
        ("64xH100", "H100-SXM-80GB", 64, 8, 400),
        ("1 x h200", "H200-SXM-141GB", 1, 1, 400),
        ("128xA100-40GB:400", "A100-SXM-40GB", 128, 16, 50),
        ("8xV100-16GB/4:25", "V100-SXM-16GB", 8, 2, 3.125),
    ],
)
def test_clusters_are_parsed(
    text: str, name: str, devices: int, nodes: int, gigabytes: float
) -> None:
    cluster = parse_cluster(text)
    assert cluster.accelerator.name == name
    assert (cluster.num_devices, cluster.num_nodes) == (devices, nodes)
    assert cluster.node_bandwidth == gigabytes * 1e9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("64", "expected COUNTxNAME"),
        ("64xH100:fast", "expected COUNTxNAME"),
        ("64xH10", "'H10' is not known; did you mean 'H100'"),
        ("8xRTX4080", "did you mean 'RTX-4090'"),
        ("8xH100SMX-80GB", "did you mean 'H100-SXM-80GB'"),
        ("8xmi300", "did you mean 'MI300X'"),
        ("0xH100", "0 devices"),
        ("8xH100/0", "0 per node"),
    ],
)
def test_invalid_clusters_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_cluster(text)


@pytest.mark.parametrize("name", ["RTX4090", "rtx 4090", "RTX_4090", "4090"])
def test_case_and_separators_of_a_name_do_not_matter(name: str) -> None:
    assert parse_cluster(f"8x{name}").accelerator.name == "RTX-4090"


def test_data_sheets_are_consistent() -> None:
    names = [one for device in accelerators() for one in (device.name, *device.aliases)]
    assert len({name.lower() for name in names}) == len(names)
    for device in accelerators():
        assert accelerator(device.name) is device
        assert device.fp32_flops < device.peak_flops
        assert device.achievable_flops is None or device.achievable_flops < device.peak_flops
        assert 1e11 < device.memory_bandwidth < 1e13
        assert device.memory_bytes > 14 << 30
        assert 0 < Constants.of(device.generation).matmul <= 1


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-SXM-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
        ("NVIDIA H200", "H200-SXM-141GB"),
        ("NVIDIA GH200 480GB", "H100-SXM-80GB"),
        ("NVIDIA GB200", "GB200"),
        ("Tesla V100-SXM2-16GB", "V100-SXM-16GB"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("Intel(R) Xeon(R) Processor @ 2.10GHz", None),
        ("NVIDIA A1000", None),
    ],
)
def test_accelerators_are_found_by_the_device_names_of_torch(device: str, name: str | None) -> None:
    found = accelerator_of_device(device)
    assert (found.name if found else None) == name

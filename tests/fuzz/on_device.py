"""Random programs on a real accelerator, on one rank, against one process on the host.

They run in this process: a crash, such as a read of the device's memory by the host, ends it.
"""

import faulthandler
from collections.abc import Collection
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import __future__ as conversion
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.fuzz.build import Net
from tests.fuzz.compare import Comparison, prepared
from tests.fuzz.programs import Case
from tests.fuzz.verdict import SHOWN

__all__ = ["assert_holds_on_device", "start"]


def start() -> None:
    """Make this process a rank, the only one; a crash shows its stacks."""
    faulthandler.enable()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


def assert_holds_on_device(case: Case, device: torch.device, without: Collection[str]) -> None:
    """Run ``case`` on ``device``, unless its description has one of the words in ``without``.

    Raises:
        AssertionError: it differs from one process.
    """
    if any(word in repr(case) for word in without):
        return
    case = replace(case, sharding=replace(case.sharding, ranks=1))
    with prepared(case):
        problems = OnAccelerator(case, device).run().problems
    assert not problems, "\n".join(problems[:SHOWN])


class OnAccelerator(Comparison):
    """A model on an accelerator, and its reference on the host."""

    def place(self, net: Net) -> Net:
        # Otherwise `Module.to` would untie parameters on a device of another library than torch.
        conversion.set_swap_module_params_on_conversion(True)
        try:
            return super().place(net)
        finally:
            conversion.set_swap_module_params_on_conversion(False)

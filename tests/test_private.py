"""Private names of torch: in one file, and checked when it is imported."""

import re
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

import shardwise
from shardwise import _private

PACKAGE = Path(shardwise.__file__).parent
# A backend, which torch asks for private attributes.
OVERRIDING = {PACKAGE / "hostccl/group.py"}
PRIVATE = re.compile(
    r"torch\._C|torch\._[a-z]|from torch[a-z_.]* import _|torch\.[a-z.]*\._[a-z]"
    r"|distributed_c10d( as|\._)"
    r"|_execution_engine|_swap_data_ptr_|_use_count\(|_backward_hooks|_post_accumulate_grad_hooks"
    r"|c10d\._|_get_backend\(|_device_types|_register_backend|_set_default_backend|\._timeout"
)


def test_no_other_file_uses_private_names_of_torch() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != Path(_private.__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if PRIVATE.search(line) and not (path in OVERRIDING and line.startswith("    def _"))
    ]
    assert not found, "\n".join(found)


def test_a_missing_name_is_found() -> None:
    assert _private.missing(_private.REQUIRED) == []
    assert _private.missing(["torch.Tensor._no_such_name"]) == ["torch.Tensor._no_such_name"]
    assert _private.missing(["torch._no_such.module"]) == ["torch._no_such.module"]


def test_transforms_are_suspended_and_resumed() -> None:
    seen = []

    def compute(x: Tensor) -> Tensor:
        with _private.without_transforms():
            plain = torch.ones(3)
            seen.append(plain.data_ptr() != 0 and not torch._C._is_fwd_grad_enabled())
        return x.square().sum()

    x = torch.ones(3)
    assert torch.equal(torch.func.grad(compute)(x), 2 * x)
    assert torch.equal(torch.func.hessian(compute)(x), 2 * torch.eye(3))
    assert seen == [True] * len(seen)
    assert torch._C._is_fwd_grad_enabled()
    assert not _private.is_transformed_by_functorch()


def test_each_level_has_a_graph_of_its_own() -> None:
    weight = torch.ones(3, requires_grad=True)
    found = []

    def compute(x: Tensor) -> Tensor:
        y = (x * weight).sum()
        levels = _private.at_all_levels([y, torch.tensor([1])])
        found.append([is_wrapped for one, is_wrapped in levels if one.grad_fn is not None])
        return y

    x = torch.ones(3)
    torch.func.grad(compute)(x)
    torch.func.jvp(compute, (x,), (x,))
    torch.vmap(compute)(x[None])
    with forward_ad.dual_level():
        compute(forward_ad.make_dual(x, x))  # type: ignore[no-untyped-call]
    compute(x)
    in_jvp = [False, False]  # the output and its tangent
    assert found == [[True, False], in_jvp, [False], in_jvp, [False]]


def test_symmetric_memory_uses_the_device_that_is_asked_for() -> None:
    """A barrier without it would use the current device, which may be another rank's."""
    group, device = mock.Mock(), torch.device("cuda", 3)
    with (
        mock.patch("torch.distributed._symmetric_memory", create=True) as symmetric,
        mock.patch.object(dist, "barrier") as barrier,
    ):
        _private.symmetric_tensor(64, group, device)
    barrier.assert_called_once_with(group=group, device_ids=[3])
    assert symmetric.empty.call_args == mock.call(64, dtype=torch.uint8, device=device)


def test_a_module_that_is_compiled_in_place_is_found() -> None:
    module = torch.nn.Linear(1, 1)
    assert not _private.is_compiled_in_place(module)
    module.compile(backend="eager")
    assert _private.is_compiled_in_place(module)

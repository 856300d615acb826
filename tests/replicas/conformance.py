"""``python -m tests.replicas.conformance``: torchft's own tests, with sharded models.

Runs the tests of torchft's wheel that use `fully_shard` (``fsdp_test.py``) or local steps
(``local_sgd_test.py``, ``local_sgd_integ_test.py``, ``diloco_regression_test.py``) on CPUs. The
models of the latter are sharded here, each layer as a unit, over the one rank that their replicas
have. ``--engine shardwise`` does both with shardwise, ``--engine fsdp2`` with PyTorch's FSDP2, and
``--engine plain`` leaves models as they are. Each test runs in a process of its own.
"""

import argparse
import importlib
import os
import sys
import tempfile
import types
import unittest
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.forked import start_forked

MODULES = ("fsdp_test", "local_sgd_test", "local_sgd_integ_test", "diloco_regression_test")
DEADLINE_SECONDS = 180.0
FSDP_RANKS = 4


def main() -> None:
    """Run the tests, print each name with its result, and the number of those that pass."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("shardwise", "fsdp2", "plain"), default="shardwise")
    parser.add_argument("--only", default="", help="a part of the names to run")
    parser.add_argument("--errors", action="store_true", help="show the output of failures")
    options = parser.parse_args()
    results = {}
    for name in filter(lambda name: options.only in name, names()):
        with tempfile.NamedTemporaryFile("r") as output:
            run = run_fsdp_test if name.startswith("fsdp_test") else run_in_process
            results[name] = run(options.engine, name, output.name)
            text = output.read()
        print(f"{'passed' if results[name] else 'FAILED'} {name}", flush=True)  # noqa: T201
        if options.errors and not results[name]:
            print(text)  # noqa: T201
    print(f"{options.engine}: {sum(results.values())} of {len(results)} passed")  # noqa: T201


def names() -> list[str]:
    """``module.Class.method`` of all tests that have no need of a GPU, or of four."""
    install_parameterized()
    loader = unittest.TestLoader()
    suites = [loader.loadTestsFromModule(imported(module)) for module in MODULES]
    return [test.id().removeprefix("torchft.") for suite in suites for test in _flat(suite)]


def _flat(suite: Any) -> Iterator[unittest.TestCase]:
    for each in suite:
        yield from _flat(each) if isinstance(each, unittest.TestSuite) else [each]


def imported(module: str) -> Any:
    return importlib.import_module(f"torchft.{module}")


def install_parameterized() -> None:
    """Stand in for the package ``parameterized``, of which the tests use one function."""
    package: Any = types.ModuleType("parameterized")
    package.parameterized = types.SimpleNamespace(expand=_expand)
    sys.modules.setdefault("parameterized", package)


def _expand(rows: list[tuple[Any, ...]]) -> Callable[[Any], None]:
    def add(method: Any) -> None:
        namespace = sys._getframe(1).f_locals  # of the class
        for number, row in enumerate(rows):

            def test(self: Any, method: Any = method, row: Any = row) -> None:
                method(self, *row)

            namespace[f"{method.__name__}_{number}"] = test

    return add


# -- tests of local steps ------------------------------------------------------------------------


def run_in_process(engine: str, name: str, output: str) -> bool:
    """Run a test in a process of its own; whether it has passed."""
    process = start_forked(_run_one, engine, name, output)
    process.join(DEADLINE_SECONDS)
    process.kill()
    process.join()
    return process.exitcode == 0


def _run_one(engine: str, name: str, output: str) -> None:
    _redirect(output)
    install_parameterized()
    module = imported(name.split(".", maxsplit=1)[0])
    if engine != "plain":
        _shard_models_of(module, engine)
    if hasattr(module, "handle_fixture"):  # its fixtures are not in the wheel
        module.handle_fixture = lambda *_: None
    suite = unittest.defaultTestLoader.loadTestsFromName(".".join(name.split(".")[1:]), module)
    passed = unittest.TextTestRunner(stream=sys.stdout).run(suite).wasSuccessful()
    sys.stdout.flush()
    os._exit(not passed)


def _redirect(output: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    torch.set_num_threads(1)


def _shard_models_of(module: Any, engine: str) -> None:
    """Replace what makes the models of ``module``, so that they are sharded."""
    store = HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)

    def sharding(make: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        def made(*args: Any, **kwargs: Any) -> nn.Module:
            model = make(*args, **kwargs)
            for layer in getattr(model, "layers", ()):
                fully_shard_of(engine)(layer)
            fully_shard_of(engine)(model)
            return model

        return made

    for name in ("SimpleModel", "TinyModel"):
        if hasattr(module, name):
            setattr(module, name, sharding(getattr(module, name)))
    if module.__name__.endswith("local_sgd_integ_test"):
        module.MyModel = sharding(module.MyModel)
    trainer = getattr(module, "MockDiLoCoTrainer", getattr(module, "DiLoCoTrainer", None))
    if trainer is not None:
        trainer.setup_model = sharding(trainer.setup_model)


def fully_shard_of(engine: str) -> Any:
    """The function of that name of an engine."""
    name = {"shardwise": "shardwise.fsdp", "fsdp2": "torch.distributed.fsdp"}[engine]
    return importlib.import_module(name).fully_shard


# -- fsdp_test.py --------------------------------------------------------------------------------


def run_fsdp_test(engine: str, name: str, output: str) -> bool:
    """Run the ranks of a test of ``fsdp_test.py``, on CPUs; whether all have passed."""
    options = {"dp_replicate": 1, "dp_shard": 2, "tp": 2} if name.endswith("_tp") else {}
    ranks = [
        start_forked(_run_fsdp_rank, engine, rank, options, output) for rank in range(FSDP_RANKS)
    ]
    for rank in ranks:
        rank.join(DEADLINE_SECONDS)
        rank.kill()
        rank.join()
    return not any(rank.exitcode for rank in ranks)


def _run_fsdp_rank(engine: str, rank: int, options: dict[str, int], output: str) -> None:
    _redirect(output)
    module = imported("fsdp_test")
    if engine == "shardwise":
        drop_in = importlib.import_module("shardwise.fsdp")
        module.fully_shard, module.FSDPModule = drop_in.fully_shard, drop_in.FSDPModule
    make_mesh = module.init_device_mesh
    module.init_device_mesh = lambda device_type, **how: make_mesh("cpu", **how)  # noqa: ARG005
    with (
        mock.patch.object(torch.cuda, "set_device"),
        mock.patch.object(nn.Module, "cuda", lambda model: model),
        mock.patch.object(torch.Tensor, "cuda", lambda tensor: tensor),
    ):
        module.FSDPTest._test_fsdp(FSDP_RANKS, rank, **options)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

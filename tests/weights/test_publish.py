"""`sw.publish`: receivers have the bits of `sw.save`'s files, of one version at a time."""

import dataclasses
import inspect
import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise import weights
from shardwise.checkpoint import save as save_module
from shardwise.checkpoint.collect import WriteJob
from shardwise.checkpoint.coordination import Coordinator
from shardwise.checkpoint.write import write
from shardwise.errors import CheckpointError, CheckpointNotFound
from shardwise.integrations import vllm
from shardwise.weights.directory import INDEX
from shardwise.weights.updates import Manifest, TensorInfo, Update, indices_of, runs_of
from tests.covering import covered_first
from tests.forked import run_forked
from tests.models import build
from tests.ranks import on_ranks
from tests.runtime.one_process import options_of
from tests.weights.common import adapted, assert_same, experts, saved, tensor_parallel
from tests.weights.killing import kill_a_sender, kill_at_every_access
from tests.weights.live_bytes import live_bytes
from tests.weights.memory_target import MemoryTarget

FRACTIONS = (0.001, 0.01, 0.1, 0.5, 0.999, 1.0, 0.0)


def change(model: nn.Module, step: int, fraction: float) -> None:
    """Change about this fraction of all elements; equally in replicas."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad(), sw.gathered(model, write_back=True):
        for parameter in model.parameters():
            tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            chosen = torch.rand(tensor.shape, generator=generator) < fraction
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            tensor[chosen] += (noise[chosen] * 3).to(tensor.dtype)


def whole(model: nn.Module, **options: Any) -> dict[str, Tensor]:
    return dict(sw.full_tensors(model, **options))


def saved_like(model: nn.Module, folder: Path, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors ``like`` in a checkpoint, cast to their dtypes."""
    tensors = saved(model, folder)
    assert len(tensors) == len(like) or any("lora_" in name for name in tensors)
    names = {name.replace(".default.", "."): name for name in tensors}  # peft's, for adapters
    return {name: tensors[names[name]].to(x.dtype) for name, x in like.items()}


# -- models --------------------------------------------------------------------------------------


def _plain(name: str, **options: Any) -> Any:
    strategy = options.pop("strategy", "fsdp")
    return sw.fully_shard(build(name), units="auto", **options_of(strategy), **options)


def _adapted() -> Any:
    return sw.fully_shard(adapted(), units="auto")


def _fused() -> nn.Module:
    """Experts whose first two matrices are one parameter, as in transformers' Mixtral."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=3,
    )  # fmt: skip
    model: nn.Module = transformers.MixtralForCausalLM(config)
    return sw.fully_shard(model, units="MixtralDecoderLayer")


MODELS: dict[str, Callable[[], nn.Module]] = {
    "fsdp, tied": lambda: _plain("gpt"),
    "hsdp": lambda: _plain("gpt", strategy="hsdp"),
    "zero1, by row": lambda: _plain("stack", strategy="zero1", granularity="row"),
    "ddp": lambda: _plain("stack", strategy="ddp"),
    "dim, offloaded": lambda: _plain(
        "stack", granularity="dim", offload_policy=sw.CPUOffloadPolicy()
    ),
    "frozen, mixed": lambda: _plain("mixed dtypes"),
    "buffers": lambda: _plain("conv"),
    "stepped on the device": lambda: _plain(
        "stack", offload_policy=sw.CPUOffloadPolicy(step="device")
    ),
    "tp x fsdp": tensor_parallel,
    "ep x fsdp": experts,
    "lora, merged": _adapted,
    "lora, alone": _adapted,
    "fused": _fused,
}


NEED_FOUR = ("hsdp", "tp x fsdp", "ep x fsdp")
ROWS = [
    row
    for row in product(MODELS, (None, torch.bfloat16), ("runs", "tensors", "everything"), (2, 4))
    if row[-1] == 4 or row[0] not in NEED_FOUR
]


@on_ranks()
@pytest.mark.parametrize("steps", [8, pytest.param(50, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("kind", "dtype", "sends", "world_size"), covered_first(ROWS))
def test_receivers_have_the_bits_of_a_checkpoint_in_every_step(
    kind: str, dtype: torch.dtype | None, sends: str, steps: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]()
    target = MemoryTarget(accepts_runs=sends == "runs")
    options: Any = {"dtype": dtype}
    if kind.startswith("lora"):
        options["adapters"] = kind.partition(", ")[2]
    changed = sends != "everything"
    for step in range(steps):
        version = sw.publish(model, target, bucket_bytes=700, only_changed=changed, **options)
        expected = whole(model, **options)
        if step % 7 == 0 and kind != "lora, merged":  # a checkpoint has weights and adapters
            assert_same(expected, saved_like(model, tmp_path / str(step), expected))
        if dist.get_rank() == 0:
            assert version == target.version == target.manifest.version == step + 1
            assert_same(target.tensors, expected)
            num_bytes = sum(tensor.nbytes for tensor in expected.values())
            can_be_small = sends == "runs" and kind != "lora, merged"  # sums are sent whole
            if step and FRACTIONS[(step - 1) % len(FRACTIONS)] in (0.0, 0.001) and can_be_small:
                assert target.num_bytes < num_bytes / 4
            assert target.num_bytes <= num_bytes
            assert changed or target.num_bytes == num_bytes
            assert (target.manifest.base is None) == (step == 0 or not changed)
        change(model, step, FRACTIONS[step % len(FRACTIONS)])


@on_ranks(2)
def test_they_are_the_bits_of_a_checkpoint(tmp_path: Path) -> None:
    model = _plain("gpt")
    for step in range(3):
        sw.publish(model, tmp_path / "published")
        sw.save(tmp_path / f"saved-{step}", model=model)
        found = weights.read_published(tmp_path / "published")
        assert found.version == step + 1
        other = build("gpt", seed=1)
        sw.load(tmp_path / f"saved-{step}", model=other)
        assert_same(found.tensors, {n: p.detach() for n, p in other.named_parameters()})
        dist.barrier()
        change(model, step, 0.2)


@on_ranks(2)
def test_merged_adapters_are_published() -> None:
    model = _adapted()
    target, alone = MemoryTarget(), MemoryTarget()
    for step in range(5):
        sw.publish(model, target, adapters="merged", dtype=torch.bfloat16)
        sw.publish(model, alone, adapters="alone")
        expected = whole(model, adapters="merged", dtype=torch.bfloat16)
        adapters = whole(model, adapters="alone")
        if dist.get_rank() == 0:
            assert_same(target.tensors, expected)
            assert_same(alone.tensors, adapters)
            if step:  # the frozen layers without adapters were sent once
                sent = sum(x.nbytes for n, x in expected.items() if n.endswith("up.weight"))
                assert target.num_bytes == sent
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.mul_(1.5)


# -- what is sent --------------------------------------------------------------------------------


@on_ranks(2)
def test_zeros_and_nans_that_change_only_in_bits_are_sent() -> None:
    model = sw.fully_shard(nn.Linear(8, 8, bias=False), units=None)
    with torch.no_grad():
        model.weight.zero_()
    target = MemoryTarget()
    for value in (0.0, -0.0, float("nan"), float("nan"), 0.0):
        before = whole(model)["weight"].view(torch.int32)
        with torch.no_grad():
            model.weight.fill_(value)
        sw.publish(model, target)
        expected = whole(model)
        if dist.get_rank() == 0:
            assert_same(target.tensors, expected)
            is_new = not torch.equal(before, expected["weight"].view(torch.int32))
            assert (target.num_bytes > 0) == (is_new or target.version == 1)


@on_ranks(2)
def test_other_arguments_send_everything() -> None:
    model, target = _plain("gpt"), MemoryTarget()
    sw.publish(model, target)
    for options in ({"dtype": torch.bfloat16}, {"names": ["layers.*"]}, {"only_changed": False}):
        version = sw.publish(model, target, **options)
        if dist.get_rank() == 0:
            assert target.manifest.base is None
            assert version == target.version
    sw.publish(model, target)
    if dist.get_rank() == 0:
        assert target.manifest.base is None, "nothing is known after only_changed=False"


@on_ranks(2)
def test_a_version_is_published_beside_a_save(tmp_path: Path) -> None:
    model, target, gate = _plain("gpt"), MemoryTarget(), threading.Event()

    def write_later(job: WriteJob, ranks: Coordinator) -> None:
        if dist.get_rank() == 1:
            assert gate.wait(100)
        write(job, ranks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_module, "write", write_later)
        pending = sw.save(tmp_path / "saved", model=model, wait=False)
        try:
            sw.publish(model, target)
        finally:
            gate.set()
        pending.wait()
    sw.load(tmp_path / "saved", model=model)
    expected = whole(model)
    if dist.get_rank() == 0:
        assert_same(target.tensors, expected)


@on_ranks(2)
def test_an_error_of_the_target_is_raised_on_all_ranks_and_the_next_version_is_whole() -> None:
    model, target = _plain("gpt"), MemoryTarget()
    sw.publish(model, target)
    before = dict(target.tensors)
    change(model, 0, 0.5)
    target.fails = True
    with pytest.raises(CheckpointError, match="No space left on device"):
        sw.publish(model, target, bucket_bytes=500)
    assert target.tensors == before
    target.fails = False
    sw.publish(model, target)
    expected = whole(model)
    if dist.get_rank() == 0:
        assert target.manifest.base is None
        assert_same(target.tensors, expected)


@pytest.mark.parametrize("fraction", [0.0, 0.003, 0.3, 0.99, 1.0])
def test_runs_are_the_indices(fraction: float) -> None:
    indices = (torch.rand(3000) < fraction).nonzero().view(-1)
    starts, lengths = runs_of(indices, 3000)
    assert torch.equal(indices_of(starts, lengths), indices)
    assert fraction < 0.9 or len(starts) <= len(indices) / 20
    assert runs_of(indices, 1 << 31)[0].dtype is torch.int64 or not len(indices)


# -- directories ---------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("in_memory", [False, True])
def test_a_directory_has_one_version_and_unchanged_files_stay(
    tmp_path: Path, *, in_memory: bool
) -> None:
    target: Any = tmp_path / "published"
    if in_memory:
        target = weights.SharedMemory("-".join(tmp_path.parts[-3:]))
    folder = target.path if in_memory else target
    model, seen = _plain("gpt"), list[weights.Published]()
    before: dict[str, Any] = {}
    last: dict[str, Tensor] = {}
    for step in range(6):
        sw.publish(model, target)
        expected = whole(model)
        if dist.get_rank() == 0:
            files = {file.name: file.stat() for file in folder.rglob("*.safetensors")}
            assert len(files) == len(expected)
            found = weights.read_published(target)
            assert_same(found.tensors, expected)
            assert found.version == step + 1
            if step:
                kept = files.keys() & before.keys()
                changed = {n for n, x in expected.items() if not torch.equal(x, last[n])}
                assert len(kept) == len(files) - len(changed)
                for name in kept:
                    assert (files[name].st_ino, files[name].st_mtime_ns) == (
                        before[name].st_ino,
                        before[name].st_mtime_ns,
                    )
            before, last = files, expected
            seen.append(found)
            assert all(found.version == n + 1 for n, found in enumerate(seen))
        with torch.no_grad():
            list(model.parameters())[step].mul_(1.25)
    if dist.get_rank() == 0:  # what was mapped stays what it was
        assert not torch.equal(seen[0].tensors["embedding.weight"], last["embedding.weight"])
        if in_memory:
            target.remove()


@on_ranks(2)
def test_a_directory_that_others_use_is_refused(tmp_path: Path) -> None:
    model = _plain("gpt")
    with pytest.raises(CheckpointNotFound, match="nothing was published"):
        weights.read_published(tmp_path)
    dist.barrier()
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="publish has not written this file"):
        sw.publish(model, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


@on_ranks(2)
def test_a_directory_that_was_deleted_is_written_again(tmp_path: Path) -> None:
    folder, model = tmp_path / "published", _plain("gpt")
    sw.publish(model, folder)
    if dist.get_rank() == 0:
        for file in folder.iterdir():
            file.unlink()
    dist.barrier()
    sw.publish(model, str(folder))
    assert_same(weights.read_published(folder).tensors, whole(model))


def test_only_the_last_directory_has_a_copy(tmp_path: Path) -> None:
    model, known = build("gpt"), []
    with live_bytes() as live:
        for step in range(3):
            assert sw.publish(model, tmp_path / str(step)) == 1
            known.append(live.now)
    assert known[0] == known[2] > 0


def test_two_programs_do_not_publish_to_a_directory_at_once(tmp_path: Path) -> None:
    one, other = weights.Directory(tmp_path), weights.Directory(tmp_path)
    whole_version = Manifest(1, None, {"weight": TensorInfo((2,), torch.float32)})
    one.begin(whole_version)
    with pytest.raises(CheckpointError, match="another program publishes there now"):
        other.begin(whole_version)
    one.send([Update("weight", torch.ones(2))])
    one.commit(1)
    with pytest.raises(CheckpointError, match="has version 1, expected 0; another program"):
        other.begin(whole_version)
    assert_same(weights.read_published(tmp_path).tensors, {"weight": torch.ones(2)})


def test_a_version_whose_last_one_is_gone_is_refused(tmp_path: Path) -> None:
    directory = weights.Directory(tmp_path)
    tensors, update = {"weight": TensorInfo((2,), torch.float32)}, Update("weight", torch.ones(2))
    directory.begin(Manifest(1, None, tensors))
    directory.send([update])
    directory.commit(1)
    directory.begin(Manifest(2, 1, tensors))
    (tmp_path / INDEX).unlink()
    for call in (partial(directory.send, [update]), partial(directory.commit, 2)):
        with pytest.raises(CheckpointError, match="has version 0, expected 1; another program"):
            call()


@pytest.mark.parametrize("what", ["replaced", "damaged"])
def test_a_version_of_another_program_is_not_built_upon(tmp_path: Path, what: str) -> None:
    """Although it has the number of the last one."""
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    sw.publish(model, tmp_path)
    if what == "replaced":
        for file in tmp_path.iterdir():
            file.unlink()
        sw.publish(other, tmp_path)
    else:
        next(tmp_path.glob("*.safetensors")).unlink()
    with torch.no_grad():
        model.bias[0] = 7.0
    assert sw.publish(model, tmp_path) == 2
    assert_same(weights.read_published(tmp_path).tensors, whole(model))


def test_a_reader_that_is_overtaken_reads_the_next_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, from_file = nn.Linear(3, 2), torch.from_file
    sw.publish(model, tmp_path)

    def overtaken(*args: Any, **options: Any) -> Tensor:
        monkeypatch.undo()
        with torch.no_grad():
            model.weight.add_(1)
            model.bias.add_(1)
        sw.publish(model, tmp_path)
        return from_file(*args, **options)

    monkeypatch.setattr(torch, "from_file", overtaken)
    found = weights.read_published(tmp_path)
    assert found.version == 2
    assert_same(found.tensors, whole(model))


def test_a_factor_of_an_adapter_that_changes_is_published(tmp_path: Path) -> None:
    model = adapted()
    for _ in range(2):
        sw.publish(model, tmp_path, adapters="merged")
        expected = whole(model, adapters="merged")
        assert_same(weights.read_published(tmp_path).tensors, expected)
        for module in model.modules():
            if hasattr(module, "scaling"):
                module.scaling["default"] *= 10


def test_odd_models_are_published_twice(tmp_path: Path) -> None:
    model = nn.Module()
    target = weights.SharedMemory(f"test-{os.getpid()}")
    try:
        sw.publish(nn.Module(), tmp_path)
        for number in range(2):
            model.register_buffer("counts", torch.arange(90, dtype=torch.int32).to(torch.uint16))
            model.get_buffer("counts")[number] = 77
            sw.publish(model, target)
            assert_same(weights.read_published(target).tensors, whole(model))
        empty = nn.Module()
        for _ in range(2):
            sw.publish(empty, tmp_path)
    finally:
        target.remove()


def test_transformers_opens_the_directory(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    sw.fully_shard(model, units="auto")
    sw.publish(model, tmp_path)
    config.save_pretrained(tmp_path)
    opened = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert_same({name: p.detach() for name, p in opened.named_parameters()}, expected)


# -- other processes -----------------------------------------------------------------------------


@on_ranks(3)
def test_receivers_of_a_group_have_each_version() -> None:
    rank = dist.get_rank()
    trainers, receivers = dist.new_group([0, 1]), dist.new_group([0, 2])
    if rank == 2:
        receiver = weights.Receiver(receivers)
        for number in range(1, 5):
            assert receiver.receive() == receiver.version == number
            expected: list[Any] = [None]
            dist.broadcast_object_list(expected, src=0, group=receivers)
            assert_same(receiver.tensors, expected[0])
        return
    mesh = DeviceMesh.from_group(trainers, "cpu")
    model = sw.fully_shard(build("gpt"), units="auto", mesh=mesh)
    target = weights.Broadcast(receivers) if rank == 0 else MemoryTarget()
    for step in range(4):
        sw.publish(model, target, bucket_bytes=900)
        sent: list[Any] = [whole(model)]
        if rank == 0:
            dist.broadcast_object_list(sent, src=0, group=receivers)
        change(model, step, 0.05)


@on_ranks(2)
def test_a_receiver_that_fails_keeps_the_last_version() -> None:
    alone = dist.new_group([0])
    if dist.get_rank() == 1:
        receiver = weights.Receiver()
        receiver.receive()
        receiver.version = 7
        with pytest.raises(RuntimeError, match=r"changes of version 1, but .* has version 7"):
            receiver.receive()
        assert receiver.receive() == 2
        dist.barrier()
        return
    model = sw.fully_shard(build("gpt"), mesh=DeviceMesh.from_group(alone, "cpu"))
    target = weights.Broadcast()
    sw.publish(model, target)
    change(model, 0, 0.05)
    with pytest.raises(RuntimeError, match="a receiver could not take over version 2"):
        sw.publish(model, target)
    assert sw.publish(model, target) == 2
    dist.barrier()


@pytest.mark.parametrize("in_memory", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_a_sender_killed_at_any_access_leaves_one_version(
    tmp_path: Path, *, in_memory: bool
) -> None:
    assert (
        run_forked(partial(kill_at_every_access, tmp_path / "published", in_memory=in_memory)) > 20
    )


def test_a_sender_killed_in_a_message_leaves_the_last_version(tmp_path: Path) -> None:
    run_forked(partial(kill_a_sender, tmp_path))


# -- vLLM ----------------------------------------------------------------------------------------


@dataclass
class SparseUpdateInfo:
    """The fields of vLLM's ``SparseNCCLWeightTransferUpdateInfo``."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    num_updates_list: list[int]


class SparseWorker:
    """What a worker's sparse engine does, with a queue in place of NCCL; and its client."""

    def __init__(self) -> None:
        self.wire: queue.Queue[Tensor] = queue.Queue()
        self.parameters: dict[str, Tensor] = {}
        self.calls: list[str] = []

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.calls.append("update")
        info = SparseUpdateInfo(**update_info)
        for name, dtype, shape, count in zip(
            info.names, info.dtype_names, info.shapes, info.num_updates_list, strict=True
        ):
            indices, values = self.wire.get(timeout=60), self.wire.get(timeout=60)
            assert (indices.dtype, values.dtype) == (torch.int32, getattr(torch, dtype))
            assert indices.shape == values.shape == (count,)
            parameter = self.parameters.setdefault(name, torch.zeros(shape, dtype=values.dtype))
            parameter.view(-1).index_copy_(0, indices.long(), values)

    def finish_weight_update(self) -> None:
        self.calls.append("finish")


@on_ranks(2)
def test_vllms_sparse_engine_gets_what_changed() -> None:
    model, worker = _plain("gpt"), SparseWorker()
    target = vllm.SparseWeights(worker, lambda tensor: worker.wire.put(tensor.clone()))
    for step in range(4):
        sw.publish(model, target, dtype=torch.bfloat16, bucket_bytes=2000)
        expected = whole(model, dtype=torch.bfloat16)
        if dist.get_rank() == 0:
            assert_same(worker.parameters, expected)
            assert (worker.calls[0], worker.calls[-1], worker.wire.empty()) == (
                "start",
                "finish",
                True,
            )
            worker.calls.clear()
        change(model, step, 0.02)


class DenseTrainer:
    """What a dense trainer engine of vLLM does with its source, on every rank."""

    def __init__(self, source: Any, *, is_sender: bool) -> None:
        self.source, self.is_sender = source, is_sender
        self.sent: dict[str, Tensor] = {}

    def send_weights(self) -> None:
        assert self.source.implements_iter_full()
        metadata = self.source.metadata
        if not self.is_sender:
            for _ in self.source.iter_full():
                pass
            return
        for meta, (name, tensor) in zip(metadata, self.source.iter_full(), strict=True):
            assert (meta.name, meta.dtype, meta.shape) == (name, tensor.dtype, tuple(tensor.shape))
            self.sent[name] = tensor


@on_ranks(2)
@pytest.mark.parametrize("to", [0, "all"])
def test_vllms_dense_engine_pulls_whole_weights(to: Any) -> None:
    model, rank = _plain("gpt"), dist.get_rank()
    source = vllm.WeightSource(model, dtype=torch.bfloat16, bucket_bytes=1000, to=to)
    engine = DenseTrainer(source, is_sender=rank == 0)
    for step in range(2):
        engine.send_weights()
        expected = whole(model, dtype=torch.bfloat16)
        if rank == 0:
            assert_same(engine.sent, expected)
        change(model, step, 0.5)


def test_the_source_has_the_interface_of_vllm() -> None:
    """``pip install vllm`` runs this; without it, the stand-ins above have its signatures."""
    base = pytest.importorskip("vllm.distributed.weight_transfer.base", reason="needs vLLM")
    model = build("stack")
    source = vllm.WeightSource(model)
    assert isinstance(inspect.getattr_static(vllm.WeightSource, "metadata"), cached_property)
    for name, member in inspect.getmembers(base.WeightSource):
        if not name.startswith("_") and name != "iter_local":  # of parts, which it does not send
            assert hasattr(source, name), name
            if inspect.isfunction(member):
                ours = inspect.signature(getattr(vllm.WeightSource, name))
                assert [*ours.parameters] == [*inspect.signature(member).parameters], name
    theirs = [base.ParamMeta(name, p.dtype, tuple(p.shape)) for name, p in model.named_parameters()]
    fields = [field.name for field in dataclasses.fields(base.ParamMeta)]
    for found, expected in zip(source.metadata, theirs, strict=True):
        assert [getattr(found, x) for x in fields] == [getattr(expected, x) for x in fields]
    assert source.owned_names(0) == [one.name for one in theirs]


def test_sparse_updates_have_the_form_that_vllm_checks() -> None:
    sparse = pytest.importorskip(
        "vllm.distributed.weight_transfer.sparse_nccl_engine", reason="needs vLLM"
    )

    class Client:
        def start_weight_update(self) -> None: ...

        def update_weights(self, update_info: dict[str, Any]) -> None:
            told.append(sparse.SparseNCCLWeightTransferUpdateInfo(**update_info))  # checks it

        def finish_weight_update(self) -> None: ...

    told: list[Any] = []
    sent: list[Tensor] = []
    model = build("stack")
    sw.publish(model, vllm.SparseWeights(Client(), sent.append))
    names = [name for name, _ in model.named_parameters()]
    assert [name for one in told for name in one.names] == names
    assert all(one.dtype is torch.int32 for one in sent[::2])


class Dropping(MemoryTarget):
    """Keeps nothing."""

    def send(self, bucket: Sequence[weights.Update]) -> None:
        pass


@on_ranks(2)
@pytest.mark.parametrize("accepts_runs", [True, False])
def test_the_sender_holds_two_buckets(*, accepts_runs: bool) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(24))).double()
    num_bytes = sum(p.nbytes for p in model.parameters())
    sw.fully_shard(model, units=nn.Linear)
    bucket_bytes, target = num_bytes // 6, Dropping(accepts_runs=accepts_runs)
    for step in range(4):
        with live_bytes() as live:
            sw.publish(model, target, bucket_bytes=bucket_bytes, only_changed=step > 0)
        kept = num_bytes // 2 if step == 1 else 0  # this rank's copy of what was sent
        assert live.peak <= 2 * bucket_bytes + kept, step
        change(model, step, 0.05)

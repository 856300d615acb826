"""``python -m tests.journey``: the way of a newcomer, from a bare environment and the built wheel.

Install, README's quickstart, a port from DDP and one from FSDP1, a training run with a tokenizer
of its own, a rank that is killed with SIGKILL, a resume, an export, and text that transformers
generates. Prints the seconds of each stage. pip resolves and installs all dependencies, in the
versions of constraints.txt.
"""

import json
import signal
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import psutil

from tests.installed import ROOT, Environment, build
from tests.snippets import snippets_of

STEPS = 120
DDP = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
blocks = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(3)]
model = DistributedDataParallel(nn.Sequential(*blocks))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(1 + dist.get_rank())
for step in range(5):
    batch = torch.randn(8, 16)
    loss = (model(batch) - batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(loss.item())
dist.destroy_process_group()
"""
PORT = {
    "from torch.nn.parallel import DistributedDataParallel": "import shardwise as sw",
    "DistributedDataParallel(nn.Sequential(*blocks))": (
        'sw.fully_shard(nn.Sequential(*blocks), units="auto")'
    ),
}
LLAMA = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
RUN = f"""
[run]
directory = "DIRECTORY"
sinks = ["tensorboard"]
[model]
path = "llama"
context = 64
[tokenizer]
vocabulary = 1024
[data]
path = {json.dumps(sysconfig.get_path("stdlib") + "/asyncio")}
cache = "cache"
validation_share = 0.1
[train]
steps = {STEPS}
global_batch = 8
validation_batches = 2
[checkpoint]
every = 10
[sample]
bytes = 20
"""
GENERATE = """
import shutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

shutil.copy("killed/model/config.json", "exported")
tokenizer = AutoTokenizer.from_pretrained("killed/model")
model = AutoModelForCausalLM.from_pretrained("killed/model")
exported = AutoModelForCausalLM.from_pretrained("exported").state_dict()
assert all(torch.equal(tensor, exported[name]) for name, tensor in model.state_dict().items())
tokens = model.generate(**tokenizer("async def ", return_tensors="pt"), max_new_tokens=40)
print(tokenizer.decode(tokens[0]))
"""


class Journey:
    """The stages, in order; each needs those before it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.bare = Environment.create(home / "environment")

    def install(self) -> None:
        """The wheel and what it depends on; extras come later."""
        self.wheel, _ = build(ROOT, self.home / "dist")
        self.bare.install("-c", str(ROOT / "constraints.txt"), str(self.wheel))

    def quickstart(self) -> None:
        [code] = [x.code for x in snippets_of(ROOT / "README.md") if x.file_name == "quickstart.py"]
        (self.home / "quickstart.py").write_text(code, encoding="utf-8")
        alone = self.run("python", "quickstart.py")
        two = self.run("torchrun", "--nproc-per-node", "2", "quickstart.py")
        for output in (alone, two):
            assert len(output.splitlines()) >= 10, output

    def without_extras(self) -> None:
        """The trainer's own model needs none; what needs one says which."""
        tiny = ["train.steps=2", "model.layers=2", "train.global_batch=2", "sample.bytes=4"]
        output = self.run("shardwise", "train", *(word for key in tiny for word in ("--set", key)))
        assert "pip install '.[plot]'" in output, output
        output = self.bare.run(self.home, "shardwise", "verify", "t5", code=2)
        assert "pip install '.[hf]'" in output, output

    def extras(self) -> None:
        wanted = f"{self.wheel}[hf,log,plot,bench,s3]"
        self.bare.install("-c", str(ROOT / "constraints.txt"), wanted)

    def port(self) -> None:
        """Change an import and a call of a DDP script, or the imports of an FSDP1 script."""
        ported = DDP
        for before, after in PORT.items():
            assert before in ported
            ported = ported.replace(before, after)
        examples = ROOT / "examples" / "porting"
        fsdp1, drop_in = (
            (examples / side / "by_hand.py").read_text("utf-8") for side in ("torch", "shardwise")
        )
        assert self.numbers(ported) == self.numbers(DDP)
        assert self.numbers(drop_in) == self.numbers(fsdp1)

    def numbers(self, script: str) -> list[float]:
        """What a script prints on two ranks, to 5 digits."""
        (self.home / "script.py").write_text(script, encoding="utf-8")
        output = self.run("torchrun", "--nproc-per-node", "2", "script.py")
        words = output.translate(str.maketrans("[],", "   ")).split()
        found = sorted(float(f"{float(word):.5g}") for word in words if word[0].isdigit())
        assert len(found) >= 3, output
        return found

    def train(self) -> None:
        """The run that nothing happens to."""
        (self.home / "llama").mkdir()
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **LLAMA}
        (self.home / "llama" / "config.json").write_text(json.dumps(config), encoding="utf-8")
        for name in ("whole", "killed"):
            text = RUN.replace("DIRECTORY", name)
            (self.home / f"{name}.toml").write_text(text, encoding="utf-8")
        self.run("shardwise", "train", "whole.toml")
        losses = self.losses("whole")
        assert len(losses) == STEPS
        assert losses[-1] < losses[0] - 1

    def kill(self) -> None:
        """SIGKILL to one rank, in the middle."""
        training = self.bare.popen(self.home, "shardwise", "train", "killed.toml")
        while training.poll() is None and len(self.losses("killed")) < STEPS // 2:
            time.sleep(0.05)
        ranks = [
            process
            for process in psutil.Process(training.pid).children(recursive=True)
            if "spawn_main" in " ".join(process.cmdline())
        ]
        assert len(ranks) == 2, "the run has ended"
        ranks[1].send_signal(signal.SIGKILL)
        output, _ = training.communicate()
        assert training.returncode == 1, output
        assert f"was killed by SIGKILL (pid {ranks[1].pid})" in output, output
        assert len(self.losses("killed")) < STEPS

    def resume(self) -> None:
        """The same command goes on; the losses are those of the run that nothing happened to."""
        output = self.run("shardwise", "train", "killed.toml")
        assert "resum" in output, output
        assert self.losses("killed") == self.losses("whole")

    def export(self) -> None:
        [*_, last] = sorted((self.home / "killed" / "checkpoints").glob("step-*"))
        self.run("shardwise", "export", str(last), "exported")

    def generate(self) -> None:
        (self.home / "generate.py").write_text(GENERATE, encoding="utf-8")
        output = self.run("python", "generate.py")
        assert "async def " in output, output
        sys.stdout.write(output[output.index("async def ") :])

    def run(self, *words: str) -> str:
        return self.bare.run(self.home, *words)

    def losses(self, run: str) -> list[float]:
        metrics = self.home / run / "metrics.jsonl"
        lines = metrics.read_text("utf-8").splitlines(keepends=True) if metrics.exists() else []
        return [json.loads(line)["loss"] for line in lines if line.endswith("\n")]


STAGES = (
    Journey.install,
    Journey.quickstart,
    Journey.without_extras,
    Journey.extras,
    Journey.port,
    Journey.train,
    Journey.kill,
    Journey.resume,
    Journey.export,
    Journey.generate,
)


def main() -> None:
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="journey-") as home:
        journey = Journey(Path(home))
        for stage in STAGES:
            start = time.monotonic()
            stage(journey)
            show(stage.__name__, start)
        show("all", begin)


def show(what: str, start: float) -> None:
    sys.stdout.write(f"{what:16}{time.monotonic() - start:8.1f} s\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

"""A plain loop of GRPO: generate with the current weights, judge, and take a step.

    torchrun --nproc-per-node=2 examples/rl/grpo.py OUT [--generate there] [--engine ddp]

With ``--generate here``, transformers generates in the processes that train, inside `sw.gathered`.
With ``--generate there``, another process generates, which gets the weights by `sw.publish` through
shared memory: only what the last step has changed.

The model, the vocabulary and the reward are tiny and artificial: a completion of even tokens is
best. OUT/ENGINE-PLACE.json gets the losses, rewards and bytes that were sent, for each step.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import shardwise as sw
from shardwise import weights

PAD, END, WORDS = 0, 1, 64
PROMPT, COMPLETION = 4, 8  # tokens
PROMPTS, GROUP = 4, 4  # on each rank in a step, and completions of each


def make_model(hidden: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 2}
    tokens = {"pad_token_id": PAD, "eos_token_id": END, "bos_token_id": END}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_attention_heads=2, **sizes, **tokens))


def generate(model: LlamaForCausalLM, prompts: Tensor, seed: int) -> Tensor:
    """Sample a group of completions [prompts * group, tokens] of each prompt."""
    torch.manual_seed(seed)
    repeated = prompts.repeat_interleave(GROUP, 0)
    options = {"do_sample": True, "max_new_tokens": COMPLETION, "top_k": 0}
    tokens = model.generate(repeated, attention_mask=torch.ones_like(repeated), **options)
    missing = PROMPT + COMPLETION - tokens.shape[1]
    return torch.nn.functional.pad(tokens, (0, missing), value=PAD)


def advantages(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The reward of each completion, and how much better it is than its group."""
    completions = tokens[:, PROMPT:]
    rewards = ((completions % 2 == 0) & (completions != PAD)).float().mean(1)
    groups = rewards.view(-1, GROUP)
    spread = groups.std(1, keepdim=True) + 1e-4
    return rewards, ((groups - groups.mean(1, keepdim=True)) / spread).view(-1)


def policy_loss(model: torch.nn.Module, tokens: Tensor, advantage: Tensor) -> Tensor:
    scores = model(tokens[:, :-1], attention_mask=(tokens[:, :-1] != PAD).long()).logits
    targets = tokens[:, PROMPT:]
    found = scores[:, PROMPT - 1 :].log_softmax(-1).gather(2, targets[..., None])[..., 0]
    is_written = targets != PAD
    return -(advantage[:, None] * found * is_written).sum() / is_written.sum()


# -- another process generates -----------------------------------------------------------------


class CountingMemory(weights.SharedMemory):
    """Shared memory that counts the bytes of a version."""

    num_bytes = 0

    def begin(self, manifest: weights.Manifest) -> None:
        self.num_bytes = 0
        super().begin(manifest)

    def send(self, bucket: Sequence[weights.Update]) -> None:
        self.num_bytes += sum(update.num_bytes for update in bucket)
        super().send(bucket)


def serve(name: str, hidden: int) -> None:
    """Generate for each line of standard input with the weights that were published last."""
    model, source = make_model(hidden), weights.SharedMemory(name)
    for line in sys.stdin:
        request = json.loads(line)
        model.load_state_dict(weights.read_published(source).tensors)
        found = [
            generate(model, torch.tensor(prompts), seed).tolist()
            for prompts, seed in zip(request["prompts"], request["seeds"], strict=True)
        ]
        print(json.dumps(found), flush=True)


class Server:
    """The process that generates. All ranks call it together; the first one talks to it."""

    def __init__(self, name: str, hidden: int) -> None:
        self.memory = CountingMemory(name)
        if dist.get_rank() == 0:
            command = [sys.executable, __file__, name, "--serve", "--hidden", str(hidden)]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def generate(self, prompts: Tensor, seed: int) -> Tensor:
        requests: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(requests, (prompts.tolist(), seed))
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            of_ranks, seeds = zip(*requests, strict=True)
            self._process.stdin.write(json.dumps({"prompts": of_ranks, "seeds": seeds}) + "\n")
            self._process.stdin.flush()
            found = [json.loads(self._process.stdout.readline())]
        dist.broadcast_object_list(found)
        return torch.tensor(found[0][dist.get_rank()])

    def close(self) -> None:
        if dist.get_rank() == 0:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
            self.memory.remove()


# -- the loop ------------------------------------------------------------------------------------


def main(options: argparse.Namespace) -> list[dict[str, float]]:
    model = make_model(options.hidden)
    trained: torch.nn.Module = model
    if options.engine == "ddp":
        trained = DistributedDataParallel(model)
    else:
        sw.fully_shard(model, units=LlamaDecoderLayer)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=options.lr, fused=True)
    dtype = getattr(torch, options.dtype)
    there = options.generate == "there"
    server = Server(f"grpo-{options.out.name}", options.hidden) if there else None
    ranks, rank, history = dist.get_world_size(), dist.get_rank(), []
    for step in range(options.steps):
        seed = step * ranks + rank
        words = torch.Generator().manual_seed(seed)
        prompts = torch.randint(2, WORDS, (PROMPTS, PROMPT), generator=words)
        model.eval()
        sent = 0
        if server is not None:
            sw.publish(model, server.memory, dtype=dtype, only_changed=True)
            sent = server.memory.num_bytes
            tokens = server.generate(prompts, seed)
        else:
            whole = sw.gathered(model) if options.engine == "shardwise" else nullcontext()
            with whole:  # ranks may generate different numbers of tokens
                tokens = generate(model, prompts, seed)
        model.train()
        rewards, advantage = advantages(tokens)
        loss = policy_loss(trained, tokens, advantage)
        loss.backward()
        norm = sw.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        means = torch.stack([loss.detach(), rewards.mean()])
        dist.all_reduce(means)
        loss_mean, reward = (means / ranks).tolist()
        found = {"loss": loss_mean, "reward": reward, "norm": float(norm), "sent": sent}
        history.append(found)
    if server is not None:
        server.close()
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--engine", choices=["shardwise", "ddp"], default="shardwise")
    parser.add_argument("--generate", choices=["here", "there"], default="here")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--dtype", default="float32", help="of published weights")
    parser.add_argument("--serve", action="store_true")
    options = parser.parse_args()
    if options.serve:
        serve(str(options.out), options.hidden)
    else:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        history = main(options)
        if dist.get_rank() == 0:
            options.out.mkdir(exist_ok=True)
            file = options.out / f"{options.engine}-{options.generate}.json"
            file.write_text(json.dumps(history))
        dist.barrier()
        dist.destroy_process_group()

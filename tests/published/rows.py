"""Published rows to test with."""

import copy
import json
from pathlib import Path
from typing import Any

ROW: dict[str, Any] = {
    "id": "example-7b-64",
    "family": "example",
    "scope": "core",
    "source": {"title": "an example"},
    "model": {
        "name": "Example 7B",
        "arch": "llama",
        "layers": 4,
        "hidden": 1024,
        "heads": 8,
        "kv_heads": 4,
        "ffn": 2816,
        "vocab": 32000,
        "seq": 2048,
        "params": 100_000_000,
    },
    "framework": "PyTorch FSDP1",
    "strategy": {"sharding": "full_shard", "shard_group": 64, "replicas": 1},
    "gpu": "A100-SXM-80GB",
    "gpus": 64,
    "gpus_per_node": 8,
    "interconnect": {"inter_node_gbps_per_node": 1600},
    "micro_batch": 4,
    "grad_accumulation": 2,
    "global_batch": 512,
    "precision": "bf16 mixed (fp32 sharded params, fp32 reduce)",
    "optimizer": "adamw",
    "activation_checkpointing": "none",
    "compile": False,
    "attention": "flash",
    "outcome": "ok",
    "measured": {"mfu": 0.5, "tokens_per_s_per_gpu": 100_000, "peak_mem_gib": 10.0},
    "definition": {
        "flops_formula": "6N+12*L*h*s per token",
        "includes_recompute": False,
        "attention_flops": "full (non-causal)",
        "peak_tflops_used": 312,
        "memory_metric": "peak allocated",
    },
    "config_complete": True,
}


def row_with(changes: dict[str, Any]) -> dict[str, Any]:
    """Return `ROW` with changed fields; "model.layers" is a nested field."""
    row = copy.deepcopy(ROW)
    for path, value in changes.items():
        *parents, name = path.split(".")
        place = row
        for parent in parents:
            place = place[parent]
        place[name] = value
    return row


def write(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"rows": rows}))
    return path

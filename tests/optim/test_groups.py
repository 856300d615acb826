"""Hidden matrices are found, and parameters of unknown modules are named."""

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.models import CASES, build


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.convolution = nn.Conv1d(4, 4, 3)
        self.recurrent = nn.LSTM(4, 5)
        self.last = nn.Linear(4, 7)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.positions = nn.Parameter(torch.ones(9, 4))


def _names(model: nn.Module, group: dict[str, list[nn.Parameter]]) -> list[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for parameter in group["params"]]


def test_a_gpt_has_hidden_matrices_an_embedding_and_vectors() -> None:
    model = build("gpt")
    sw.fully_shard(model, units=CASES["gpt"].units)
    split = {"*.qkv.weight": 3}
    by_options = {
        str({k: v for k, v in group.items() if k != "params"}): _names(model, group)
        for group in sw.optim.parameter_groups(model, split=split)
    }
    assert by_options.pop("{'method': 'adamw'}") == ["embedding.weight"]
    assert all("qkv" in name for name in by_options.pop("{'split': 3}"))
    assert all(name.endswith(".weight") for name in by_options.pop("{}"))
    (vectors,) = by_options.values()
    assert all("norm" in name or name.endswith("bias") for name in vectors)


def test_options_follow_from_how_modules_store_weights() -> None:
    model = Odd()
    groups = sw.optim.parameter_groups(model, others=["positions"])
    found = {name: group for group in groups for name in _names(model, group)}
    assert found["attention.in_proj_weight"]["split"] == 3
    assert found["recurrent.weight_hh_l0"]["split"] == 4
    assert found["convolution.weight"]["stacked"] is False
    assert {found[name]["method"] for name in ("last.weight", "positions")} == {"adamw"}
    assert "method" not in found["attention.out_proj.weight"]
    assert not any(name.startswith("frozen") for name in found)
    sw.optim.Muon(groups)


def test_parameters_of_unknown_modules_are_named() -> None:
    with pytest.raises(sw.PlanError, match=r"positions \(9, 4\): .*others="):
        sw.optim.parameter_groups(Odd())
    with pytest.raises(sw.PlanError, match="'nothing' matches no parameter"):
        sw.optim.parameter_groups(Odd(), matrices=["nothing"])

"""Nested state is restored with its types."""

import json
from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint.tree import decode, encode, in_order


def there_and_back(value: Any) -> Any:
    tensors: dict[str, Tensor] = {}
    text = json.dumps(in_order(encode(value, tensors)), sort_keys=True)  # as in a manifest
    return decode(json.loads(text), tensors.__getitem__)


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        0.1,
        float("inf"),
        "text",
        [1, [2.5, None], (True, "x")],
        {"betas": (0.9, 0.999), "nested": {"a": [], "b": {}, "c": ()}},
        {30: 1, 80: 2, "x": (3,), None: False},
        {"b": 1, "a": {3: {"d": 1, "c": [{"z": 0, "y": 0}]}}},
        Counter({2: 1, 4: 3}),
        Counter("bba"),
        {"$tensor": "not one"},
        10**30,
        deque([1, (2,)], maxlen=2),
        deque([{}]),
        {"momentum_dtype": torch.bfloat16},
    ],
)
def test_plain_data_are_restored(value: Any) -> None:
    returned = there_and_back(value)
    assert returned == value
    assert repr(returned) == repr(value)  # types as well


def test_tensors_and_arrays_are_restored() -> None:
    state: Any = {"a": torch.arange(3), 5: [np.arange(4, dtype=np.uint32), np.float64(0.5)]}
    returned = there_and_back(state)
    assert torch.equal(returned["a"], state["a"])
    array, number = returned[5]
    assert array.dtype == np.uint32
    assert array.tolist() == [0, 1, 2, 3]
    assert number == 0.5


def test_random_states_of_numpy_are_restored() -> None:
    generator = np.random.RandomState(3)
    state = generator.get_state(legacy=True)
    expected = generator.rand()
    generator.set_state(there_and_back(state))
    assert generator.rand() == expected


def test_the_order_of_dicts_is_kept_in_a_checkpoint(tmp_path: Path) -> None:
    model, order = nn.Linear(2, 3), {"b": 1, "a": 2}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    sw.save(tmp_path / "x", model=model, scheduler=scheduler, order=order)
    loaded = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1])
    state = sw.load(tmp_path / "x", model=model, scheduler=loaded).state
    assert list(state["order"].items()) == [("b", 1), ("a", 2)]
    assert list(loaded.milestones.elements()) == [2, 4]


def test_colliding_paths_are_named() -> None:
    with pytest.raises(sw.CheckpointError, match="a/b: two tensors"):
        encode({"a": {"b": torch.ones(1)}, "a/b": torch.ones(1)}, {})

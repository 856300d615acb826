"""The example of sequence parallelism trains as one process does."""

import copy
import runpy
from pathlib import Path

from tests.ranks import on_ranks
from tests.runtime.one_process import (
    adamw,
    assert_close,
    assert_equal_models,
    assert_reduced_once,
    mean_over_ranks,
)

SCRIPT = Path(__file__).parents[1] / "examples" / "parallelism" / "ulysses.py"


@on_ranks(4)
def test_training_equals_one_process() -> None:
    names = runpy.run_path(str(SCRIPT))
    loss_of = names["loss_of"]
    reference = names["Transformer"]().double()
    model = copy.deepcopy(reference)
    row, column = names["shard"](model, 2, 2)
    optimizers = [adamw(m.parameters()) for m in (reference, model)]
    for step in range(2):
        batch = names["batch_of"](step)
        expected = loss_of(reference, *batch)
        expected.backward()
        loss = loss_of(model, *(x.chunk(2)[row].chunk(2, 1)[column] for x in batch))
        loss.backward()
        assert_close(mean_over_ranks(loss), expected.detach(), "loss")
        assert_equal_models(model, reference, step)
        assert_reduced_once(model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, one in model.named_parameters():
        wanted = reference.get_parameter(name).detach()
        assert_close(one.detach().full_tensor(), wanted, name)

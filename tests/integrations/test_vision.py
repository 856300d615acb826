"""Models of texts with images, when only some ranks have images."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import shardwise as sw
from shardwise.errors import RanksDiverged
from tests.models import llama_config
from tests.ranks import on_ranks
from tests.runtime.one_process import options_of

IMAGE, PIXELS, PATCH = 63, 16, 8
STEPS = 4
MORE = ("zero1", "zero2", "ddp", "hfsdp")  # strategies


def llava() -> Any:
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        image_size=PIXELS, patch_size=PATCH, projection_dim=16,
    )  # fmt: skip
    text = llama_config(vocab_size=64)
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE)
    ).double()


def batch(step: int, rank: int) -> dict[str, Tensor]:
    """Texts; every other rank has an image in each, and all or none have in the last two steps."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(3, IMAGE, (2, 8), generator=generator)
    made = {"input_ids": tokens, "labels": tokens}
    if step == STEPS - 2 or (step < STEPS - 2 and (step + rank) % 2 == 0):
        tokens[:, 1 : 1 + (PIXELS // PATCH) ** 2] = IMAGE
        images = torch.rand(2, 3, PIXELS, PIXELS, generator=generator, dtype=torch.float64)
        made["pixel_values"] = images
    return made


@on_ranks(4, thorough=(2,))
@pytest.mark.parametrize(
    "strategy", ["fsdp", "hsdp", *(pytest.param(s, marks=pytest.mark.thorough) for s in MORE)]
)
def test_ranks_without_images_need_not_run_the_vision_tower(strategy: str) -> None:
    alone, sharded = llava(), llava()
    sw.fully_shard(sharded, units=LlamaDecoderLayer, **options_of(strategy))
    world_size, rank = dist.get_world_size(), dist.get_rank()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (alone, sharded)]
    weight = "model.vision_tower.encoder.layers.0.mlp.fc1.weight"
    initial = alone.get_parameter(weight).detach().clone()
    for step in range(STEPS):
        loss = sharded(**batch(step, rank)).loss
        loss.backward()
        for number in range(world_size):
            expected = alone(**batch(step, number)).loss
            (expected / world_size).backward()
            if number == rank:
                torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with sw.gathered(sharded):
        found = dict(sharded.named_parameters())
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(found[name].detach(), parameter.detach(), rtol=0, atol=1e-10)
    assert not torch.equal(initial, alone.get_parameter(weight))


@on_ranks(2)
def test_a_tower_that_is_divided_into_units_is_named_with_the_way_out() -> None:
    model = sw.fully_shard(llava(), units="auto")
    with pytest.raises(RanksDiverged) as caught:
        model(**batch(0, dist.get_rank())).loss.backward()
    text = str(caught.value)
    assert "rank 0 entered model.vision_tower.encoder.layers.0" in text
    assert "such as a vision tower" in text
    assert text.endswith("none of their blocks may be a unit.")

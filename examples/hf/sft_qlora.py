"""The program of sft_lora.py with a 4-bit base (QLoRA, with bitsandbytes).

    torchrun --nproc-per-node=2 examples/hf/sft_qlora.py OUT [--resume OUT/trainer/checkpoint-4]

The weights are packed into float32 tensors, which are sharded and gathered unchanged. To compute in
bfloat16, pack them into bfloat16 tensors.
"""

from pathlib import Path

import torch
from sft_lora import main, make_base
from transformers import BitsAndBytesConfig, LlamaForCausalLM
from trl import SFTConfig

PACKED = torch.bfloat16 if torch.cuda.is_available() else torch.float32


def make_quantized(arguments: SFTConfig) -> LlamaForCausalLM:
    path = Path(arguments.output_dir).with_name("base")
    with arguments.main_process_first():
        make_base(arguments).save_pretrained(path)
    options = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=PACKED,
        bnb_4bit_quant_storage=PACKED,
    )
    return LlamaForCausalLM.from_pretrained(path, quantization_config=options, dtype=PACKED)


if __name__ == "__main__":
    main(make_quantized)

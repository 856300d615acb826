"""The trainer: trains a GPT or a Hugging Face model, sharded over ranks, with one command."""

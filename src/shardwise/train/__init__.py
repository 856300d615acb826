"""The trainer: a small GPT on real text, sharded over the ranks, from one command."""

"""Ranks and their failures: joining a launcher's ranks, or starting local ones."""

"""What single parts of the engine cost: ``python -m benchmarks.guard``, ``.padding``."""

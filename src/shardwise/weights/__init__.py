"""Whole weights out of a sharded model: `full_tensors`, and `publish` to an inference engine."""

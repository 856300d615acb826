"""The benchmark: shardwise, DDP, FSDP1, FSDP2, ZeroRedundancyOptimizer and DeepSpeed.

It prints measurements and asserts no time. The other engines are imported in `baselines` only.
"""

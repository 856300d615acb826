"""The benchmark: compares shardwise with DDP, FSDP1, FSDP2, ZeroRedundancyOptimizer and DeepSpeed.

It prints measurements and asserts no times. Only `baselines` imports the other engines.
"""

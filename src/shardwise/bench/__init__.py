"""The harness: shardwise beside DDP, FSDP1, FSDP2, ZeroRedundancyOptimizer and DeepSpeed.

It prints what was measured and asserts no time. Peers are imported here and nowhere else.
"""

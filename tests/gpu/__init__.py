"""``python -m tests.gpu``: what a GPU has to show, in less than nine minutes on one card.

Every check trains on the device, compares with plain PyTorch on the same device, and runs in
processes of its own with a deadline, so that a crash or a hang loses nothing. It needs Python,
torch, numpy and shardwise; a check that needs more is skipped, with the reason.
"""

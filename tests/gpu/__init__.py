"""``python -m tests.gpu``: what a GPU has to show, in less than nine minutes on one card.

Every check trains on the device, compares with plain PyTorch on the same device, and runs in
processes of its own with a deadline, so that a crash or a hang loses nothing. It needs Python,
torch, numpy and shardwise; a check that needs more is skipped, with the reason.

Without a card, ``--device cpu`` and ``--device simulated`` run what makes sense there. The
simulated device runs jobs of other streams late and checks the order of every access to memory
(`tests/streams`). What only a card can show:

- NCCL: its groups, operators, abort, symmetric and registered memory;
- the accelerator API of torch on a real device, and that no thread of the engine changes or leaves
  the current device;
- the caching allocator: live and reserved memory against the certificate, out of memory on purpose
  and the step after it;
- that a steady step never makes the host wait (``set_sync_debug_mode``), and how many kernels and
  allocator calls it takes;
- time: per step, per unit on the host, MFU, beside FSDP2;
- several cards: everything in the section "cards".
"""

"""Which engines share processes, so that all of their models fit into the machine's memory."""

from collections.abc import Sequence

from shardwise.bench.engines import ENGINES
from shardwise.bench.setting import Setting

__all__ = ["plan_heats"]

# Bytes a parameter: itself, its gradient and AdamW's two states; a sharded engine also keeps some
# units for the next step, or memory that was freed and not given back.
WHOLE, FOR_GATHERED = 16, 4
SHARE_OF_MEMORY = 0.6  # the rest is for activations, and for the others on this machine


def plan_heats(setting: Setting, num_parameters: int, available_bytes: int) -> list[list[str]]:
    """Groups of engines that take turns; the base is first in each.

    Args:
        setting: its engines, the base first.
        num_parameters: of the model.
        available_bytes: of the machine; 0 is unknown, and puts everything into one heat.
    """
    base, *others = setting.engines
    room = int(SHARE_OF_MEMORY * available_bytes)
    heats: list[list[str]] = [[base]]
    for name in others:
        taken = _bytes([*heats[-1], name], setting.ranks, num_parameters)
        if available_bytes and taken > room and len(heats[-1]) > 1:
            heats.append([base])
        heats[-1].append(name)
    return heats


def _bytes(names: Sequence[str], ranks: int, num_parameters: int) -> int:
    by_rank = (
        WHOLE if ENGINES[name].keeps_whole else WHOLE // ranks + FOR_GATHERED for name in names
    )
    return sum(by_rank) * num_parameters * ranks

"""How a checkpoint and what is to be loaded from it compare, tensor by tensor."""

from dataclasses import dataclass, field

from shardwise.errors import CheckpointError

__all__ = ["Report"]

_SHOWN = 12  # of each kind; a wrong model has thousands


@dataclass
class Report:
    """Lists of names; the last two with what was expected and what was found."""

    missing: list[str] = field(default_factory=list)  # asked for, and not in the checkpoint
    unexpected: list[str] = field(default_factory=list)  # in the checkpoint, and nobody's
    reshaped: list[str] = field(default_factory=list)
    retyped: list[str] = field(default_factory=list)  # converted without a loss
    narrowed: list[str] = field(default_factory=list)  # would be rounded

    def check(self, where: str, *, strict: bool, cast: bool) -> None:
        """Refuse to load unless all fits.

        Raises:
            CheckpointError: with every list that is in the way.
        """
        problems = []
        if strict:
            problems += [
                ("missing in the checkpoint", self.missing),
                ("unexpected in the checkpoint", self.unexpected),
            ]
        problems.append(("of another shape", self.reshaped))
        if not cast:
            problems.append(("of a dtype that would be rounded (cast=True does it)", self.narrowed))
        found = [_section(title, names) for title, names in problems if names]
        if found:
            advice = "; to load what fits, pass only=[patterns] or strict=False" if strict else ""
            raise CheckpointError(f"{where} does not fit{advice}\n" + "\n".join(found))

    def __str__(self) -> str:
        lists = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "reshaped": self.reshaped,
            "re-typed": self.retyped,
            "narrowed": self.narrowed,
        }
        return "\n".join(_section(title, names) for title, names in lists.items() if names)


def _section(title: str, names: list[str]) -> str:
    more = f"\n  and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{title}: {len(names)}\n  " + "\n  ".join(names[:_SHOWN]) + more

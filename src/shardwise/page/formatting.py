"""Formats numbers for the terminal and the page."""

from rich.filesize import decimal

__all__ = ["NOTHING", "bytes_text", "percent", "seconds_text"]

NOTHING = "-"
_SCALES = ((1.0, "s", 1.0), (1e-3, "ms", 1e3), (0.0, "µs", 1e6))


def seconds_text(seconds: float) -> str:
    """Format with three digits, such as 41.3 ms; zero is a dash."""
    if not seconds:
        return NOTHING
    _, unit, factor = next(scale for scale in _SCALES if abs(seconds) >= scale[0])
    value = seconds * factor
    digits = max(0, 2 - len(str(int(abs(value)))) + 1)
    return f"{value:.{digits}f} {unit}"


def bytes_text(num_bytes: float) -> str:
    """Format bytes, such as 180.4 MB; zero is a dash."""
    return decimal(round(num_bytes)) if num_bytes else NOTHING


def percent(share: float) -> str:
    return f"{share:.1%}" if share else NOTHING

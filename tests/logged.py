"""What a logger of this process says."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def logged(name: str, file: Path | None = None) -> Iterator[list[str]]:
    """The messages of logger ``name``, as they come; pytest's fixture sees no other rank.

    They are appended to ``file`` too, for other ranks.
    """
    messages: list[str] = []

    def emit(record: logging.LogRecord) -> None:
        messages.append(record.getMessage())
        if file is not None:
            with file.open("a", encoding="utf-8") as stream:
                stream.write(f"{record.getMessage()}\n")

    handler = logging.Handler()
    handler.emit = emit  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)

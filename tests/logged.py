"""What a logger of this process says."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged(name: str) -> Iterator[list[str]]:
    """The messages of logger ``name``, as they come; pytest's fixture sees no other rank."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)

"""``python -m shardwise.outer HOST:PORT``: run the hub that connects replicas."""

import asyncio
import logging
import sys

from shardwise.outer.serving import serve


def main() -> None:
    """Run a hub until the process is killed."""
    host, _, port = sys.argv[1].rpartition(":") if len(sys.argv) == 2 else ("", "", "")  # noqa: PLR2004
    if not port.isdecimal():
        sys.exit("usage: python -m shardwise.outer HOST:PORT")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    asyncio.run(serve(host, int(port)))


main()

"""Run a hub in this process, possibly on a thread."""

import asyncio
import logging
import threading
from concurrent.futures import Future

from shardwise.outer.hub import Hub

__all__ = ["HubThread", "serve"]

logger = logging.getLogger("shardwise.outer")

_ABORT_SECONDS = 0.01  # between attempts to abort all connections


async def serve(host: str, port: int, started: "Future[tuple[Hub, int]] | None" = None) -> None:
    """Run a hub at ``host:port`` until cancelled, then wait for all tasks of the event loop.

    Args:
        host: the address to listen at.
        port: the port to listen at; 0 chooses a free one.
        started: receives the hub and its port once it listens.
    """
    hub = Hub()
    server = await asyncio.start_server(hub.accept, host, port, limit=1 << 22)
    heartbeats = asyncio.create_task(hub.send_heartbeats())
    try:
        port = server.sockets[0].getsockname()[1]
        logger.info("hub at %s:%d", host, port)
        if started is not None:
            started.set_result((hub, port))
        await server.serve_forever()
    finally:
        heartbeats.cancel()
        server.close()
        # A connection that was just accepted has a task before it is in `hub.connections`.
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for writer in hub.connections.values():
                writer.transport.abort()
            await asyncio.wait(others, timeout=_ABORT_SECONDS)


class HubThread:
    """A hub on a thread of this process. A context manager that stops it at the end."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        started: Future[tuple[Hub, int]] = Future()
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(serve(host, port, started))
        self._thread = threading.Thread(target=self._run, name="shardwise-hub", daemon=True)
        self._thread.start()
        self.hub, port = started.result(timeout=60)
        self.address = f"{host}:{port}"

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def stop(self) -> None:
        """End the hub as if its process had been killed."""
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def __enter__(self) -> "HubThread":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

"""A review in a process of its own that starts at once: forked from one that has imported everything."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, ForkServerContext
from pathlib import Path

from csda.review.server import serve
from csda.review.session import open_folder, open_run

_FORKSERVER = multiprocessing.get_context("forkserver")
_FORKSERVER.set_forkserver_preload(["csda.review.server", "csda.review.session", "uvicorn", "torch", "pytest"])


def _serve(told: Connection, folder: Path, out: Path | None, classes: tuple[str, ...], port: int, cache: str) -> None:
    os.environ["CSDA_CACHE"] = cache
    session = open_run(folder, "me") if out is None else open_folder(folder, out, classes, "me")
    serve(session, port=port, announce=told.send)


class Server:
    """Serves a run, or a folder with `out`, at one port, also after it was killed."""

    def __init__(
        self,
        folder: Path,
        out: Path | None = None,
        classes: tuple[str, ...] = (),
        processes: ForkContext | ForkServerContext = _FORKSERVER,
    ) -> None:
        self.folder, self.out, self.classes, self.port, self.processes = folder, out, classes, 0, processes
        self.start()

    def start(self) -> None:
        told, tell = self.processes.Pipe(duplex=False)
        words = (tell, self.folder, self.out, self.classes, self.port, os.environ["CSDA_CACHE"])
        self.process = self.processes.Process(target=_serve, args=words)
        self.process.start()
        tell.close()
        self.address = str(told.recv()).partition("\n")[0]
        self.port = int(self.address.rpartition(":")[2].strip("/"))
        told.close()

    def end(self, by: signal.Signals = signal.SIGTERM) -> None:
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, by)
        self.process.join()

"""The servers that `benchmarks/fanout.py` compares, each a process of its own on a free port.

All do the same: `GET /events` is an SSE stream, `POST /publish` sends one event of about 200 bytes
to every stream. Ours runs as `python -m benchmarks.streaming fast`, and the same endpoint below
plain uvicorn as `plain`; nchan is nginx with the module of that name.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import uvicorn
from starlette.types import Receive, Scope, Send

from headwater.gateway.http.server import new_event_loop, serve
from headwater.gateway.http.transports import Sink, open_stream
from headwater.model import Update
from headwater.protocol import Deltas, Frame

NCHAN = Path("/usr/lib/nginx/modules/ngx_nchan_module.so")
AT = datetime(2026, 1, 1, tzinfo=UTC)

_NGINX = """
load_module {module};
daemon off;
worker_processes 1;
pid {folder}/pid;
error_log stderr crit;
events {{ worker_connections 20000; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  nchan_shared_memory_size 128M;
  server {{
    listen 127.0.0.1:{port} backlog=2048;
    keepalive_requests 100000000;
    location = /publish {{ nchan_publisher; nchan_channel_id all; nchan_message_buffer_length 1; }}
    location = /events {{ nchan_subscriber eventsource; nchan_channel_id all; }}
  }}
}}
"""


class Server:
    """A running server: where it listens, and what its processes have used."""

    def __init__(self, port: int, pid: int) -> None:
        self.port = port
        self._pid = pid

    def cpu_seconds(self) -> float:
        ticks = 0
        for pid in self._processes():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def memory_bytes(self) -> int:
        """What the processes have in memory, shared pages divided by those who share them."""
        total = 0
        for pid in self._processes():
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += sum(int(kib) for kib in re.findall(r"^Pss: +(\d+) kB", text, re.M))
        return total * 1024

    def _processes(self) -> list[int]:
        children = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text()
        return [self._pid, *map(int, children.split())]


@contextmanager
def ours(kind: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "benchmarks.streaming", kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Server(int(process.stdout.readline()), process.pid)
        finally:
            process.kill()


@contextmanager
def nchan() -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="headwater-") as folder:
        Path(folder).chmod(0o711)
        configuration = Path(folder, "nginx.conf")
        configuration.write_text(_NGINX.format(folder=folder, port=port, module=NCHAN))
        command = ["nginx", "-p", folder, "-e", "stderr", "-c", str(configuration)]
        with subprocess.Popen(command) as process:
            try:
                _await_listening(port, process)
                yield Server(port, process.pid)
            finally:
                process.terminate()


def has_nchan() -> bool:
    return shutil.which("nginx") is not None and NCHAN.exists()


def _await_listening(port: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            pass
    raise RuntimeError(f"nginx ended with status {process.returncode}")


# ------------------------------------------------------------------------ our own, in its process


class _App:
    def __init__(self) -> None:
        self._sinks: set[Sink] = set()
        self._count = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == "/events":
            await self._stream(scope, receive, send)
        else:
            self._publish()
            await send({"type": "http.response.start", "status": 204})
            await send({"type": "http.response.body"})

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        sink = await open_stream(scope, receive, send, content_type="text/event-stream")
        self._sinks.add(sink)
        await sink.closed()
        self._sinks.discard(sink)

    def _publish(self) -> None:
        self._count += 1
        row = {"id": self._count, "status": "open"}
        frame = Frame(Deltas(1, f"{self._count}:{self._count}:", AT, (Update((1,), row, 0),)))
        for sink in self._sinks:
            sink.send(frame)


async def _serve(kind: str) -> None:
    if kind == "fast":
        await serve(_App(), host="127.0.0.1", port=0, drain=0, ready=_say)
    else:
        listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
        _say(listening.getsockname()[1])
        config = uvicorn.Config(
            _App(), http="httptools", log_config=None, access_log=False, lifespan="off"
        )
        await uvicorn.Server(config).serve([listening])


def _say(port: int) -> None:
    print(port, flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(sys.argv[1]))

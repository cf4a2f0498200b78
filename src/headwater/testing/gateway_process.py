"""A gateway process, `headwater serve` on a free port, for tests and benchmarks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from headwater.hub.drift import DRIFT

SETTINGS: dict[str, Any] = {"gateway_metrics": "open"}
"""The default settings of these gateways."""


class Served:
    """A running gateway."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self.log = log

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, trust_env=False, **options)

    def post(self, path: str, body: object = None) -> httpx.Response:
        """The response to a request with this body, which must succeed."""
        answer = httpx.post(self.url + path, json=body or {}, timeout=30, trust_env=False)
        return answer.raise_for_status()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        found = 0.0
        for line in self.get("/metrics").text.splitlines():
            full, _, value = line.rpartition(" ")
            base, _, rest = full.partition("{")
            if base == name and wanted <= set(rest.rstrip("}").split(",")):
                found += float(value)
        return found

    def memory(self) -> int:
        """Bytes of memory that only this process uses."""
        for line in Path(f"/proc/{self.process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("smaps_rollup has no Pss")

    def cpu(self) -> float:
        """Seconds of processor time the process has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> int:
        """Ask it to stop, and wait until it has."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def serving(
    database: str,
    folder: Path,
    *,
    program: str | None = None,
    port: int = 0,
    options: Sequence[str] = (),
    **settings: Any,
) -> Iterator[Served]:
    """Run a gateway inside the block. `program` is module:name in `folder`; `options` are
    further ones of `headwater serve`."""
    values = {"url": database, **SETTINGS, **settings}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HEADWATER_")}
    for name, value in values.items():
        text = ",".join(value) if isinstance(value, list | tuple) else str(value)
        environment[f"HEADWATER_{name.upper()}"] = text
    command = [sys.executable, "-m", "headwater", "serve", "--port", str(port), "--json"]
    log = folder / f"gateway-{os.urandom(4).hex()}.log"
    with log.open("w") as complaints:
        process = subprocess.Popen(
            [*command, *options, *([program] if program else [])],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"the gateway did not start: {log.read_text()}"
        yield Served(process, json.loads(line)["url"], log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        assert process.stdout is not None
        process.stdout.close()
    drift = [line for line in log.read_text().splitlines() if DRIFT in line]
    assert not drift, drift[0]

"""Starts Spark's Java for this program, and notices when it has ended.

Java needs a second before it can be used, so `begin` starts it before Python imports what it needs,
and `connected` waits for it. The first start on a machine uses Spark's own scripts, which run
another Java to find out the command line. That command line is stored, and later starts use it
directly, unless anything that the scripts look at has changed.
"""

from __future__ import annotations

import atexit
import logging
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from shutil import rmtree
from threading import Lock
from typing import TYPE_CHECKING, Any

import msgspec

from headwater.errors import PipelineError
from headwater.pipeline.permissions import make_private, read_private
from headwater.pipeline.spark import log_file
from headwater.pipeline.spark.log_file import LogPipe

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOOK_SECONDS = 0.01

_START_SECONDS = 300.0
"""How long a start of Spark's Java may take, on a machine that has other work."""

_COMMAND_BYTES_MAX = 1_000_000

_COMMANDS_MAX = 8
"""Command lines that are stored. With more, the oldest is removed."""

_TOKEN = "SPARK_CONNECT_AUTHENTICATE_TOKEN"

_LAUNCH_SETTINGS = ("spark.driver.", "spark.jars", "spark.files", "spark.archives", "spark.submit.")
"""Settings that Java must have when it starts. It gets the others with the context."""


class Launch(msgspec.Struct, frozen=True):
    """What Spark's Java is started with."""

    folder: Path
    home: Path
    java: Path
    settings: Mapping[str, str]
    umask: int

    @classmethod
    def of(
        cls, folder: Path, home: Path, java: Path, settings: Mapping[str, str], umask: int
    ) -> Launch:
        """A launch for a session with these settings."""
        # On a cluster, all of them: its own scripts may read any.
        is_local = "spark.master" not in settings
        kept = settings if not is_local else _needed(settings)
        return cls(folder, home, java, dict(kept), umask)

    def script(self) -> list[str]:
        """The command that uses Spark's scripts."""
        options = (part for k, v in self.settings.items() for part in ("--conf", f"{k}={v}"))
        arguments = shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell"))
        return [str(self.home / "bin" / "spark-submit"), *options, *arguments]

    def environment(self) -> dict[str, str]:
        named = {"SPARK_HOME": str(self.home), "JAVA_HOME": str(self.java)}
        return dict(os.environ) | named | {"SPARK_CONNECT_MODE": "0"}

    def stored_command(self) -> Path | None:
        """The file with the command line of an equal launch, whether it exists or not. None where
        Spark's scripts run a script of the user."""
        conf = Path(os.environ.get("SPARK_CONF_DIR", self.home / "conf"))
        if (conf / "spark-env.sh").exists() or "PYSPARK_GATEWAY_PORT" in os.environ:
            return None
        changed = []
        for path in (conf / "spark-defaults.conf", self.home / "jars", self.java / "bin" / "java"):
            with suppress(OSError):
                changed.append((str(path.resolve()), path.stat().st_mtime_ns))
        own = {k: v for k, v in self.environment().items() if k.startswith(("SPARK_", "JAVA_"))}
        own.pop(_TOKEN, None)
        key = repr((version("pyspark"), self.script(), changed, sorted(own.items())))
        name = blake2b(key.encode(), digest_size=12).hexdigest()
        return self.folder / "commands" / f"{name}.json"


def _needed(settings: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in settings.items() if k.startswith(_LAUNCH_SETTINGS)}


class _Command(msgspec.Struct, frozen=True):
    """A command line of Java, and what Spark's scripts added to its environment."""

    arguments: list[str]
    environment: dict[str, str]


class StartingJava:
    """A Java that was started for this program."""

    def __init__(self, launch: Launch, token: str | None = None) -> None:
        self.launch = launch
        self.token = token
        self.log = LogPipe()
        self._folder = Path(tempfile.mkdtemp(prefix="headwater-java-"))
        self._info = self._folder / "port"
        self._stored = launch.stored_command()
        command = _read_command(self._stored)
        environment = launch.environment() | {"_PYSPARK_DRIVER_CONN_INFO_PATH": str(self._info)}
        if token is not None:
            environment[_TOKEN] = token
        self._environment = environment
        self._is_known = command is not None
        self.process = subprocess.Popen(
            launch.script() if command is None else command.arguments,
            env=environment if command is None else environment | command.environment,
            # Java ends when this pipe does: when this program has ended.
            stdin=subprocess.PIPE,
            stdout=self.log.descriptor,
            stderr=self.log.descriptor,
            # Ctrl-C is for this program, which stops Spark in order.
            start_new_session=True,
            umask=launch.umask,
        )
        self.log.close()

    def connect(self, log: Path) -> Any:
        """PySpark's gateway to it, once it listens. Its output is written to the file `log`.
        PipelineError if it ends instead."""
        from pyspark.java_gateway import launch_gateway

        self.log.write_to(log)
        log_file.use(log)
        try:
            port, secret = self._address(log)
        finally:
            rmtree(self._folder, ignore_errors=True)
        with _announced(port, secret):
            gateway = launch_gateway()  # type: ignore[no-untyped-call]
        gateway.proc = self.process
        if not self._is_known and self._stored is not None:
            _store_command(self._stored, self.process.pid, self._environment)
        return gateway

    def _address(self, log: Path) -> tuple[int, str]:
        deadline = time.monotonic() + _START_SECONDS
        while not self._info.exists():
            if time.monotonic() > deadline:
                self.kill()
                raise PipelineError(
                    f"Spark did not start within {_START_SECONDS:.0f} s",
                    hint=f"The output of Java is in {log}.",
                    retryable=True,
                )
            if self.process.poll() is not None:
                self.log.join()
                if self._is_known and self._stored is not None:
                    self._stored.unlink(missing_ok=True)
                raise PipelineError(
                    f"Spark did not start: {log_file.last_line(log) or 'Java ended at once'}",
                    hint=f"The output of Java is in {log}. headwater doctor checks the installed"
                    " Java.",
                )
            time.sleep(_LOOK_SECONDS)
        content = self._info.read_bytes()
        length = int.from_bytes(content[4:8], "big")
        return int.from_bytes(content[:4], "big"), content[8 : 8 + length].decode()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        rmtree(self._folder, ignore_errors=True)


_starting: StartingJava | None = None
_lock = Lock()


def begin(launch: Launch, token: str | None = None) -> None:
    """Start Java for the session that this program is going to make."""
    global _starting
    with _lock:
        if _starting is None:
            _starting = StartingJava(launch, token)
            atexit.register(discard)


def discard() -> None:
    """End a Java that was begun and is not needed."""
    if java := _taken():
        java.kill()


def begun_token() -> str | None:
    """The token that the begun Java has in its environment."""
    with _lock:
        return None if _starting is None else _starting.token


def _taken() -> StartingJava | None:
    global _starting
    with _lock:
        java, _starting = _starting, None
    return java


def connected(launch: Launch, log: Path) -> None:
    """Start Java and connect PySpark with it, unless this program has one. One that was begun is
    used if it fits."""
    from pyspark import SparkContext

    if SparkContext._gateway is not None:
        discard()
        return
    java = _taken()
    token = os.environ.get(_TOKEN)
    if java is not None and (java.launch != launch or token not in (None, java.token)):
        java.kill()
        java = None
    java = java or StartingJava(launch)
    try:
        gateway = java.connect(log)
    except BaseException:
        java.kill()
        raise
    SparkContext._ensure_initialized(gateway=gateway)


@contextmanager
def _announced(port: int, secret: str) -> Iterator[None]:
    """PySpark connects to this port inside the block, instead of starting Java."""
    named = {"PYSPARK_GATEWAY_PORT": str(port), "PYSPARK_GATEWAY_SECRET": secret}
    os.environ.update(named)
    try:
        yield
    finally:
        for name in named:
            os.environ.pop(name, None)


def _read_command(path: Path | None) -> _Command | None:
    content = None if path is None else read_private(path, _COMMAND_BYTES_MAX)
    if content is None:
        return None
    try:
        return msgspec.json.decode(content, type=_Command)
    except msgspec.DecodeError:
        return None


def _store_command(path: Path, pid: int, given: Mapping[str, str]) -> None:
    """Store the command line of a running Java for the next start. Does nothing where the system
    does not show it."""
    with suppress(OSError, UnicodeDecodeError):
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
        if "org.apache.spark.deploy.SparkSubmit" not in arguments:
            return
        lines = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        named = dict(line.split("=", 1) for line in lines if "=" in line)
        shell = ("_", "SHLVL", "PWD", "OLDPWD")
        added = {k: v for k, v in named.items() if given.get(k) != v and k not in shell}
        make_private(path.parent)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(msgspec.json.encode(_Command(arguments, added)))
        unfinished.rename(path)
        known = sorted(path.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)
        for old in known[:-_COMMANDS_MAX]:
            old.unlink(missing_ok=True)


# ------------------------------------------------------------------------ the end of Java


def without_tracebacks(session: SparkSession) -> None:
    """When Java ends, py4j and PySpark print tracebacks of their own threads. What the program did
    fails too, with an error that says why."""
    # py4j logs some of them as the root logger, whose own level is for the whole program.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(_is_not_of_py4j)
    server = getattr(session.sparkContext, "_accumulatorServer", None)
    if server is not None:
        server.handle_error = lambda *_: None


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    return Path(record.pathname).parent.name != "py4j"


class SparkLost(PipelineError):
    """Spark's Java has ended, or cannot be reached, while it was needed."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            reason,
            hint="No change is lost. If it ran out of memory: set [lake] memory to more bytes. The"
            " output of Java is in the log file of Spark, whose path headwater status prints.",
            retryable=True,
        )


def ended(patience: float = 0.0) -> str | None:
    """Why Spark's Java has ended, in words; None while it runs. One that does not answer any more
    may take some seconds to end."""
    from pyspark import SparkContext

    process = getattr(SparkContext._gateway, "proc", None)
    if process is None:
        return None
    try:
        code = process.wait(patience)
    except subprocess.TimeoutExpired:
        return None
    if code == _OUT_OF_MEMORY:
        return "Spark's Java ran out of memory"
    how = f"was killed (signal {-code})" if code < 0 else f"ended with exit code {code}"
    return f"Spark's Java {how}"


def lost(error: BaseException) -> SparkLost | None:
    """An error as the loss of Spark; None for any other error."""
    kinds = {each.__name__ for each in type(error).__mro__}
    is_silent = "Py4JError" in kinds and "Py4JJavaError" not in kinds
    if isinstance(error, SparkLost):
        return error
    if reason := ended(_END_SECONDS if is_silent or isinstance(error, OSError) else 0.0):
        return SparkLost(reason)
    if isinstance(error, ConnectionError) or "Py4JNetworkError" in kinds:
        return SparkLost(f"the connection to Spark's Java was lost: {error}")
    return None


_END_SECONDS = 5.0
"""How long a Java that does not answer may take to end, for an error that says why."""

_OUT_OF_MEMORY = 3
"""The exit code of Java with the option ExitOnOutOfMemoryError."""


def forget() -> None:
    """Make PySpark forget a Java that has ended, so that this program can start another. What still
    runs of it is ended."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    gateway, context = SparkContext._gateway, SparkContext._active_spark_context
    process = getattr(gateway, "proc", None)
    if process is not None and process.poll() is None:
        process.kill()
        process.wait()
    if context is not None:
        server = getattr(context, "_accumulatorServer", None)
        if server is not None:
            server.shutdown()
        context._jsc = None
    if gateway is not None:
        with suppress(Exception):
            gateway.shutdown()
    with SparkContext._lock:
        SparkContext._active_spark_context = SparkContext._gateway = SparkContext._jvm = None
    SparkSession._instantiatedSession = SparkSession._activeSession = None

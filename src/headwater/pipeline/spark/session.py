"""The Spark session: settings for a stream of small batches on one machine; on a cluster, the
cluster's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING

from headwater.errors import ConfigError
from headwater.limits import EMBEDDED_SOCKET_PATH_BYTES_MAX
from headwater.pipeline import permissions
from headwater.pipeline.packages import require, spark_needed
from headwater.pipeline.permissions import make_private
from headwater.pipeline.spark import class_archive, start_times
from headwater.pipeline.spark.connect_server import missing
from headwater.pipeline.spark.java import find_java
from headwater.pipeline.spark.launch import Launch, connected, without_tracebacks
from headwater.pipeline.spark.launch import begin as begin_java
from headwater.pipeline.spark.memory import heap_setting
from headwater.pipeline.spark.shared_session import find

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ALWAYS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.streaming.minBatchesToRetain": "10",
    # Beyond 32 paths Spark starts a job to list them: 12 s instead of 0.3.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "100000",
    # Rows may have a megabyte each. The defaults (4,096 and 10,000 rows, without a bound on bytes)
    # need gigabytes then; smaller batches of small rows cost next to nothing.
    "spark.sql.parquet.columnarReaderBatchSize": "64",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "200",
    "spark.sql.execution.arrow.maxBytesPerBatch": str(8 * 1024 * 1024),
    # The streams of Java hold what they wrote or read until they are reset, after 100 objects: a
    # stored DataFrame has 4 MB in each.
    "spark.serializer.objectStreamReset": "1",
    # Rows of a window or of a join that have the same key; without this, by their number.
    **{
        f"spark.sql.{node}Exec.buffer.spill.size.threshold": str(16 * 1024 * 1024)
        for node in ("window", "sortMergeJoin", "cartesianProduct")
    },
}

LOCAL = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",
    # Few rows pass through the JVM: full optimization of code during the start costs more time than
    # it saves. So it begins after ten times the usual number of calls.
    "spark.driver.extraJavaOptions": (
        "-XX:+UseParallelGC"
        " -XX:Tier4InvocationThreshold=50000 -XX:Tier4MinInvocationThreshold=6000"
        " -XX:Tier4CompileThreshold=150000 -XX:Tier4BackEdgeThreshold=400000"
    ),
    # Without it every batch of a Python source stalls for 40 ms.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}

_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_MEMORY = "spark.driver.memory"
_SUBMIT_OPTIONS = "SPARK_SUBMIT_OPTS"

_END_WITHOUT_MEMORY = "-XX:+ExitOnOutOfMemoryError"
"""Without memory Java ends, and is started again: nothing it does later could be relied on."""

LOCAL_MASTER = "local[*,4]"
"""All cores; a task may fail four times, as on a cluster. `local[*]` gives up after one."""


def spark_session(
    folder: str | Path,
    *,
    master: str = LOCAL_MASTER,
    name: str = "headwater",
    settings: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> SparkSession:
    """A session with the source `headwater` registered. The folder is for Spark's files on this
    machine: a script that starts Java, temporary files. Its output is written to the file `log`, if
    given. PipelineError if it does not start; ConfigError for a Spark Connect server."""
    require()
    folder = Path(folder)
    launch, chosen = _prepared(folder, master, settings or {})
    if log is not None and launch is not None:
        connected(launch, log)
        start_times.mark("java")
    chosen |= {"spark.master": master, "spark.app.name": name}

    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    for key, value in chosen.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    if log is not None:
        without_tracebacks(session)
    start_times.mark("session")

    _register(session)
    return session


def _register(session: SparkSession) -> None:
    from headwater.pipeline.stream.source import HeadwaterSource

    session.dataSource.register(HeadwaterSource)


def refuse_connect(master: str | None, settings: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError where Spark would be a Spark Connect server. A pipeline plans and commits
    its batches in the process of Spark's driver, and over Connect that is the server's."""
    remote = (settings or {}).get("spark.remote") or os.environ.get("SPARK_REMOTE")
    if master is not None and master.startswith("sc:"):
        given, remote = "the master", master
    elif remote:
        given = "spark.remote, or the variable SPARK_REMOTE,"
    else:
        return
    address, _, _ = remote.partition(";")  # what follows may be a token
    raise ConfigError(
        f"{given} is {address}, a Spark Connect server: a pipeline does not run over Spark Connect,"
        " because it commits batches in the process of Spark's driver",
        hint="Give the cluster itself, as in --master spark://host:7077, yarn or k8s://…; for the"
        " cores of this machine, leave --master out and SPARK_REMOTE unset.",
    )


def begin(
    folder: Path, settings: Mapping[str, str], *, token: str | None = None, umask: int | None = None
) -> None:
    """Start Java for a session on this machine that will be made with these settings. What is
    imported meanwhile costs no time."""
    launch, _ = _prepared(folder, LOCAL_MASTER, settings, umask)
    if launch is not None:
        begin_java(launch, token)


def _prepared(
    folder: Path, master: str, settings: Mapping[str, str], umask: int | None = None
) -> tuple[Launch | None, dict[str, str]]:
    """How to start Java, and all settings. The environment of this process is prepared for both.
    None where Spark's own way must be used."""
    refuse_connect(master, settings)
    make_private(folder)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    # Not as a setting: it would replace the options in the spark-defaults.conf of a cluster.
    options = os.environ.get(_SUBMIT_OPTIONS, "")
    if _END_WITHOUT_MEMORY not in options.split():
        os.environ[_SUBMIT_OPTIONS] = f"{_END_WITHOUT_MEMORY} {options}".rstrip()
    is_local, home = master.startswith("local"), None
    if is_local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        home = _home_without_archive(folder)
        if home is not None:
            os.environ.setdefault("SPARK_HOME", str(home))
    java = find_java(folder)
    os.environ["JAVA_HOME"] = str(java.home)
    own = LOCAL | {_MEMORY: heap_setting()} | _folders(folder) if is_local else {}
    chosen = ALWAYS | own | dict(settings)
    if is_local:
        (folder / "tmp").mkdir(exist_ok=True)
        # Temporary files of Java contain rows, too: so they go to a private folder.
        java_options = [f"-Djava.io.tmpdir={folder / 'tmp'}", *class_archive.options(folder, java)]
        quoted = (f'"{each}"' for each in java_options)
        chosen[_JAVA_OPTIONS] = " ".join([chosen.get(_JAVA_OPTIONS, ""), *quoted]).strip()
    home = Path(os.environ["SPARK_HOME"]) if "SPARK_HOME" in os.environ else _installed_home()
    if home is None:
        return None, chosen
    launched = chosen | ({} if is_local else {"spark.master": master})
    mask = permissions.current_umask() if umask is None else umask
    return Launch.of(folder, home, java.home, launched, mask), chosen


def any_session(root: str) -> SparkSession:
    """This program's own session; else one with the pipeline that runs for the lake; else a new
    one."""
    with spark_needed():
        from pyspark.sql import SparkSession

    own = SparkSession.getActiveSession()
    if own is not None:
        return own
    service = find(root)
    if service is not None and service.remote is not None and not missing():
        session = SparkSession.builder.remote(service.remote).getOrCreate()
        _register(session)
        return session
    folder = spark_folder()
    session = spark_session(folder, log=folder / "spark.log")
    # Errors are raised here; what Java logs about them, also after Ctrl-C, does not help users.
    session.sparkContext.setLogLevel("OFF")
    return session


def _folders(folder: Path) -> dict[str, str]:
    # A socket has a name of 42 characters, and its path must not be too long.
    fits = len(os.fsencode(folder / "tmp")) + 1 + 42 <= EMBEDDED_SOCKET_PATH_BYTES_MAX
    return {
        "spark.local.dir": str(folder / "tmp"),
        "spark.python.unix.domain.socket.dir": str(folder / "tmp") if fits else gettempdir(),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }


def spark_folder() -> Path:
    """The folder for Spark's files on this machine. It may be removed at any time."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(cache if os.path.isabs(cache) else "~/.cache").expanduser()
    return home / "headwater" / "spark"


def _home_without_archive(folder: Path) -> Path | None:
    """The installed PySpark as Spark's home, without the zip archive of PySpark: workers would
    import from it and compile it each time, which takes a second per process. Without it they
    import the installed package. None if PySpark is installed in another way."""
    installed = _installed_home()
    if installed is None:
        return None
    name = blake2b(str(installed).encode(), digest_size=6).hexdigest()
    home = folder / "homes" / name
    home.mkdir(parents=True, exist_ok=True)
    for part in ("bin", "sbin", "jars", "conf", "data"):
        with suppress(FileExistsError):
            if (installed / part).exists():
                (home / part).symlink_to(installed / part)
    return home


def _installed_home() -> Path | None:
    """The installed PySpark, if it has Spark itself."""
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        return None
    installed = Path(spec.origin).parent
    return installed if (installed / "jars").is_dir() else None

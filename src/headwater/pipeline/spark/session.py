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

from headwater.errors import PipelineError
from headwater.limits import EMBEDDED_SOCKET_PATH_BYTES_MAX
from headwater.pipeline.packages import require, spark_needed
from headwater.pipeline.permissions import make_private
from headwater.pipeline.spark import class_archive, log_file
from headwater.pipeline.spark.connect_server import missing
from headwater.pipeline.spark.java import find_java
from headwater.pipeline.spark.shared_session import find

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ALWAYS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.streaming.minBatchesToRetain": "10",
    # Beyond 32 paths Spark starts a job to list them: 12 s instead of 0.3.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "100000",
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
        "-XX:+UseParallelGC -XX:Tier4InvocationThreshold=50000 -XX:Tier4MinInvocationThreshold=6000"
        " -XX:Tier4CompileThreshold=150000 -XX:Tier4BackEdgeThreshold=400000"
    ),
    # Without it every batch of a Python source stalls for 40 ms.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.python.daemon.module": "headwater.pipeline.spark.daemon",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}

_JAVA_OPTIONS = "spark.driver.extraJavaOptions"

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
    given. PipelineError if it does not start."""
    require()
    folder = Path(folder)
    make_private(folder)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    is_local = master.startswith("local")
    if is_local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        if home := _home_without_archive(folder):
            os.environ.setdefault("SPARK_HOME", str(home))
    java = find_java(folder)
    os.environ["JAVA_HOME"] = str(java.home)

    from pyspark.sql import SparkSession

    from headwater.pipeline.stream.source import HeadwaterSource

    chosen = ALWAYS | (LOCAL | _folders(folder) if is_local else {}) | dict(settings or {})
    if is_local:
        (folder / "tmp").mkdir(exist_ok=True)
        # Temporary files of Java contain rows, too: so they go to a private folder.
        java_options = [f"-Djava.io.tmpdir={folder / 'tmp'}", *class_archive.options(folder, java)]
        quoted = (f'"{each}"' for each in java_options)
        chosen[_JAVA_OPTIONS] = " ".join([chosen.get(_JAVA_OPTIONS, ""), *quoted]).strip()
    chosen |= {"spark.master": master, "spark.app.name": name}
    if log is not None:
        _launch(chosen, log)
    builder = SparkSession.builder
    for key, value in chosen.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.dataSource.register(HeadwaterSource)
    return session


def _launch(settings: Mapping[str, str], log: Path) -> None:
    """Start Java for this program, unless it has one, with its output in a file."""
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway

    if SparkContext._gateway is not None:
        return
    output = log_file.start(log)
    try:
        conf = SparkConf().setAll(list(settings.items()))
        gateway = launch_gateway(  # type: ignore[no-untyped-call]
            conf, {"stdout": output, "stderr": output}
        )
    except PySparkRuntimeError as error:
        raise PipelineError(
            f"Spark did not start: {log_file.last_line(log) or error}",
            hint=f"The output of Java is in {log}. headwater doctor checks the installed Java.",
        ) from error
    finally:
        os.close(output)
    SparkContext._ensure_initialized(gateway=gateway)


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
        return SparkSession.builder.remote(service.remote).getOrCreate()
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
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        return None
    installed = Path(spec.origin).parent
    if not (installed / "jars").is_dir():
        return None
    name = blake2b(str(installed).encode(), digest_size=6).hexdigest()
    home = folder / "homes" / name
    home.mkdir(parents=True, exist_ok=True)
    for part in ("bin", "sbin", "jars", "conf", "data"):
        with suppress(FileExistsError):
            if (installed / part).exists():
                (home / part).symlink_to(installed / part)
    return home

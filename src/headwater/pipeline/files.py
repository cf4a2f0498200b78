"""Files of a lake, in a folder or under a URL that Arrow knows.

delta-rs writes Delta tables, and Spark reads them. Other files of the lake (checkpoints, staged
Parquet) and the Parquet of small batches are read and written here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow.fs as pafs


class FileLocation(msgspec.Struct, frozen=True):
    """A folder in a file system. The parts of a name below it are separated by slashes."""

    system: pafs.FileSystem
    base: str

    @classmethod
    def of(cls, path: str) -> FileLocation:
        """The folder at a path or URL; it need not exist."""
        if "://" not in path:
            return cls(pafs.LocalFileSystem(), str(Path(path).absolute()))
        system, base = pafs.FileSystem.from_uri(path)
        return cls(system, base.rstrip("/"))

    @property
    def is_local(self) -> bool:
        return isinstance(self.system, pafs.LocalFileSystem)

    def below(self, name: str) -> str:
        return f"{self.base}/{name}"

    def exists(self, name: str) -> bool:
        found = self.system.get_file_info(self.below(name))
        return bool(found.type != pafs.FileType.NotFound)

    def read(self, name: str) -> bytes:
        with self.system.open_input_stream(self.below(name)) as stream:
            content: bytes = stream.read()
            return content

    def write(self, name: str, content: bytes) -> None:
        """Write a file: complete or not at all, where the file system can rename."""
        self.system.create_dir(self.below(name).rpartition("/")[0], recursive=True)
        unfinished = self.below(f"{name}.unfinished")
        with self.system.open_output_stream(unfinished) as stream:
            stream.write(content)
        self.system.move(unfinished, self.below(name))

    def files(self, name: str) -> Iterator[pafs.FileInfo]:
        """Every file below a folder; none if the folder does not exist."""
        chosen = pafs.FileSelector(self.below(name), recursive=True, allow_not_found=True)
        for info in self.system.get_file_info(chosen):
            if info.type == pafs.FileType.File:
                yield info

    def remove(self, name: str) -> None:
        """Remove a folder with its contents, if it exists."""
        if self.exists(name):
            self.system.delete_dir(self.below(name))

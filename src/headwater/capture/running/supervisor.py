"""Runs every source of a database."""

from __future__ import annotations


class Supervisor:
    """Runs the sources of one database, those of these names only if names are given."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def run(self, names: list[str] | None = None) -> None:
        """Until `stop`. Sources that are declared later are started, too."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Finish the transactions at hand and end `run`."""

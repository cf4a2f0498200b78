"""A consumer to be killed: appends each change to a file, which is its effect, and keeps a cursor.

Run as `python -m tests.support.consumer URL CURSOR FILE`.
"""

from __future__ import annotations

import asyncio
import os
import sys

from headwater import Headwater
from headwater.commands.output import change_as_json


async def consume(url: str, cursor: str, path: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, b"start\n")
    async with Headwater(url) as hw:
        async for transaction in hw.changes(cursor=cursor):
            lines = [change_as_json(change, transaction) for change in transaction.changes]
            os.write(file, ("\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    asyncio.run(consume(*sys.argv[1:]))

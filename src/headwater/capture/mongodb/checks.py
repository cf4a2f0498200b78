"""What is wrong with a MongoDB source before it starts: each problem with its fix.

The checks read; they change nothing. The rights are tried, not looked up: a stream is opened and
one document of each collection is read, which is what the source will do.
"""

from __future__ import annotations

from pymongo.errors import OperationFailure

from headwater.capture.mongodb import collections
from headwater.capture.mongodb.columns import Layout
from headwater.capture.mongodb.connection import Connection, Server
from headwater.capture.mongodb.failures import STANDALONE_FIX, VERSION_MIN, translate
from headwater.capture.source import Problem, SourceDefinition
from headwater.errors import HeadwaterError, SourceUnavailable


def server_problems(server: Server) -> list[Problem]:
    """
    >>> [p.what for p in server_problems(Server((5, 0, 9), True, False))]
    ['the server is MongoDB 5.0.9, which is too old']
    """
    problems = []
    if server.version < VERSION_MIN:
        version = ".".join(map(str, server.version))
        problems.append(
            Problem(
                f"the server is MongoDB {version}, which is too old", "Upgrade it to 6.0 or later."
            )
        )
    if not server.replica_set and not server.sharded:
        problems.append(Problem("the server is not a member of a replica set", STANDALONE_FIX))
    return problems


def collection_problems(
    definition: SourceDefinition, found: dict[str, collections.Collection]
) -> list[Problem]:
    problems = []
    for spec in definition.tables:
        try:
            layout = collections.layout_of(spec, found)
        except HeadwaterError as error:
            problems.append(Problem(str(error), error.hint or ""))
            continue
        problems += _warnings(layout, spec.name in found)
    if not problems:
        problems += _of_all(definition, found)
    return problems


def _of_all(
    definition: SourceDefinition, found: dict[str, collections.Collection]
) -> list[Problem]:
    try:
        collections.layouts(definition, found)
    except HeadwaterError as error:
        return [Problem(str(error), error.hint or "")]
    return []


def _warnings(layout: Layout, exists: bool) -> list[Problem]:
    problems = []
    if not exists:
        what = f"the collection {layout.name} does not exist"
        fix = "Check its name. It is mirrored as soon as it has a document."
        problems.append(Problem(what, fix, warning=True))
    for path in layout.left_out():
        what = f"{layout.name}: {path} is declared in types, and left out"
        fix = "Add it to columns, or remove it from exclude, or from types."
        problems.append(Problem(what, fix, warning=True))
    return problems


async def read_problems(connection: Connection, names: list[str]) -> list[Problem]:
    """Which of the collections cannot be read."""
    problems = []
    for name in names:
        try:
            await connection.database[name].find_one({}, {"_id": 1})
        except OperationFailure as error:
            problem = translate(error, connection.url, f"reading the collection {name}")
            if isinstance(problem, SourceUnavailable):
                raise problem from error
            problems.append(Problem(str(problem), problem.hint or ""))
    return problems

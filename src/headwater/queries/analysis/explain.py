"""Explains what a query reads, as the hub finds it: it runs the query once and analyses it."""

from __future__ import annotations

from headwater.database import connect
from headwater.errors import FunctionFailed, HeadwaterError
from headwater.identity import ANONYMOUS
from headwater.queries.analysis.analyst import Analysis, Analyst
from headwater.queries.analysis.statements import Executed
from headwater.queries.context import Context
from headwater.queries.execution.impersonation import begin, statement_timeout
from headwater.queries.execution.runner import run_with_timeout
from headwater.queries.functions import Arguments, Query


async def explain(
    url: str, query: Query, arguments: Arguments, seconds: float
) -> list[tuple[Executed, Analysis]]:
    """The statements that a query runs, each with what it reads. For the authors of the query:
    errors are raised with all details."""
    try:
        executed = await _run(url, query, arguments, query.timeout or seconds)
    except HeadwaterError:
        raise
    except Exception as error:
        raise FunctionFailed(f"{query.label} failed: {type(error).__name__}: {error}") from error
    return await analyse(url, executed)


async def analyse(url: str, executed: list[Executed]) -> list[tuple[Executed, Analysis]]:
    """What each statement reads."""
    analyst = Analyst(url)
    try:
        return [(each, await analyst.analyse(each.statement)) for each in executed]
    finally:
        await analyst.close()


async def _run(url: str, query: Query, arguments: Arguments, seconds: float) -> list[Executed]:
    executed: list[Executed] = []
    connection = await connect(url, purpose="explain", application_path=True)
    try:
        how = statement_timeout(seconds)
        await begin(connection, "begin isolation level repeatable read read only", how)
        context = Context(connection, ANONYMOUS, function=query.name, observe=executed.append)
        await run_with_timeout(query, context, arguments, seconds)
    finally:
        await connection.close()
    return executed

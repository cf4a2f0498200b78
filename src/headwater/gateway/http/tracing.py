"""Spans around what the gateway does, and the trace that a request belongs to.

Requests name theirs as the W3C's Trace Context says, in `traceparent`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from headwater.errors import HeadwaterError

tracer = trace.get_tracer("headwater")
_headers = TraceContextTextMapPropagator()


@contextmanager
def traced(
    name: str, attributes: Mapping[str, str], parent: Context | None = None
) -> Iterator[str | None]:
    """A span. Yields the id of its trace, None without a tracer."""
    with tracer.start_as_current_span(
        name, parent, attributes=attributes, record_exception=False
    ) as span:
        try:
            yield _trace_id(span)
        except HeadwaterError as error:
            span.set_attribute("headwater.error", error.code)
            raise


def _trace_id(span: trace.Span) -> str | None:
    context = span.get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else None


def parent_of(headers: Mapping[str, str]) -> Context | None:
    """The span that a request's `traceparent` names. None where the application around us traces
    requests itself: then ours is below its span."""
    if trace.get_current_span().get_span_context().is_valid:
        return None
    return _headers.extract(headers)

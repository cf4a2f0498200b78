"""OpenTelemetry spans of the gateway, and the trace that a request belongs to.

Requests name their trace in `traceparent`, as W3C Trace Context specifies.
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
    """A span. Yields the id of its trace; None without a tracer."""
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
    """The span in a request's `traceparent`. None if the application that mounts the gateway traces
    requests itself: then its span is the parent."""
    if trace.get_current_span().get_span_context().is_valid:
        return None
    return _headers.extract(headers)

"""The program's context in a distributed trace, so that the server's work appears in it (docs/tracing.md)."""

from __future__ import annotations

import os
import re
import sys
from typing import Dict, Tuple

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]*)?")
_TRACESTATE = re.compile(r"[\x20-\x7e]{1,512}")


def headers() -> Tuple[Tuple[str, str], ...]:
    """W3C's traceparent and tracestate as gRPC metadata: of the current span if the program uses OpenTelemetry,
    otherwise from the environment variables TRACEPARENT and TRACESTATE. Empty without either."""
    found: Dict[str, str] = {}
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        TraceContextTextMapPropagator().inject(found)
    if not found:
        found = {name: os.environ.get(name.upper(), "") for name in ("traceparent", "tracestate")}
    if not _TRACEPARENT.fullmatch(found.get("traceparent", "")):
        return ()
    state = found.get("tracestate", "")
    return (("traceparent", found["traceparent"]),) + ((("tracestate", state),) if _TRACESTATE.fullmatch(state) else ())

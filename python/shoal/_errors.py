"""The errors of a feed, and their texts."""

from __future__ import annotations

import errno
import operator
import os
from typing import Any, Optional

import grpc


class FeedError(RuntimeError):
    """The feed failed. code is the gRPC status code's name, such as "UNAVAILABLE", or None."""

    code: Optional[str]

    def __init__(self, text: str, code: Optional[str] = None) -> None:
        super().__init__(text)
        self.code = code


class MapError(FeedError):
    """The function passed as map= failed. sample is the number of the sample (None if it was called
    with whole batches), __cause__ the function's exception."""

    sample: Optional[int]

    def __init__(self, text: str, sample: Optional[int] = None) -> None:
        super().__init__(text, "MAP")
        self.sample = sample


def whole_number(name: str, value: Any) -> int:
    """value as an int. A value that is not a whole number is a TypeError with the argument's name."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}: it must be a whole number") from None


def explain(error: grpc.RpcError, addr: str) -> FeedError:
    """The error with its remedy."""
    code = error.code().name if isinstance(error, grpc.Call) else None
    text = error.details() if isinstance(error, grpc.Call) else str(error)
    text = text or ""
    remedy = ""
    if code == "UNAVAILABLE" and text.endswith(os.strerror(errno.EACCES)):
        remedy = ". This user may not connect: see --socket-group of `shoal serve`"
    elif code == "UNAVAILABLE" and addr.startswith("tls://"):
        remedy = (". Check that `shoal serve` runs there with TLS, that ca= holds the issuer of its certificate, and "
                  "that the certificate is "
                  "for this host name. If the server has --tls-client-ca, it requires this client's certificate: pass "
                  "cert= and key=, "
                  "signed by that authority. Resume from the last state_dict()")
    elif code == "UNAVAILABLE":
        remedy = (". Check that `shoal serve` runs there, and the address. Resume from the last "
                  "state_dict(), or use reconnect=SECONDS to resume automatically")
    elif code == "UNAUTHENTICATED" and "token" not in text:
        remedy = ". The server requires a token: pass token="
    return FeedError(f"feed {addr}: {text}{remedy}", code)

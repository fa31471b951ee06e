"""What can go wrong with a feed, in words."""

from __future__ import annotations

import errno
import os
from typing import Optional

import grpc


class FeedError(RuntimeError):
    """The feed failed. code is the gRPC status code's name, such as "UNAVAILABLE", or None."""

    code: Optional[str]

    def __init__(self, text: str, code: Optional[str] = None) -> None:
        super().__init__(text)
        self.code = code


class MapError(FeedError):
    """The function given as map= failed. sample is the number of the sample (None where it was called
    with whole batches), __cause__ what it raised."""

    sample: Optional[int]

    def __init__(self, text: str, sample: Optional[int] = None) -> None:
        super().__init__(text, "MAP")
        self.sample = sample


def explain(error: grpc.RpcError, addr: str) -> FeedError:
    """The error with its remedy."""
    code = error.code().name if isinstance(error, grpc.Call) else None
    text = error.details() if isinstance(error, grpc.Call) else str(error)
    text = text or ""
    remedy = ""
    if code == "UNAVAILABLE" and text.endswith(os.strerror(errno.EACCES)):
        remedy = ". The socket is for others: see --socket-mode and --socket-group of `shoal serve`"
    elif code == "UNAVAILABLE" and addr.startswith("tls://"):
        remedy = (". Is `shoal serve` running there with TLS, does ca= hold the issuer of its certificate, and is the certificate "
                  "for this host's name? The training goes on from the last state_dict()")
    elif code == "UNAVAILABLE":
        remedy = (". Is `shoal serve` running there? Start it, or correct the address; the training goes on from the last "
                  "state_dict(), or by itself with reconnect=SECONDS")
    elif code == "UNAUTHENTICATED" and "token" not in text:
        remedy = ". The server wants a token: token="
    return FeedError(f"feed {addr}: {text}{remedy}", code)

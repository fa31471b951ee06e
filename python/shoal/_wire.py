"""The messages of shoal.feed.v1 (loader/feedpb/feed.proto), without the protobuf package.

Generated code needs a matching version of the protobuf runtime, and a trainer's environment may have any version. The
feed needs a few small messages, so this is a codec for the part of protobuf that they use: varints, strings, bytes,
messages, and repeated ones. Unknown fields are skipped, as protobuf requires, so that newer servers work.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Dict, Optional, Tuple, Union

_UINT, _BOOL, _STR, _BYTES = "uint", "bool", "str", "bytes"


class _Field:
    def __init__(self, name: str, kind: Union[str, _Schema], repeated: bool = False,
                 memo: Optional[Memo] = None) -> None:
        self.name, self.kind, self.repeated, self.memo = name, kind, repeated, memo


class Memo(dict[bytes, SimpleNamespace]):
    """Messages by their bytes. Most batches have the same planes, and decoding them would be most of a header's cost.
    Bounded, since planes of raw samples all differ."""

    def __missing__(self, key: bytes) -> SimpleNamespace:
        if len(self) >= 256:
            self.clear()
        value = self[key] = _decode(PLANE, key, 0, len(key))
        return value


class _Schema(dict[int, _Field]):
    """Fields by number, and the values of an empty message."""

    def __init__(self, fields: Dict[int, _Field]) -> None:
        super().__init__(fields)
        plain = [f for f in self.values() if not f.repeated]
        empty: Dict[str, Any] = {_UINT: 0, _BOOL: False, _STR: "", _BYTES: b""}
        self.defaults = {f.name: empty.get(f.kind) if isinstance(f.kind, str) else None for f in plain}
        self.lists = [f.name for f in self.values() if f.repeated]


def _schema(**fields: Tuple[Any, ...]) -> _Schema:
    """name=(number, kind[, True if repeated[, a Memo]]); a kind may be a schema."""
    return _Schema({spec[0]: _Field(name, *spec[1:]) for name, spec in fields.items()})


INFO = _schema(dataset=(1, _STR), samples=(2, _UINT), bytes=(3, _UINT), classes=(4, _STR, True), server=(5, _STR),
               node=(6, _STR), weight=(7, _UINT))
OWNERS_REQUEST = _schema(placement=(1, _STR))
OWNERS_PART = _schema(dataset=(1, _STR), owners=(2, _BYTES))
STATS = _schema(json=(1, _STR))

OPEN = _schema(session=(1, _STR), client=(2, _STR), order=(3, _STR), batch=(4, _UINT), world=(5, _UINT),
               rank=(6, _UINT),
               transform=(7, _STR), seed=(8, _UINT), epoch=(9, _UINT), epochs=(10, _UINT), tail=(11, _STR),
               bad=(12, _STR),
               state=(13, _STR), credits=(14, _UINT), rebatch=(15, _BOOL), dataset=(16, _STR),
               weight=(17, _UINT), slots=(18, _UINT), readonly=(19, _BOOL), device=(20, _STR), label=(21, _STR),
               placement=(22, _STR))
CREDIT = _schema(n=(1, _UINT))
RELEASE = _schema(slots=(1, _UINT, True))
CLIENT_MESSAGE = _schema(open=(1, OPEN), credit=(2, CREDIT), release=(3, RELEASE))

POOL = _schema(key=(1, _STR), slots=(2, _UINT), slot_bytes=(3, _UINT), device=(4, _STR))

PLANE = _schema(name=(1, _STR), dtype=(2, _STR), shape=(3, _UINT, True), offset=(4, _UINT), length=(5, _UINT))
BAD_SAMPLE = _schema(row=(1, _UINT), id=(2, _UINT), path=(3, _STR), cause=(4, _STR))
OPENED = _schema(session=(1, _STR), dataset=(2, _STR), samples=(3, _UINT), batch=(4, _UINT), global_batch=(5, _UINT),
                 world=(6, _UINT), rank=(7, _UINT), batches=(8, _UINT), per_epoch=(9, _UINT), transform=(10, _STR),
                 transform_hash=(11, _STR), order=(12, _STR), tail=(13, _STR), bad=(14, _STR), epoch=(15, _UINT),
                 layout=(16, _STR), planes=(17, PLANE, True), state=(18, _STR), pool=(19, POOL), label=(21, _STR))
BATCH_HEADER = _schema(index=(1, _UINT), epoch=(2, _UINT), rows=(3, _UINT), valid=(4, _UINT), total_bytes=(5, _UINT),
                       planes=(6, PLANE, True, Memo()), bad=(7, BAD_SAMPLE, True), state=(8, _STR), slot=(9, _UINT),
                       draws=(10, _BYTES))
CHUNK = _schema(data=(1, _BYTES))
EPOCH_END = _schema(epoch=(1, _UINT), batches=(2, _UINT), state=(3, _STR))
SERVER_MESSAGE = _schema(opened=(1, OPENED), batch=(2, BATCH_HEADER), chunk=(3, CHUNK), epoch_end=(4, EPOCH_END))

_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5


class WireError(ValueError):
    """The bytes are not a message."""


def _put_varint(out: bytearray, value: int) -> None:
    if not 0 <= value < 1 << 64:
        raise ValueError(f"{value} is not an unsigned 64-bit number")
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def encode(schema: _Schema, **values: Any) -> bytes:
    """Returns the message as bytes. Values that are None or the default are left out."""
    out = bytearray()
    numbers = {field.name: number for number, field in schema.items()}
    for name, value in values.items():
        number, field = numbers[name], schema[numbers[name]]
        for item in value if field.repeated else (value,):
            if item is None or isinstance(field.kind, str) and not field.repeated and not item:
                continue
            if field.kind in (_UINT, _BOOL):
                _put_varint(out, number << 3 | _VARINT)
                _put_varint(out, int(item))
                continue
            body = encode(field.kind, **item) if isinstance(field.kind,
                                                            _Schema) else item.encode() if field.kind == _STR else bytes(item)
            _put_varint(out, number << 3 | _DELIMITED)
            _put_varint(out, len(body))
            out += body
    return bytes(out)


def _varint(data: bytes, pos: int, end: int) -> Tuple[int, int]:
    value = shift = 0
    while True:
        if pos >= end or shift > 63:
            raise WireError("an incomplete varint")
        byte = data[pos]
        pos += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, pos
        shift += 7


def decode(schema: _Schema, data: Union[bytes, bytearray, memoryview]) -> SimpleNamespace:
    """Returns the message as an object with an attribute for every field. Missing fields have protobuf's default; a
    missing message is None."""
    return _decode(schema, bytes(data), 0, len(data))


def _decode(schema: _Schema, data: bytes, pos: int, end: int) -> SimpleNamespace:
    message: Dict[str, Any] = schema.defaults.copy()
    for name in schema.lists:
        message[name] = []
    while pos < end:
        tag = data[pos]
        if tag < 0x80:
            pos += 1
        else:
            tag, pos = _varint(data, pos, end)
        number, wire = tag >> 3, tag & 7
        field = schema.get(number)
        if number == 0:
            raise WireError("field number 0")
        if wire == _VARINT:
            value, pos = _varint(data, pos, end)
            if field is not None and field.kind in (_UINT, _BOOL):
                _store(message, field, bool(value) if field.kind == _BOOL else value)
            continue
        if wire == _DELIMITED:
            length, pos = _varint(data, pos, end)
        elif wire in (_FIXED64, _FIXED32):
            length, field = 8 if wire == _FIXED64 else 4, None
        else:
            raise WireError(f"unknown wire type {wire}")
        stop = pos + length
        if stop > end:
            raise WireError("a field that is longer than its message")
        if field is None:
            pass
        elif field.memo is not None:
            _store(message, field, field.memo[data[pos:stop]])
        elif isinstance(field.kind, _Schema):
            _store(message, field, _decode(field.kind, data, pos, stop))
        elif field.kind == _STR:
            _store(message, field, str(data[pos:stop], "utf-8"))
        elif field.kind == _BYTES:
            _store(message, field, data[pos:stop])
        elif field.repeated:  # packed numbers
            at = pos
            while at < stop:
                value, at = _varint(data, at, stop)
                _store(message, field, value)
        pos = stop
    return SimpleNamespace(**message)


def _store(message: Dict[str, Any], field: _Field, value: Any) -> None:
    if field.repeated:
        message[field.name].append(value)
    else:
        message[field.name] = value


_CHUNK_TAG, _DATA_TAG = 3 << 3 | _DELIMITED, 1 << 3 | _DELIMITED


def chunk(data: bytes) -> Optional[memoryview]:
    """Returns the payload of a ServerMessage that is a Chunk, as a view, or None for other messages."""
    if not data or data[0] != _CHUNK_TAG:
        return None
    end = len(data)
    size, pos = _varint(data, 1, end)
    if pos + size != end:
        return None
    if size == 0:
        return memoryview(b"")
    if data[pos] != _DATA_TAG:
        return None
    size, pos = _varint(data, pos + 1, end)
    if pos + size != end:
        return None
    return memoryview(data)[pos:]

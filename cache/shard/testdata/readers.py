"""Prints what Python makes of a tar: WebDataset's samples, tarfile's members, and the blocks."""
import json
import re
import sys
import tarfile


def go_quote(name):
    return json.dumps(name, ensure_ascii=False)


def base_plus_ext(path):
    match = re.match(r"^((?:.*/|)[^.]+)[.]([^/]*)$", path)
    return (match.group(1), match.group(2)) if match else (None, None)


def samples(members):
    current, fields = None, []
    for m in members:
        prefix, suffix = base_plus_ext(m.name)
        if prefix is None:
            continue
        if prefix != current:
            if fields:
                print(" ".join(fields))
            current, fields = prefix, []
        if suffix in fields:
            raise ValueError(f"{m.name}: duplicate field {suffix}")
        fields.append(suffix)
    if fields:
        print(" ".join(fields))


def pax_records(body):
    records = {}
    while body:
        length = int(body[: body.index(b" ")])
        key, value = body[body.index(b" ") + 1 : length - 1].split(b"=", 1)
        records[key] = value
        body = body[length:]
    return records


def blocks(data):
    at, pax = 0, {}
    while at < len(data):
        head = data[at : at + 512]
        at += 512
        if head == bytes(512):
            assert data[at:] == bytes(512), "two zero blocks end a tar"
            return
        want = int(head[148:154], 8)
        assert sum(head[:148]) + 8 * 32 + sum(head[156:]) == want, "checksum"
        assert head[257:265] == b"ustar\x0000", "POSIX magic"
        size = int(head[124:135], 8)
        if head[156:157] == b"x":
            pax = pax_records(data[at : at + size])
        else:
            assert head[156:157] == b"0", "regular file"
            name = head[:100].rstrip(b"\0")
            prefix = head[345:500].rstrip(b"\0")
            if prefix:
                name = prefix + b"/" + name
            name = pax.get(b"path", name).decode()
            size = int(pax.get(b"size", size))
            print(at, size, go_quote(name))
            pax = {}
        at += (size + 511) // 512 * 512
    raise ValueError("no end")


with tarfile.open(sys.argv[1], "r:") as tar:
    members = tar.getmembers()
samples(members)
print("--")
for m in members:
    assert m.isreg() and m.mode == 0o644 and m.uid == 0 and m.gid == 0, m.name
    print(m.offset_data, m.size, go_quote(m.name))
print("--")
with open(sys.argv[1], "rb") as f:
    blocks(f.read())

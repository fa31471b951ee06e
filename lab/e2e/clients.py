"""Clients of S3 that are not ours, against the endpoint in $AWS_ENDPOINT_URL.

    clients.py make FORMAT DIR      a dataset in DIR/FORMAT, as its library writes it
    clients.py read CLIENT BUCKET   everything below train/: lists, stats, whole objects, ranges
    clients.py write CLIENT BUCKET  writes, reads at once what was written, lists it, deletes it
    clients.py data FORMAT ROOT     the values of a dataset in DIR/FORMAT or s3://bucket/FORMAT
    clients.py job whole|ranged BUCKET SEED   a DataLoader with DistributedSampler reads objects with boto3

Prints JSON. A client that sees other bytes than were written ends with an error.
"""

import hashlib
import io
import json
import os
import random
import subprocess
import sys
import tempfile

ENDPOINT = os.environ.get("AWS_ENDPOINT_URL", "")
REGION = os.environ.get("AWS_REGION", "us-east-1")
LARGE = "train/large.bin"


class Boto3:
    def __init__(self, bucket):
        import boto3

        self.bucket, self.s3 = bucket, boto3.client("s3")

    def list(self, prefix):
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix,
            PaginationConfig={"PageSize": 7})
        return {o["Key"]: o["Size"] for page in pages for o in page.get("Contents", [])}

    def stat(self, key):
        return self.s3.head_object(Bucket=self.bucket, Key=key)["ContentLength"]

    def get(self, key):
        if key == LARGE:
            into = io.BytesIO()
            self.s3.download_fileobj(self.bucket, key, into)  # parts of 8 MB
            return into.getvalue()
        return self.s3.get_object(Bucket=self.bucket, Key=key)["Body"].read()

    def range(self, key, at, n):
        return self.s3.get_object(Bucket=self.bucket, Key=key, Range=f"bytes={at}-{at + n - 1}")["Body"].read()

    def put(self, key, data):
        self.s3.upload_fileobj(io.BytesIO(data), self.bucket, key)

    def delete(self, key):
        self.s3.delete_object(Bucket=self.bucket, Key=key)

    def missing(self, key):
        import botocore.exceptions

        try:
            self.s3.head_object(Bucket=self.bucket, Key=key)
        except botocore.exceptions.ClientError as e:
            return e.response["ResponseMetadata"]["HTTPStatusCode"] == 404
        return False

    def all(self, prefix):
        return {key: self.get(key) for key in self.list(prefix)}


class Presigned(Boto3):
    """Presigned URLs, without an SDK."""

    def __init__(self, bucket):
        import boto3
        import botocore.config

        # boto3 signs URLs with version 2 if it is not told.
        self.bucket, self.s3 = bucket, boto3.client("s3", config=botocore.config.Config(signature_version="s3v4"))

    def get(self, key):
        import urllib.request

        url = self.s3.generate_presigned_url("get_object", Params={"Bucket": self.bucket, "Key": key})
        return urllib.request.urlopen(url).read()

    def put(self, key, data):
        import urllib.request

        url = self.s3.generate_presigned_url("put_object", Params={"Bucket": self.bucket, "Key": key})
        urllib.request.urlopen(urllib.request.Request(url, data, method="PUT", headers={"Content-Type": ""}))


class Unsigned(Boto3):
    def __init__(self, bucket):
        import boto3
        import botocore
        import botocore.config

        self.bucket, self.s3 = bucket, boto3.client("s3",
                                                    config=botocore.config.Config(signature_version=botocore.UNSIGNED))


class Program:
    """A client that is a program."""

    def run(self, *args, data=None, check=True):
        got = subprocess.run([*self.program, *args], input=data, capture_output=True)
        if check and got.returncode:
            raise RuntimeError(f"{args}: exit {got.returncode}: {got.stderr.decode()}")
        return got.stdout if check else got

    def all(self, prefix):
        with tempfile.TemporaryDirectory() as dir:
            self.down(prefix, dir)
            found = {}
            for at, _, names in os.walk(dir):
                for name in names:
                    path = os.path.join(at, name)
                    with open(path, "rb") as f:
                        found[prefix + os.path.relpath(path, dir)] = f.read()
            return found

    def put(self, key, data):
        with tempfile.TemporaryDirectory() as dir:
            path = os.path.join(dir, os.path.basename(key))
            with open(path, "wb") as f:
                f.write(data)
            self.up(path, key)


class AWS(Program):
    def __init__(self, bucket):
        self.bucket, self.program = bucket, [os.path.join(os.path.dirname(sys.executable), "aws")]

    def url(self, key):
        return f"s3://{self.bucket}/{key}"

    def list(self, prefix):
        lines = self.run("s3", "ls", "--recursive", self.url(prefix), check=False).stdout.decode().splitlines()
        return {f[3]: int(f[2]) for f in (line.split(maxsplit=3) for line in lines)}

    def object(self, verb, key, *args):
        return json.loads(self.run("s3api", verb, "--bucket", self.bucket, "--key", key, *args))

    def stat(self, key):
        return self.object("head-object", key)["ContentLength"]

    def get(self, key):
        return self.run("s3", "cp", self.url(key), "-")

    def range(self, key, at, n):
        with tempfile.NamedTemporaryFile() as f:
            self.object("get-object", key, "--range", f"bytes={at}-{at + n - 1}", f.name)
            return f.read()

    def down(self, prefix, dir):
        self.run("s3", "sync", self.url(prefix), dir)

    def up(self, path, key):
        if key.endswith("/odd ü+=.bin"):
            self.run("s3", "sync", os.path.dirname(path), self.url(os.path.dirname(key)))
        else:
            self.run("s3", "cp", path, self.url(key))

    def delete(self, key):
        self.run("s3", "rm", self.url(key))

    def missing(self, key):
        return b"(404)" in self.run("s3api", "head-object", "--bucket", self.bucket, "--key", key, check=False).stderr


class Rclone(Program):
    program = ["rclone", "--config", ""]

    def __init__(self, bucket):
        os.environ |= {"RCLONE_S3_PROVIDER": "Other", "RCLONE_S3_ENV_AUTH": "true", "RCLONE_S3_ENDPOINT": ENDPOINT,
                       "RCLONE_S3_REGION": REGION}
        self.root = f":s3:{bucket}/"

    def list(self, prefix):
        found = json.loads(self.run("lsjson", "-R", "--files-only", self.root + prefix, check=False).stdout or "[]")
        return {prefix + o["Path"]: o["Size"] for o in found if isinstance(o, dict)}

    def stat(self, key):
        return json.loads(self.run("lsjson", "--stat", self.root + key))["Size"]

    def get(self, key):
        return self.run("cat", self.root + key)

    def range(self, key, at, n):
        return self.run("cat", "--offset", str(at), "--count", str(n), self.root + key)

    def down(self, prefix, dir):
        self.run("copy", self.root + prefix, dir)

    def up(self, path, key):
        self.run("copyto", path, self.root + key)

    def delete(self, key):
        self.run("deletefile", self.root + key)

    def missing(self, key):
        found = json.loads(self.run("lsjson", "--stat", self.root + key, check=False).stdout or "null")
        return found is None or found["IsDir"]


class S3FS:
    def __init__(self, bucket):
        import s3fs

        self.bucket, self.fs = bucket, s3fs.S3FileSystem(use_listings_cache=False)

    def path(self, key):
        return f"{self.bucket}/{key}"

    def key(self, path):
        return path.removeprefix(self.bucket + "/")

    def list(self, prefix):
        return {self.key(path): info["size"] for path, info in self.fs.find(self.path(prefix), detail=True).items()}

    def stat(self, key):
        return self.fs.info(self.path(key))["size"]

    def get(self, key):
        with self.fs.open(self.path(key)) as f:
            return f.read()

    def range(self, key, at, n):
        return self.fs.cat_ranges([self.path(key)], [at], [at + n])[0]

    def put(self, key, data):
        with self.fs.open(self.path(key), "wb") as f:
            f.write(data)

    def delete(self, key):
        self.fs.rm(self.path(key))

    def missing(self, key):
        return not self.fs.exists(self.path(key))

    def all(self, prefix):
        return {self.key(path): data for path, data in self.fs.cat(self.fs.find(self.path(prefix))).items()}


class Arrow:
    def __init__(self, bucket):
        import pyarrow.fs

        self.bucket, self.fs = bucket, pyarrow.fs.S3FileSystem(endpoint_override=ENDPOINT, region=REGION)

    def path(self, key):
        return f"{self.bucket}/{key}"

    def list(self, prefix):
        import pyarrow.fs

        found = self.fs.get_file_info(pyarrow.fs.FileSelector(self.path(prefix.rstrip("/")), recursive=True,
                                                              allow_not_found=True))
        return {f.path.removeprefix(self.bucket + "/"): f.size for f in found if f.is_file}

    def stat(self, key):
        return self.fs.get_file_info(self.path(key)).size

    def get(self, key):
        with self.fs.open_input_stream(self.path(key)) as f:
            return f.read()

    def range(self, key, at, n):
        with self.fs.open_input_file(self.path(key)) as f:
            return f.read_at(n, at)

    def put(self, key, data):
        with self.fs.open_output_stream(self.path(key)) as f:
            f.write(data)

    def delete(self, key):
        self.fs.delete_file(self.path(key))

    def missing(self, key):
        import pyarrow.fs

        return self.fs.get_file_info(self.path(key)).type == pyarrow.fs.FileType.NotFound

    def all(self, prefix):
        return {key: self.get(key) for key in self.list(prefix)}


class Torch(Boto3):
    """s3torchconnector; it deletes nothing, and shows no sizes."""

    def dataset(self, kind, prefix, **more):
        import s3torchconnector as tc

        return kind.from_prefix(f"s3://{self.bucket}/{prefix}", region=REGION, endpoint=ENDPOINT,
                                s3client_config=tc.S3ClientConfig(force_path_style=True), **more)

    def get(self, key):
        import s3torchconnector as tc

        return next(o.read() for o in self.dataset(tc.S3MapDataset, key) if o.key == key)

    def range(self, key, at, n):
        import s3torchconnector as tc

        for o in self.dataset(tc.S3MapDataset, key, reader_constructor=tc.S3ReaderConstructor.range_based()):
            o.seek(at)
            return o.read(n)

    def put(self, key, data):
        import s3torchconnector as tc

        checkpoint = tc.S3Checkpoint(REGION, endpoint=ENDPOINT,
                                     s3client_config=tc.S3ClientConfig(force_path_style=True))
        with checkpoint.writer(f"s3://{self.bucket}/{key}") as f:
            f.write(data)

    def all(self, prefix):
        import s3torchconnector as tc

        iterable = {o.key: o.read() for o in self.dataset(tc.S3IterableDataset, prefix)}
        check(iterable == {o.key: o.read() for o in self.dataset(tc.S3MapDataset, prefix)}, "map and iterable dataset")
        return iterable


CLIENTS = {
    "boto3": Boto3, "presigned": Presigned, "unsigned": Unsigned, "awscli": AWS, "s3fs": S3FS, "pyarrow": Arrow,
    "rclone": Rclone,
    "s3torchconnector": Torch,
}


def check(ok, what):
    if not ok:
        raise AssertionError(what)


def read(client, bucket):
    c = CLIENTS[client](bucket)
    objects, sizes = c.all("train/"), c.list("train/")
    check({key: len(data) for key, data in objects.items()} == sizes,
          f"listed {sizes}, read {[(k, len(d)) for k, d in objects.items()]}")
    for key in [LARGE, *sorted(objects)[:4]]:
        check(c.stat(key) == len(objects[key]), f"size of {key}")
        check(c.get(key) == objects[key], key)
    size = len(objects[LARGE])
    for at, n in (0, 10), (size - 7, 7), (4 << 20, 1), ((4 << 20) - 5, 10), (1 << 20, 5 << 20):
        check(c.range(LARGE, at, n) == objects[LARGE][at : at + n], f"{n} bytes at {at}")
    return {key: hashlib.sha256(data).hexdigest() for key, data in objects.items()}


def write(client, bucket):
    c = CLIENTS[client](bucket)
    held, new, large = f"train/held/{client}.bin", f"train/new/{client}/odd ü+=.bin", f"train/new/{client}/large.bin"
    check(len(c.get(held)) > 0, "the held key")
    written = {}
    for key, data in (held, b"second"), (held, b"third!"), (new, os.urandom(100_000)), (large, os.urandom(18 << 20)):
        c.put(key, data)
        written[key] = data
        check(c.get(key) == data, f"{key} was not read as it was written")
        check(c.stat(key) == len(data), f"size of {key}")
        check(c.list(os.path.dirname(key) + "/").get(key) == len(data), f"{key} in the listing")
    check(c.range(large, 9 << 20, 99) == written[large][9 << 20 :][:99], "a range of what was written")
    c.delete(new)
    c.delete(held)
    for key in held, new:
        check(c.missing(key), f"{key} was deleted")
        check(key not in c.list(os.path.dirname(key) + "/"), f"{key} was deleted, and is listed")
    return {large: hashlib.sha256(written[large]).hexdigest()}


ROWS = 2000


def make(format, root):
    rng = random.Random(1)
    rows = [{"id": i, "image": rng.randbytes(2000)} for i in range(ROWS)]
    root = f"{root}/{format}"
    os.makedirs(root)
    if format in ("parquet", "lance"):
        import lance
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.Table.from_pylist(rows)
        if format == "lance":
            lance.write_dataset(table, root)
        else:
            for i in range(4):
                pq.write_table(table.slice(i * ROWS // 4, ROWS // 4), f"{root}/{i}.parquet", row_group_size=100)
    elif format == "mds":
        import streaming

        with streaming.MDSWriter(out=root, columns={"id": "int", "image": "bytes"}, size_limit=1 << 20) as w:
            for row in rows:
                w.write(row)
    else:
        named_types()
        from litdata.streaming.cache import Cache

        cache = Cache(root, chunk_bytes="1MB")
        for i, row in enumerate(rows):
            cache[i] = row
        cache.done()
        cache.merge()
    return format


def named_types():
    """litdata names types that Debian's torch lacks."""
    import torch

    for name in "uint16", "uint32", "uint64":
        if not hasattr(torch, name):
            setattr(torch, name, name)
    import litdata

    return litdata


def s3(root):
    return root.startswith("s3://")


def parquet_arrow(root):
    import pyarrow.dataset as ds
    import pyarrow.fs

    fs = pyarrow.fs.S3FileSystem(endpoint_override=ENDPOINT, region=REGION) if s3(root) else None
    return ds.dataset(root.removeprefix("s3://"), filesystem=fs).to_table(columns=["id", "image"]).to_pylist()


def parquet_duckdb(root):
    import duckdb
    import duckdb_extension_httpfs  # noqa: F401  the extension itself

    db = duckdb.connect()
    if s3(root):
        path = next(os.path.join(at, n) for p in [os.path.dirname(duckdb_extension_httpfs.__file__)] for at, _,
                    ns in os.walk(p) for n in ns if n.endswith(".duckdb_extension"))
        db.execute(f"LOAD '{path}'")
        host = ENDPOINT.removeprefix("http://")
        db.execute(f"CREATE SECRET (TYPE s3, KEY_ID '{os.environ['AWS_ACCESS_KEY_ID']}', SECRET "
                   f"'{os.environ['AWS_SECRET_ACCESS_KEY']}', "
                   f"REGION '{REGION}', ENDPOINT '{host}', URL_STYLE 'path', USE_SSL false)")
    rows = db.execute(f"SELECT id, image FROM read_parquet('{root}/*.parquet')").fetchall()
    return [{"id": i, "image": image} for i, image in rows]


def lance_rows(root):
    import lance

    options = {"aws_endpoint": ENDPOINT, "allow_http": "true"} if s3(root) else {}
    return lance.dataset(root, storage_options=options).to_table(columns=["id", "image"]).to_pylist()


def mds(root):
    import streaming

    with tempfile.TemporaryDirectory() as local:
        os.environ["S3_ENDPOINT_URL"] = ENDPOINT
        where = {"remote": root, "local": local} if s3(root) else {"local": root}
        return list(streaming.StreamingDataset(**where, shuffle=True, shuffle_seed=7, batch_size=1))


def lit(root):
    litdata = named_types()
    options = {"storage_options": {"endpoint_url": ENDPOINT}} if s3(root) else {}
    with tempfile.TemporaryDirectory() as local:
        return list(litdata.StreamingDataset(root, cache_dir=local if s3(root) else None, shuffle=False, **options))


FORMATS = {"parquet": parquet_arrow, "parquet by duckdb": parquet_duckdb, "lance": lance_rows, "mds": mds,
           "litdata": lit}


def data(format, root):
    rows = sorted((int(row["id"]), bytes(row["image"])) for row in FORMATS[format](root))
    check(len(rows) == ROWS, f"{len(rows)} rows")
    digest = hashlib.sha256()
    for i, image in rows:
        digest.update(b"%d:" % i + image)
    return digest.hexdigest()


class Objects:
    def __init__(self, bucket, keys, ranged):
        self.bucket, self.keys, self.ranged, self.client = bucket, keys, ranged, None

    def __len__(self):
        return len(self.keys)

    def __getitem__(self, i):
        if self.client is None:  # one for each worker
            self.client = Boto3(self.bucket)
        key, size = self.keys[i]
        if self.ranged:
            parts = [self.client.range(key, at, min(size - at, 16 << 10)) for at in range(0, size, 16 << 10)]
            return key, hashlib.sha256(b"".join(parts)).hexdigest()
        return key, hashlib.sha256(self.client.get(key)).hexdigest()


def job(how, bucket, seed):
    import torch.utils.data as td
    from torch.utils.data.distributed import DistributedSampler

    objects = Objects(bucket, sorted(Boto3(bucket).list("train/").items()), how == "ranged")
    sampler = DistributedSampler(objects, num_replicas=1, rank=0, seed=int(seed))
    loader = td.DataLoader(objects, sampler=sampler, num_workers=2, batch_size=8, collate_fn=list)
    return dict(row for batch in loader for row in batch)


if __name__ == "__main__":
    verb = {"make": make, "read": read, "write": write, "data": data, "job": job}[sys.argv[1]]
    got = verb(*sys.argv[2:])
    sys.stdout.flush()
    os.write(1, b"\n" + json.dumps(got).encode() + b"\n")

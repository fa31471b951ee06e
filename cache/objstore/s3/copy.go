package s3

import (
	"context"
	"errors"
	"net/http"
	"strings"

	"github.com/minio/minio-go/v7"
	"golang.org/x/sync/errgroup"

	"github.com/shoalfs/shoal/cache/objstore"
)

// Objects up to copyMost are copied by one request, larger ones in parts of copyPart or more, several at a time. Tests
// lower both.
var copyMost, copyPart int64 = objstore.CopyMost, 512 << 20

// copyRetry is for the parts of a copy: a failed one must not cost the others.
var copyRetry = objstore.RetryPolicy{TryTimeout: slowAnswer, Total: 3 * slowAnswer}

const headerSource = "X-Amz-Copy-Source"

func isCopy(r *http.Request) bool { return r.Header.Get(headerSource) != "" }

// Copy implements [objstore.Uploader]. Metadata goes along with objects up to 5 GiB only.
func (s *Store) Copy(ctx context.Context, from objstore.Object, key string) (objstore.Object, error) {
	if err := checkPut(ctx, key); err != nil {
		return objstore.Object{}, err
	}
	match := map[string]string{headerSource + "-If-Match": `"` + from.ETag + `"`}
	if strings.HasPrefix(from.ETag, weakPrefix) { // the store has no ETags to match
		match = nil
		if err := objstore.Current(ctx, s, from); err != nil {
			return objstore.Object{}, err
		}
	}
	if from.Size > copyMost {
		return s.copyParts(ctx, from, key, match)
	}
	g := s.keys.generation()
	info, err := s.core.CopyObject(ctx, s.bucket, from.Key, s.bucket, key, match, minio.CopySrcOptions{},
		minio.PutObjectOptions{})
	if err = s.copied(ctx, g, from, key, info.ETag, err); err != nil {
		return objstore.Object{}, err
	}
	return s.stored(ctx, key, from.Size, minio.UploadInfo{}) // by Stat: some stores answer with another ETag
}

// copied returns the error of a request to copy, also if the answer has status 200: S3 begins it before it has copied.
func (s *Store) copied(ctx context.Context, g uint64, from objstore.Object, key, etag string, err error) error {
	switch {
	case err != nil:
		return s.fail(ctx, g, "put", from.Key+" to "+s.url(key), err)
	case etag == "" && !s.weakETag:
		return &objstore.Error{Op: "put", Key: s.url(key), Kind: objstore.KindTransient,
			Err: errors.New("the store began to copy, and failed")}
	}
	return nil
}

// copyParts copies by a multipart upload without checksums: the bytes are not here to compute them.
func (s *Store) copyParts(ctx context.Context, from objstore.Object, key string, match map[string]string) (
	o objstore.Object, err error) {
	plan, err := objstore.PlanParts(key, from.Size, max(copyPart, from.Size/9_999)) // S3 takes 10,000 parts
	if err != nil {
		return o, err
	}
	u, err := s.begin(ctx, plan, false)
	if err != nil {
		return o, err
	}
	group, gctx := errgroup.WithContext(ctx)
	group.SetLimit(8)
	for n := range plan.Parts {
		group.Go(func() error {
			return copyRetry.Do(gctx, "put", key, func(ctx context.Context) error {
				return u.copyPart(ctx, n, from, match)
			})
		})
	}
	if err = group.Wait(); err == nil {
		err = copyRetry.Do(ctx, "put", key, func(ctx context.Context) (err error) {
			o, err = u.Complete(ctx)
			return err
		})
	}
	if err != nil {
		_ = objstore.FastFail.Do(context.WithoutCancel(ctx), "delete", key, u.Abort) // else Uploads shows it
	}
	return o, err
}

// copyPart is Part of the source's bytes at the same offset.
func (u *upload) copyPart(ctx context.Context, n int, from objstore.Object, match map[string]string) error {
	off := int64(n) * u.PartSize
	g := u.s.keys.generation()
	part, err := u.s.core.CopyObjectPart(ctx, u.s.bucket, from.Key, u.s.bucket, u.Key, u.id, n+1, off,
		min(u.PartSize, u.Size-off), match)
	if err = u.s.copied(ctx, g, from, u.Key, part.ETag, err); err != nil {
		return err
	}
	part.ETag = strings.Trim(part.ETag, `"`)
	u.mu.Lock()
	defer u.mu.Unlock()
	u.etags[n] = part
	return nil
}

// Resume implements [objstore.Uploader]: the server's list says which parts are there.
func (s *Store) Resume(ctx context.Context, key, id string, size, partSize int64) (
	_ objstore.Upload, stored int, err error) {
	plan, err := objstore.PlanParts(key, size, partSize)
	if err == nil && id == "" {
		err = plan.Gone()
	}
	if err != nil {
		return nil, 0, err
	}
	u := &upload{PartPlan: plan, s: s, id: id, etags: make([]minio.CompletePart, plan.Parts),
		stored: map[int]minio.ObjectPart{}}
	for marker := 0; ; {
		g := s.keys.generation()
		page, err := s.core.ListObjectParts(ctx, s.bucket, key, id, marker, 1000)
		switch {
		case err != nil && minio.ToErrorResponse(err).Code == codeNoSuchUpload:
			return nil, 0, plan.Gone()
		case err != nil:
			return nil, 0, s.fail(ctx, g, "put", s.url(key), err)
		}
		u.whole = page.ChecksumType == crcWhole
		for _, p := range page.ObjectParts {
			if p.ETag = strings.Trim(p.ETag, `"`); plan.Check(p.PartNumber-1, int(p.Size)) == nil && p.ETag != "" {
				u.stored[p.PartNumber-1] = p
			}
		}
		if !page.IsTruncated || page.NextPartNumberMarker <= marker {
			return u, len(u.stored), nil
		}
		marker = page.NextPartNumberMarker
	}
}

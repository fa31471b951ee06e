package s3

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/shoalfs/shoal/cache/objstore"
)

// versions knows the version IDs of pinned objects that were overwritten or deleted in a versioned bucket. It does
// nothing while objects are as listed. The first read that finds another object lists the versions of its key, once;
// all later reads of it request that version (ADR 0030).
type versions struct {
	log *slog.Logger

	found atomic.Bool // whether ids holds any
	asks  singleflight.Group

	mu      sync.Mutex
	ids     map[pinnedObject]pinnedVersion
	off     time.Time // no listing before this time
	quietAt time.Time // nothing is logged before
}

type pinnedObject struct{ key, etag string }

// pinnedVersion is the ID of a version; without one, the time until which it is assumed gone.
type pinnedVersion struct {
	id   string
	gone time.Time
}

const (
	// mostVersions bounds the memory to some 10 MB; forgotten versions are listed again.
	mostVersions = 100_000
	// unversioned is the pause between listings for a bucket without older versions, or an object whose version is
	// gone; forbidden that if versions may not be listed. Otherwise each read would cost a listing.
	unversioned = time.Minute
	forbidden   = 10 * time.Minute
	// askTimeout bounds a listing of one key's versions. It is shorter than the timeout of a request, after which that
	// would be retried.
	askTimeout = 10 * time.Second
	// versionPage is the size of one listing: an object rarely has more versions.
	versionPage = 100
)

// of returns the ID of the version of o to request; "" is the current one.
func (v *versions) of(o objstore.Object) string {
	if !v.found.Load() {
		return ""
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.ids[pinnedObject{o.Key, o.ETag}].id
}

func (v *versions) remember(o objstore.Object, p pinnedVersion) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.ids == nil || len(v.ids) >= mostVersions {
		v.ids = make(map[pinnedObject]pinnedVersion)
	}
	v.ids[pinnedObject{o.Key, o.ETag}] = p
	v.found.Store(true)
}

// rest stops the listings for a while.
func (v *versions) rest(d time.Duration) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.off = time.Now().Add(d)
}

// speak reports whether to log, once a minute.
func (v *versions) speak() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	now := time.Now()
	if now.Before(v.quietAt) {
		return false
	}
	v.quietAt = now.Add(quiet)
	return true
}

// hopeless reports whether listing the versions of o would be useless.
func (v *versions) hopeless(o objstore.Object) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	now := time.Now()
	return now.Before(v.off) || now.Before(v.ids[pinnedObject{o.Key, o.ETag}].gone)
}

// orPinned handles a failed read of o, which requested a version if id is not empty. If the store has another object
// now, and still has the pinned version, it returns an error that is retried at once; the retry requests that
// version. Otherwise it returns err.
func (s *Store) orPinned(ctx context.Context, o objstore.Object, id string, err error) error {
	kind := objstore.KindOf(err)
	if s.versions == nil {
		return err
	}
	if id != "" {
		switch kind {
		case objstore.KindNotFound, objstore.KindChanged, objstore.KindInvalid:
			s.versions.remember(o, pinnedVersion{gone: time.Now().Add(unversioned)}) // it was deleted for good
			return objstore.Changed(o, "")
		case objstore.KindDenied:
			s.versions.remember(o, pinnedVersion{})
			s.versions.rest(forbidden)
			return &objstore.Error{Op: "read", Key: o.Key, Kind: objstore.KindChanged, Err: err,
				Remedy: objstore.RemedyChanged + "; to read the old version, the credentials need s3:GetObjectVersion"}
		}
		return err
	}
	if kind != objstore.KindNotFound && kind != objstore.KindChanged || s.versions.hopeless(o) {
		return err
	}
	asked := s.versions.asks.DoChan(o.Key+"\x00"+o.ETag, func() (any, error) {
		actx, cancel := context.WithTimeout(context.WithoutCancel(ctx), askTimeout)
		defer cancel()
		return s.findVersion(actx, o)
	})
	select {
	case <-ctx.Done():
		return ctx.Err()
	case r := <-asked:
		switch {
		case r.Err != nil && objstore.KindOf(r.Err) == objstore.KindTransient:
			return r.Err
		case r.Err != nil || r.Val == "":
			return err
		}
	}
	return &objstore.Error{Op: "read", Key: o.Key, Kind: objstore.KindTransient, AtOnce: true,
		Err: errors.New("it was overwritten or deleted; the version that was listed is requested")}
}

// findVersion lists the versions of o's key and remembers the one with its ETag. It returns "" if there is none.
func (s *Store) findVersion(ctx context.Context, o objstore.Object) (id string, err error) {
	if id = s.versions.of(o); id != "" {
		return id, nil // another read has found it meanwhile
	}
	opts := s.listOptions(o.Key, "", true, versionPage)
	opts.WithVersions = true
	g := s.keys.generation()
	versioned := false
	for info := range s.core.ListObjectsIter(ctx, s.bucket, opts) {
		if info.Err != nil {
			err = s.fail(ctx, g, "list", s.url(o.Key), info.Err)
			if errors.Is(info.Err, io.EOF) || errors.Is(info.Err, errNotXML) || errors.Is(info.Err, errOtherXML) ||
				strings.HasPrefix(info.Err.Error(), "unrecognized option") {
				err = &objstore.Error{Op: "list", Key: s.url(o.Key), Kind: objstore.KindInvalid, Err: errNoVersions}
			}
			break
		}
		if info.Key != o.Key { // in key order: longer keys follow
			break
		}
		versioned = versioned || info.VersionID != "" && info.VersionID != nullVersion
		if !info.IsDeleteMarker && etagOf(info) == o.ETag && info.Size == o.Size && info.VersionID != "" {
			s.versions.remember(o, pinnedVersion{id: info.VersionID})
			if s.versions.speak() {
				s.versions.log.Warn(
					"objects were overwritten or deleted in the store; reads go on from the versions that were listed",
					"key", o.Key,
					"remedy", "take the new versions with `shoal refresh`, or restore the old ones")
			}
			return info.VersionID, nil
		}
	}
	rest := forbidden
	if ctx.Err() != nil { // minio-go ends in silence
		rest, err = unversioned,
			&objstore.Error{Op: "list", Key: s.url(o.Key), Kind: objstore.KindOther,
				Err: fmt.Errorf("its versions were not listed in %v", askTimeout)}
	}
	switch {
	case err != nil && objstore.KindOf(err) == objstore.KindTransient:
	case err != nil:
		s.versions.rest(rest)
		if s.versions.speak() {
			s.versions.log.Info("the versions of changed objects cannot be listed; reads of these objects fail",
				"cause", err,
				"remedy", "to go on reading the listed versions, enable versioning of the bucket and allow "+
					"s3:ListBucketVersions and s3:GetObjectVersion")
		}
	case versioned:
		s.versions.remember(o, pinnedVersion{gone: time.Now().Add(unversioned)})
	default:
		s.versions.rest(unversioned)
	}
	return "", err
}

// errNoVersions is for stores that ignore ?versions and list objects, or send nothing or a page: minio-go finds no
// XML, or elements that are not versions.
var errNoVersions = errors.New("the store does not list versions")

// nullVersion is the ID of objects stored before the bucket was versioned.
const nullVersion = "null"

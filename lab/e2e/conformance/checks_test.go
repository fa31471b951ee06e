package conformance

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// check is a capability; run returns what is worth noting.
type check struct {
	name string
	run  func(b *bed) (note string, err error)
}

var checks = []check{
	{"mount", checkMount},
	{"pack", checkPack},
	{"refresh", checkRefresh},
	{"changed", checkChanged},
	{"versions", checkVersions},
	{"weak-etag", checkWeakETags},
	{"carry", checkCarry},
}

// checkMount compares every byte.
func checkMount(b *bed) (note string, err error) {
	if len(b.lost) > 0 {
		note = fmt.Sprintf("the store does not keep these names, which were left out: %q", b.lost)
	}
	mnt, err := b.mount(b.source(), "mnt")
	if err != nil {
		return note, err
	}
	return note, b.compare(mnt)
}

// checkPack packs into shards of several parts, compares the mounted shards, and packs again.
func checkPack(b *bed) (note string, err error) {
	dest := "s3://" + b.bucket + "/packed"
	pack := []string{"pack", b.source(), dest, "--shard-size", "12MiB", "--seed", "1"}
	if _, err := b.verb(pack...); err != nil {
		return "", err
	}
	plain, err := b.mount(b.source(), "plain")
	if err != nil {
		return "", err
	}
	packed, err := b.mount(dest, "packed")
	if err != nil {
		return "", err
	}
	if err := b.compare(packed); err != nil {
		return "", err
	}
	want, err := b.version(plain)
	if err != nil {
		return "", err
	}
	if got, err := b.version(packed); err != nil || got != want {
		return "", fmt.Errorf("the shards are version %s, the source %s (%w)", got, want, err)
	}
	again, err := b.verb(pack...)
	if err == nil && !strings.Contains(again, "nothing to do") {
		err = fmt.Errorf("packed again: %s", again)
	}
	return "", err
}

// checkRefresh changes, adds and removes objects.
func checkRefresh(b *bed) (note string, err error) {
	mnt, err := b.mount(b.source(), "mnt")
	if err == nil {
		err = b.compare(mnt)
	}
	if err == nil {
		err = errors.Join(
			b.put("class0/img000.jpg", []byte("changed, and of another length")),
			b.put("class9/new.jpg", []byte("new")),
			b.remove("class1/img001.jpg"),
		)
	}
	if err == nil {
		_, err = b.verb("refresh", mnt)
	}
	if err == nil {
		err = b.compare(mnt)
	}
	return "", err
}

// checkChanged overwrites and removes objects of a bucket that is not versioned, under a mount.
func checkChanged(b *bed) (note string, err error) {
	mnt, err := b.mount(b.source(), "mnt")
	if err == nil {
		err = b.overwrite()
	}
	for _, path := range overwritten {
		if err == nil {
			err = staleAtOnce(filepath.Join(mnt, path))
		}
	}
	return "", err
}

// overwritten are the files that overwrite changes: one of another size, one of the same, and one that is gone. The
// last is larger than a request of the readers.
var overwritten = []string{"class0/img003.jpg", "class1/img004.jpg", "class2/img005.jpg", "large/0.bin"}

// overwrite changes files in the store and not in the tree.
func (b *bed) overwrite() error {
	was := make(map[string][]byte)
	for _, path := range overwritten {
		was[path] = b.tree[path]
	}
	err := errors.Join(
		b.put(overwritten[0], []byte("another length")),
		b.put(overwritten[1], slices.Repeat([]byte("x"), len(was[overwritten[1]]))),
		b.remove(overwritten[2]),
		b.put(overwritten[3], slices.Repeat([]byte("y"), len(was[overwritten[3]]))),
	)
	for path, data := range was {
		b.tree[path] = data
	}
	return err
}

// checkVersions overwrites and removes objects of a versioned bucket, under a mount: what was listed is read on.
func checkVersions(b *bed) (note string, err error) {
	if err := b.client.EnableVersioning(b.Context(), b.bucket); err != nil {
		return "", fmt.Errorf("%w: the store does not version buckets: %w", errNotOffered, err)
	}
	for path, data := range b.tree { // those of before have no version
		if err := b.put(path, data); err != nil {
			return "", err
		}
	}
	mnt, err := b.mount(b.source(), "mnt")
	if err == nil {
		err = b.overwrite()
	}
	if err == nil {
		err = b.compare(mnt)
	}
	if err != nil {
		return "", err
	}
	if _, err := b.verb("refresh", mnt); err != nil {
		return "", err
	}
	got, err := os.ReadFile(filepath.Join(mnt, overwritten[0]))
	if err == nil && string(got) != "another length" {
		err = fmt.Errorf("after the refresh: %.20q", got)
	}
	return "", err
}

// checkWeakETags reads through a proxy that takes the ETags away: without the flag the mount is refused, with it
// every byte is right, and a change of size or of the time in seconds is seen.
func checkWeakETags(b *bed) (note string, err error) {
	if err := b.withoutETags(); err != nil {
		return "", err
	}
	if _, err := b.mount(b.source(), "refused"); err == nil || !strings.Contains(err.Error(), "--store weak-etag") {
		return "", fmt.Errorf("without --store weak-etag: %w", err)
	}
	mnt, err := b.mount(b.source(), "mnt", "--store", "weak-etag")
	if err == nil {
		err = b.compare(mnt)
	}
	if err != nil {
		return "", err
	}
	cold, err := b.mount(b.source(), "cold", "--store", "weak-etag")
	if err != nil {
		return "", err
	}
	time.Sleep(2 * time.Second) // the times of what is stored next differ
	if err := b.overwrite(); err != nil {
		return "", err
	}
	for _, path := range overwritten {
		if err := staleAtOnce(filepath.Join(cold, path)); err != nil {
			return "", err
		}
	}
	return "", nil
}

// Package stores opens the store that a source names: a bucket or a folder.
package stores

import (
	"context"
	"errors"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/s3"
)

// Options configure [Open], which sets the bucket. The zero value takes everything from the AWS environment.
type Options = s3.Config

// Open returns the store that text names, without decorators, and the place of the dataset in it. It reads
// credentials and configuration but does not contact the store; Check does that. For a source of tar shards the store
// is their bucket or folder.
func Open(ctx context.Context, text string, o Options) (objstore.Store, objstore.Source, error) {
	src, err := objstore.ParseSource(text)
	if err != nil {
		return nil, objstore.Source{}, err
	}
	return open(ctx, src, o)
}

// Create is Open for a destination: a missing local folder is created. It refuses patterns of shards, since the
// writer names the shards.
func Create(ctx context.Context, text string, o Options) (objstore.Store, objstore.Source, error) {
	dst, err := objstore.ParseSource(text)
	if err != nil {
		return nil, objstore.Source{}, err
	}
	if dst.Shards != "" {
		return nil, objstore.Source{}, &objstore.Error{Op: "open", Key: dst.String(), Kind: objstore.KindInvalid,
			Err:    errors.New("a destination is a prefix or a folder, not the name of a shard"),
			Remedy: "leave out " + dst.Shards + ", or end it with / if it is a folder"}
	}
	if dst.Scheme == "file" {
		if err := objstore.CreateDir(dst); err != nil {
			return nil, objstore.Source{}, err
		}
	}
	return open(ctx, dst, o)
}

func open(ctx context.Context, src objstore.Source, o Options) (objstore.Store, objstore.Source, error) {
	if src.Scheme == "file" {
		d, src, err := objstore.OpenDir(src, o.Store)
		if err != nil {
			return nil, objstore.Source{}, err
		}
		return d, src, nil
	}
	o.Bucket = src.Bucket
	s, err := s3.New(ctx, o)
	if err != nil {
		return nil, objstore.Source{}, err
	}
	src.Endpoint = s.Endpoint()
	return s, src, nil
}

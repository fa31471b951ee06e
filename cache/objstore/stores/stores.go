// Package stores opens the store that a source names: a bucket or a folder.
package stores

import (
	"context"
	"errors"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/s3"
)

// Options are what [Open] needs beyond the source's text. The zero value takes all from the AWS
// environment.
type Options struct {
	// S3 configures an S3 source. Its Bucket is set from the source.
	S3 s3.Config
	// Store is what the user may ask of any store. It goes over S3.Store.
	Store objstore.StoreOptions
	// Getenv is where the AWS variables, and HOME for the profile files, come from; nil means
	// [os.Getenv]. It goes over S3.Getenv.
	Getenv func(name string) string
}

// Open returns the bare store that text names, without decorators, and where the dataset lies in
// it. It reads credentials and configuration but does not contact the store; call Check for that.
// The store of a source of tar shards is the bucket, or the folder, that holds them.
func Open(ctx context.Context, text string, o Options) (objstore.Store, objstore.Source, error) {
	src, err := objstore.ParseSource(text)
	if err != nil {
		return nil, objstore.Source{}, err
	}
	return open(ctx, src, o)
}

// Create is Open for a place that is to be written to: a local folder that is not there is made. It
// refuses patterns of shards, since who writes shards names them.
func Create(ctx context.Context, text string, o Options) (objstore.Store, objstore.Source, error) {
	dst, err := objstore.ParseSource(text)
	if err != nil {
		return nil, objstore.Source{}, err
	}
	if dst.Shards != "" {
		return nil, objstore.Source{}, &objstore.Error{
			Op: "open", Key: dst.String(), Kind: objstore.KindInvalid, Err: errors.New("a destination is a prefix or a folder, not the name of a shard"),
			Remedy: "leave out " + dst.Shards + ", or end it with / if it is a folder",
		}
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
	cfg := o.S3
	cfg.Bucket, cfg.Store = src.Bucket, o.Store
	if o.Getenv != nil {
		cfg.Getenv = o.Getenv
	}
	s, err := s3.New(ctx, cfg)
	if err != nil {
		return nil, objstore.Source{}, err
	}
	src.Endpoint = s.Endpoint()
	return s, src, nil
}

package peer

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/s3"
	"github.com/shoalfs/shoal/cache/segment"
	"github.com/shoalfs/shoal/lab/rig/certtest"
	"github.com/shoalfs/shoal/lab/rig/cputime"
	"github.com/shoalfs/shoal/lab/rig/memstore"
	"github.com/shoalfs/shoal/lab/rig/s3server"
)

const (
	benchSize    = 63 << 10
	benchObjects = 256
	benchReaders = 16
)

// BenchmarkRead reads objects of 63 KB: from a real S3 server, another process, and from a peer, whose both ends are in
// this one, as is the peer's cache: on its disk (in the page cache), or in its memory. cpu-µs/object is what this
// process uses.
func BenchmarkRead(b *testing.B) {
	srv, err := s3server.Start(b.Context(), s3server.Options{Dir: b.TempDir()})
	if err != nil {
		b.Skip(err)
	}
	b.Cleanup(srv.Stop)
	store, m := benchStore(b, srv)
	each := func(b *testing.B, batch int, read func(files []int, bufs [][]byte) error) {
		var next atomic.Int64
		var wg sync.WaitGroup
		run := func(objects int64) {
			next.Store(0)
			for range benchReaders {
				wg.Go(func() {
					files, bufs := make([]int, batch), make([][]byte, batch)
					for i := range bufs {
						bufs[i] = make([]byte, benchSize)
					}
					for at := next.Add(int64(batch)); at <= objects; at = next.Add(int64(batch)) {
						for i := range files {
							files[i] = (int(at) + i) % benchObjects
						}
						if err := read(files, bufs); err != nil {
							b.Error(err)
						}
					}
				})
			}
			wg.Wait()
		}
		run(2 * benchObjects) // connections, and what is verified once
		before := cputime.Sum(os.Getpid())
		b.ResetTimer()
		run(int64(b.N))
		b.ReportMetric((cputime.Sum(os.Getpid())-before)*1e6/float64(b.N), "cpu-µs/object")
	}
	b.Run("store", func(b *testing.B) {
		each(b, 1, func(files []int, bufs [][]byte) error {
			return store.ReadAt(b.Context(), m.Object(files[0]), bufs[0], 0)
		})
	})
	a := certtest.New(b, "cluster")
	cert, key := a.Issue(b, "node", time.Hour)
	secure, err := TLS(cert, key, a.File)
	if err != nil {
		b.Fatal(err)
	}
	for _, disk := range []bool{true, false} {
		for name, config := range map[string]*tls.Config{"plain": nil, "mtls": secure} {
			for _, batch := range []int{1, 16} {
				b.Run(fmt.Sprintf("%s/batch=%d/disk=%v", name, batch, disk), func(b *testing.B) {
					read := benchPeer(b, store, m, config, disk)
					each(b, batch, read)
				})
			}
		}
	}
}

// benchStore fills a bucket.
func benchStore(b *testing.B, srv *s3server.Server) (*s3.Store, *catalog.Manifest) {
	client, err := s3server.Client(srv.URL, 4)
	if err == nil {
		err = s3server.MakeBucket(b.Context(), client, "bench")
	}
	if err != nil {
		b.Fatal(err)
	}
	var objects []objstore.Object
	for i := range benchObjects {
		key := fmt.Sprintf("c/f%04d", i)
		info, err := client.PutObject(b.Context(), "bench", key, bytes.NewReader(noise[1000*i:][:benchSize]), benchSize,
			minio.PutObjectOptions{})
		if err != nil {
			b.Fatal(err)
		}
		objects = append(objects, objstore.Object{Key: key, Size: benchSize, ETag: info.ETag, ModTime: time.Now()})
	}
	m, err := catalog.Build(memstore.Listing(objects...), catalog.BuildOptions{})
	if err != nil {
		b.Fatal(err)
	}
	store, err := s3.New(context.Background(),
		s3.Config{Endpoint: srv.URL, Region: s3server.Region, Bucket: "bench", AccessKeyID: s3server.AccessKey,
			SecretAccessKey: s3server.SecretKey})
	if err != nil {
		b.Fatal(err)
	}
	return store, m
}

type benchServing struct {
	*cache.Volume
	m *catalog.Manifest
}

func (s benchServing) Terms() Terms { return Terms{} }

func (s benchServing) Received() int64 { return 0 }

func (s benchServing) Check(file int, path [16]byte, etag string) bool {
	return file < s.m.Len() && s.m.PathHash(file) == path && s.m.ETag(file) == etag
}

type benchServings struct{ v benchServing }

func (s benchServings) Volume([16]byte, [32]byte) (Volume, func(), bool) { return s.v, func() {}, true }

func (s benchServings) Opening([16]byte) <-chan struct{} { return nil }

func (s benchServings) File(string) (io.ReadCloser, int64, error) { return nil, 0, fs.ErrNotExist }

// benchPeer starts a peer that has all objects, and returns a function that reads from it.
func benchPeer(b *testing.B, store objstore.Reader, m *catalog.Manifest, config *tls.Config, disk bool) func(
	files []int, bufs [][]byte) error {
	log := slog.New(slog.DiscardHandler)
	c := cache.New(cache.Options{Memory: 256 << 20, Logger: log})
	v := c.NewVolume(cache.VolumeOptions{Manifest: m, Store: store})
	if disk {
		if err := v.OpenDisk(b.TempDir(), segment.Options{MaxBytes: 1 << 30, Logger: log}); err != nil {
			b.Fatal(err)
		}
	}
	for f := range m.Len() {
		if !disk {
			v.Prefetch(c.NewAccount(1), f, 0, time.Time{}, nil)
		}
		if _, err := v.ReadAt(b.Context(), f, make([]byte, benchSize), 0); err != nil {
			b.Fatal(err)
		}
	}
	if err := v.Flush(b.Context()); err != nil {
		b.Fatal(err)
	}
	server := NewServer(ServerConfig{Self: "node-b", Serving: benchServings{benchServing{v, m}}, Memory: 64 << 20,
		TLS: config, Log: log})
	l := listen(b)
	go func() { _ = server.Listen(l) }()
	client := NewClient(ClientConfig{TLS: config, Log: log})
	b.Cleanup(func() {
		client.Close()
		server.Close()
		if err := v.Close(); err != nil {
			b.Error(err)
		}
		if err := c.Close(); err != nil {
			b.Error(err)
		}
	})
	node := Node{ID: "node-b", Address: l.Addr().String()}
	return func(files []int, bufs [][]byte) error {
		pieces := make([]Piece, len(files))
		for i, f := range files {
			pieces[i] = Piece{File: f, Path: m.PathHash(f), ETag: m.ETag(f), P: bufs[i]}
		}
		for {
			client.Read(b.Context(), node, Request{Version: m.VersionHash()}, pieces)
			if !slices.ContainsFunc(pieces, func(p Piece) bool { return !p.Filled }) {
				return nil
			}
			time.Sleep(10 * time.Millisecond) // a busy machine: it was taken to be away
		}
	}
}

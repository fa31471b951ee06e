// Command getcpu measures what one GET costs this process in processor time, user and system, side by
// side for a plain minio-go client and for Shoal's store: the store alone and in the stack that the
// engine puts it into. Where client, proxy and server share the cores, as on the machines that the
// other benchmarks run on, this is what decides the rate. Run it from the repository's root:
// go run ./lab/bench/getcpu
//
// The arms alternate (A B C A B C …) and read the same objects; medians are reported.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"path/filepath"
	"runtime/pprof"
	"sync"
	"sync/atomic"
	"time"

	"github.com/minio/minio-go/v7"
	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/s3"
	"github.com/shoalfs/shoal/cache/objstore/stores"
	"github.com/shoalfs/shoal/lab/bench/kit"
	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/s3server"
)

func main() {
	log.SetFlags(0)
	dir := flag.String("dir", ".bench", "work folder")
	size := flag.Int("size", 62_000, "bytes an object")
	gets := flag.Int("n", 8000, "GETs a run")
	conns := flag.Int("c", 512, "requests in flight")
	reps := flag.Int("reps", 5, "runs of each arm")
	latency := flag.Duration("latency", 30*time.Millisecond, "median latency of the store (0: no proxy)")
	profile := flag.String("profile", "", "write a CPU profile of the last arm to this file")
	only := flag.String("only", "", "run only this arm")
	flag.Parse()
	if err := run(*dir, *size, *gets, *conns, *reps, *latency, *profile, *only); err != nil {
		log.Fatal("getcpu: ", err)
	}
}

type arm struct {
	name string
	read func(ctx context.Context, o objstore.Object, p []byte) error
	cpu  []float64 // µs a GET, of each run
	rate []float64 // GETs a second
}

func run(dir string, size, gets, conns, reps int, latency time.Duration, profile, only string) error {
	ctx := context.Background()
	k, err := kit.New(dir, "")
	if err != nil {
		return err
	}
	server, err := s3server.Start(ctx, s3server.Options{Dir: filepath.Join(k.Dir, "getcpu-objects")})
	if err != nil {
		return err
	}
	defer server.Stop()
	bucket := fmt.Sprintf("tiny-%d", size)
	admin, err := s3server.Client(server.URL, 1)
	if err != nil {
		return err
	}
	if there, err := admin.BucketExists(ctx, bucket); err != nil {
		return err
	} else if !there {
		if err := server.Lay(ctx, bucket, "", s3server.Tiny{Folders: s3server.Folders(4, 500), Size: size}); err != nil {
			return err
		}
	}
	endpoint := server.URL
	if latency > 0 {
		far, err := proxy.Spawn(ctx, []string{filepath.Join(k.Bin, "s3proxy")}, server.URL, proxy.Options{Latency: latency, Sigma: 0.3})
		if err != nil {
			return err
		}
		defer far.Stop()
		endpoint = far.URL
	}

	client, err := s3server.Client(endpoint, conns)
	if err != nil {
		return err
	}
	core := minio.Core{Client: client}
	store, _, err := stores.Open(ctx, "s3://"+bucket, stores.Options{S3: s3.Config{
		Endpoint: endpoint, AccessKeyID: s3server.AccessKey, SecretAccessKey: s3server.SecretKey, Region: s3server.Region,
	}})
	if err != nil {
		return err
	}
	stack := objstore.Retry(objstore.LimitAdaptive(objstore.Hedge(objstore.NewMeter(store), nil), conns), objstore.RetryPolicy{})
	arms := []*arm{
		{name: "minio-go", read: func(ctx context.Context, o objstore.Object, p []byte) error {
			body, _, _, err := core.GetObject(ctx, bucket, o.Key, minio.GetObjectOptions{})
			if err != nil {
				return err
			}
			defer body.Close()
			_, err = io.ReadFull(body, p)
			return err
		}},
		{name: "store", read: func(ctx context.Context, o objstore.Object, p []byte) error { return store.ReadAt(ctx, o, p, 0) }},
		{name: "stack", read: func(ctx context.Context, o objstore.Object, p []byte) error { return stack.ReadAt(ctx, o, p, 0) }},
	}
	if only != "" {
		for _, a := range arms {
			if a.name == only {
				arms = []*arm{a}
			}
		}
		if arms[0].name != only {
			return fmt.Errorf("no arm %q", only)
		}
	}
	var objects []objstore.Object
	for o, err := range store.List(ctx, "") {
		if err != nil {
			return err
		}
		objects = append(objects, o)
	}
	k.Header("Processor time of a GET")
	k.Say("%d GETs of %d bytes a run, %d in flight, latency %v; median of %d runs, all runs in brackets.\n", gets, size, conns, latency, reps)
	for rep := range reps + 1 { // the first run opens the connections and counts for nothing
		for i, a := range arms {
			if profile != "" && rep == reps && i == len(arms)-1 {
				f, err := os.Create(profile)
				if err != nil {
					return err
				}
				if err := errors.Join(pprof.StartCPUProfile(f), a.run(ctx, objects, gets, conns, true)); err != nil {
					return err
				}
				pprof.StopCPUProfile()
				if err := f.Close(); err != nil {
					return err
				}
				continue
			}
			if err := a.run(ctx, objects, gets, conns, rep > 0); err != nil {
				return fmt.Errorf("%s: %w", a.name, err)
			}
		}
	}
	k.Say("| client | processor time a GET, µs | GETs/s |\n|---|---|---|")
	for _, a := range arms {
		k.Say("| %s | %.0f (%s) | %.0f (%s) |", a.name, kit.Median(a.cpu), kit.Numbers(a.cpu, 0), kit.Median(a.rate), kit.Numbers(a.rate, 0))
	}
	return nil
}

// run reads gets objects, conns at once, and notes what that cost.
func (a *arm) run(ctx context.Context, objects []objstore.Object, gets, conns int, count bool) error {
	var next atomic.Int64
	var wg sync.WaitGroup
	errs := make(chan error, conns)
	before, start := processorTime(), time.Now()
	for range conns {
		wg.Go(func() {
			p := make([]byte, objects[0].Size)
			for i := int(next.Add(1)) - 1; i < gets; i = int(next.Add(1)) - 1 {
				o := objects[i%len(objects)]
				if err := a.read(ctx, o, p[:o.Size]); err != nil {
					errs <- err
					return
				}
			}
		})
	}
	wg.Wait()
	took, used := time.Since(start), processorTime()-before
	if len(errs) > 0 {
		return <-errs
	}
	if count {
		a.cpu = append(a.cpu, float64(used.Microseconds())/float64(gets))
		a.rate = append(a.rate, float64(gets)/took.Seconds())
	}
	return nil
}

// processorTime is what this process has used so far, in user and system mode.
func processorTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		log.Fatal("getcpu: ", err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

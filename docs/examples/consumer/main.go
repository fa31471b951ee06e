// Command consumer reads a feed in Go: it counts the samples of each class and prints a digest of all samples. It
// can be stopped at any time and then resumes where it stopped.
//
//	shoal serve s3://photos/train --listen unix:///run/shoal/feed.sock --daemon
//	go run ./docs/examples/consumer unix:///run/shoal/feed.sock
//	go run ./docs/examples/consumer -batches 3 -state state.json unix:///run/shoal/feed.sock   # three batches at a time
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"

	"github.com/shoalfs/shoal/loader/feedclient"
	"github.com/shoalfs/shoal/loader/feedpb"
)

func main() {
	batch := flag.Uint("batch", 64, "samples a batch")
	batches := flag.Int("batches", 0, "stop after so many batches (0: at the end of the epoch)")
	seed := flag.Uint64("seed", 7, "of the order")
	state := flag.String("state", "", "file that keeps the place between runs")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if flag.NArg() != 1 {
		flag.Usage()
		os.Exit(2)
	}
	open := &feedpb.Open{Session: "consumer", Order: "uniform", Batch: uint32(*batch), Seed: *seed, Epochs: 1,
		Tail: "uneven"}
	if err := consume(ctx, flag.Arg(0), open, *batches, *state); err != nil {
		fmt.Fprintln(os.Stderr, "consumer:", err)
		os.Exit(1)
	}
}

// consume reads at most limit batches, or all if limit is 0, starting at the position in the state file.
func consume(ctx context.Context, addr string, open *feedpb.Open, limit int, stateFile string) error {
	if stateFile != "" {
		state, err := os.ReadFile(stateFile)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		open.State = string(state)
	}
	client, err := feedclient.Dial(addr, feedclient.Security{})
	if err != nil {
		return err
	}
	defer client.Close()
	info, err := client.Info(ctx)
	if err != nil {
		return err
	}
	stream, err := client.Open(ctx, open)
	if err != nil {
		return err
	}
	defer stream.Close()

	digest, perClass := feedclient.NewDigest(), map[int64]int{}
	samples, size := 0, 0
	for n := 0; limit == 0 || n < limit; n++ {
		b, err := stream.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		for i := range b.Rows() {
			if b.Valid(i) {
				samples++
				size += len(b.Row(i)) // the stored object, because there is no transform
				perClass[b.Label(i)]++
			}
		}
		digest.Add(b)
		state := b.Header.GetState()
		b.Release() // the batch must not be used after this
		if stateFile != "" {
			// To count each sample exactly once, save the state together with the results of the batch.
			err := os.WriteFile(stateFile+".new", []byte(state), 0o600)
			if err == nil {
				err = os.Rename(stateFile+".new", stateFile) // or a kill could leave half a state
			}
			if err != nil {
				return err
			}
		}
	}
	for class, name := range info.GetClasses() {
		if n := perClass[int64(class)]; n > 0 {
			fmt.Printf("%-24s %d\n", name, n)
		}
	}
	fmt.Printf("%d samples, %d bytes, digest %x\n", samples, size, digest.Sum())
	return nil
}

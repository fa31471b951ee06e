package main

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"

	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/daemon"
	"github.com/shoalfs/shoal/internal/human"
	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/loader/feedclient"
	"github.com/shoalfs/shoal/loader/feedpb"
	"github.com/shoalfs/shoal/prefetch/engine"
	"github.com/shoalfs/shoal/prefetch/order"
)

// feedReport is what `shoal feed --json` prints (docs/stats.md).
type feedReport struct {
	Version     int     `json:"version"` // of this schema
	Dataset     string  `json:"dataset"`
	Transform   string  `json:"transform"`
	Epochs      int     `json:"epochs"` // consumed to the end
	Batches     int     `json:"batches"`
	Samples     int     `json:"samples"` // valid rows
	Bad         int     `json:"bad_samples"`
	Bytes       int64   `json:"bytes"` // of batches
	Seconds     float64 `json:"seconds"`
	Stall       float64 `json:"stall_seconds"` // of these, spent waiting for a batch to begin
	SamplesPerS float64 `json:"samples_per_second"`
	Digest      string  `json:"digest"`
	State       string  `json:"state"` // to go on from

	// Of the session's order; position counts the samples delivered.
	Order engine.OrderState `json:"order"`
	daemonReport
}

// daemonReport is of the daemon, after the last batch.
type daemonReport struct {
	Opens       int64               `json:"opens"`
	Reads       int64               `json:"reads"`
	GetRequests int64               `json:"get_requests"`
	GetBytes    int64               `json:"get_bytes"`
	Hits        engine.Hits         `json:"hits"`
	Lead        int                 `json:"lead_samples"`
	Errors      []engine.ErrorEvent `json:"errors"`
	Daemon      json.RawMessage     `json:"daemon"` // its stats, whole
}

// refused separates wrong usage from failure, even if the server cannot be reached.
func refused(err error, open *feedpb.Open) error {
	switch e := (*feedclient.Error)(nil); {
	case !errors.As(err, &e):
	case e.Code == codes.InvalidArgument:
		return cli.Usage(err)
	case e.Code == codes.Unavailable:
		if wrong := loader.Check(context.Background(), open, compileTransform); wrong != nil {
			return cli.Usage(wrong)
		}
	}
	return err
}

func cutShort(ctx context.Context, err error, r *feedReport, state string) error {
	if ctx.Err() != nil {
		err = daemon.ErrInterrupted
	} else if e := (*feedclient.Error)(nil); !errors.As(err, &e) || e.Code != codes.Unavailable {
		return err
	}
	return fmt.Errorf("%w; %s in %s came before, go on with --state '%s'", err, human.Count(r.Samples, "sample"),
		human.Count(r.Batches, "batch"), state)
}

type feedOptions struct {
	open      feedpb.Open
	batches   uint
	transport string
	asJSON    bool
	security  clientSecurity
}

func feedCommand() *cobra.Command {
	var o feedOptions
	open := &o.open
	c := &cobra.Command{
		Use:   "feed ADDR",
		Short: "Consume a feed in the terminal: rates, stalls, digest",
		Long: `Opens a session at ADDR (unix:///PATH, tcp://HOST:PORT or tls://HOST:PORT) and consumes its batches. The digest is
SHA-256 over (sample u64, length u64, bytes), little-endian, of all valid rows in order of delivery.`,
		Example: `  shoal feed unix:///run/shoal/feed.sock --batch 256 --transform "RandomResizedCrop(224)|RandomHorizontalFlip()|uint8|nchw"
  shoal feed tls://feed.example.org:7070 --ca ca.crt --token-file token --epochs 2 --json`,
		RunE: func(c *cobra.Command, args []string) error { return o.run(c, args[0]) },
	}
	o.security.add(c)
	f := c.Flags()
	f.Uint32Var(&open.Batch, "batch", 256, "samples per batch and rank")
	f.Uint32Var(&open.Epochs, "epochs", 1, "epochs to consume (0: without end)")
	f.Uint32Var(&open.Epoch, "epoch", 0, "first epoch")
	f.StringVar(&open.Transform, "transform", "",
		`transform of each sample, such as "RandomResizedCrop(224)|RandomHorizontalFlip()|uint8|nchw" (default: raw bytes)`)
	f.Uint64Var(&open.Seed, "seed", 0, "seed for order and augmentation")
	f.StringVar(&open.Order, "order", "uniform", "order of the samples")
	f.Uint32Var(&open.World, "world", 1, "number of ranks")
	f.Uint32Var(&open.Rank, "rank", 0, "this rank")
	f.StringVar(&open.Tail, "tail", "",
		"what to do with an incomplete last batch: drop, pad or uneven (default: uneven, which delivers every sample)")
	f.StringVar(&open.Bad, "bad", "error", "samples that cannot be decoded: error, skip:0.1% or skip:N an epoch")
	f.StringVar(&open.Label, "label", "",
		"what labels are: folder, cls (the number in the file .cls beside a sample), json:KEY (in .json), "+
			"COLUMN.TYPE (integers of MDS, such as label.int64) or none (default: class folders, or else .cls files)")
	f.StringVar(&open.State, "state", "", "state to resume from, as printed by --json")
	f.StringVar(&open.Session, "session", "",
		"name of the session; a newer one of the same name and rank ends this one")
	f.BoolVar(&open.Rebatch, "rebatch", false, "allow a global batch size other than the state's")
	f.Uint32Var(&open.Credits, "credits", 4, "batches that the server may send ahead")
	f.Uint32Var(&open.Weight, "weight", 1,
		"prefetching weight of this session relative to the daemon's other streams, 1 to 1000")
	f.StringVar(&o.transport, "transport", "auto", "how batches are transferred: slots (memory shared with a server "+
		"on this host), chunks (over the connection), or auto")
	f.UintVar(&o.batches, "batches", 0, "stop after so many batches (0: at the end)")
	f.BoolVar(&o.asJSON, "json", false, "print the versioned JSON (docs/stats.md)")
	c.PreRun = func(c *cobra.Command, _ []string) {
		if open.State != "" { // defaults and standing settings must not contradict the state
			if !given(c, "batch") {
				open.Batch = 0
			}
			if !given(c, "order") {
				open.Order = ""
			}
		} else if open.Tail == "" {
			open.Tail = "uneven"
		}
	}
	return c
}

func (o *feedOptions) run(c *cobra.Command, addr string) error {
	open := &o.open
	client, err := o.security.dial(addr)
	if err != nil {
		return err
	}
	defer client.Close()
	if client.Transport, err = feedclient.ParseTransport(o.transport); err != nil {
		return cli.Usagef("--transport: %w", err)
	}
	if !given(c, "epochs") && open.State != "" {
		open.Epochs = 1
	}
	open.Client = fmt.Sprintf("shoal feed (pid %d)", os.Getpid())
	stream, err := client.Open(c.Context(), open)
	if err != nil {
		return refused(err, open)
	}
	defer stream.Close()
	opened := stream.Opened()
	r := feedReport{Version: 1, Dataset: opened.GetDataset(), Transform: opened.GetTransform(),
		Order: engine.OrderState{Spec: order.Unversioned(opened.GetOrder()), State: "following"}}
	digest := feedclient.NewDigest()
	start := time.Now()
	bar, total := late(daemon.Own, "consuming"), int(opened.GetBatches())+int(opened.GetPerEpoch())*(int(open.Epochs)-1)
	for o.batches == 0 || uint(r.Batches) < o.batches {
		b, err := stream.Next()
		if errors.Is(err, io.EOF) {
			r.Order.State = "finished"
			break
		}
		if err != nil {
			bar.Done("")
			return cutShort(c.Context(), err, &r, stream.State())
		}
		digest.Add(b)
		r.Batches++
		r.Order.Epoch = int(b.Header.GetEpoch())
		r.Samples += int(b.Header.GetValid())
		r.Bad += len(b.Header.GetBad())
		r.Bytes += int64(b.Header.GetTotalBytes())
		for _, bad := range b.Header.GetBad() {
			fmt.Fprintln(c.ErrOrStderr(),
				oneLine(fmt.Sprintf("skipped sample %d, %s: %s", bad.GetId(), bad.GetPath(), bad.GetCause())))
		}
		b.Release()
		bar.Set(r.Batches, total, fmt.Sprintf("%s, %.0f samples/s", human.Count(r.Batches, "batch"),
			float64(r.Samples)/time.Since(start).Seconds()))
	}
	bar.Done("")
	r.Seconds, r.Stall, r.Epochs = time.Since(start).Seconds(), stream.Stalled().Seconds(), stream.Epochs()
	r.SamplesPerS, r.Order.Position = float64(r.Samples)/r.Seconds, r.Samples
	r.Digest, r.State = hex.EncodeToString(digest.Sum()), stream.State()
	if !o.asJSON {
		fmt.Fprintf(c.OutOrStdout(), "%s in %s, %s, in %.2f s: %s samples/s, %.1f%% of the time waiting\n",
			human.Count(r.Samples, "sample"), human.Count(r.Batches, "batch"), human.Bytes(r.Bytes),
			r.Seconds, human.Number(int64(r.SamplesPerS)), 100*r.Stall/r.Seconds)
		fmt.Fprintf(c.OutOrStdout(), "dataset %.12s, order %s, transform %s\ndigest %s\n", r.Dataset, r.Order.Spec,
			r.Transform, r.Digest)
		return nil
	}
	raw, err := client.Stats(c.Context())
	s, err := parseStats[daemonReport](raw, err)
	if err != nil {
		return err
	}
	r.daemonReport, r.Daemon = *s, raw
	return json.NewEncoder(c.OutOrStdout()).Encode(r)
}

package e2e

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/loader/feedclient"
	"github.com/shoalfs/shoal/loader/feedpb"
)

// sourceSample is what a library read of a sample, see sources.py.
type sourceSample struct {
	Of, Type string
	Doc, Row int
	Tokens   []int64
	Columns  struct {
		Caption string
		Label   int64
		Image   struct{ Pixels []byte }
		Tokens  []int64
	}
}

// TestSources feeds documents of .bin and .idx, and columns of MDS and Parquet, over kills of the server at every
// batch, and compares each with what the libraries read that wrote them. With SHOAL_CLIENTS (make conformance) they
// write other ones now.
func TestSources(t *testing.T) {
	dir := "../../cache/shard/testdata/sources"
	if clients := os.Getenv("SHOAL_CLIENTS"); clients != "" {
		dir = t.TempDir()
		run := func(args ...string) []byte {
			var errs strings.Builder
			cmd := exec.CommandContext(t.Context(), clients+"-torch/bin/python",
				append([]string{"-B", "sources.py"}, args...)...)
			cmd.Stderr = &errs
			out, err := cmd.Output()
			if err != nil {
				t.Fatalf("%v: %v\n%s", args, err, errs.String())
			}
			return out
		}
		run("write", dir, "100")
		write(t, filepath.Join(dir, "samples.jsonl"), run("read", dir))
	}
	f, err := os.Open(filepath.Join(dir, "samples.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	want := map[string][]sourceSample{} // by folder
	lines := bufio.NewScanner(f)
	for lines.Buffer(nil, 1<<26); lines.Scan(); {
		var s sourceSample
		if err := json.Unmarshal(lines.Bytes(), &s); err != nil {
			t.Fatal(err)
		}
		folder, _, ok := strings.Cut(s.Of, "/")
		if !ok {
			folder = "megatron"
		}
		want[folder] = append(want[folder], s)
	}
	for _, folder := range []string{"megatron", "mds", "tokens", "parquet"} {
		if len(want[folder]) == 0 {
			t.Fatalf("%s has no samples, %v", folder, lines.Err())
		}
	}
	_, env := far(t, proxy.Options{Latency: time.Millisecond})
	source := bucket(t, dir)

	tokens := func(t *testing.T, b *feedclient.Batch, row, length int, want []int64) {
		data, n := plane(t, b, "data"), int(binary.LittleEndian.Uint32(plane(t, b, "length")[4*row:]))
		if n != min(len(want), length) {
			t.Fatalf("sample %d has %d tokens, want %d", b.ID(row), n, len(want))
		}
		for k := range n {
			if got := int64(binary.LittleEndian.Uint64(data[8*(row*length+k):])); got != want[k] {
				t.Fatalf("sample %d, token %d is %d, want %d", b.ID(row), k, got, want[k])
			}
		}
	}
	pictures := func(t *testing.T, b *feedclient.Batch, row int, want sourceSample) {
		if got := plane(t, b, "data")[6*8*3*row:][:6*8*3]; !slices.Equal(got, want.Columns.Image.Pixels) ||
			b.Label(row) != want.Columns.Label {
			t.Errorf("row %d: label %d, want %d, pixels %d, want %d",
				want.Row, b.Label(row), want.Columns.Label, got, want.Columns.Image.Pixels)
		}
	}
	for _, c := range []struct {
		name, folder, samples string
		open                  *feedpb.Open
		check                 func(t *testing.T, b *feedclient.Batch, row int, want sourceSample)
	}{
		{"documents", "megatron", "rows", &feedpb.Open{Transform: "tokens(40)"},
			func(t *testing.T, b *feedclient.Batch, row int, want sourceSample) {
				tokens(t, b, row, 40, want.Tokens)
				if class := map[bool]int64{true: 0, false: 1}[want.Of == "a_text_document.bin"]; b.Label(row) != class {
					t.Errorf("%s has label %d", want.Of, b.Label(row))
				}
			}},
		{"buckets", "megatron", "rows", &feedpb.Open{Transform: "tokens(100)", Order: "buckets"},
			func(t *testing.T, b *feedclient.Batch, row int, want sourceSample) {
				tokens(t, b, row, 100, want.Tokens)
			}},
		{"pictures", "mds", "rows:image", &feedpb.Open{Transform: "Resize((6, 8))|uint8|nhwc", Label: "label.int64"},
			pictures},
		{"pictures of Parquet", "parquet", "rows",
			&feedpb.Open{Transform: "Resize((6, 8))|uint8|nhwc", Label: "label.int64"}, pictures},
		{"tokens of Parquet", "parquet", "rows:tokens,", &feedpb.Open{Transform: "tokens(5)"},
			func(t *testing.T, b *feedclient.Batch, row int, want sourceSample) {
				tokens(t, b, row, 5, want.Columns.Tokens)
			}},
		{"text", "mds", "rows:caption", &feedpb.Open{},
			func(t *testing.T, b *feedclient.Batch, row int, want sourceSample) {
				if got := string(b.Row(row)); got != want.Columns.Caption {
					t.Errorf("row %d: %q, want %q", want.Row, got, want.Columns.Caption)
				}
			}},
		{"arrays", "tokens", "rows:tokens", &feedpb.Open{Transform: "tokens(300)"},
			func(t *testing.T, b *feedclient.Batch, row int, want sourceSample) {
				tokens(t, b, row, 300, want.Columns.Tokens)
			}},
	} {
		t.Run(c.name, func(t *testing.T) {
			cache := t.TempDir()
			seen := make([]int, len(want[c.folder]))
			state := ""
			batch := uint32(max(3, len(seen)/16))
			for life := 0; ; life++ {
				addr := "unix://" + filepath.Join(t.TempDir(), "f.sock")
				d := inForeground(t, env, "serve", source+"/"+c.folder, "--listen", addr, "--samples", c.samples,
					"--cache-dir", cache)
				healthy(t, addr)
				o := &feedpb.Open{Batch: batch, World: 1, Tail: "uneven", Epochs: 1, Seed: 5, State: state,
					Transform: c.open.GetTransform(), Order: c.open.GetOrder(), Label: c.open.GetLabel()}
				s := openFeed(t, addr, o)
				if n := int(s.Opened().GetSamples()); n != len(seen) {
					t.Fatalf("%d samples, want %d", n, len(seen))
				}
				b, err := s.Next()
				if errors.Is(err, io.EOF) {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				for row := range b.Rows() {
					id := b.ID(row)
					seen[id]++
					c.check(t, b, row, want[c.folder][id])
				}
				b.Release()
				state = s.State()
				d.signal(t, syscall.SIGKILL) // with batches on the way
				<-d.exited
				s.Close()
			}
			for i, n := range seen {
				if n != 1 {
					t.Errorf("sample %d came %d times", i, n)
				}
			}
		})
	}

	t.Run("packed", func(t *testing.T) {
		addr, mnt := serve(t, env, source+"/megatron", "--samples", "rows")
		seen := map[int64]int{}
		packed := &feedpb.Open{Batch: 2, World: 1, Transform: "packed(150)", Tail: "uneven", Epochs: 1}
		consume(t, addr, packed, func(b *feedclient.Batch, planes map[string][]byte) {
			data, documents := planes["data"], planes["documents"]
			most := len(documents) / 8 / b.Rows()
			for r := range b.Rows() {
				at := r * 150
				for d := range most {
					doc := int64(binary.LittleEndian.Uint64(documents[8*(r*most+d):]))
					if doc < 0 {
						break
					}
					seen[doc]++
					for k, v := range want["megatron"][doc].Tokens {
						if got := int64(binary.LittleEndian.Uint64(data[8*at:])); got != v {
							t.Fatalf("document %d, token %d is %d, want %d", doc, k, got, v)
						}
						at++
					}
				}
			}
		})
		if len(seen) != len(want["megatron"]) {
			t.Errorf("%d documents, want %d", len(seen), len(want["megatron"]))
		}
		doc := want["megatron"][3]
		text, err := os.ReadFile(filepath.Join(mnt, doc.Of, fmt.Sprintf("%012d.%s", doc.Doc, doc.Type)))
		if err != nil || len(text) != 2*len(doc.Tokens) {
			t.Errorf("a document in the mount: %d bytes, %v, want %d tokens", len(text), err, len(doc.Tokens))
		}

		mixed := openFeed(t, addr,
			&feedpb.Open{Batch: 16, World: 1,
				Transform: "tokens(8)", Order: "mixture:weights=a_text_document.bin:3+b_text_sentence.bin:1",
				Tail: "drop", Epochs: 1})
		b, err := mixed.Next()
		if err != nil {
			t.Fatal(err)
		}
		of := map[string]int{}
		for row := range b.Rows() {
			s := want["megatron"][b.ID(row)]
			of[s.Of]++
			tokens(t, b, row, 8, s.Tokens)
		}
		b.Release()
		if a, b := of["a_text_document.bin"], of["b_text_sentence.bin"]; a <= b || b == 0 {
			t.Errorf("a batch of 16, 3 to 1, has %v", of)
		}
	})

	t.Run("bad shards", func(t *testing.T) {
		bad := t.TempDir()
		for _, folder := range []string{"megatron", "mds"} {
			if err := os.CopyFS(filepath.Join(bad, folder), os.DirFS(filepath.Join(dir, folder))); err != nil {
				t.Fatal(err)
			}
		}
		for _, name := range []string{"megatron/a_text_document.bin", "mds/shard.00001.mds"} {
			if err := os.Truncate(filepath.Join(bad, name), 100); err != nil {
				t.Fatal(err)
			}
		}
		source := bucket(t, bad)
		for folder, c := range map[string]struct {
			samples, names string
			left           func(s sourceSample) bool
		}{
			"megatron": {"rows", "a_text_document.idx", func(s sourceSample) bool {
				return s.Of != "a_text_document.bin"
			}},
			"mds": {"rows:caption", "shard.00001.mds", func(s sourceSample) bool {
				return s.Of != "mds/shard.00001.mds"
			}},
		} {
			_, errs, code := shoal(t, env, "serve", source+"/"+folder, "--samples", c.samples,
				"--cache-dir", t.TempDir(), "--listen", "unix://"+filepath.Join(t.TempDir(), "f.sock"))
			if code == 0 || !strings.Contains(errs, c.names) || !strings.Contains(errs, "--bad-shards skip") {
				t.Errorf("%s: exit %d, %s", folder, code, errs)
			}
			n := 0
			for _, s := range want[folder] {
				if c.left(s) {
					n++
				}
			}
			addr, _ := serve(t, env, source+"/"+folder, "--samples", c.samples, "--bad-shards", "skip")
			if r := feed(t, addr, "--batch", "4", "--epochs", "1"); r.Samples != n {
				t.Errorf("%s: %d samples without the bad shard, want %d", folder, r.Samples, n)
			}
		}
	})
}

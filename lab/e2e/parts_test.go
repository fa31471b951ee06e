package e2e

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/loader/feedclient"
	"github.com/shoalfs/shoal/loader/feedpb"
)

// annotated is a photograph of the detection set.
type annotated struct {
	label int64
	boxes [][4]float64 // x, y, width, height
	kinds []int64
	cut   int // the mask is 1 to the left of this column, and 2 to its right
}

// The size of what pictures makes.
const (
	photoWidth  = 200
	photoHeight = 150
)

// detectionSet lays out n photographs with label, annotations and mask each, all in one folder:
// 000000.jpg, .cls, .json, .mask.png.
func detectionSet(t testing.TB, n int) (dir string, truth []annotated) {
	t.Helper()
	from, paths := pictures(t, 1, n)
	dir = t.TempDir()
	r := rand.New(rand.NewPCG(1, 6))
	for i, p := range paths {
		photo, err := os.ReadFile(filepath.Join(from, p))
		if err != nil {
			t.Fatal(err)
		}
		a := annotated{label: int64(r.IntN(1000)), cut: 1 + r.IntN(photoWidth-1)}
		var notes []string
		for range r.IntN(5) {
			x, y := r.IntN(photoWidth-20), r.IntN(photoHeight-20)
			b := [4]float64{float64(x), float64(y), float64(10 + r.IntN(photoWidth-10-x)),
				float64(10 + r.IntN(photoHeight-10-y))}
			a.boxes, a.kinds = append(a.boxes, b), append(a.kinds, r.Int64N(91))
			notes = append(notes, fmt.Sprintf(`{"bbox": [%g, %g, %g, %g], "category_id": %d, "iscrowd": 0}`, b[0], b[1],
				b[2], b[3], a.kinds[len(a.kinds)-1]))
		}
		mask := image.NewPaletted(image.Rect(0, 0, photoWidth, photoHeight),
			color.Palette{color.Black, color.White, color.Transparent})
		for j := range mask.Pix {
			mask.Pix[j] = 1
			if j%mask.Stride >= a.cut {
				mask.Pix[j] = 2
			}
		}
		var b bytes.Buffer
		if err := png.Encode(&b, mask); err != nil {
			t.Fatal(err)
		}
		stem := filepath.Join(dir, fmt.Sprintf("%06d", i))
		write(t, stem+".jpg", photo)
		write(t, stem+".cls", fmt.Appendf(nil, "%d", a.label))
		write(t, stem+".json", fmt.Appendf(nil, `{"id": %d, "annotations": [%s]}`, i, strings.Join(notes, ", ")))
		write(t, stem+".mask.png", b.Bytes())
		truth = append(truth, a)
	}
	return dir, truth
}

// webdataset packs a flat folder into shards of perShard samples with GNU tar, members in order of their names.
func webdataset(t testing.TB, dir string, n, perShard int) (set string) {
	t.Helper()
	set = t.TempDir()
	for from := 0; from < n; from += perShard {
		args := []string{"cf", fmt.Sprintf("%s/train-%06d.tar", set, from/perShard), "--format=ustar",
			"--sort=name", "-C", dir}
		for i := from; i < min(from+perShard, n); i++ {
			for _, ext := range []string{"cls", "jpg", "json", "mask.png"} {
				args = append(args, fmt.Sprintf("%06d.%s", i, ext))
			}
		}
		if out, err := exec.Command("tar", args...).CombinedOutput(); err != nil {
			t.Fatalf("tar: %v\n%s", err, out)
		}
	}
	return set
}

func uploaded(t testing.TB, dir, kind string) (source string) {
	t.Helper()
	name := bucketName(t) + "-" + kind
	upload(t, dir, name)
	return "s3://" + name + "/train"
}

// consume reads one epoch and hands out its planes by name.
func consume(t testing.TB, addr string, o *feedpb.Open,
	each func(b *feedclient.Batch, planes map[string][]byte)) *feedpb.Opened {
	t.Helper()
	c, err := feedclient.Dial(addr, feedclient.Security{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s, err := c.Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for {
		b, err := s.Next()
		if errors.Is(err, io.EOF) {
			return s.Opened()
		}
		if err != nil {
			t.Fatal(err)
		}
		planes := map[string][]byte{}
		for _, p := range b.Header.GetPlanes() {
			planes[p.GetName()] = b.Bytes()[p.GetOffset():][:p.GetLength()]
		}
		each(b, planes)
		b.Release()
	}
}

// A detection set of a WebDataset, and of a flat folder, cold from a store that is far: every picture comes with
// its label, its boxes and its mask, and with the GETs that its files take.
func TestDetectionFeed(t *testing.T) {
	const n = 60
	dir, truth := detectionSet(t, n)
	const transform = "Detection(max_boxes=8)|Segmentation(dtype='int64')|Resize((75, 100))|nhwc"
	digests := map[string]string{}
	for kind, layout := range map[string]string{"folder": dir, "tars": webdataset(t, dir, n, 23)} {
		t.Run(kind, func(t *testing.T) {
			_, env := far(t, proxy.Options{Latency: 20 * time.Millisecond})
			addr, mnt := serve(t, env, uploaded(t, layout, kind), "--samples", ".jpg")
			listed := readStats(t, mnt)
			if listed.Samples != n {
				t.Fatalf("%d samples", listed.Samples)
			}
			seen := 0
			le := binary.LittleEndian
			opened := consume(t, addr,
				&feedpb.Open{Order: "uniform:seed=2", Batch: 8, Tail: "uneven", Epochs: 1, Transform: transform},
				func(b *feedclient.Batch, p map[string][]byte) {
					for i := range b.Rows() {
						seen++
						a := truth[b.ID(i)]
						if b.Label(i) != a.label {
							t.Errorf("sample %d: label %d, want %d", b.ID(i), b.Label(i), a.label)
						}
						if got := int(le.Uint64(p["boxes_n"][8*i:])); got != len(a.boxes) {
							t.Errorf("sample %d: %d boxes, want %d", b.ID(i), got, len(a.boxes))
							continue
						}
						for k, box := range a.boxes {
							want := [4]float64{box[0] / 2, box[1] / 2, (box[0] + box[2]) / 2, (box[1] + box[3]) / 2}
							for c := range want {
								got := math.Float32frombits(le.Uint32(p["boxes"][16*(8*i+k)+4*c:]))
								if math.Abs(float64(got)-want[c]) > 1e-4 {
									t.Errorf("sample %d, box %d: %g at %d, want %g", b.ID(i), k, got, c, want[c])
								}
							}
							if got := int64(le.Uint64(p["labels"][8*(8*i+k):])); got != a.kinds[k] {
								t.Errorf("sample %d, box %d: label %d, want %d", b.ID(i), k, got, a.kinds[k])
							}
						}
						for x := range 100 { // pixel x is pixel 2x+1 of the mask
							want := uint64(1)
							if 2*x+1 >= a.cut {
								want = 2
							}
							if got := le.Uint64(p["mask"][8*((i*75+40)*100+x):]); got != want {
								t.Fatalf("sample %d: mask %d in column %d, want %d: it is cut at %d",
									b.ID(i), got, x, want, a.cut)
							}
						}
					}
				})
			if seen != n || opened.GetLabel() != "cls" {
				t.Errorf("%d samples with labels of %q", seen, opened.GetLabel())
			}
			s := readStats(t, mnt)
			gets := s.Gets - s.Hedges.Sent - listed.Gets
			switch {
			case kind == "folder" && gets != 4*n:
				t.Errorf("%d GETs for %d files", gets, 4*n)
			case kind == "tars" && gets > n/2:
				t.Errorf("%d GETs for %d samples in tars", gets, n)
			}
			// Whatever the layout, the same.
			digests[kind] = feed(t, addr, "--batch", "8", "--seed", "5", "--transform",
				"Detection()|RandomResizedCrop(64)|RandomHorizontalFlip()").Digest
			out, errs, code := shoal(t, nil, "verify", addr, "--python", "/usr/bin/python3", "--batch", "8",
				"--transform", "Detection()|Resize(80)|RandomCrop(64)|RandAugment()")
			if code != 0 || !strings.Contains(out, "8 of 8 rows equal") {
				t.Errorf("verify: exit %d\n%s%s", code, out, errs)
			}
		})
	}
	if digests["folder"] != digests["tars"] {
		t.Errorf("digests differ: %v", digests)
	}
}

// Only the parts that a session wants are fetched. Labels: what there is by itself, what is asked for, and what
// cannot be had.
func TestLabelsOfParts(t *testing.T) {
	const n = 24
	dir, truth := detectionSet(t, n)
	_, env := far(t, proxy.Options{})
	addr, mnt := serve(t, env, uploaded(t, dir, "flat"), "--samples", ".jpg", "--cache-size", "0")
	labels := func(label, transform string) (got []int64, gets int64) {
		before := readStats(t, mnt)
		got = make([]int64, n)
		consume(t, addr, &feedpb.Open{Order: "sequential", Batch: 5, Tail: "uneven", Epochs: 1, Label: label,
			Transform: transform}, func(b *feedclient.Batch, _ map[string][]byte) {
			for i := range b.Rows() {
				got[b.ID(i)] = b.Label(i)
			}
		})
		after := readStats(t, mnt)
		return got, after.Gets - after.Hedges.Sent - before.Gets + before.Hedges.Sent
	}
	for _, tt := range []struct {
		label, transform string
		want             func(i int) int64
		most             int64
	}{
		{"", "", func(i int) int64 { return truth[i].label }, 2 * n},
		{"cls", "Resize((10, 10))", func(i int) int64 { return truth[i].label }, 2 * n},
		{"folder", "", func(int) int64 { return -1 }, n},
		{"none", "", func(int) int64 { return -1 }, n},
		{"json:id", "", func(i int) int64 { return int64(i) }, 2 * n},
	} {
		got, gets := labels(tt.label, tt.transform)
		for i := range got {
			if got[i] != tt.want(i) {
				t.Errorf("label=%q: sample %d has %d, want %d", tt.label, i, got[i], tt.want(i))
			}
		}
		if gets > tt.most {
			t.Errorf("label=%q: %d GETs, want at most %d", tt.label, gets, tt.most)
		}
	}
	for label, words := range map[string]string{"dog": "json:KEY", "json:annotations": "not an integer",
		"json:nothing": "no key"} {
		_, errs, code := shoal(t, nil, "feed", addr, "--batch", "4", "--label", label)
		if want := map[bool]int{true: 2, false: 1}[label == "dog"]; code != want || !strings.Contains(errs, words) {
			t.Errorf("--label %s: exit %d, want %d and %q:\n%s", label, code, want, words, errs)
		}
	}
	// Every picture a sample, masks too: then masks are no parts.
	addr, _ = serve(t, env, uploaded(t, dir, "again"))
	_, errs, code := shoal(t, nil, "feed", addr, "--batch", "4", "--transform", "Segmentation()|Resize((8, 8))")
	if code != 2 || !strings.Contains(errs, "--samples") {
		t.Errorf("masks that are samples: exit %d\n%s", code, errs)
	}
	_, errs, code = shoal(t, nil, "feed", addr, "--batch", "4", "--transform", "Detection(boxes='txt')|Resize((8, 8))")
	if code != 2 || !strings.Contains(errs, ".txt") {
		t.Errorf("no such part: exit %d\n%s", code, errs)
	}
}

// Class folders with annotations beside the photographs; one that is broken, and one that changes in the store.
func TestDetectionInFolders(t *testing.T) {
	const n = 12
	flat, _ := detectionSet(t, n)
	dir := t.TempDir()
	for i := range n {
		for _, ext := range []string{"jpg", "json"} {
			data, err := os.ReadFile(filepath.Join(flat, fmt.Sprintf("%06d.%s", i, ext)))
			if err != nil {
				t.Fatal(err)
			}
			if i == 7 && ext == "json" {
				data = data[:len(data)/2]
			}
			write(t, filepath.Join(dir, fmt.Sprintf("c%d/%06d.%s", i%3, i, ext)), data)
		}
	}
	const broken = "c1/000007.jpg"
	_, env := far(t, proxy.Options{})
	addr, _ := serve(t, env, bucket(t, dir), "--cache-size", "0", "--memory", "256MiB")
	flags := []string{"feed", addr, "--batch", "4", "--transform", "Detection()|Resize((16, 16))"}
	_, errs, code := shoal(t, nil, flags...)
	if code != 1 || !strings.Contains(errs, broken) || !strings.Contains(errs, ".json") {
		t.Errorf("exit %d:\n%s", code, errs)
	}
	out, errs, code := shoal(t, nil, append(flags, "--bad", "skip:1")...)
	if code != 0 || !strings.Contains(errs, broken) || !strings.HasPrefix(out, "11 samples") {
		t.Errorf("skip: exit %d:\n%s%s", code, out, errs)
	}
	// Annotations that are no longer those of the version: never used in silence, and no bad sample.
	addr, _ = serve(t, env, "s3://"+bucketName(t)+"/train", "--cache-size", "0")
	write(t, filepath.Join(dir, "c2/000005.json"), []byte(`{"annotations": []} `))
	upload(t, dir, bucketName(t))
	flags[1] = addr
	_, errs, code = shoal(t, nil, append(flags, "--bad", "skip:50%")...)
	if code != 1 || !strings.Contains(errs, "c2/000005.json") || !strings.Contains(errs, "changed") {
		t.Errorf("a part that changed: exit %d\n%s", code, errs)
	}
}

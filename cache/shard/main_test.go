package shard

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math/rand/v2"
	"slices"
	"sort"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// store is a store in memory that takes parts of any size, fails at a given request, and can be
// tampered with.
type store struct {
	*memstore.Mem

	mu      sync.Mutex
	ops     int
	failAt  int // the request that fails, and all after it: as a process that was killed
	lost    bool
	uploads map[*upload]bool
	cleanUp error                                        // of Uploads
	onRead  func(o objstore.Object, p []byte, off int64) // after each read
	gets    int
	read    int64
	latency time.Duration
}

func newStore() *store {
	return &store{Mem: memstore.New(), uploads: make(map[*upload]bool)}
}

var errKilled = fmt.Errorf("killed")

// step counts a request. A write whose answer is lost happens, and fails.
func (s *store) step() (before, after error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ops++
	if s.failAt == 0 || s.ops < s.failAt {
		return nil, nil
	}
	if s.ops == s.failAt && s.lost {
		return nil, errKilled
	}
	return errKilled, nil
}

func (s *store) Stat(ctx context.Context, key string) (objstore.Object, error) {
	if err, _ := s.step(); err != nil {
		return objstore.Object{}, err
	}
	return s.Mem.Stat(ctx, key)
}

func (s *store) ReadAt(ctx context.Context, o objstore.Object, p []byte, off int64) error {
	if err, _ := s.step(); err != nil {
		return err
	}
	if s.latency > 0 {
		select {
		case <-time.After(s.latency):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if err := s.Mem.ReadAt(ctx, o, p, off); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gets++
	s.read += int64(len(p))
	if s.onRead != nil {
		s.onRead(o, p, off)
	}
	return nil
}

func (s *store) List(ctx context.Context, prefix, after string) iter.Seq2[objstore.Object, error] {
	if err, _ := s.step(); err != nil {
		return func(yield func(objstore.Object, error) bool) { yield(objstore.Object{}, err) }
	}
	return s.Mem.List(ctx, prefix, after)
}

func (s *store) PutNew(ctx context.Context, key string, data []byte) (objstore.Object, error) {
	before, after := s.step()
	if before != nil {
		return objstore.Object{}, before
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, err := s.Mem.Stat(ctx, key); err == nil {
		return objstore.Object{}, &objstore.Error{Op: "put", Key: key, Kind: objstore.KindExists}
	}
	return s.PutBytes(key, data), after
}

func (s *store) Delete(ctx context.Context, key, etag string) error {
	before, after := s.step()
	if before != nil {
		return before
	}
	if err := s.Mem.Delete(ctx, key, etag); err != nil {
		return err
	}
	return after
}

func (s *store) Uploads(_ context.Context, prefix string) (list []objstore.Unfinished, err error) {
	before, after := s.step()
	if before = errors.Join(before, s.cleanUp); before != nil {
		return nil, before
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for u := range s.uploads {
		if strings.HasPrefix(u.key, prefix) {
			list = append(list, objstore.Unfinished{Key: u.key, ID: u.ID()})
		}
	}
	return list, after
}

func (s *store) AbortUpload(_ context.Context, _, id string) error {
	before, after := s.step()
	if before != nil {
		return before
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.uploads, func(u *upload, _ bool) bool { return u.ID() == id })
	return after
}

type upload struct {
	s              *store
	key            string
	size, partSize int64
	parts          map[int][]byte
}

func (s *store) Upload(_ context.Context, key string, size, partSize int64) (objstore.Upload, error) {
	before, after := s.step()
	if before != nil {
		return nil, before
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	u := &upload{s, key, size, partSize, make(map[int][]byte)}
	s.uploads[u] = true
	return u, after
}

func (u *upload) ID() string { return fmt.Sprintf("%p", u) }

func (u *upload) Part(_ context.Context, n int, p []byte) error {
	before, after := u.s.step()
	if before != nil {
		return before
	}
	u.s.mu.Lock()
	defer u.s.mu.Unlock()
	if want := min(u.partSize, u.size-int64(n)*u.partSize); int64(len(p)) != want {
		return fmt.Errorf("part %d has %d bytes, want %d", n, len(p), want)
	}
	u.parts[n] = slices.Clone(p)
	return after
}

func (u *upload) Complete(context.Context) (objstore.Object, error) {
	before, after := u.s.step()
	if before != nil {
		return objstore.Object{}, before
	}
	u.s.mu.Lock()
	defer u.s.mu.Unlock()
	if !u.s.uploads[u] {
		return objstore.Object{}, fmt.Errorf("upload of %s has ended", u.key)
	}
	var data []byte
	for n := int64(0); n*u.partSize < u.size; n++ {
		data = append(data, u.parts[int(n)]...)
	}
	if int64(len(data)) != u.size {
		return objstore.Object{}, fmt.Errorf("parts have %d bytes, want %d", len(data), u.size)
	}
	delete(u.s.uploads, u)
	return u.s.PutBytes(u.key, data), after
}

func (u *upload) Abort(context.Context) error {
	if err, _ := u.s.step(); err != nil {
		return err
	}
	u.s.mu.Lock()
	defer u.s.mu.Unlock()
	delete(u.s.uploads, u)
	return nil
}

// perm is a seeded order.
type perm []int

func (p perm) Len() int       { return len(p) }
func (p perm) At(pos int) int { return p[pos] }

func permute(seed uint64) func(n int) Order {
	return func(n int) Order { return perm(rand.New(rand.NewPCG(seed, 1)).Perm(n)) }
}

// bytesOf makes n bytes that no compression or shift hides.
func bytesOf(seed uint64, n int) []byte {
	b := make([]byte, n)
	// Random bytes are slow under the race detector, so they repeat; by a prime, so that no block
	// equals its neighbours.
	const period = 10007
	_, _ = rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), byte(seed >> 16)}).Read(b[:min(n, period)])
	for i := period; i < n; i *= 2 {
		copy(b[i:], b[:i])
	}
	return b
}

// fill puts files under src/ and returns their manifest.
func fill(t rapid.TB, s *store, files map[string]int) *catalog.Manifest {
	t.Helper()
	paths := make([]string, 0, len(files))
	for p := range files {
		paths = append(paths, p)
	}
	sort.Strings(paths)
	for i, p := range paths {
		s.PutBytes("src/"+p, bytesOf(uint64(i), files[p]))
	}
	m, err := catalog.Build(s.Mem.List(context.Background(), "src/", ""), catalog.BuildOptions{Prefix: "src/"})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// keys lists what is under prefix, without it.
func keys(s *store, prefix string) []string {
	var out []string
	for o := range s.Mem.List(context.Background(), prefix, "") {
		out = append(out, strings.TrimPrefix(o.Key, prefix))
	}
	return out
}

func get(t rapid.TB, s *store, key string) []byte {
	t.Helper()
	o, err := s.Mem.Stat(context.Background(), key)
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, o.Size)
	if err := s.Mem.ReadAt(context.Background(), o, b, 0); err != nil {
		t.Fatal(err)
	}
	return b
}

// members reads all members of a source.
func members(ctx context.Context, s *store, src objstore.Source) (*Set, []Member, error) {
	set, err := Open(ctx, s, src, OpenOptions{})
	if err != nil {
		return nil, nil, err
	}
	var out []Member
	for m, err := range set.Members(ctx) {
		if err != nil {
			return set, nil, err
		}
		out = append(out, m)
	}
	return set, out, nil
}

// rebuild makes a manifest of members, as a mount of the set does.
func rebuild(t rapid.TB, list []Member) *catalog.Manifest {
	t.Helper()
	m, err := catalog.Build(func(yield func(objstore.Object, error) bool) {
		for _, m := range list {
			if !yield(objstore.Object{Key: m.Path, Size: m.Size, ETag: m.ETag, ModTime: m.ModTime}, nil) {
				return
			}
		}
	}, catalog.BuildOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// What archive/tar does not write: the parts of a header, for tars that are wrong.

// paxLen returns the length of the record "LEN KEY=VALUE\n", where LEN counts itself.
func paxLen(key string, value int) int {
	n := len(key) + value + 3
	total := n + len(strconv.Itoa(n))
	if len(strconv.Itoa(total)) > len(strconv.Itoa(n)) {
		total++
	}
	return total
}

func appendPax(dst []byte, key, value string) []byte {
	dst = strconv.AppendInt(dst, int64(paxLen(key, len(value))), 10)
	dst = append(append(append(dst, ' '), key...), '=')
	return append(append(dst, value...), '\n')
}

// appendBlock appends one ustar header block.
func appendBlock(dst []byte, prefix, base string, typeflag byte, size, mtime int64) []byte {
	at := len(dst)
	dst = append(dst, make([]byte, blockSize)...)
	h := dst[at:]
	copy(h[0:100], base)
	copy(h[100:], "0000644\x00")
	copy(h[108:], "0000000\x00")
	copy(h[116:], "0000000\x00")
	octal(h[124:136], size)
	if mtime < 0 || mtime > ustarOctal {
		mtime = 0
	}
	octal(h[136:148], mtime)
	h[156] = typeflag
	copy(h[257:], "ustar\x0000")
	copy(h[329:], "0000000\x00")
	copy(h[337:], "0000000\x00")
	copy(h[345:500], prefix)
	sum := int64(8 * ' ')
	for _, c := range h {
		sum += int64(c)
	}
	octal(h[148:155], sum)
	h[155] = ' '
	return dst
}

// octal fills b with v, zero-padded, and a NUL.
func octal(b []byte, v int64) {
	for i := len(b) - 2; i >= 0; i-- {
		b[i] = '0' + byte(v&7)
		v >>= 3
	}
	b[len(b)-1] = 0
}

package cache

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/segment"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

// foldCodec codes files whose second half repeats the first.
type foldCodec struct {
	broken           atomic.Bool  // Decode fails
	lost             atomic.Bool  // Form does not know what Decode needs
	plain            atomic.Bool  // what is restored is kept so
	hold             sync.RWMutex // Decode waits while it is locked
	encoded, decoded atomic.Int64
	slow             time.Duration
}

const foldMagic = "FOLD"

func isFolded(b []byte) bool { return bytes.HasPrefix(b, []byte(foldMagic)) }

// folding returns a copy of b that has a coded form, if it is long enough.
func folding(b []byte) []byte {
	b = bytes.Clone(b)
	copy(b[len(b)/2:len(b)/2*2], b)
	return b
}

func (c *foldCodec) Encode(dst, file []byte) ([]byte, bool) {
	c.encoded.Add(1)
	time.Sleep(c.slow)
	half := len(file) / 2
	if half < 64 || !bytes.Equal(file[:half], file[half:2*half]) {
		return dst, false
	}
	dst = binary.LittleEndian.AppendUint32(append(dst, foldMagic...), uint32(len(file)))
	return append(append(dst, file[:half]...), file[2*half:]...), true
}

func (c *foldCodec) Decode(dst, coded []byte) ([]byte, error) {
	if c.broken.Load() || !isFolded(coded) {
		return nil, errors.New("no tables")
	}
	c.decoded.Add(1)
	c.hold.RLock()
	defer c.hold.RUnlock()
	half := int(binary.LittleEndian.Uint32(coded[4:])) / 2
	body := coded[8:]
	return append(append(append(dst, body[:half]...), body[:half]...), body[half:]...), nil
}

func (c *foldCodec) Form([]byte) (form [8]byte) {
	if !c.lost.Load() {
		copy(form[:], "fold-one")
	}
	return form
}

func (c *foldCodec) KeepRestored() bool { return c.plain.Load() }

// codedFixture is a dataset of files of which all but every fifth fold.
type codedFixture struct {
	t     *testing.T
	dir   string
	mem   *memstore.Mem
	gate  *gate
	m     *catalog.Manifest
	want  [][]byte
	codec foldCodec
	o     segment.Options
	c     *Cache
	v     *Volume
}

func newCoded(t *testing.T, files, size int) *codedFixture {
	f := newCodedIn(t, t.TempDir(), files, size)
	t.Cleanup(func() { closeCache(t, f.c) })
	return f
}

func newCodedIn(t *testing.T, dir string, files, size int) *codedFixture {
	f := &codedFixture{t: t, dir: dir, mem: memstore.New(), o: segment.Options{SegmentSize: 1 << 20, Logger: quiet}}
	f.gate = &gate{Reader: f.mem}
	for i := range files {
		f.put(i, size+i)
	}
	f.list()
	f.open()
	return f
}

func (f *codedFixture) put(i, size int) {
	b := noise[997*i%(1<<20):][:size]
	if i%5 != 4 {
		b = folding(b)
	}
	f.mem.PutBytes(fmt.Sprintf("a/%04d", i), b)
}

func (f *codedFixture) list() {
	m, err := catalog.Build(f.mem.List(f.t.Context(), "a/", ""), catalog.BuildOptions{Prefix: "a/"})
	if err != nil {
		f.t.Fatal(err)
	}
	f.m, f.want = m, nil
	for i := range m.Len() {
		o := m.Object(i)
		data := make([]byte, o.Size)
		if err := f.mem.ReadAt(f.t.Context(), o, data, 0); err != nil {
			f.t.Fatal(err)
		}
		f.want = append(f.want, data)
	}
}

func (f *codedFixture) volume() *Volume {
	return f.c.NewVolume(VolumeOptions{Manifest: f.m, Dataset: [16]byte{9}, Store: f.gate, Codec: &f.codec})
}

func (f *codedFixture) open() {
	f.c = newPatient(Options{Memory: 64 << 20, Disk: 1 << 30, Logger: quiet})
	f.v = f.volume()
	if err := f.v.OpenDisk(f.dir, f.o); err != nil {
		f.t.Fatal(err)
	}
}

func (f *codedFixture) reopen() {
	closeCache(f.t, f.c)
	f.open()
}

// fill keeps all files that fit.
func (f *codedFixture) fill() {
	f.readAll(f.v)
	settled(f.t, f.c)
}

func (f *codedFixture) readAll(v *Volume) {
	for i := range f.want {
		p := make([]byte, len(f.want[i]))
		if n, err := v.ReadAt(context.Background(), i, p, 0); err != nil || !bytes.Equal(p[:n], f.want[i]) {
			f.t.Fatalf("file %d: %d bytes of %d, %v", i, n, len(f.want[i]), err)
		}
		v.Spend(i)
	}
}

// recode recodes all there is.
func (f *codedFixture) recode() {
	r := NewRecoder(f.v, 2, func(time.Duration) {})
	for quiet := 0; quiet < 2; {
		if quiet++; r.Next(f.t.Context()) {
			quiet = 0
		}
	}
}

func (f *codedFixture) gets() int64 { return f.gate.reads.Load() }

func TestRecode(t *testing.T) {
	for _, small := range []bool{false, true} { // the store has room for copies, or none
		f := newCoded(t, 100, 60<<10)
		f.fill()
		used := f.v.Stats().DiskUsed
		if small {
			f.c.budget.SetLimit(used)
		}
		f.recode()
		s := f.v.Stats()
		if s.Coded != 80 || s.Kept != 100 || s.CodedAfter > s.CodedBefore*51/100 || s.DiskUsed > used*7/10 ||
			s.Restored != 0 {
			t.Errorf("%d coded of %d kept, %d bytes in %d, %d on disk of %d, %d restored",
				s.Coded, s.Kept, s.CodedBefore, s.CodedAfter, s.DiskUsed, used, s.Restored)
		}
		gets := f.gets()
		f.readAll(f.v)
		if s := f.v.Stats(); s.Restored != 80 || s.Restore <= 0 {
			t.Errorf("%d restored, in %v", s.Restored, s.Restore)
		}
		for i := range f.want {
			data, release, err := f.v.SampleCoded(t.Context(), i)
			if err != nil || isFolded(data) != (i%5 != 4) {
				t.Fatalf("file %d: coded %v, %v", i, isFolded(data), err)
			}
			release()
			if data, release, err = f.v.Sample(t.Context(), i); err != nil || !bytes.Equal(data, f.want[i]) {
				t.Fatalf("file %d: %d bytes, %v", i, len(data), err)
			}
			release()
			f.v.Spend(i)
		}
		encoded := f.codec.encoded.Load()
		f.recode()
		// those that have none, once: a new recoder does not know them
		if n := f.codec.encoded.Load() - encoded; n > 40 {
			t.Errorf("%d encoded again", n)
		}
		f.reopen()
		if again := f.v.Stats(); again.Coded != 80 || again.Kept != 100 || again.CodedAfter != s.CodedAfter {
			t.Errorf("after a restart: %+v", again)
		}
		f.readAll(f.v)
		if n := f.gets() - gets; n != 0 {
			t.Errorf("%d requests to the store", n)
		}
	}
}

// Recoded files whose originals are read are kept in that form again, as far as there is room.
func TestKeepRestored(t *testing.T) {
	for _, full := range []bool{false, true} {
		f := newCoded(t, 100, 60<<10)
		f.fill()
		f.recode()
		if full {
			f.c.budget.SetLimit(f.v.Stats().DiskUsed)
		}
		f.codec.plain.Store(true)
		gets := f.gets()
		for pass := 0; pass == 0 || f.v.Stats().Coded > 0 && !full; pass++ { // one restored file is written at a time
			f.fill()
		}
		s := f.v.Stats()
		if full != (s.Coded > 0) || s.Kept != 100 || full && s.DiskUsed > f.c.budget.Limit() {
			t.Errorf("full %v: %+v", full, s)
		}
		restored := s.Restored
		if f.fill(); f.v.Stats().Restored > restored && !full {
			t.Error("restored again")
		}
		f.reopen()
		if f.fill(); f.gets() != gets || f.v.Stats().Coded > s.Coded {
			t.Errorf("%d requests, %+v after a restart", f.gets()-gets, f.v.Stats())
		}
	}
}

// A disk without free space keeps what is restored as it was, and stays in use.
func TestKeepRestoredDiskFull(t *testing.T) {
	f := newCoded(t, 10, 60<<10)
	f.fill()
	f.recode()
	f.codec.plain.Store(true)
	must(t, f.v.ds.disk.Load().writer.do(t.Context(), func() {
		f.c.statfs = func(string) (free, size int64, err error) { return 1 << 20, 1 << 30, nil }
	}))
	f.fill()
	must(t, f.v.Flush(t.Context()))
	if s := f.v.Stats(); s.DiskDown || s.DiskErrors > 0 || s.Coded != 8 || s.Restored == 0 {
		t.Errorf("%+v", s)
	}
}

// A reader in pieces, and readers of the same file, share one restore.
func TestRestoreOnce(t *testing.T) {
	f := newCoded(t, 4, 200<<10)
	f.fill()
	f.recode()
	p := make([]byte, 32<<10)
	for off := 0; off < len(f.want[0]); off += len(p) {
		if n, err := f.v.ReadAt(t.Context(), 0, p, int64(off)); err != nil || !bytes.Equal(p[:n], f.want[0][off:][:n]) {
			t.Fatal(n, err)
		}
	}
	f.codec.hold.Lock()
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			q := make([]byte, len(f.want[1]))
			if _, err := f.v.ReadAt(t.Context(), 1, q, 0); err != nil || !bytes.Equal(q, f.want[1]) {
				t.Error(err)
			}
		})
	}
	eventually(t, "all wait for one restore", func() bool { return f.c.Stats().Joined == 7 })
	short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, _, err := f.v.Serve(short, 1, 0, 100, time.Time{}, true); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a node that asks for what is held does not wait for the restore: %v", err)
	}
	f.codec.hold.Unlock()
	all.Wait()
	if n := f.codec.decoded.Load(); n != 2 {
		t.Errorf("%d restores", n)
	}
	data, release, err := f.v.Serve(t.Context(), 2, 10, 5000, time.Time{}, true)
	if err != nil || !bytes.Equal(data, f.want[2][10:5010]) {
		t.Fatal(err)
	}
	release()
}

// A recoder that has found nothing does not look at the extents again before something has changed on the disk.
func TestRecodeIdle(t *testing.T) {
	f := newCoded(t, 20, 60<<10)
	f.fill()
	r := NewRecoder(f.v, 1, func(time.Duration) {})
	for r.Next(t.Context()) || r.growing != 0 || len(r.queue) > 0 {
	}
	again := func() bool {
		for i := range r.tried {
			r.tried[i].Store(0) // so that a look finds something
		}
		return r.Next(t.Context()) || r.growing != 0
	}
	if again() {
		t.Error("looked again")
	}
	f.put(3, 70<<10)
	f.list()
	old := f.v
	f.v = f.volume()
	f.v.Inherit(old)
	old.Retire()
	r.v = f.v
	f.fill()
	if !again() {
		t.Error("did not look again")
	}
}

// What cannot be restored is fetched again, and kept as it came; not for a peer that asks for what is held only.
func TestRestoreFails(t *testing.T) {
	f := newCoded(t, 10, 60<<10)
	f.fill()
	f.recode()
	f.codec.broken.Store(true)
	gets := f.gets()
	if _, _, err := f.v.Serve(t.Context(), 0, 0, 100, time.Time{}, true); !errors.Is(err, ErrNotHeld) || f.gets() > gets {
		t.Errorf("a peer that asks for what is held: %d requests, %v", f.gets()-gets, err)
	}
	f.fill()
	if n, s := f.gets()-gets, f.v.Stats(); n != 8 || s.Coded != 0 || s.Kept != 10 || s.Corrupt != 8 ||
		s.CodedAfter != 0 {
		t.Errorf("%d requests, %+v", n, s)
	}
	f.reopen()
	gets = f.gets()
	f.fill()
	if n, s := f.gets()-gets, f.v.Stats(); n != 0 || s.Coded != 0 || s.Kept != 10 {
		t.Errorf("after a restart: %d requests, %+v", n, s)
	}
}

// A version inherits coded records; a volume without a codec takes none.
func TestInheritCoded(t *testing.T) {
	f := newCoded(t, 20, 60<<10)
	f.fill()
	f.recode()
	f.put(3, 70<<10)
	old := f.v
	f.list()
	f.v = f.volume()
	f.v.Inherit(old)
	old.Retire()
	gets := f.gets()
	f.readAll(f.v)
	if n, s := f.gets()-gets, f.v.Stats(); n != 1 || s.Coded != 15 {
		t.Errorf("%d requests, %+v", n, s)
	}
	closeCache(t, f.c)
	f.c = New(Options{Memory: 64 << 20, Logger: quiet})
	f.v = f.c.NewVolume(VolumeOptions{Manifest: f.m, Dataset: [16]byte{9}, Store: f.gate})
	if err := f.v.OpenDisk(f.dir, f.o); err != nil {
		t.Fatal(err)
	}
	f.readAll(f.v)
	if s := f.v.Stats(); s.Coded != 0 {
		t.Errorf("%+v", s)
	}
}

// Readers of all kinds, new versions and a quota that comes and goes, while files are recoded.
func TestRecodeBesideReaders(t *testing.T) {
	for _, procs := range []int{1, 2, 8} {
		t.Run(fmt.Sprint(procs), func(t *testing.T) {
			defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(procs))
			f := newCoded(t, 120, 30<<10)
			f.codec.slow = 50 * time.Microsecond
			f.fill()
			ctx, stop := context.WithCancel(t.Context())
			var all sync.WaitGroup
			var cur atomic.Pointer[Volume]
			cur.Store(f.v)
			for k := range 4 {
				all.Go(func() {
					for i := k; ctx.Err() == nil; i = (i + 7) % len(f.want) {
						v := cur.Load()
						data, release, err := v.Sample(context.Background(), i)
						if k%2 == 1 && err == nil {
							release()
							data, release, err = v.SampleCoded(context.Background(), i)
						}
						if err != nil {
							t.Error(err)
							return
						}
						if isFolded(data) {
							data, _ = f.codec.Decode(nil, data)
						}
						if !bytes.Equal(data, f.want[i]) {
							t.Errorf("file %d differs", i)
						}
						release()
						v.Spend(i)
					}
				})
			}
			for round := range 4 {
				f.codec.plain.Store(round == 2)
				f.recode()
				v := f.volume()
				v.Inherit(cur.Load())
				old := cur.Swap(v)
				old.Retire()
				f.v = v
				if round == 1 {
					v.SetQuota(1 << 20)
				} else {
					v.SetQuota(0)
				}
				f.readAll(v)
			}
			stop()
			all.Wait()
			f.codec.plain.Store(false)
			f.v.SetQuota(0)
			f.fill()
			f.fill()
			f.recode()
			if s := f.v.Stats(); s.Coded != 96 || s.Kept != 120 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// foldedPeer is another node that has all files, and those that fold coded only.
type foldedPeer struct {
	want         [][]byte
	gate         chan struct{} // Read waits for it; nil: it does not
	asked        atomic.Int64  // wants
	coded, plain atomic.Int64  // bytes given
}

func (p *foldedPeer) Owns(int, int) bool { return false }

func (p *foldedPeer) Sampled(int, int) bool { return false }

func (p *foldedPeer) Nodes() int { return 2 }

func (p *foldedPeer) Asks(int, int) bool { return true }

// checker is what the volume says of what its peers gave.
type checker = func(context.Context, Want) error

func (p *foldedPeer) Read(ctx context.Context, wants []Want, _ bool, check checker) (rest []Want) {
	p.asked.Add(int64(len(wants)))
	if p.gate != nil {
		<-p.gate
	}
	for _, w := range wants {
		file := p.want[w.File]
		if coded, ok := new(foldCodec).Encode(nil, file); ok && w.Coded != nil {
			*w.Coded = copy(w.P, coded)
			p.coded.Add(int64(len(coded)))
		} else {
			p.plain.Add(int64(copy(w.P, file[w.Off:])))
		}
		if check(ctx, w) != nil {
			rest = append(rest, w)
		}
	}
	return rest
}

func (f *codedFixture) checkPieces(v *Volume, i int) {
	f.t.Helper()
	p := make([]byte, 16<<10)
	for off := 0; off < len(f.want[i]); off += len(p) {
		if n, err := v.ReadAt(context.Background(), i, p, int64(off)); err != nil ||
			!bytes.Equal(p[:n], f.want[i][off:][:n]) {
			f.t.Fatalf("file %d at %d: %d bytes, %v", i, off, n, err)
		}
	}
}

// A coded file that lands while a Verify begins reaches its waiters whole and no longer, and is kept nowhere.
func TestCodedWhileAVerifyBegins(t *testing.T) {
	f := newCoded(t, 1, 60<<10)
	p := &foldedPeer{want: f.want, gate: make(chan struct{})}
	f.v.SetPeers(p)
	read := make(chan error, 1)
	go func() {
		data, release, err := f.v.SampleCoded(context.Background(), 0)
		if coded, _ := new(foldCodec).Encode(nil, f.want[0]); err == nil && !bytes.Equal(data, coded) {
			err = fmt.Errorf("%d bytes, not those %d", len(data), len(coded))
		}
		if release != nil {
			release()
		}
		read <- err
	}()
	eventually(t, "the peer is asked", func() bool { return p.asked.Load() > 0 })
	_, err := f.v.Verify(t.Context(), nil)
	must(t, err)
	close(p.gate)
	must(t, <-read)
	settled(t, f.c)
	if at := f.v.Residence(0); at != InStore {
		t.Errorf("it is kept: %d", at)
	}
}

// wrongReader gives other bytes than the store has.
type wrongReader struct{ objstore.Reader }

func (r wrongReader) ReadAt(ctx context.Context, o objstore.Object, p []byte, off int64) error {
	defer wrong(p)
	return r.Reader.ReadAt(ctx, o, p, off)
}

func wrong(p []byte) {
	for i := range p {
		p[i] ^= 1
	}
}

// What a Verify drops does not come back after a restart, neither as it was before it was kept in its other form, nor
// in a form that was made of it before.
func TestVerifyDropsAllForms(t *testing.T) {
	f := newCoded(t, 100, 60<<10)
	f.gate.Reader = wrongReader{f.mem}
	for _, b := range f.want {
		wrong(b)
	}
	f.fill()
	f.recode()
	f.codec.plain.Store(true)
	for f.v.Stats().Coded > 40 {
		f.fill()
	}
	f.gate.Reader = f.mem
	late := f.v.key(0, 0).record(0)
	if r, err := f.v.Verify(t.Context(), nil); err != nil || r.Dropped != 100 {
		t.Fatal(r.Dropped, err)
	}
	must(t, late.d.writer.do(t.Context(), func() {
		late.replaced(late.d.append(late.describe(len(f.want[0])), f.want[0], nil), isPlain)
	}))
	f.reopen()
	if kept, _ := f.v.Kept(); kept != 0 {
		t.Errorf("%d are back", kept)
	}
}

// What comes coded from a peer is kept so, also over a restart, and read by all.
func TestCodedFromPeer(t *testing.T) {
	f := newCoded(t, 20, 60<<10)
	p := &foldedPeer{want: f.want}
	f.v.SetPeers(p)
	for i := range f.want {
		data, release, err := f.v.SampleCoded(t.Context(), i)
		if err != nil || isFolded(data) != (i%5 != 4) {
			t.Fatalf("file %d: coded %v, %v", i, isFolded(data), err)
		}
		release()
	}
	settled(t, f.c)
	s := f.v.Stats()
	if s.Coded != 16 || s.Kept != 20 || s.Restored != 0 || s.PeerBytes != p.coded.Load()+p.plain.Load() ||
		f.gets() != 0 || s.Misses != 20 || s.Reads != 20 {
		t.Errorf("%+v, %d requests", s, f.gets())
	}
	if n, _ := f.c.ring.used(); n > 0 {
		t.Errorf("%d left in memory", n)
	}
	for _, form := range []string{"fold-one", "fold-two"} {
		data, release, ok := f.v.ServeCoded(t.Context(), 0, 0, len(f.want[0]), [8]byte([]byte(form)))
		if ok != (form == "fold-one") || ok && !isFolded(data) {
			t.Errorf("%s: %v", form, ok)
		}
		if ok {
			release()
		}
	}
	if _, _, ok := f.v.ServeCoded(t.Context(), 0, 1, len(f.want[0])-1, [8]byte([]byte("fold-one"))); ok {
		t.Error("a part was served")
	}
	f.reopen()
	f.readAll(f.v)
	if s := f.v.Stats(); s.Coded != 16 || s.Restored != 16 || f.gets() != 0 {
		t.Errorf("after a restart: %+v, %d requests", s, f.gets())
	}
}

// Samples whose form cannot be decoded any more are fetched again.
func TestCodedLost(t *testing.T) {
	f := newCoded(t, 10, 60<<10)
	f.fill()
	f.recode()
	f.codec.broken.Store(true)
	f.codec.lost.Store(true)
	gets := f.gets()
	for i := range f.want {
		data, release, err := f.v.SampleCoded(t.Context(), i)
		if err != nil || !bytes.Equal(data, f.want[i]) {
			t.Fatalf("file %d: %d bytes, %v", i, len(data), err)
		}
		release()
	}
	settled(t, f.c)
	if s := f.v.Stats(); s.Coded != 0 || s.Kept != 10 || f.gets()-gets != 8 {
		t.Errorf("%+v, %d requests", s, f.gets()-gets)
	}
}

// What another node sent in a form that cannot be decoded is fetched, and kept, by the first who wants the file.
func TestCodedBad(t *testing.T) {
	f := newCoded(t, 2, 60<<10)
	f.v.SetPeers(&foldedPeer{want: f.want})
	landed := make(chan error, 1)
	f.v.Prefetch(nil, 0, 0, time.Time{}, func(_ int, err error) { landed <- err })
	if err := <-landed; err != nil {
		t.Fatal(err)
	}
	settled(t, f.c)
	f.codec.broken.Store(true)
	f.v.SetPeers(nil)
	for range 3 {
		data, release, err := f.v.Sample(t.Context(), 0)
		if err != nil || !bytes.Equal(data, f.want[0]) {
			t.Fatal(err)
		}
		release()
		settled(t, f.c)
	}
	if s := f.v.Stats(); f.gets() != 1 || s.Coded != 0 || s.Kept != 1 || s.Corrupt != 1 {
		t.Errorf("%+v, %d requests", s, f.gets())
	}
}

// A file that is claimed while it is restored is on the account then.
func TestClaimWhileRestored(t *testing.T) {
	f := newCoded(t, 2, 60<<10)
	c := New(Options{Memory: 16 << 20, Logger: quiet})
	defer closeCache(t, c)
	v := c.NewVolume(VolumeOptions{Manifest: f.m, Dataset: [16]byte{9}, Store: f.gate, Codec: &f.codec,
		Peers: &foldedPeer{want: f.want}})
	landed := make(chan error, 1)
	v.Prefetch(nil, 0, 0, time.Time{}, func(_ int, err error) { landed <- err })
	<-landed
	a := c.NewAccount(1)
	f.codec.hold.Lock()
	done := make(chan error, 1)
	go func() {
		_, release, err := v.Sample(t.Context(), 0)
		if err == nil {
			release()
		}
		done <- err
	}()
	// once more than to check what the peer gave
	eventually(t, "it is being restored", func() bool { return f.codec.decoded.Load() == 2 })
	if !v.Claim(a, 0, 0) || a.Held() == 0 {
		t.Fatalf("%d bytes on the account", a.Held())
	}
	f.codec.hold.Unlock()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	eventually(t, "it has landed", func() bool { v.mu.Lock(); defer v.mu.Unlock(); return len(v.flights) == 0 })
	if a.Held() != footprint(len(f.want[0])) {
		t.Errorf("%d bytes on the account", a.Held())
	}
	v.Spend(0)
	c.CloseAccount(a)
}

// foldedStore delivers files that fold coded, where that is asked for.
type foldedStore struct{ *gate }

func (s foldedStore) ReadCoded(ctx context.Context, o objstore.Object, spans []objstore.Span, coded []*int) error {
	for i, sp := range spans {
		if err := s.ReadAt(ctx, o, sp.P, sp.Off); err != nil {
			return err
		}
		if b, ok := new(foldCodec).Encode(nil, sp.P); ok && coded[i] != nil {
			*coded[i] = copy(sp.P, b)
		}
	}
	return nil
}

// What comes coded from the store is kept so; a reader who wants the file gets it as it came.
func TestCodedFromStore(t *testing.T) {
	f := newCoded(t, 20, 60<<10)
	closeCache(t, f.c)
	f.c = newPatient(Options{Memory: 64 << 20, Disk: 1 << 30, Logger: quiet})
	f.v = f.c.NewVolume(VolumeOptions{Manifest: f.m, Dataset: [16]byte{9}, Store: foldedStore{f.gate}, Codec: &f.codec})
	if err := f.v.OpenDisk(f.dir, f.o); err != nil {
		t.Fatal(err)
	}
	p := make([]byte, len(f.want[0]))
	if _, err := f.v.ReadAt(t.Context(), 0, p, 0); err != nil || !bytes.Equal(p, f.want[0]) {
		t.Fatal(err)
	}
	for i := 1; i < len(f.want); i++ {
		data, release, err := f.v.SampleCoded(t.Context(), i)
		if err != nil || isFolded(data) != (i%5 != 4) {
			t.Fatalf("file %d: coded %v, %v", i, isFolded(data), err)
		}
		release()
	}
	settled(t, f.c)
	if s := f.v.Stats(); s.Coded != 15 || s.Kept != 20 || s.Restored != 0 || s.PeerBytes != 0 || f.gets() != 20 {
		t.Errorf("%+v, %d requests", s, f.gets())
	}
	f.reopen()
	f.readAll(f.v)
	if s := f.v.Stats(); s.Restored != 15 || f.gets() != 20 {
		t.Errorf("after a restart: %+v, %d requests", s, f.gets())
	}
}

// A coded form in memory is restored once for all who read the file, and stays on the account that it was fetched for.
func TestCodedInMemory(t *testing.T) {
	f := newCoded(t, 10, 60<<10)
	c := New(Options{Memory: 16 << 20, Logger: quiet})
	defer closeCache(t, c)
	p := &foldedPeer{want: f.want}
	v := c.NewVolume(VolumeOptions{Manifest: f.m, Dataset: [16]byte{9}, Store: f.gate, Codec: &f.codec, Peers: p})
	a := c.NewAccount(1)
	var all sync.WaitGroup
	all.Add(len(f.want))
	landed := func(int, error) { all.Done() }
	for i := range 5 {
		if out := v.Prefetch(a, i, 0, time.Time{}, landed); out != Started {
			t.Fatal(out)
		}
	}
	if n, _ := v.PrefetchGroup(a, []int{5}, time.Time{}, landed); n != 1 {
		t.Fatal(n)
	}
	for i := 6; i < 10; i++ {
		v.Prefetch(a, i, 0, time.Time{}, landed)
	}
	all.Wait()
	held := a.Held()
	for i := range f.want {
		if i%2 == 0 {
			f.checkPieces(v, i)
		}
		data, release, err := v.SampleCoded(t.Context(), i)
		if err != nil || isFolded(data) != (i%5 != 4) {
			t.Errorf("file %d: coded %v, %v", i, isFolded(data), err)
		}
		release()
	}
	if s := v.Stats(); s.Restored != 4 || a.Held() != held || s.PeerBytes != p.coded.Load()+p.plain.Load() {
		t.Errorf("%d on the account of %d, %+v", a.Held(), held, s)
	}
	// What cannot be restored is fetched as it came.
	f.codec.broken.Store(true)
	f.checkPieces(v, 1)
	data, release, err := v.SampleCoded(t.Context(), 1)
	if err != nil || !bytes.Equal(data, f.want[1]) {
		t.Error(err)
	}
	release()
	f.codec.broken.Store(false)
	for i := range f.want {
		v.Spend(i)
	}
	if a.Held() != 0 {
		t.Errorf("%d left on the account", a.Held())
	}
	c.CloseAccount(a)
	// A reader who wants the file as it came does not ask for another form.
	v.c.ring.drop(nil)
	plain := p.plain.Load()
	f.checkPieces(v, 2)
	if n := p.plain.Load() - plain; n != int64(len(f.want[2])) {
		t.Errorf("%d bytes as they came", n)
	}
}

// Who joins a flight that brings a coded form gets the file, or the coded form, as it asks.
func TestJoinCoded(t *testing.T) {
	f := newCoded(t, 4, 60<<10)
	p := &foldedPeer{want: f.want, gate: make(chan struct{})}
	f.v.SetPeers(p)
	landed := make(chan error, 1)
	f.v.Prefetch(nil, 0, 0, time.Time{}, func(_ int, err error) { landed <- err })
	eventually(t, "the peer is asked", func() bool { return p.asked.Load() == 1 })
	var all sync.WaitGroup
	for k := range 8 {
		all.Go(func() {
			read := f.v.Sample
			if k%2 == 0 {
				read = f.v.SampleCoded
			}
			data, release, err := read(t.Context(), 0)
			if err != nil {
				t.Error(err)
				return
			}
			defer release()
			if isFolded(data) != (k%2 == 0) || k%2 == 1 && !bytes.Equal(data, f.want[0]) {
				t.Errorf("reader %d: coded %v", k, isFolded(data))
			}
		})
	}
	eventually(t, "all wait", func() bool { return f.c.Stats().Joined == 8 })
	close(p.gate)
	all.Wait()
	// one to check what the peer gave; what all who wait have read is not kept
	if err := <-landed; err != nil || f.codec.decoded.Load() > 5 || p.asked.Load() != 1 {
		t.Errorf("%d restores, %d asked, %v", f.codec.decoded.Load(), p.asked.Load(), err)
	}
	f.v.Spend(0)
	if err := f.v.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	if s := f.v.Stats(); s.Kept != 1 {
		t.Errorf("%+v", s)
	}
}

// Readers of all kinds, prefetches and other nodes, with little memory, while coded forms come from a peer.
func TestCodedPeersBesideReaders(t *testing.T) {
	f := newCoded(t, 60, 50<<10)
	c := newPatient(Options{Memory: 2 << 20, Disk: 3 << 20, Logger: quiet})
	p := &foldedPeer{want: f.want}
	v := c.NewVolume(VolumeOptions{Manifest: f.m, Dataset: [16]byte{9}, Store: f.gate, Codec: &f.codec, Peers: p})
	if err := v.OpenDisk(t.TempDir(), f.o); err != nil {
		t.Fatal(err)
	}
	a := c.NewAccount(1)
	check := func(i int, data []byte) {
		if isFolded(data) {
			data, _ = new(foldCodec).Decode(nil, data)
		}
		if !bytes.Equal(data, f.want[i]) {
			t.Errorf("file %d differs", i)
		}
	}
	var all sync.WaitGroup
	for k := range 6 {
		all.Go(func() {
			for round := range 150 {
				i := (round*7 + k*11) % len(f.want)
				data, release, err, ok := []byte(nil), func() {}, error(nil), true
				switch (k + round) % 6 {
				case 0:
					data, release, err = v.Sample(context.Background(), i)
				case 1:
					data, release, ok = v.ServeCoded(context.Background(), i, 0, len(f.want[i]),
						[8]byte([]byte("fold-one")))
				case 2:
					data, release, err = v.Serve(context.Background(), i, 0, len(f.want[i]), time.Time{}, false)
					ok = !errors.Is(err, ErrBusy) && !errors.Is(err, ErrMemory) && !errors.Is(err, ErrNotHeld)
				case 3:
					v.Prefetch(a, i, 0, time.Time{}, nil)
					ok = false
				case 4:
					v.Hand(a, i)
					ok = false
				default:
					data, release, err = v.SampleCoded(context.Background(), i)
				}
				if !ok {
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				check(i, data)
				release()
				v.Spend(i)
			}
		})
	}
	all.Wait()
	if err := v.Flush(t.Context()); err != nil {
		t.Error(err)
	}
	for i := range f.want {
		v.Spend(i)
	}
	eventually(t, "all flights have landed", func() bool {
		v.mu.Lock()
		defer v.mu.Unlock()
		return len(v.flights) == 0
	})
	for i := range f.want {
		v.Spend(i)
	}
	if s := v.Stats(); a.Held() != 0 || s.Coded == 0 || s.Corrupt != 0 {
		t.Errorf("%d on the account, %+v", a.Held(), s)
	}
	closeCache(t, c)
}

package daemon

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/internal/handover"
)

// child is the keeping side of a socket to a keeper.
type child struct {
	c     *net.UnixConn
	ended chan struct{}
}

func newChild(t *rapid.T, k *keeper) *child {
	k.Lock()
	ours, theirs, err := k.gift(&exec.Cmd{})
	k.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.FileConn(theirs)
	if err = errors.Join(err, theirs.Close()); err != nil {
		t.Fatal(err)
	}
	h := &child{c.(*net.UnixConn), make(chan struct{})}
	go func() { k.serve(ours); close(h.ended) }()
	return h
}

// die ends the child, and waits until the keeper has taken everything that it had said.
func (h *child) die() { _ = h.c.Close(); <-h.ended }

// gone reports whether nobody has the other end of a pipe any more.
func gone(w *os.File) bool {
	_, err := w.Write([]byte{0})
	return errors.Is(err, syscall.EPIPE)
}

// A keeper has what its children keep, whatever they do and whenever they die; it has nothing twice, and nothing of
// what was dropped.
func TestKeeperModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		k := newKeeper()
		defer func() { k.remove(func(*keepsake) bool { return true }) }()
		type thing struct {
			id string
			w  *os.File
		}
		model, dropped, next := map[string]thing{}, []*os.File(nil), 0
		h := newChild(t, k)
		defer func() { h.die() }()
		drop := func(name string) {
			if o, ok := model[name]; ok {
				dropped = append(dropped, o.w)
				delete(model, name)
			}
		}
		steps := rapid.SliceOfN(rapid.SampledFrom([]string{"keep", "drop", "die", "renew", "fail"}), 1,
			20).Draw(t, "steps")
		for _, step := range steps {
			name := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "name")
			switch step {
			case "keep":
				r, w, err := os.Pipe()
				if err != nil {
					t.Fatal(err)
				}
				next++
				id := strconv.Itoa(next)
				if err := handover.WriteReply(h.c, &keepsake{ID: id, Name: name}, int(r.Fd())); err != nil {
					t.Fatal(err)
				}
				r.Close()
				drop(name)
				model[name] = thing{id, w}
			case "drop":
				if o, ok := model[name]; ok {
					if err := handover.WriteReply(h.c, &keepsake{ID: o.id, Name: name}); err != nil {
						t.Fatal(err)
					}
					drop(name)
				}
			default:
				h.die()
				code := 1
				if step == "renew" {
					code = codeRenewed
				}
				renewed, failed := k.renewed, k.failed
				atOnce := k.died(step != "fail", exitOf(t, code), "cause")
				if want := step == "renew" ||
					step == "fail" && renewed && failed == "" && k.good != nil; atOnce != want {
					t.Fatalf("%s: another child at once: %v", step, atOnce)
				}
				if k.ready(os.Getpid()); step == "fail" && atOnce && k.failed != "cause" {
					t.Fatalf("the old program does not know why it runs: %q", k.failed)
				}
				var names []string
				k.Lock()
				for _, o := range k.all {
					if names = append(names, o.Name); o.taken || o.ID != model[o.Name].id {
						t.Errorf("%s of %s: taken %v", o.Name, o.ID, o.taken)
					}
				}
				k.Unlock()
				if len(names) != len(model) || len(slices.Compact(slices.Sorted(slices.Values(names)))) != len(model) {
					t.Fatalf("the keeper has %v of %d", names, len(model))
				}
				h = newChild(t, k)
			}
		}
		h.die()
		for name, o := range model {
			if gone(o.w) {
				t.Errorf("%s is lost", name)
			}
			o.w.Close()
		}
		for _, w := range dropped {
			if !gone(w) {
				t.Error("what was dropped is still kept")
			}
			w.Close()
		}
	})
}

// What is served for a fifth of the time is kept, however many deaths there are. What is served for less ends, and in
// any case letGo after the last death.
func TestDeathsInQuickSuccession(t *testing.T) {
	for _, c := range []struct {
		life, gap time.Duration // served, and not
		deaths    int           // the last of them, in which it ends; 0: in none of 200
	}{
		{letGo / 6, letGo / 10, 0},
		{letGo / 40, letGo / 11, 0},
		{0, letGo / 8, 8},
		{letGo / 100, letGo / 20, 96},
		{2 * letGo, letGo - 1, 0},
		{letGo, letGo, 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			k := newKeeper()
			is := func() int {
				synctest.Wait()
				k.Lock()
				defer k.Unlock()
				return len(k.all)
			}
			for death := 1; death <= 200; death++ {
				k.take(&keepsake{ID: "1", Name: "a", taken: true})
				time.Sleep(c.life)
				k.died(true, nil, "")
				time.Sleep(c.gap)
				if ended := is() == 0; ended != (death == c.deaths) {
					t.Fatalf("%v served and %v not: after %d deaths it has ended: %v", c.life, c.gap, death, ended)
				} else if ended {
					return
				}
			}
			time.Sleep(letGo)
			if is() != 0 {
				t.Errorf("%v served and %v not: it has not ended %v after the last death", c.life, c.gap, letGo)
			}
		})
	}
}

// What was not taken is let go, or dropped, and no longer counts: what is left has all the time after the next death.
func TestDeathAfterOneWasLetGo(t *testing.T) {
	for _, dropped := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			k := newKeeper()
			for _, name := range []string{"a", "b"} {
				k.take(&keepsake{ID: name, Name: name, taken: true})
			}
			k.died(true, nil, "")
			k.take(&keepsake{ID: "c", Name: "a", taken: true})
			if dropped {
				k.drop(func(o *keepsake) bool { return o.Name == "b" })
			}
			time.Sleep(10 * letGo)
			k.died(true, nil, "")
			time.Sleep(letGo - 1)
			synctest.Wait()
			k.Lock()
			if len(k.all) != 1 {
				t.Errorf("dropped: %v: %d are kept, want 1", dropped, len(k.all))
			}
			k.Unlock()
			time.Sleep(letGo)
		})
	}
}

// Seconds in which the keeper itself got no processor do not count, neither now nor after the next death.
func TestFrozenKeeper(t *testing.T) {
	for thaw, first := range map[string]func(k *keeper){
		"the timer rings": (*keeper).look,
		"the child dies":  func(k *keeper) { k.died(false, nil, "") },
		"it takes all, and dies": func(k *keeper) {
			k.take(&keepsake{ID: "1", Name: "a", taken: true})
			k.died(true, nil, "")
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			k := newKeeper()
			k.take(&keepsake{ID: "1", Name: "a", taken: true})
			k.died(true, nil, "")
			time.Sleep(letGo / 2)
			synctest.Wait()
			k.timer.Stop()
			time.Sleep(2 * letGo)
			first(k)
			for _, c := range []struct {
				after time.Duration
				kept  int
			}{{letGo/2 - 1, 1}, {1, 0}} {
				time.Sleep(c.after)
				synctest.Wait()
				k.Lock()
				if len(k.all) != c.kept {
					t.Errorf("%s: %v later %d are kept, want %d", thaw, c.after, len(k.all), c.kept)
				}
				k.Unlock()
			}
		})
	}
}

// exits are the ends of processes with an exit code.
var exits = map[int]*exec.ExitError{}

func exitOf(t *rapid.T, code int) *exec.ExitError {
	if exits[code] == nil {
		var exit *exec.ExitError
		if !errors.As(exec.Command("/bin/sh", "-c", "exit "+strconv.Itoa(code)).Run(), &exit) {
			t.Fatal("no exit code")
		}
		exits[code] = exit
	}
	return exits[code]
}

// What a process inherits is given to one who asks for it, and ends at the time that it was told.
func TestInheritedIsLetGo(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	fd, err := unix.Dup(int(r.Fd()))
	r.Close()
	if err != nil {
		t.Fatal(err)
	}
	own.left.put(&keepsake{Name: "x", files: []*os.File{os.NewFile(uintptr(fd), "x"), os.Stdin}})
	if h := (Holder{}); !h.Has("x") || h.Has("y") || h.Held("y") != nil || len(h.Inherited()) != 1 {
		t.Error("what is inherited is not found")
	}
	files := Holder{}.Held("x")
	if len(files) != 2 || (Holder{}).Has("x") || gone(w) {
		t.Fatalf("taken: %v", files)
	}
	files[0].Close()
	if !gone(w) {
		t.Error("a copy is left")
	}
	if i := (inheritance{Left: letGo, Until: time.Now().Add(-time.Hour)}); i.wait() != letGo { // the clock was set
		t.Errorf("it is let go in %v", i.wait())
	}
	synctest.Test(t, func(t *testing.T) {
		own.left.put(&keepsake{Name: "x"})
		own.left.letGoIn(letGo)
		time.Sleep(letGo - 1)
		if synctest.Wait(); !(Holder{}).Has("x") {
			t.Error("it is let go too early")
		}
		time.Sleep(time.Nanosecond)
		if synctest.Wait(); (Holder{}).Has("x") {
			t.Error("it is not let go")
		}
		own.left = keeper{} // other bubbles must not touch its timer
	})
}

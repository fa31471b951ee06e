package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/handover"
)

// A keeper is asked by the processes of other containers. Each names what it is, and of each name one is served at a
// time: it gets what the one before it has left, a message for each keepsake and one that ends them, and then says what
// it keeps, as a child does to its supervisor. When its connection ends, it is dead, however it ended. If the keeper
// ends, its clients go on, and give all they have to the next one.

// KeeperEnv has the address of the keeper, unix:///PATH, of a process that leaves its mounts to a successor.
const KeeperEnv = "SHOAL_KEEPER"

const (
	letGoPod = 2 * time.Minute // letGo for pods: an image may have to be fetched for the next one
	redial   = time.Second     // between attempts to reach a keeper that has ended
)

// kept is what a keeper has of one name.
type kept struct {
	keeper
	turn chan struct{} // held while a client is connected
}

// ServeKeeper keeps what the processes that connect to address serve, until ctx ends.
func ServeKeeper(ctx context.Context, address string) error {
	path, ok := strings.CutPrefix(address, "unix://")
	if !ok || path == "" {
		return cli.Usagef("keeper %s: give unix:///PATH", address)
	}
	if conn, err := dialUnix(path); err == nil {
		_ = conn.Close()
		return fmt.Errorf("keeper %s: a keeper listens there already (its clients go on with it)", address)
	}
	if info, err := os.Lstat(path); err == nil && info.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("keeper %s: a file that is not a socket is there (remove it, or give another path)", address)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("keeper %s: %w", address, err)
	}
	mask := syscall.Umask(0o177) // who can connect can have every mount
	l, err := listenUnix(path)
	syscall.Umask(mask)
	if err != nil {
		return fmt.Errorf("keeper %s: %w", address, err)
	}
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	Outlive()
	if err := Own.Ready(); err != nil {
		return err
	}
	var all sync.Map // *kept by name
	for {
		c, err := handover.Accept(l.AcceptUnix, slog.Default())
		if err != nil { // ctx has ended
			return nil
		}
		go func() {
			defer func() { _ = c.Close() }()
			if err := serveClient(c, &all); err != nil {
				slog.Warn("a client of the keeper is not served", "cause", err)
			}
		}()
	}
}

func serveClient(c *net.UnixConn, all *sync.Map) error {
	_ = c.SetDeadline(time.Now().Add(handover.Timeout))
	var who keepsake
	var err error
	if who.files, err = handover.Receive(c, &who); err != nil || len(who.files) > 0 || who.Name == "" {
		who.close()
		return errors.Join(err, errors.New("it did not say what it is"))
	}
	known, _ := all.LoadOrStore(who.Name, &kept{keeper{patient: letGoPod}, make(chan struct{}, 1)})
	k := known.(*kept)
	select {
	case k.turn <- struct{}{}: // the one before it has ended
	case <-time.After(handover.Timeout):
		return handover.WriteReply(c,
			inheritance{Failed: "another process uses the same cache directory, and still runs (end it first)"})
	}
	defer func() { <-k.turn }()
	if err := k.hand(c); err != nil {
		return err
	}
	slog.Info("connected", "client", who.Name)
	_ = c.SetDeadline(time.Time{})
	k.serve(c)
	k.died(true, nil, "")
	slog.Info("disconnected; what it served waits for the next one", "client", who.Name)
	return nil
}

func (k *kept) hand(c *net.UnixConn) error {
	k.Lock()
	defer k.Unlock()
	for _, o := range k.all {
		if err := o.send(c, o.files); err != nil {
			return err
		}
	}
	return handover.WriteReply(c, inheritance{Left: k.left(), Until: time.Now().Add(k.left())})
}

// Connect lets the keeper at address, if there is one, have what this process will keep, and takes what a predecessor
// with the same folder has left there.
func Connect(address, folder string) error {
	if address == "" || own.to != nil {
		return nil
	}
	var at unix.Stat_t
	if err := errors.Join(os.MkdirAll(folder, 0o700), unix.Stat(folder, &at)); err != nil {
		return fmt.Errorf("cache directory %s: %w", folder, err)
	}
	name := fmt.Sprintf("%d:%d", at.Dev, at.Ino) // of the same folder in each container of a node, whatever its path
	c, left, wait, err := connect(address, name)
	for begun := time.Now(); errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED); c, left, wait,
		err = connect(address, name) {
		if time.Since(begun) > handover.Timeout {
			return fmt.Errorf("%s=%s: %w (start `shoal keeper %s`, whose folder must be the same one here)",
				KeeperEnv, address, err, address)
		}
		time.Sleep(redial / 10) // a node that boots starts both
	}
	if err != nil {
		return fmt.Errorf("%s=%s: %w", KeeperEnv, address, err)
	}
	own.to, own.away, own.left.all = c, true, left
	own.left.letGoIn(wait)
	go func() {
		for {
			_, _ = c.Read(make([]byte, 1)) // it says no more
			slog.Error("the keeper has ended: until there is another, mounts end with this process", "keeper", address)
			own.mu.Lock()
			own.to = nil
			own.mu.Unlock()
			for _ = c.Close(); ; time.Sleep(redial) {
				if c, left, _, err = connect(address, name); err == nil {
					break
				}
			}
			for _, k := range left {
				k.close()
			}
			slog.Info("another keeper has what is served", "keeper", address)
			own.kept.Lock()
			own.mu.Lock()
			own.to = c
			own.mu.Unlock()
			for _, k := range own.kept.all {
				give(k, k.files)
			}
			own.kept.Unlock()
		}
	}()
	return nil
}

// Kept reports whether a keeper has what this process keeps.
func Kept() bool {
	own.mu.Lock()
	defer own.mu.Unlock()
	return own.away && own.to != nil
}

func connect(address, name string) (c *net.UnixConn, left []*keepsake, wait time.Duration, err error) {
	conn, err := dialUnix(strings.TrimPrefix(address, "unix://"))
	if err != nil {
		return nil, nil, 0, err
	}
	c = conn.(*net.UnixConn)
	_ = c.SetReadDeadline(time.Now().Add(2 * handover.Timeout))
	err = handover.WriteReply(c, keepsake{Name: name})
	for err == nil {
		var said struct {
			keepsake
			inheritance
		}
		if said.files, err = handover.Receive(c, &said); err == nil && said.Failed != "" {
			err = errors.New(said.Failed)
		} else if err == nil && len(said.files) == 0 {
			return c, left, said.wait(), c.SetReadDeadline(time.Time{})
		}
		left = append(left, &said.keepsake)
	}
	for _, k := range left {
		k.close()
	}
	_ = c.Close()
	return nil, nil, 0, err
}

package ckpt

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/ckpt/folder"
	"github.com/shoalfs/shoal/internal/pause"
)

// prefixLock is an object that one daemon has, or all that run with Unordered, or in one cluster. Whoever has it writes
// it again every lockBeat, if it is as it wrote it (objstore.WithMatch); a lock that has not changed for lockDead is of
// a dead daemon. No clock is compared with another host's.
type prefixLock struct {
	cfg     Config
	key     string
	mine    holder
	etag    string
	renewed atomic.Int64 // when its last write began: ns since 1970, as a monotonic clock may stand still
}

// holder is what the object says.
type holder struct {
	ID    string    `json:"id"` // of the journal; if several may have the lock, their cluster or unordered
	Host  string    `json:"host"`
	PID   int       `json:"pid"`
	Dir   string    `json:"dir"`
	Since time.Time `json:"since"`
	Beat  int64     `json:"beat"`
}

const unordered = "unordered"

var lockBeat, lockDead, lockLook = 15 * time.Second, 50 * time.Second, time.Second // tests shorten them

// takePrefix takes the lock. If another daemon has it, it waits until that one shows that it lives, and then fails.
func takePrefix(ctx context.Context, cfg Config, id string) (*prefixLock, error) {
	host, _ := os.Hostname()
	l := &prefixLock{cfg: cfg, key: cfg.Prefix + folder.Home + "/lock",
		mine: holder{ID: id, Host: host, PID: os.Getpid(), Dir: cfg.Dir, Since: time.Now().UTC()}}
	if cfg.Unordered {
		l.mine.ID = unordered
	} else if cfg.Cluster.Name != "" {
		at := cfg.Cluster
		at.User, at.Servers = "", slices.Sorted(slices.Values(at.Servers))
		l.mine.ID = at.String()
	}
	var seen objstore.Object
	var since time.Time
	for {
		l.renewed.Store(time.Now().UnixNano())
		o, err := cfg.Store.PutNew(ctx, l.key, l.content())
		if err == nil {
			l.etag = o.ETag
			return l, nil
		} else if objstore.KindOf(err) != objstore.KindExists {
			return nil, err
		}
		o, has, err := l.read(ctx)
		switch {
		case objstore.KindOf(err) == objstore.KindNotFound || objstore.KindOf(err) == objstore.KindChanged:
			// It went, or was renewed, just now, or the store is of two minds.
		case err != nil:
			return nil, err
		case has.ID == l.mine.ID && has.ID != id:
			l.etag = o.ETag
			return l, nil
		case has.ID == l.mine.ID || o.ETag == seen.ETag && time.Since(since) > lockDead:
			if err := cfg.Store.Delete(ctx, o.Key, o.ETag); err == nil {
				continue
			} else if objstore.KindOf(err) != objstore.KindChanged {
				return nil, err
			}
		case seen.ETag != "" && o.ETag != seen.ETag:
			how := "without --cluster"
			if strings.Contains(has.ID, "://") {
				how = "--cluster " + has.ID
			} else if has.ID == unordered {
				how = "--hosts-unordered"
			}
			return nil, fmt.Errorf("%s is in use by host %s (pid %d, folder %s, since %s, %s): stop that one, give "+
				"another prefix, or give all hosts the same --cluster, or --hosts-unordered",
				cfg.Dest, has.Host, has.PID, has.Dir, has.Since.Local().Format(time.DateTime), how)
		case seen.ETag == "":
			seen, since = o, time.Now()
			cfg.Log.Warn("another daemon has this destination; checking whether it lives, for up to "+lockDead.String(),
				"host", has.Host, "pid", has.PID, "folder", has.Dir)
		}
		if err := pause.For(ctx, lockLook); err != nil {
			return nil, err
		}
	}
}

// alone reports whether only one daemon may have the lock.
func (l *prefixLock) alone() bool { return !l.cfg.Unordered && l.cfg.Cluster.Name == "" }

// fresh reports whether nobody can have taken the lock for a dead daemon's yet.
func (l *prefixLock) fresh() bool {
	return l.cfg.Unordered || time.Now().UnixNano()-l.renewed.Load() < int64(lockDead)
}

func (l *prefixLock) content() []byte {
	l.mine.Beat++
	return encode(l.mine)
}

func (l *prefixLock) read(ctx context.Context) (o objstore.Object, has holder, err error) {
	if o, err = l.cfg.Store.Stat(ctx, l.key); err != nil {
		return o, has, err
	}
	b := make([]byte, o.Size)
	if err = l.cfg.Store.ReadAt(ctx, o, b, 0); err == nil {
		_ = json.Unmarshal(b, &has) // what is not ours is another one's
	}
	return o, has, err
}

// keep writes the lock again and again. It calls stop if another daemon has taken it.
func (l *prefixLock) keep(ctx context.Context, stop context.CancelCauseFunc) {
	for pause.For(ctx, lockBeat) == nil {
		began := time.Now().UnixNano()
		etag, err := put(objstore.WithMatch(ctx, l.etag), l.cfg.Store, l.key, l.content())
		if k := objstore.KindOf(err); k == objstore.KindChanged || k == objstore.KindNotFound {
			var o objstore.Object
			var has holder
			if o, has, err = l.read(ctx); objstore.KindOf(err) == objstore.KindNotFound {
				o, err = l.cfg.Store.PutNew(ctx, l.key, l.content())
			} else if err == nil && (has.ID != l.mine.ID || l.alone() && !has.Since.Equal(l.mine.Since)) {
				why := "had not heard of this one for " + lockDead.String()
				if has.ID == l.mine.ID {
					why = "has a copy of this one's journal"
				}
				stop(fmt.Errorf("%s was taken over by host %s (pid %d, folder %s), which %s: stop one of them",
					l.cfg.Dest, has.Host, has.PID, has.Dir, why))
				return
			}
			etag = o.ETag // by a lost answer, or another one's of the same cluster
		}
		if err == nil {
			l.etag = etag
			l.renewed.Store(began)
		} else if ctx.Err() == nil {
			l.cfg.Log.Warn("cannot renew the lock of the destination", "cause", err)
		}
	}
}

func (l *prefixLock) release() {
	if !l.alone() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := l.cfg.Store.Delete(ctx, l.key, l.etag); err != nil {
		l.cfg.Log.Warn("cannot release the destination; another host can have it after "+lockDead.String(),
			"cause", err)
	}
}

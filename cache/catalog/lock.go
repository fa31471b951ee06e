package catalog

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// cacheVersion is the version of the layout of a cache folder as a whole.
const cacheVersion = 1

// Lock makes the cache folder if need be and takes it for this process, until release is called or the
// process ends. Its error names the process that holds it. It also writes or checks the
// file FORMAT: a folder of a newer version is refused with an error that wraps ErrNewerFormat.
func Lock(cacheDir string) (release func() error, err error) {
	if err := os.MkdirAll(cacheDir, 0o777); err != nil {
		return nil, fmt.Errorf("cache folder: %w", err)
	}
	path := filepath.Join(cacheDir, "lock")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, fmt.Errorf("cache folder: %w", err)
	}
	defer func() {
		if err != nil {
			_ = f.Close()
		}
	}()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); errors.Is(err, unix.EWOULDBLOCK) {
		who, _ := io.ReadAll(io.LimitReader(f, 4096))
		holder := strings.TrimSpace(string(who))
		if holder == "" {
			holder = "another process"
		}
		return nil, fmt.Errorf("cache folder %s is in use by %s (end that process, or use another --cache-dir)", cacheDir, holder)
	} else if err != nil {
		return nil, fmt.Errorf("cache folder: lock %s: %w", path, err)
	}
	if err := f.Truncate(0); err != nil {
		return nil, fmt.Errorf("cache folder: %w", err)
	}
	if _, err := fmt.Fprintf(f, "pid %d: %s\n", os.Getpid(), strings.Join(os.Args, " ")); err != nil {
		return nil, fmt.Errorf("cache folder: %w", err)
	}
	if err := checkCacheFormat(cacheDir); err != nil {
		return nil, err
	}
	return func() error {
		// Emptied while the lock is still held, so that it never names who does not hold it.
		return errors.Join(f.Truncate(0), f.Close())
	}, nil
}

func checkCacheFormat(cacheDir string) error {
	path := filepath.Join(cacheDir, "FORMAT")
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err := writeFileSync(path, fmt.Appendf(nil, "shoal cache %d\n", cacheVersion)); err != nil {
			return fmt.Errorf("cache folder: %w", err)
		}
		return nil
	}
	if err != nil {
		return fmt.Errorf("cache folder: %w", err)
	}
	var v int
	if _, err := fmt.Sscanf(string(b), "shoal cache %d", &v); err != nil || v < 1 {
		return fmt.Errorf("%s: %w: %.40q (this is no cache folder of shoal, or remove the whole folder)", path, ErrCorrupt, b)
	}
	if v > cacheVersion {
		return fmt.Errorf("cache folder %s: %w: format version %d, this one reads %d (use that version of shoal, or another --cache-dir)", cacheDir, ErrNewerFormat, v, cacheVersion)
	}
	return nil
}

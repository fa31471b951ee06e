package catalog

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/cache/crypt"
	"github.com/shoalfs/shoal/internal/durable"
)

// cacheVersion is the format version of a cache folder. Folders of versions before the first release are refused, or
// emptied; from 4 on a new version reads what older ones wrote, or converts it (ADR 61).
const cacheVersion = 4

// encryptedVersion is that of an encrypted cache folder: older programs refuse it instead of writing plaintext.
const encryptedVersion = 5

// ErrKey is wrapped by errors about an encrypted folder opened without a key, or the reverse. Like
// crypt.ErrWrongSecret, it does not mean that the folder is damaged.
var ErrKey = errors.New("encryption")

// ErrInUse is wrapped by Lock's error about a folder that another process owns.
var ErrInUse = errors.New("in use")

// passwords finds those of URLs among arguments.
var passwords = regexp.MustCompile(`(://[^\s:/@]*):\S*@`)

// Lock makes the cache folder if necessary and locks it for this process, until release is called or the process ends.
// Its error names the process that holds it. It also writes or checks the file FORMAT: a folder of an older version is
// refused, or with resetOld emptied, and one of a newer version is refused with an error that wraps ErrNewerFormat.
//
// If the folder is encrypted with the user's secret, it returns the key. A new folder gets one. With a secret, an
// unencrypted folder is refused, and so is an encrypted one if secret is nil.
func Lock(cacheDir string, secret *crypt.Secret, resetOld bool) (key *crypt.Key, release func() error, err error) {
	if err := os.MkdirAll(cacheDir, 0o777); err != nil {
		return nil, nil, fmt.Errorf("cache folder: %w", err)
	}
	path := filepath.Join(cacheDir, "lock")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, nil, fmt.Errorf("cache folder: %w", err)
	}
	defer func() {
		if err != nil {
			_ = unlock(f)
		}
	}()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); errors.Is(err, unix.EWOULDBLOCK) {
		who, _ := io.ReadAll(io.LimitReader(f, 4096))
		holder := cmp.Or(strings.TrimSpace(string(who)), "another process")
		return nil, nil, fmt.Errorf("cache folder %s is %w by %s (end that process, or use another --cache-dir)",
			cacheDir, ErrInUse, holder)
	} else if err != nil {
		return nil, nil, fmt.Errorf("cache folder: lock %s: %w", path, err)
	}
	if err = f.Truncate(0); err == nil {
		_, err = fmt.Fprintf(f, "pid %d: %s\n",
			os.Getpid(), passwords.ReplaceAllString(strings.Join(os.Args, " "), "$1@"))
	}
	// Temporary files of a FORMAT, left by a crash.
	stale, _ := fs.Glob(os.DirFS(cacheDir), durable.TempPrefix+"*") // the pattern is right
	for i := 0; i < len(stale) && err == nil; i++ {
		err = os.Remove(filepath.Join(cacheDir, stale[i]))
	}
	if err != nil {
		return nil, nil, fmt.Errorf("cache folder: %w", err)
	}
	if key, err = checkCacheFormat(cacheDir, secret, resetOld); err != nil {
		return nil, nil, err
	}
	return key, func() error {
		// Emptied while the lock is still held, so that it never names a process that does not hold it.
		return errors.Join(f.Truncate(0), unlock(f))
	}, nil
}

// unlock releases a lock and closes its file. Closing alone is not enough: a child forked at this moment has the
// descriptor as well, and with it the lock, until its exec.
func unlock(f *os.File) error {
	return errors.Join(unix.Flock(int(f.Fd()), unix.LOCK_UN), f.Close())
}

const formatFile = "FORMAT"

// ReadFormat returns the version in the file FORMAT of a cache folder. Its error wraps fs.ErrNotExist if there is no
// such file, and ErrCorrupt if that has no version.
func ReadFormat(cacheDir string) (v int, err error) {
	path := filepath.Join(cacheDir, formatFile)
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	if _, err := fmt.Sscanf(string(b), "shoal cache %d", &v); err != nil || v < 1 {
		return 0, fmt.Errorf(
			"%s: %w: %.40q (if this is a cache folder of shoal, repair it with: shoal fsck %s --repair)", path,
			ErrCorrupt, b, cacheDir)
	}
	return v, nil
}

// contents are the entries of cache folders with what was fetched and listed, in all formats so far.
var contents = []string{"segments", "tables", "manifests", "layouts", "codings", "facts", "facts.copy", "catalog"}

// Used reports whether a folder contains entries of a cache folder, even without FORMAT.
func Used(cacheDir string) bool {
	return slices.ContainsFunc([]string{"segments", "facts", "facts.copy", "manifests"}, func(name string) bool {
		_, err := os.Lstat(filepath.Join(cacheDir, name))
		return err == nil
	})
}

// checkCacheFormat reads FORMAT and the key, and writes missing ones: the key first, so that a folder that has no
// FORMAT yet, and is empty, is never taken for an unencrypted one.
func checkCacheFormat(cacheDir string, secret *crypt.Secret, resetOld bool) (*crypt.Key, error) {
	has, err := crypt.Exists(cacheDir)
	if err != nil {
		return nil, fmt.Errorf("cache folder: %w", err)
	}
	written, readErr := ReadFormat(cacheDir)
	v := written
	switch lost := errors.Is(readErr, fs.ErrNotExist); {
	case readErr != nil && !lost:
		return nil, fmt.Errorf("cache folder: %w", readErr)
	case lost && Used(cacheDir) && has:
		v = encryptedVersion
	case lost && Used(cacheDir):
		v = cacheVersion
	}
	if v > encryptedVersion {
		return nil, fmt.Errorf("cache folder %s: %w: format version %d, but this version reads %d (use that version "+
			"of shoal, or another --cache-dir)", cacheDir, ErrNewerFormat, v, encryptedVersion)
	}
	if v > 0 && v < cacheVersion {
		if !resetOld {
			return nil, fmt.Errorf("cache folder %s was written by an older version of shoal: format version %d, but "+
				"this version reads %d (shoal mount, serve, s3 and warm start it afresh with --reset-old-cache; or "+
				"use another --cache-dir)", cacheDir, v, cacheVersion)
		}
		for _, name := range contents {
			if err := os.RemoveAll(filepath.Join(cacheDir, name)); err != nil {
				return nil, fmt.Errorf("cache folder: %w", err)
			}
		}
		v = 0
	}
	var key *crypt.Key
	want := cacheVersion
	switch {
	case secret == nil && (has || v == encryptedVersion):
		return nil, fmt.Errorf("%w: the cache in %s is encrypted (give its key with --encryption-key-file FILE or in "+
			"SHOAL_ENCRYPTION_KEY, or use another --cache-dir)", ErrKey, cacheDir)
	case secret == nil:
	case has:
		key, err = crypt.Open(cacheDir, *secret)
		want = encryptedVersion
	case v == encryptedVersion:
		return nil, fmt.Errorf("%w: %s is missing, and without it nothing in the cache can be read (restore that "+
			"file from a backup, or remove the whole folder)", ErrKey, filepath.Join(cacheDir, crypt.FileName))
	case v != 0 && Used(cacheDir): // not of a start that failed
		return nil, fmt.Errorf("%w: the cache in %s is not encrypted, but a key was given (remove the whole folder "+
			"to start an encrypted cache, use another --cache-dir, or give no key)", ErrKey, cacheDir)
	default:
		key, err = crypt.Create(cacheDir, *secret)
		want = encryptedVersion
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrKey, err)
	}
	if written == want {
		return key, nil
	}
	line := fmt.Appendf(nil, "shoal cache %d\n", want)
	if err := write(filepath.Join(cacheDir, formatFile), "cacheformat", slices.Values([][]byte{line})); err != nil {
		return nil, fmt.Errorf("cache folder: %w", err)
	}
	return key, nil
}

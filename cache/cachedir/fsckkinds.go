package cachedir

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/crypt"
)

// kind says whether an entry of a cache directory is a folder or a regular file.
type kind struct {
	pattern string // of fs.Glob
	folder  bool
}

var (
	datasetID, digest = strings.Repeat("[0-9a-f]", 32), strings.Repeat("[0-9a-f]", 64)
	number            = strings.Repeat("[0-9]", 8)

	// ownKinds must be right before a process can lock the directory, innerKinds before it can open the content.
	ownKinds   = []kind{{"FORMAT", false}, {"lock", false}, {crypt.FileName, false}}
	innerKinds = []kind{
		{"shoal.log", false}, {"facts", false}, {"facts.copy", false},
		{"codings", true}, {"codings/" + datasetID, false}, {"codings/" + datasetID + ".copy", false},
		{"manifests", true}, {"manifests/" + digest, false}, {"layouts", true}, {"layouts/" + digest, false},
		{"tables", true}, {"tables/" + datasetID, true}, {"tables/" + datasetID + "/" + number + ".table", false},
		{"segments", true}, {"segments/" + datasetID, true}, {"segments/" + datasetID + "/" + number + ".seg", false},
	}
)

// kinds finds folders that should be files, and files that should be folders. A repair removes empty folders and
// moves everything else aside, since its content is unknown.
func (r *Report) kinds(dir string, kinds []kind, repair bool) error {
	for _, k := range kinds {
		names, err := fs.Glob(os.DirFS(dir), k.pattern)
		if err != nil {
			return err
		}
		for _, name := range names {
			path := filepath.Join(dir, name)
			info, err := os.Stat(path)
			if err == nil && (k.folder && info.IsDir() || !k.folder && info.Mode().IsRegular()) {
				continue
			}
			want := "regular file"
			if k.folder {
				want = "folder"
			}
			if !repair {
				r.find("%s: is not a %s (remedy: move it aside)", path, want)
				continue
			}
			to, err := moveAside(path)
			if err != nil {
				return err
			}
			r.find("%s: is not a %s (repaired: %s)", path, want, to)
		}
	}
	return nil
}

// moveAside frees a name, and says where its entry went.
func moveAside(path string) (string, error) {
	if info, err := os.Lstat(path); err == nil && info.IsDir() && os.Remove(path) == nil {
		return "the empty folder was removed", nil
	}
	for n := 1; ; n++ {
		to := fmt.Sprintf("%s.aside%d", path, n)
		if _, err := os.Lstat(to); errors.Is(err, fs.ErrNotExist) {
			return "moved to " + to, os.Rename(path, to)
		} else if err != nil {
			return "", err
		}
	}
}

// format checks the file FORMAT. If it is missing, locking the directory writes it.
func (r *Report) format(dir string, repair bool) error {
	path, state := filepath.Join(dir, "FORMAT"), "remedy"
	if repair {
		state = "repaired"
	}
	switch _, err := catalog.ReadFormat(dir); {
	case errors.Is(err, catalog.ErrCorrupt):
		r.find("%s: does not say which version of Shoal wrote the directory (%s: rewrite it)", path, state)
		if repair {
			return os.Remove(path)
		}
	case errors.Is(err, fs.ErrNotExist) && r.Damage == 0: // not just moved aside
		r.find("%s: is missing (%s: rewrite it)", path, state)
	}
	return nil
}

// unfit reports whether damage must be repaired before the rest can be checked.
func (r *Report) unfit(repair bool) bool {
	if r.Damage == 0 || repair {
		return false
	}
	r.note("The rest can be checked after this is repaired.")
	return true
}

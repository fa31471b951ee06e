package python

import (
	"archive/zip"
	"bytes"
	"compress/flate"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"io"
	"io/fs"
	"regexp"
	"strings"
	"time"
)

// File is one file of a package, named by its place in it.
type File struct {
	Name string
	Mode fs.FileMode
	Data []byte
}

// Wheel describes one wheel (PEP 427).
type Wheel struct {
	Name    string    // shoalfs, or shoalfs_client
	Version string    // as SemVer
	Tags    []string  // such as py3-none-any
	Created time.Time // of every file
	Scripts []File    // what goes on PATH
	Notes   []File    // what lies beside the metadata: licences
	Readme  []byte
}

var (
	development = regexp.MustCompile(`^(\d+\.\d+\.\d+)-dev\b\.?(.*)$`)
	release     = regexp.MustCompile(`^(\d+\.\d+\.\d+)(?:-(a|b|rc)\.?(\d+))?(?:-(\d+)-(g[0-9a-f]+))?$`)
)

// Version returns a version as PEP 440 writes it: 0.1.0-dev.g5f2c1ab is 0.1.0.dev0+g5f2c1ab.
func Version(v string) string {
	if clean, ok := strings.CutSuffix(v, "-dirty"); ok {
		v = Version(clean)
		if strings.Contains(v, "+") {
			return v + ".dirty"
		}
		return v + "+dirty"
	}
	if m := development.FindStringSubmatch(v); m != nil {
		return strings.TrimSuffix(m[1]+".dev0+"+strings.ReplaceAll(m[2], "-", "."), "+")
	}
	if m := release.FindStringSubmatch(v); m != nil {
		if v = m[1] + m[2] + m[3]; m[4] != "" {
			v += ".post" + m[4] + "+" + m[5]
		}
	}
	return v
}

// Client returns the package, with its version in it.
func Client(version string) (files []File, err error) {
	err = fs.WalkDir(Files, ".", func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := Files.ReadFile(p)
		if p == "shoal/_version.py" {
			data = fmt.Appendf(nil, "__version__ = %q\n", Version(version))
		}
		files = append(files, File{p, 0o644, data})
		return err
	})
	return files, err
}

// Metadata returns the file METADATA (packaging.python.org/specifications/core-metadata, 2.1).
func (w *Wheel) Metadata() []byte {
	return fmt.Appendf(nil, `Metadata-Version: 2.1
Name: %s
Version: %s
Summary: Keeps GPUs fed from object storage: a mount and a batch feed that know the order of the epoch
Home-page: https://github.com/shoalfs/shoal
License: Apache-2.0
Classifier: Operating System :: POSIX :: Linux
Classifier: Typing :: Typed
Requires-Python: >=3.9
Requires-Dist: numpy
Requires-Dist: grpcio
Description-Content-Type: text/markdown

%s`, strings.ReplaceAll(w.Name, "_", "-"), Version(w.Version), w.Readme)
}

// FileName is how the wheel must be called.
func (w *Wheel) FileName() string {
	platforms := make([]string, len(w.Tags))
	for i, t := range w.Tags {
		platforms[i] = t[strings.LastIndexByte(t, '-')+1:]
	}
	return fmt.Sprintf("%s-%s-py3-none-%s.whl", w.Name, Version(w.Version), strings.Join(platforms, "."))
}

// Write writes the wheel: the client, the scripts and the notes. The same wheel has the same bytes.
func (w *Wheel) Write(out io.Writer) error {
	files, err := Client(w.Version)
	if err != nil {
		return err
	}
	base := w.Name + "-" + Version(w.Version)
	for _, f := range w.Scripts {
		files = append(files, File{base + ".data/scripts/" + f.Name, 0o755, f.Data})
	}
	info := base + ".dist-info/"
	for _, f := range w.Notes {
		files = append(files, File{info + f.Name, 0o644, f.Data})
	}
	about := fmt.Sprintf("Wheel-Version: 1.0\nGenerator: shoal\nRoot-Is-Purelib: %v\nTag: %s\n",
		len(w.Scripts) == 0, strings.Join(w.Tags, "\nTag: "))
	files = append(files, File{info + "METADATA", 0o644, w.Metadata()}, File{info + "WHEEL", 0o644, []byte(about)},
		// as in pyproject.toml
		File{info + "entry_points.txt", 0o644, []byte("[fsspec.specs]\nshoal = shoal._fsspec:ShoalFileSystem\n")})
	var record bytes.Buffer
	for _, f := range files {
		sum := sha256.Sum256(f.Data)
		fmt.Fprintf(&record, "%s,sha256=%s,%d\n", f.Name, base64.RawURLEncoding.EncodeToString(sum[:]), len(f.Data))
	}
	fmt.Fprintf(&record, "%sRECORD,,\n", info)
	files = append(files, File{info + "RECORD", 0o644, record.Bytes()})

	z := zip.NewWriter(out)
	z.RegisterCompressor(zip.Deflate, func(out io.Writer) (io.WriteCloser, error) {
		return flate.NewWriter(out, flate.BestCompression)
	})
	for _, f := range files {
		h := zip.FileHeader{Name: f.Name, Method: zip.Deflate, Modified: w.Created}
		h.SetMode(f.Mode)
		e, err := z.CreateHeader(&h)
		if err != nil {
			return err
		}
		if _, err := e.Write(f.Data); err != nil {
			return err
		}
	}
	return z.Close()
}

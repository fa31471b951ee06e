package main

import (
	"archive/tar"
	"bytes"
	"encoding/pem"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/crypto/x509roots/fallback/bundle"
)

const (
	// userID is user and group "shoal": a feed needs no other. Kubernetes' runAsNonRoot and fsGroup want numbers.
	userID = 65532
	home   = "/var/lib/shoal"

	billPath = "usr/share/sbom/shoal.cdx.json"
)

// file is one entry of a layer. Without data it is a folder.
type file struct {
	name  string
	mode  int64
	owner int
	data  []byte
}

// baseFiles are those that no version of shoal changes: users, folders to write to, who may sign a certificate.
// There is no shell, no libc and no fusermount3 (docs/adr/0033-the-image.md).
func baseFiles(r *release) ([]file, error) {
	passwd := fmt.Sprintf("root:x:0:0:root:/root:/sbin/nologin\nshoal:x:%d:%d:shoal:%s:/sbin/nologin\n",
		userID, userID, home)
	group := fmt.Sprintf("root:x:0:\nshoal:x:%d:\n", userID)
	files := []file{
		{name: "etc/passwd", mode: 0o644, data: []byte(passwd)},
		{name: "etc/group", mode: 0o644, data: []byte(group)},
		{name: "etc/ssl/certs/ca-certificates.crt", mode: 0o644, data: authorities()},
		{name: "mnt/", mode: 0o755},
		{name: "root/", mode: 0o700},
		{name: "run/shoal/", mode: 0o755, owner: userID},
		{name: "tmp/", mode: 0o1777},
		{name: "var/cache/shoal/", mode: 0o700, owner: userID},
		{name: home[1:] + "/", mode: 0o700, owner: userID},
	}
	for _, l := range r.licences {
		name, path, _ := strings.Cut(l, "=")
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("licence of %s: %w", name, err)
		}
		files = append(files, file{name: "usr/share/doc/" + name + "/copyright", mode: 0o644, data: text})
	}
	return files, nil
}

// authorities returns Mozilla's roots as Go's module of them has them, so that the sum in go.sum stands for what this
// machine might have added. Roots that are trusted with reservations only, which a PEM file cannot say, are left out.
func authorities() []byte {
	var b bytes.Buffer
	for root := range bundle.Roots() {
		if root.Constraint == nil {
			_ = pem.Encode(&b, &pem.Block{Type: "CERTIFICATE", Bytes: root.Certificate})
		}
	}
	return b.Bytes()
}

// layer makes a layer of files, with the folders above them.
func layer(files []file, created time.Time) (v1.Layer, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	seen := map[string]bool{}
	add := func(f file) error {
		h := &tar.Header{Name: f.name, Mode: f.mode, Uid: f.owner, Gid: f.owner, Size: int64(len(f.data)),
			ModTime: created, Typeflag: tar.TypeReg, Format: tar.FormatPAX}
		if f.name[len(f.name)-1] == '/' {
			h.Typeflag = tar.TypeDir
		}
		seen[f.name] = true
		if err := w.WriteHeader(h); err != nil {
			return err
		}
		_, err := w.Write(f.data)
		return err
	}
	for _, f := range files {
		for i := 0; i < len(f.name)-1; i++ {
			if dir := f.name[:i+1]; f.name[i] == '/' && !seen[dir] {
				if err := add(file{name: dir, mode: 0o755}); err != nil {
					return nil, err
				}
			}
		}
		if err := add(f); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(b.Bytes())), nil
	},
		tarball.WithMediaType(types.OCILayer), tarball.WithCompressedCaching)
}

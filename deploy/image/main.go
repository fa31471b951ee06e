// Command image makes Shoal's OCI image of binaries that are already built, without a daemon. docs/deploy.md says what
// the image holds. From the same binaries it makes the same bits.
//
// It writes an OCI layout with one image an architecture under one index, and beside each image its bill of materials
// as a referrer; a tarball of this machine's architecture for `docker load`; and the bills as files.
package main

import (
	"debug/elf"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

type release struct {
	version  string
	revision string
	created  time.Time
	licences []string // that the image carries, NAME=FILE
}

// binary is a static shoal and what was linked into it beside Go's modules.
type binary struct {
	path   string
	arch   string   // as Go names it
	debian []string // PACKAGE=VERSION
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "image: "+err.Error())
		os.Exit(1)
	}
}

func run(args []string) error {
	f := flag.NewFlagSet("image", flag.ContinueOnError)
	var r release
	f.StringVar(&r.version, "version", "dev", "version of shoal; the image's tag")
	f.StringVar(&r.revision, "revision", "", "commit that it was built from")
	created := f.Int64("created", 0, "seconds since 1970 that all files and the image bear")
	licences := f.String("licences", "", "licence texts to carry, NAME=FILE, separated by commas")
	dir := f.String("layout", "", "folder for the OCI layout; replaced")
	tar := f.String("tar", "", "file for `docker load`")
	sbom := f.String("sbom", "", "prefix of the files for the bills of materials: PREFIX-ARCH.cdx.json")
	f.Usage = func() {
		fmt.Fprintln(f.Output(), "usage: image FLAGS BINARY[,DEBIAN-PACKAGE=VERSION...] ...")
		f.PrintDefaults()
	}
	if err := f.Parse(args); err != nil {
		return err
	}
	if f.NArg() == 0 || *dir == "" || *tar == "" || *sbom == "" {
		f.Usage()
		return errors.New("give -layout, -tar, -sbom and a binary")
	}
	r.created = time.Unix(*created, 0).UTC()
	if *licences != "" {
		r.licences = strings.Split(*licences, ",")
	}
	return build(&r, f.Args(), *dir, *tar, *sbom)
}

func build(r *release, args []string, dir, tar, sbom string) error {
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	var bills []v1.Image
	for _, arg := range args {
		b, err := newBinary(arg)
		if err != nil {
			return err
		}
		bill, err := billOfMaterials(r, b)
		if err != nil {
			return err
		}
		img, err := image(r, b, bill)
		if err != nil {
			return err
		}
		index = mutate.AppendManifests(index,
			mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: b.platform()}})
		attached, err := attach(img, bill)
		if err != nil {
			return err
		}
		bills = append(bills, attached)
		if b.arch == runtime.GOARCH {
			tag, err := name.NewTag("shoal:" + r.version)
			if err == nil {
				err = tarball.WriteToFile(tar, tag, img)
			}
			if err != nil {
				return err
			}
		}
		err = os.WriteFile(sbom+"-"+b.arch+".cdx.json", bill, 0o644)
		if err = errors.Join(err, report(b, img)); err != nil {
			return err
		}
	}
	return writeLayout(r, index, bills, dir)
}

func newBinary(arg string) (*binary, error) {
	parts := strings.Split(arg, ",")
	b := &binary{path: parts[0], debian: parts[1:]}
	e, err := elf.Open(b.path)
	if err != nil {
		return nil, fmt.Errorf("%s: %w (build it first: make build)", b.path, err)
	}
	defer func() { _ = e.Close() }()
	b.arch = map[elf.Machine]string{elf.EM_X86_64: "amd64", elf.EM_AARCH64: "arm64"}[e.Machine]
	if b.arch == "" {
		return nil, fmt.Errorf("%s is for %v, for which no image was ever made (amd64 and arm64 are known)",
			b.path, e.Machine)
	}
	if libs, err := e.ImportedLibraries(); err != nil || len(libs) > 0 {
		return nil, fmt.Errorf(
			"%s needs %v, and the image holds no libraries: link it statically, as make image does", b.path, libs)
	}
	return b, nil
}

func (b *binary) platform() *v1.Platform {
	p := &v1.Platform{OS: "linux", Architecture: b.arch}
	if b.arch == "arm64" {
		p.Variant = "v8"
	}
	return p
}

// image puts the layers together: what seldom changes, the bill, the binary.
func image(r *release, b *binary, bill []byte) (v1.Image, error) {
	binaryFile, err := os.ReadFile(b.path)
	if err != nil {
		return nil, err
	}
	base, err := baseFiles(r)
	if err != nil {
		return nil, err
	}
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	for _, part := range []struct {
		files []file
		what  string
	}{
		{base, "users, folders, certificates, licences"},
		{[]file{
			{name: "usr/bin/shoal", mode: 0o755, data: binaryFile},
			{name: billPath, mode: 0o644, data: bill},
		}, "shoal " + r.version},
	} {
		l, err := layer(part.files, r.created)
		if err != nil {
			return nil, err
		}
		if img, err = mutate.Append(img,
			mutate.Addendum{Layer: l,
				History: v1.History{Created: v1.Time{Time: r.created}, Comment: part.what}}); err != nil {
			return nil, err
		}
	}
	cf, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	cf = cf.DeepCopy()
	p := b.platform()
	cf.OS, cf.Architecture, cf.Variant = p.OS, p.Architecture, p.Variant
	cf.Created = v1.Time{Time: r.created}
	cf.Config = v1.Config{
		User:       fmt.Sprintf("%d:%d", userID, userID),
		Entrypoint: []string{"/usr/bin/shoal"},
		Cmd:        []string{"--help"},
		Env:        []string{"PATH=/usr/bin", "HOME=" + home, "XDG_CACHE_HOME=/var/cache"},
		WorkingDir: "/",
		Volumes:    map[string]struct{}{"/var/cache/shoal": {}},
		StopSignal: "SIGTERM",
		Healthcheck: &v1.HealthConfig{
			Test: []string{"CMD", "/usr/bin/shoal", "health"}, Interval: 10 * time.Second, Timeout: 6 * time.Second,
			StartPeriod: time.Minute, Retries: 3,
		},
		Labels: labels(r),
	}
	return mutate.ConfigFile(img, cf)
}

func labels(r *release) map[string]string {
	const prefix, project = "org.opencontainers.image.", "https://github.com/shoalfs/shoal"
	l := map[string]string{
		prefix + "title": "shoal",
		prefix + "description": "Keeps GPUs fed from object storage: a mount and a batch feed that know the order " +
			"of the epoch",
		prefix + "url":           project,
		prefix + "source":        project,
		prefix + "documentation": project + "/blob/main/docs/deploy.md",
		prefix + "licenses":      "Apache-2.0",
		prefix + "version":       r.version,
		prefix + "created":       r.created.Format(time.RFC3339),
	}
	if r.revision != "" {
		l[prefix+"revision"] = r.revision
	}
	return l
}

// attach makes a manifest that refers to an image and holds its bill, as registries list under "referrers".
func attach(img v1.Image, bill []byte) (v1.Image, error) {
	subject, err := partial.Descriptor(img)
	if err != nil {
		return nil, err
	}
	m := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), billType)
	if m, err = mutate.AppendLayers(m, static.NewLayer(bill, billType)); err != nil {
		return nil, err
	}
	return mutate.Subject(m, *subject).(v1.Image), nil
}

func writeLayout(r *release, index v1.ImageIndex, bills []v1.Image, dir string) error {
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	p, err := layout.Write(dir, empty.Index)
	if err != nil {
		return err
	}
	if err := p.AppendIndex(index,
		layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": r.version})); err != nil {
		return err
	}
	for _, b := range bills {
		if err := p.AppendImage(b); err != nil {
			return err
		}
	}
	return nil
}

func report(b *binary, img v1.Image) error {
	layers, err := img.Layers()
	if err != nil {
		return err
	}
	var packed, unpacked int64
	for _, l := range layers {
		n, err := l.Size()
		if err != nil {
			return err
		}
		packed += n
		r, err := l.Uncompressed()
		if err != nil {
			return err
		}
		m, err := io.Copy(io.Discard, r)
		if err := errors.Join(err, r.Close()); err != nil {
			return err
		}
		unpacked += m
	}
	digest, err := img.Digest()
	if err != nil {
		return err
	}
	fmt.Printf("linux/%s: %.1f MB, %.1f MB unpacked, %s\n", b.arch, float64(packed)/1e6, float64(unpacked)/1e6, digest)
	return nil
}

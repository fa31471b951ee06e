package main

import (
	"bytes"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"fmt"
	"os"
	"path"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/package-url/packageurl-go"
)

// billType is the media type of a bill of materials in a registry.
const billType = "application/vnd.cyclonedx+json"

// billOfMaterials lists what an image holds: Go and modules, as the binary says, libraries of Debian, certificates.
func billOfMaterials(r *release, b *binary) ([]byte, error) {
	info, err := buildinfo.ReadFile(b.path)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", b.path, err)
	}
	content, err := os.ReadFile(b.path)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(content)
	root := cdx.Component{
		Type: cdx.ComponentTypeContainer, BOMRef: "shoal", Name: "shoal", Version: r.version,
		Licenses: &cdx.Licenses{{License: &cdx.License{ID: "Apache-2.0"}}},
		PackageURL: packageurl.NewPackageURL("oci", "",
			"shoal", r.version, packageurl.QualifiersFromMap(map[string]string{"arch": b.arch}), "").String(),
	}
	parts := []cdx.Component{{
		Type: cdx.ComponentTypeApplication, BOMRef: "bin", Name: info.Main.Path, Version: r.version,
		Hashes: &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hex.EncodeToString(sum[:])}},
	}, library("golang", "", "stdlib", strings.TrimPrefix(info.GoVersion, "go"))}
	for _, d := range info.Deps {
		if d.Replace != nil {
			d = d.Replace
		}
		parts = append(parts, goModule(d))
	}
	for _, p := range b.debian {
		name, version, ok := strings.Cut(p, "=")
		if !ok || version == "" {
			return nil, fmt.Errorf("%q: give PACKAGE=VERSION of what was linked into %s", p, b.path)
		}
		parts = append(parts, library("deb", "debian", name, version))
	}
	own, err := buildinfo.ReadFile("/proc/self/exe")
	if err != nil {
		return nil, err
	}
	for _, d := range own.Deps {
		if d.Path == "golang.org/x/crypto/x509roots/fallback" { // etc/ssl/certs
			parts = append(parts, goModule(d))
		}
	}
	refs := make([]string, len(parts))
	for i := range parts {
		refs[i] = parts[i].BOMRef
	}
	slices.Sort(refs)
	bill := cdx.NewBOM()
	bill.Metadata = &cdx.Metadata{Timestamp: r.created.Format(time.RFC3339), Component: &root}
	bill.Components = &parts
	bill.Dependencies = &[]cdx.Dependency{{Ref: root.BOMRef, Dependencies: &refs}}
	var out bytes.Buffer
	if err := cdx.NewBOMEncoder(&out, cdx.BOMFileFormatJSON).SetPretty(true).Encode(bill); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

func goModule(m *debug.Module) cdx.Component {
	dir, name := path.Split(m.Path)
	c := library("golang", strings.TrimSuffix(dir, "/"), name, m.Version)
	c.Name = m.Path
	return c
}

func library(kind, namespace, name, version string) cdx.Component {
	url := packageurl.NewPackageURL(kind, namespace, name, version, nil, "").String()
	return cdx.Component{Type: cdx.ComponentTypeLibrary, BOMRef: url, Name: name, Version: version, PackageURL: url}
}

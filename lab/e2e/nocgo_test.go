package e2e

import (
	"strings"
	"sync"
	"testing"
)

// What go install makes where there is no C compiler mounts and feeds. Pictures alone it refuses, and says what is
// missing.
func TestWithoutCgo(t *testing.T) {
	t.Setenv("CGO_ENABLED", "0")
	defer func(whole string) { shoalBin = whole }(shoalBin)
	shoalBin = program(t, new(sync.Once), "shoal-nocgo", "../../cmd/shoal")
	if out := mustShoal(t, nil, "version", "--json"); !strings.Contains(out, `"jpeg":false`) {
		t.Errorf("version: %s", out)
	}
	dir, paths := pictures(t, 2, 10)
	addr, mnt := serve(t, nil, "file://"+dir)
	readAll(t, mnt, dir, paths)
	r := feed(t, addr, "--batch", "5", "--order", "uniform:seed=3")
	if want := digest(t, dir, paths, orderOf(t, "uniform:seed=3", len(paths))); r.Digest != want {
		t.Errorf("%d raw samples with another digest than the order's", r.Samples)
	}
	for _, refused := range [][]string{
		{"feed", addr, "--batch", "5", "--transform", "RandomResizedCrop(64)|uint8|nchw"},
		{"pack", "file://" + dir, "file://" + t.TempDir(), "--resize", "short=64"},
	} {
		if _, errs, code := shoal(t, nil, refused...); code == 0 || !strings.Contains(errs, "no libjpeg") ||
			!strings.Contains(errs, "libjpeg62-turbo-dev") {
			t.Errorf("%s: exit %d, %s", refused[0], code, errs)
		}
	}
}

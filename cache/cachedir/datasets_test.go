package cachedir

import (
	"log/slog"
	"testing"

	"github.com/shoalfs/shoal/cache/catalog"
)

// A source is named as its user wrote it, whatever its key has: a question mark does not end it.
func TestFind(t *testing.T) {
	d, err := Open(Options{Path: t.TempDir(), Size: 64 << 20, Memory: 256 << 20,
		Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	for _, plain := range []string{"s3://photos/what/", "s3://photos/what?/", "s3://photos/a?endpoint=x/"} {
		title := plain + "?endpoint=http%3A%2F%2Fh"
		if err := d.Catalog.Touch(catalog.DatasetID(title), title); err != nil {
			t.Fatal(err)
		}
	}
	for text, want := range map[string]string{
		"s3://photos/what": "s3://photos/what/", "s3://photos/what?": "s3://photos/what?/",
		"s3://photos/what?/": "s3://photos/what?/", "s3://photos/a?endpoint=x": "s3://photos/a?endpoint=x/",
		"s3://photos/a": "",
	} {
		if i, err := d.Find(text); i.Plain() != want || (err == nil) != (want != "") {
			t.Errorf("%s: %q, %v", text, i.Plain(), err)
		}
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

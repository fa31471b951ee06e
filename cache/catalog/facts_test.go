package catalog

import (
	"testing"
	"time"
)

// Facts are read while a change waits for the disk.
func TestReadingFactsWaitsForNoChange(t *testing.T) {
	c, err := Open(t.TempDir(), Options{})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	c.mu.Lock() // as a change that hangs
	go func() {
		c.Stale("s")
		c.Number("s")
		c.Had("s", "v")
		_, err := c.Datasets()
		if _, e := c.Sources(); err == nil {
			err = e
		}
		if _, e := c.Shuffles(DatasetID("s")); err == nil {
			err = e
		}
		done <- err
	}()
	select {
	case err = <-done:
		c.mu.Unlock()
	case <-time.After(10 * time.Second):
		c.mu.Unlock()
		t.Error("they wait")
		err = <-done
	}
	if err != nil || c.Close() != nil {
		t.Error(err)
	}
}

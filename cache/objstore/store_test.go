package objstore_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/objstoretest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestMemConformance(t *testing.T) {
	objstoretest.Run(t, func(t *testing.T) objstoretest.Harness {
		return objstoretest.Harness{Store: objstoretest.NewMem(), HostileKeys: true}
	})
}

func TestDirConformance(t *testing.T) {
	objstoretest.Run(t, func(t *testing.T) objstoretest.Harness {
		d, _ := newDir(t)
		return objstoretest.Harness{Store: d, RefusesHostileKeys: true}
	})
}

// TestStackConformance runs the suite on all decorators at once: they must not be noticed.
func TestStackConformance(t *testing.T) {
	objstoretest.Run(t, func(t *testing.T) objstoretest.Harness {
		m := objstoretest.NewMem()
		stack := objstore.Retry(objstore.Limit(objstore.NewMeter(objstoretest.Fault(t, m, "* * 1 503")), 4), objstore.RetryPolicy{Base: 1, Cap: 1})
		return objstoretest.Harness{Store: stack, HostileKeys: true}
	})
}

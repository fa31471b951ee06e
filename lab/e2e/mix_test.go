package e2e

import (
	"testing"
)

// Mixed batches and labels arrive as documented: each row blended with the one before it, by one weight a batch.
func TestFeedMixes(t *testing.T) {
	dir, _ := pictures(t, 4, 16)
	addr, _ := serve(t, nil, "file://"+dir)
	var got struct{ Batches, Blended int }
	runPython(t, &got, `
import json, sys, numpy as np
from shoal import Feed
ops = "RandomResizedCrop(32)|RandomHorizontalFlip()|uint8|nhwc"
args = dict(seed=5, epochs=1, order="torch:seed=9", as_torch=False)
plain = list(b.copy() for b in Feed(sys.argv[1], 16, transform=ops, **args))
mixed = list(b.copy() for b in Feed(sys.argv[1], 16, transform=ops + "|MixUp(alpha=0.5)", **args))
soft = list(b.copy() for b in Feed(sys.argv[1], 16, transform=ops + "|CutMix(num_classes=4)", **args))
assert len(plain) == len(mixed) == len(soft) == 4
blended = 0
for p, m, s in zip(plain, mixed, soft):
    assert (p.id == m.id).all() and (p.label == m.label).all()
    assert (m.fields["label_b"] == np.roll(p.label, 1)).all()
    lam = m.fields["lam"]
    assert lam.dtype == np.float32 and (lam == lam[0]).all() and 0 <= lam[0] <= 1
    k = round(float(lam[0]) * 65536)
    a, b = p.data.astype(np.int64), np.roll(p.data, 1, axis=0).astype(np.int64)
    want = (k * a + (65536 - k) * b) / 65536
    assert np.abs(m.data - want).max() <= 0.5, np.abs(m.data - want).max()
    blended += int((m.data != p.data).any())
    target = s.fields["target"]
    assert target.shape == (16, 4) and np.allclose(target.sum(1), 1)
    kept = (s.data == p.data).all(axis=-1)
    pasted = (s.data == np.roll(p.data, 1, axis=0)).all(axis=-1)
    assert (kept | pasted).all()
print(json.dumps(dict(batches=len(mixed), blended=blended)))`, addr)
	if got.Batches != 4 || got.Blended == 0 {
		t.Errorf("%+v", got)
	}
}

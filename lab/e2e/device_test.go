package e2e

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/lab/driver"
)

// deviceEqualsHost reads two epochs twice, from the device and from host memory, and compares bytes, labels and states.
// It prints what the data were.
const deviceEqualsHost = `
import sys
import numpy as np
import shoal
address, transform = sys.argv[1:]
common = dict(batch_size=4, transform=transform or None, seed=3, as_torch=False, tail="pad", epochs=2)
host, device = shoal.Feed(address, **common), shoal.Feed(address, device="cuda", **common)
def same(a, b):
    if isinstance(a, list):
        assert isinstance(b, list) and len(a) == len(b)
        for x, y in zip(a, b): same(x, y)
        return
    b = b.get() if hasattr(b, "get") else b
    assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, b.shape, a.dtype, b.dtype)
    np.testing.assert_array_equal(a.view(np.uint8), np.ascontiguousarray(b).view(np.uint8))
kinds, batches = set(), 0
for epoch in range(2):
    for h, d in zip(host, device, strict=True):
        for name in ("data", "label", "id", "valid"): same(getattr(h, name), getattr(d, name))
        assert not d.fields, d.fields
        kinds.add(type(d.data[0] if isinstance(d.data, list) else d.data).__name__)
        batches += 1
    assert host.state_dict() == device.state_dict(), (host.state_dict(), device.state_dict())
assert batches == 6, batches
print(*kinds)
`

// TestDeviceOfTheTrainer has the Python client take the batches of a real server to a device, which is in software:
// slots are copied and finished there. Where there is no device, or too little memory, the same batches come in host
// memory, with a warning.
func TestDeviceOfTheTrainer(t *testing.T) {
	t.Parallel()
	lib := t.TempDir()
	if _, err := driver.Build(lib); err != nil {
		t.Fatal(err)
	}
	dir, _ := pictures(t, 2, 5)
	addr, _ := serve(t, nil, "file://"+dir)
	const crop = "RandomResizedCrop((14, 19))|RandomHorizontalFlip()|"
	const norm = "|Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))"
	for _, c := range []struct{ name, transform, script, kind, warning string }{
		{"uint8", crop + "uint8|nhwc", "", "DeviceArray", ""},
		{"fp16", crop + "fp16|nchw" + norm, "", "DeviceArray", ""},
		{"bf16", crop + "bf16|nhwc" + norm, "", "DeviceArray", ""},
		{"fp32", crop + "fp32|nchw" + norm, "", "DeviceArray", ""},
		{"a blur, in grey", "RandomResizedCrop((14, " +
			"19))|RandomGrayscale(0.5)|GaussianBlur(3)|RandomHorizontalFlip()|fp16|nchw" + norm, "", "DeviceArray", ""},
		{"finished on the host", crop + "fp32|nchw" + norm + "|RandomErasing()", "", "DeviceArray", ""},
		{"raw samples", "", "", "DeviceArray", ""},
		{"slow copies", crop + "fp16|nchw" + norm, "delay.copy=3000000;delay.launch=5000000", "DeviceArray", ""},
		{"no device", crop + "fp16|nchw" + norm, "devices=0", "ndarray", "sees no GPU"},
		{"old driver", crop + "fp16|nchw" + norm, "version=8000", "ndarray", "CUDA 8.0"},
		{"no memory", crop + "bf16|nchw" + norm, "cuMemAlloc:3=2", "ndarray", "out of memory"},
		{"no page-locking", crop + "fp32|nhwc" + norm, "cuMemHostRegister:1=800", "ndarray", "not permitted"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			cmd := python(t, deviceEqualsHost, addr, c.transform)
			trace := filepath.Join(t.TempDir(), "trace")
			cmd.Env = append(cmd.Env, "LD_LIBRARY_PATH="+lib, "GRPC_VERBOSITY=ERROR",
				"SHOAL_CUDA_SCRIPT=pageable=0;"+c.script, "SHOAL_CUDA_TRACE="+trace)
			var errs strings.Builder
			cmd.Stderr = &errs
			out, err := cmd.Output()
			if err != nil || strings.TrimSpace(string(out)) != c.kind {
				t.Fatalf("%v: data are %q, want %s\n%s", err, out, c.kind, errs.String())
			}
			if warned := strings.Count(errs.String(), "Batches stay in host memory"); c.warning != "" &&
				(warned != 1 || !strings.Contains(errs.String(), c.warning)) ||
				c.warning == "" && warned != 0 {
				t.Errorf("%d warnings, want one with %q:\n%s", warned, c.warning, errs.String())
			}
			work, _ := os.ReadFile(trace) // there may be none
			if kernel, want := bytes.Contains(work, []byte("shoal_finish")),
				c.warning == "" && c.name != "raw samples" && c.name != "finished on the host"; kernel != want {
				t.Errorf("the kernel ran: %v, want %v", kernel, want)
			}
		})
	}
}

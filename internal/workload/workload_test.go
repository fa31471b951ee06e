package workload

import "testing"

func TestShapes(t *testing.T) {
	s, ok := Find("retinanet-b200")
	if _, none := Find("nothing"); !ok || none {
		t.Fatal("Find")
	}
	// MLPerf Storage: 505 files a second each.
	rate := float64(s.Batch) / s.Step.Seconds()
	if rate < 504 || rate > 506 {
		t.Errorf("%v samples/s", rate)
	}
	if got := rate * float64(s.SampleBytes) / 1e6; got < 162 || got > 164 {
		t.Errorf("%v MB/s", got)
	}
}

package workload

import "testing"

func TestShapes(t *testing.T) {
	s, ok := Find("retinanet-b200")
	if _, none := Find("nothing"); !ok || none {
		t.Fatal("Find")
	}
	// MLPerf Storage: 505 files a second each.
	if rate := float64(s.Batch) / s.Step.Seconds(); rate < 504 || rate > 506 {
		t.Errorf("%v samples/s", rate)
	}
	if got := s.Rate() / 1e6; got < 162 || got > 164 {
		t.Errorf("%v MB/s", got)
	}
}

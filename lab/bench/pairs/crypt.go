package pairs

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/shoalfs/shoal/lab/bench/kit"
)

// least is the share of the rate in clear that an encrypted cache should have.
const least = 0.9

// Crypt measures what encryption at rest costs: the same photographs of 63 KB in a cache in clear and in one that is
// encrypted, read in turns
//
//	by 8 threads through a mount, the segments in the page cache, and the disk's bytes cold
//	by a feed of raw samples, and of decoded ones (RandomResizedCrop(224), flip)
func Crypt(flags *flag.FlagSet) func(k *kit.Kit) error {
	count := flags.Int("photos", 4096, "photographs")
	reps := flags.Int("reps", 7, "runs of each side")
	return func(k *kit.Kit) error { return crypt(k, *count, *reps) }
}

func crypt(k *kit.Kit, count, reps int) error {
	if err := k.Photographs(count); err != nil {
		return err
	}
	source := "file://" + k.Photos
	list, err := k.Shuffled("crypt.txt")
	if err != nil {
		return err
	}
	key := filepath.Join(k.Dir, "crypt.key")
	if err := os.WriteFile(key, []byte(strings.Repeat("5eed", 16)), 0o600); err != nil {
		return err
	}
	sides := [2]*side{
		{Kit: k, name: "clear", flags: []string{"--cache-dir", filepath.Join(k.Dir, "cache-clear")}},
		{Kit: k, name: "encrypted", flags: []string{"--cache-dir", filepath.Join(k.Dir, "cache-crypt"), "--encryption-key-file", key}},
	}
	mount := func(flags ...string) func(s *side) (kit.Cost, error) {
		return func(s *side) (kit.Cost, error) {
			m, err := k.Mount(source, "mnt", append(s.flags, "--kernel-cache", "off", "--order", "none")...)
			return cached(k, m, err, func() (int, float64, error) {
				r, err := k.Read(m.Dir, list, flags...)
				return r.Files, r.Seconds, err
			})
		}
	}
	feed := func(flags ...string) func(s *side) (kit.Cost, error) {
		return func(s *side) (kit.Cost, error) {
			m, err := k.Serve(source, "mnt", append(s.flags, "--order", "none")...)
			return cached(k, m, err, func() (int, float64, error) {
				f, err := k.Feed(m.Addr, flags...)
				return f.Samples, f.Seconds, err
			})
		}
	}
	k.Header("Encryption at rest: an encrypted cache beside one in clear")
	k.Say("%d photographs. Readers and daemon share the cores. Every byte was compared first.\n", len(k.Paths))
	for _, s := range sides {
		if err := k.Run(nil, k.Shoal, append([]string{"warm", source, "--refresh"}, s.flags...)...); err != nil {
			return err
		}
		if _, err := mount("-verify", k.Photos)(s); err != nil {
			return err
		}
	}
	situations := []situation{
		{"", mount()}, // back into the page cache
		{"mount, segments in the page cache", mount()},
		{"feed, raw", feed()},
		{"feed, decoded", feed("--transform", "RandomResizedCrop(224)|RandomHorizontalFlip()|uint8|nhwc")},
		// The last one, since it leaves nothing of either side in the page cache but what it read itself.
		{"mount, page cache cold", mount("-drop-caches")},
	}
	if err := take(sides, situations, reps); err != nil {
		return err
	}
	k.Say("| | clear, files/s | encrypted, files/s | ratio of medians | rounds | CPU µs a file | target %.2f |", least)
	k.Say("| --- | ---: | ---: | ---: | --- | --- | --- |")
	for _, what := range situations[1:] {
		clear, crypt := kit.Median(sides[0].rate[what.name]), kit.Median(sides[1].rate[what.name])
		k.Say("| %s | %.0f | %.0f | %.2f | %s | %.0f, %.0f | %s |", what.name, clear, crypt, crypt/clear, kit.Numbers(ratios(sides, what.name), 2),
			kit.Median(sides[0].cpu[what.name]), kit.Median(sides[1].cpu[what.name]), kit.Verdict(crypt/clear >= least))
	}
	k.Say("\nAll runs, files/s, in clear and encrypted:\n")
	for _, what := range situations[1:] {
		k.Say("- %s: %s; %s", what.name, kit.Numbers(sides[0].rate[what.name], 0), kit.Numbers(sides[1].rate[what.name], 0))
	}
	return nil
}

// cached measures what f reads from a daemon that has just been started, and ends it. All has to come, and nothing of it
// from the source.
func cached(k *kit.Kit, m *kit.Mount, err error, f func() (int, float64, error)) (c kit.Cost, _ error) {
	if err != nil {
		return c, err
	}
	c, err = m.Cost(f)
	st, e := m.Stats()
	switch {
	case e == nil && st.Misses > 0:
		e = fmt.Errorf("%d files came from the source", st.Misses)
	case e == nil && err == nil && int(c.Files) != len(k.Paths):
		e = fmt.Errorf("%.0f of %d files came", c.Files, len(k.Paths))
	}
	return c, errors.Join(err, e, m.Close())
}

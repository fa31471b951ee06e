package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/shoalfs/shoal/lab/bench/kit"
)

const traceCache = "cache-traces"

// falseLocks reads traces that are no torch shuffle.
func (b *bench) falseLocks(dir string) error {
	paths, err := kit.Walk(dir)
	if err != nil {
		return err
	}
	list, err := b.List("tiny.txt", paths)
	if err != nil {
		return err
	}
	// What is in the cache already is read as fast as a trace can be.
	if err := b.Run(nil, b.Shoal, "warm", tinySource, "--cache-dir", filepath.Join(b.Dir, traceCache), "--memory", b.memory); err != nil {
		return err
	}
	kinds := []string{"random", "random with replacement", "sequential", "validation", "python shuffle", "numpy permutation", "shuffled classes"}
	locks, count := map[string]int{}, map[string]int{}
	const wholeWait = 2 * time.Minute
	for i := range b.traces {
		kind := kinds[i%len(kinds)]
		workers := 1 << (i / len(kinds) % 4)
		wait := b.settle
		if i < b.wholeTraces {
			wait = wholeWait
		}
		m, err := b.mount(tinySource, traceCache, "auto", false)
		if err != nil {
			return err
		}
		w := watch(m)
		err = b.Run(nil, b.python, tracer, m.Dir, list, kind, strconv.Itoa(i/len(kinds)), strconv.Itoa(workers), "32", "768")
		if err == nil {
			select {
			case <-time.After(wait):
			case <-b.Ctx.Done():
				err = b.Ctx.Err()
			}
		}
		all, watchErr := w.end()
		if err := errors.Join(err, watchErr, m.Close()); err != nil {
			return fmt.Errorf("%s: %w", kind, err)
		}
		count[kind]++
		if j := slices.IndexFunc(all, func(s seen) bool { return s.locked }); j >= 0 {
			locks[kind]++
			fmt.Fprintf(os.Stderr, "false lock: %s, trace %d, %d workers: %s after %d reads\n", kind, i, workers, all[j].spec, all[j].opens)
		}
		if (i+1)%10 == 0 {
			fmt.Fprintf(os.Stderr, "traces: %d of %d\n", i+1, b.traces)
		}
	}
	b.Say("## Orders that are none of torch's\n")
	b.Say("768 reads each of %d small files, by 1 to 8 processes that take batches of 32 in turn; watched for %s after the last read, the first %d for %s, in which the search of all seeds ends.\n", b.tiny, b.settle, min(b.wholeTraces, b.traces), wholeWait)
	b.Say("| order | traces | false locks |")
	b.Say("| --- | ---: | ---: |")
	total := 0
	for _, k := range kinds {
		b.Say("| %s | %d | %d |", k, count[k], locks[k])
		total += locks[k]
	}
	b.sayAll([]string{fmt.Sprintf("%d false locks over %d traces (none over at least 200: %s).", total, b.traces, kit.Verdict(total == 0 && b.traces >= 200))})
	return nil
}

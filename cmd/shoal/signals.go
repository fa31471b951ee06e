package main

import (
	"context"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"
)

// hurryPatience is how long a process may take after the second signal, so that it leaves no dead mount.
const hurryPatience = time.Second

// told is closed by the first signal, and hurry by the second: then there is no more waiting.
var told, hurry = make(chan struct{}), make(chan struct{})

// onSignals returns a context that ends at the first signal, which requests an orderly end. The second requests an
// immediate one: the process exits within hurryPatience.
func onSignals() (ctx context.Context, stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, endSignals()...)
	done := make(chan struct{})
	go func() {
		for n := 1; ; n++ {
			select {
			case <-done:
				return
			case <-signals:
			}
			switch n {
			case 1:
				close(told)
				cancel()
			case 2:
				close(hurry)
				time.AfterFunc(hurryPatience, func() { os.Exit(1) })
			default:
				os.Exit(1)
			}
		}
	}()
	return ctx, sync.OnceFunc(func() { signal.Stop(signals); close(done); cancel() })
}

// endSignals returns the signals that request an orderly end.
func endSignals() []os.Signal {
	signals := []os.Signal{syscall.SIGINT, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) { // as under nohup
		signals = append(signals, syscall.SIGHUP) // a terminal that closes must leave no dead mount
	}
	return signals
}

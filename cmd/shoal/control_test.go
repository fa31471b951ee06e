package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/shoalfs/shoal/internal/daemon"
	"github.com/shoalfs/shoal/prefetch/engine"
)

// Who only asks a daemon gives it nothing of its own: a folder, or a mount, that root asks about may be another user's.
func TestAskingGivesNoSecrets(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "FORMAT"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	asked := make(chan string, 100)
	a := &daemon.Answers{Verbs: attachVerbs, Most: 1, Failed: func(*daemon.Verb, error) {},
		Run: func(_ context.Context, v *daemon.Verb) error {
			asked <- v.Args[0]
			if len(v.Env) > 0 {
				t.Errorf("%v came with %v", v.Args, v.Env)
			}
			_, err := fmt.Fprint(v, `{}`)
			return err
		}}
	if _, err := a.ListenIn(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	t.Setenv("AWS_SECRET_ACCESS_KEY", "hush")
	t.Setenv(tokenEnv, "hush")
	for _, verb := range []string{"stat", "stop", "refresh"} {
		_, _ = shoal(t, verb, dir) // it is no whole daemon
	}
	close(asked)
	var all []string
	for verb := range asked {
		all = append(all, verb)
	}
	if !slices.Equal(all, []string{"stat", "stat", "refresh"}) { // stop asks whom it would stop
		t.Errorf("the daemon was asked to %v", all)
	}
}

// A flag of a verb that attaches is of the whole process, and compared with what is in force; or of the dataset, and
// compared by engine.join or applied; or the verb's own. Any other would be silently ignored.
func TestEveryFlagIsHeeded(t *testing.T) {
	heeded := map[string]bool{}
	var tagged func(c reflect.Type)
	tagged = func(c reflect.Type) {
		for i := range c.NumField() {
			if flag := c.Field(i).Tag.Get("flag"); flag != "" {
				heeded[flag] = true
			} else if c.Field(i).Type.Kind() == reflect.Struct {
				tagged(c.Field(i).Type)
			}
		}
	}
	tagged(reflect.TypeFor[engine.HostConfig]())
	for _, flag := range strings.Fields(`
		encryption-key-file reset-old-cache cache-dir config standing help
		samples shards bad-shards recode near near-endpoint near-profile store connections publish order refresh
		admin daemon allow-other kernel-cache fuse-transport s3 s3-keys s3-anonymous s3-read-only tls-cert tls-key
		listen mount socket-group tls-client-ca token-file fraction list`) {
		heeded[flag] = true
	}
	r := root()
	for _, verb := range []string{"mount", "serve", "s3", "warm"} {
		c, _, err := r.Find([]string{verb})
		if err != nil {
			t.Fatal(err)
		}
		c.Flags().VisitAll(func(f *pflag.Flag) {
			if !heeded[f.Name] {
				t.Errorf("%s --%s: attaching ignores it", verb, f.Name)
			}
		})
	}
}

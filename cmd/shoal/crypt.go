package main

import (
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/shoalfs/shoal/cache/crypt"
	"github.com/shoalfs/shoal/internal/audit"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/prefetch/engine"
)

// keyEnv holds the cache's encryption key if no file is given. It is never a flag's value, which everybody on the
// machine can read.
const keyEnv = "SHOAL_ENCRYPTION_KEY"

type cryptOptions struct{ keyFile string }

func (o *cryptOptions) add(f *pflag.FlagSet) {
	f.StringVar(&o.keyFile, "encryption-key-file", "",
		"file with the encryption key of the cache directory: 32 raw bytes, or hex or base64\n(default: the key in "+
			keyEnv+", if set; otherwise the cache is not encrypted; docs/security.md)")
}

// secret returns the user's key; nil if there is none.
func (o *cryptOptions) secret(inv *invocation) (*crypt.Secret, error) {
	s, given, err := keyOf(inv, "encryption-key-file", o.keyFile, keyEnv, crypt.ParseSecret)
	if err != nil || !given {
		return nil, err
	}
	return &s, nil
}

// keyOf reads a key from the file that a flag names or, if it names none, from a variable. given is whether there is
// one. Errors name the flag and the file, or the variable, and reveal nothing of the content.
func keyOf[T any](inv *invocation, flag, file, variable string, parse func(text []byte) (T, error)) (
	key T, given bool, err error) {
	text, from := []byte(inv.environ(variable)), variable
	if file != "" {
		if file, err = inv.abs(file); err == nil {
			text, err = headOf(file)
		}
		if from = "--" + flag + ": " + file; err != nil {
			return key, true, fmt.Errorf("--%s: %w", flag, err)
		}
	} else if len(text) == 0 {
		return key, false, nil
	}
	if key, err = parse(text); err != nil {
		err = fmt.Errorf("%s: %w", from, err)
	}
	return key, true, err
}

// headOf reads more of a file than a key can have.
func headOf(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, 4096))
}

func cacheRekeyCommand(cache *cacheFlags) *cobra.Command {
	var newFile string
	c := &cobra.Command{
		Use:   "rekey CACHE-DIR --new-encryption-key-file FILE",
		Short: "Change the key of an encrypted cache directory",
		Long: `Makes the key in FILE the key of CACHE-DIR; the old key no longer opens it. This takes a moment, whatever the size
of the cache: the data is encrypted with the directory's own key, and only that key is encrypted again. Anyone who
had both the old key and a copy of CACHE-DIR/ENCRYPTION can still read the cached data. In that case remove the
directory and fill a new one.`,
		Example: "  shoal cache rekey /nvme/shoal --encryption-key-file old.key --new-encryption-key-file new.key",
		Args:    cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, args []string) error {
			cacheDir, _, err := dirAnd(c, &cache.dir, args, 0)
			if err != nil {
				return err
			}
			if newFile == "" {
				return cli.Usagef("give the new key: --new-encryption-key-file FILE")
			}
			inv := invocationOf(c.Context())
			s, _, err := keyOf(inv, "new-encryption-key-file", newFile, "", crypt.ParseSecret)
			if err != nil {
				return err
			}
			return withCache(c, cache, cacheDir, func(h *engine.Host, out io.Writer) error {
				err := h.Rekey(s)
				h.Audit().Write(outcome(audit.Event{Event: "cache_rekey", KeyID: s.ID(), Peer: inv.who()}, err))
				if err != nil {
					return err
				}
				fmt.Fprintf(out, "the key of %s is now %s\n", cacheDir, s.ID())
				return nil
			})
		},
	}
	c.Flags().StringVar(&newFile, "new-encryption-key-file", "",
		"file with the new key: 32 raw bytes, or hex or base64")
	return c
}

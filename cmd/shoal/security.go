package main

import (
	"fmt"
	"io"
	"log/slog"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/shoalfs/shoal/cache/crypt"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/loader/feedclient"
)

// tokenEnv holds the token where no --token-file does: others can read a command line, but not an environment.
const tokenEnv = "SHOAL_FEED_TOKEN"

// feedSecurity are the flags of a feed's server that limit its clients.
type feedSecurity struct {
	files     loader.TLSFiles
	tokenFile string
}

func (s *feedSecurity) add(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&s.files.Cert, "tls-cert", "",
		"certificate for tls:// addresses, PEM, with intermediates; reloaded when it changes")
	f.StringVar(&s.files.Key, "tls-key", "", "key of --tls-cert, PEM")
	f.StringVar(&s.files.ClientCA, "tls-client-ca", "",
		"CA certificates, PEM: clients of tls:// addresses need a certificate signed by one of them")
	f.StringVar(&s.tokenFile, "token-file", "",
		"file with tokens, one per line: clients must present one of them (default: the token in "+tokenEnv+", if set)")
}

func (s *feedSecurity) resolve(inv *invocation, log *slog.Logger, lo *loader.ListenOptions) (
	_ *loader.Tokens, err error) {
	if _, err := inv.absAll(&s.files.Cert, &s.files.Key, &s.files.ClientCA, &s.tokenFile); err != nil {
		return nil, err
	}
	if s.files != (loader.TLSFiles{}) {
		if lo.TLS, err = loader.ServerTLS(s.files, log); err != nil {
			return nil, wrongUse(err)
		}
	}
	token := ""
	if s.tokenFile == "" {
		token = inv.environ(tokenEnv)
	}
	tokens, err := loader.NewTokens(token, s.tokenFile, log)
	lo.Tokens = tokens != nil
	return tokens, err
}

// clientSecurity are the flags of a feed's client.
type clientSecurity struct {
	s         feedclient.Security
	tokenFile string
}

func (s *clientSecurity) add(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&s.s.CA, "ca", "", "CA certificates for tls:// servers, PEM (default: the system's)")
	f.StringVar(&s.s.Cert, "cert", "", "certificate of this client, PEM, for servers with --tls-client-ca")
	f.StringVar(&s.s.Key, "key", "", "key of --cert, PEM")
	f.StringVar(&s.s.ServerName, "server-name", "", "name in the server's certificate (default: the host of ADDR)")
	f.StringVar(&s.tokenFile, "token-file", "", "file with the token for the server (default: "+tokenEnv+", if set)")
}

// dial prepares a connection to a feed. Wrong flags are wrong usage.
func (s *clientSecurity) dial(addr string) (_ *feedclient.Client, err error) {
	s.s.Token = os.Getenv(tokenEnv)
	if s.tokenFile != "" {
		if s.s.Token, err = feedclient.ReadToken(s.tokenFile); err != nil {
			return nil, err
		}
	}
	client, err := feedclient.Dial(addr, s.s)
	if err != nil {
		return nil, cli.Usage(err)
	}
	return client, nil
}

// keyEnv holds the cache's key where no file does. It is never a flag's value, which everybody here can read.
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

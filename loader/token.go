package loader

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"

	"github.com/shoalfs/shoal/internal/audit"
)

// Tokens are the secrets of which a client must present one, as metadata "authorization: Bearer TOKEN". Only their
// hashes are kept, and they never appear in a log or an error.
type Tokens struct {
	fixed [][sha256.Size]byte
	file  *reloaded[[][sha256.Size]byte] // nil: none
}

// NewTokens reads one token from text, or one for each line of a file, or both; it returns nil if neither is given.
// Blank lines and lines that begin with # are skipped. The file is checked at every call of a client: add the new
// token, move the trainers, then remove the old one.
func NewTokens(text, file string, log *slog.Logger) (*Tokens, error) {
	if text == "" && file == "" {
		return nil, nil
	}
	t := &Tokens{}
	if text != "" {
		if !CanBeToken(text) {
			return nil, errors.New("the token contains spaces or non-ASCII characters: use letters and digits")
		}
		t.fixed = append(t.fixed, sha256.Sum256([]byte(text)))
	}
	if file != "" {
		var err error
		t.file, err = newReloaded("token file", []string{file}, log, func() ([][sha256.Size]byte, error) {
			list, err := ReadTokens(file)
			if err != nil {
				return nil, err
			}
			var hashes [][sha256.Size]byte
			for _, token := range list {
				hashes = append(hashes, sha256.Sum256([]byte(token)))
			}
			return hashes, nil
		})
		if err != nil {
			return nil, err
		}
	}
	return t, nil
}

// ReadTokens reads a token file, which must hold at least one token.
func ReadTokens(file string) ([]string, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("token file: %w", err)
	}
	var list []string
	for i, line := range strings.Split(string(b), "\n") {
		token := strings.TrimSpace(line)
		if token == "" || strings.HasPrefix(token, "#") {
			continue
		}
		if !CanBeToken(token) {
			return nil, fmt.Errorf("token file %s, line %d: spaces or non-ASCII characters: write one token a line, "+
				"of letters and digits", file, i+1)
		}
		list = append(list, token)
	}
	if len(list) == 0 {
		return nil, fmt.Errorf(
			"token file %s holds no token: write one a line, such as the output of `openssl rand -hex 32`", file)
	}
	return list, nil
}

// CanBeToken reports whether text can be sent as a token: visible ASCII without spaces.
func CanBeToken(text string) bool {
	for i := range len(text) {
		if text[i] <= ' ' || text[i] > '~' {
			return false
		}
	}
	return text != ""
}

// allow takes the same time for every token, right or wrong.
func (t *Tokens) allow(token string) bool {
	sum := sha256.Sum256([]byte(token))
	known := t.fixed
	if t.file != nil {
		known = append(known[:len(known):len(known)], t.file.get()...)
	}
	ok := 0
	for i := range known {
		ok |= subtle.ConstantTimeCompare(sum[:], known[i][:])
	}
	return ok == 1
}

var (
	errNoToken = coded(codes.Unauthenticated, "this server requires a token, and none was sent: "+
		"pass --token-file or set SHOAL_FEED_TOKEN (in Python Feed(token=...))")
	errWrongToken = coded(codes.Unauthenticated, "the server does not accept this token: "+
		"compare it with the server's --token-file or SHOAL_FEED_TOKEN")
)

// check verifies the token in a call's metadata.
func (t *Tokens) check(ctx context.Context) error {
	sent := metadata.ValueFromIncomingContext(ctx, "authorization")
	if len(sent) == 0 {
		return errNoToken
	}
	scheme, token, _ := strings.Cut(sent[0], " ")
	if len(sent) > 1 || !strings.EqualFold(scheme, "bearer") || !t.allow(strings.TrimSpace(token)) {
		return errWrongToken
	}
	return nil
}

// No token needed: a Kubernetes probe sends no metadata, and learns only that the server runs.
const healthMethods = "/grpc.health.v1.Health/"

// guard makes the server's calls require a token; it does nothing if t is nil.
func (t *Tokens) guard(log *slog.Logger, events *audit.Log) []grpc.ServerOption {
	if t == nil {
		return nil
	}
	check := func(ctx context.Context, method string) error {
		if strings.HasPrefix(method, healthMethods) {
			return nil
		}
		err := t.check(ctx)
		if err != nil {
			from := "unknown"
			if p, ok := peer.FromContext(ctx); ok {
				from = p.Addr.String()
			}
			log.Warn("feed: a call without a valid token was refused", "method", method, "from", from, "cause", err)
			events.Write(audit.Event{Event: "feed_call", Method: method, Outcome: "refused", Cause: err.Error(),
				Peer: peerOf(ctx, true)})
		}
		return toStatus(err)
	}
	return []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(
			func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
				if err := check(ctx, info.FullMethod); err != nil {
					return nil, err
				}
				return next(ctx, req)
			}),
		grpc.ChainStreamInterceptor(
			func(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
				if err := check(stream.Context(), info.FullMethod); err != nil {
					return err
				}
				return next(srv, stream)
			}),
	}
}

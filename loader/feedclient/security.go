package feedclient

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/shoalfs/shoal/loader"
)

// Security says how client and server authenticate each other. All files are PEM.
type Security struct {
	CA         string // authorities that may sign the server's certificate; empty: the system's
	Cert, Key  string // the client's certificate, for servers that require one; read again at every connection
	ServerName string // name in the server's certificate; empty: the address's host
	Token      string // sent with every call; over tcp:// in plain text
}

// ReadToken returns the first token of a file in the format of `shoal serve --token-file`.
func ReadToken(file string) (string, error) {
	list, err := loader.ReadTokens(file)
	if err != nil {
		return "", err
	}
	return list[0], nil
}

// dialOptions are the transport's and the calls' credentials.
func (s Security) dialOptions(encrypted bool) ([]grpc.DialOption, error) {
	transport := insecure.NewCredentials()
	switch {
	case encrypted:
		c, err := s.tls()
		if err != nil {
			return nil, err
		}
		transport = credentials.NewTLS(c)
	case s.CA != "" || s.Cert != "" || s.Key != "" || s.ServerName != "":
		return nil, errors.New("certificates are for tls://HOST:PORT: change the address, or leave them out")
	}
	list := []grpc.DialOption{grpc.WithTransportCredentials(readerTells{transport})}
	if s.Token != "" {
		if !loader.CanBeToken(s.Token) {
			return nil, errors.New("the token contains spaces or non-ASCII characters: tokens are visible ASCII")
		}
		list = append(list, grpc.WithPerRPCCredentials(bearer(s.Token)))
	}
	return list, nil
}

func (s Security) tls() (*tls.Config, error) {
	c := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: s.ServerName}
	if s.CA != "" {
		pem, err := os.ReadFile(s.CA)
		if err != nil {
			return nil, fmt.Errorf("authorities: %w", err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("authorities: %s holds no PEM certificate", s.CA)
		}
	}
	if s.Cert == "" && s.Key == "" {
		return c, nil
	}
	if s.Cert == "" || s.Key == "" {
		return nil, errors.New("a client certificate and its key are used together: pass both --cert and --key")
	}
	load := func() (*tls.Certificate, error) {
		pair, err := tls.LoadX509KeyPair(s.Cert, s.Key)
		if err != nil {
			return nil, fmt.Errorf("certificate %s with key %s: %w", s.Cert, s.Key, err)
		}
		return &pair, nil
	}
	if _, err := load(); err != nil { // report bad files now, not at the first connection
		return nil, err
	}
	c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return load() }
	return c, nil
}

// readerTells makes connections on which only reads report how they ended. A server that refuses a client says why and
// closes; if gRPC still has to write then, it would report a broken pipe and not the server's reason.
type readerTells struct {
	credentials.TransportCredentials
}

func (c readerTells) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (
	net.Conn, credentials.AuthInfo, error) {
	conn, info, err := c.TransportCredentials.ClientHandshake(ctx, authority, raw)
	if err != nil {
		return nil, nil, err
	}
	return toldByReader{conn}, info, nil
}

func (c readerTells) Clone() credentials.TransportCredentials {
	return readerTells{c.TransportCredentials.Clone()}
}

type toldByReader struct{ net.Conn }

func (c toldByReader) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	if errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) { // the reader sees the end, too
		return len(p), nil
	}
	return n, err
}

// bearer is a token in the metadata of every call.
type bearer string

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(b)}, nil
}

// RequireTransportSecurity implements credentials.PerRPCCredentials: unix sockets and loopback have none.
func (bearer) RequireTransportSecurity() bool { return false }

// remedies say what to do about a failed connection, by a part of the error's text; the first match counts.
// The texts are those of crypto/tls, crypto/x509 and gRPC.
var remedies = []struct{ text, remedy string }{
	{"certificate signed by unknown authority",
		"this client does not trust the authority that signed the server's certificate: pass it with --ca FILE"},
	{"certificate is valid for", "connect by a name in the certificate, or pass one of its names with --server-name"},
	{"certificate is not valid for any names",
		"the certificate has no names: give the server a certificate with the host's name"},
	{"doesn't contain any IP SANs",
		"the certificate has no IP addresses: connect by name, or pass its name with --server-name"},
	{"certificate has expired or is not yet valid",
		"renew the server's certificate (the server reads a new file without a restart), or set the clock"},
	{"tls: certificate required", "this server requires a client certificate: pass --cert and --key"},
	{"tls: expired certificate", "the client's certificate has expired: renew it"},
	{"tls: unknown certificate authority",
		"the server does not trust the authority that signed the client's certificate: use one of its " +
			"--tls-client-ca, or add yours there"},
	{"tls: bad certificate",
		"the server does not accept the client's certificate: it must be signed by one of its --tls-client-ca, for " +
			"client authentication"},
	{"first record does not look like a TLS handshake", "the server uses plain TCP at this address: connect to tcp://"},
	{"remote error: tls: ", "the TLS settings of server and client do not match: compare --tls-client-ca of the " +
		"server with --cert, and --ca with the server's certificate"},
	{"error reading server preface",
		"the server at this address does not speak the feed's protocol; if it is a tls:// address of the server, " +
			"connect to tls://"},
}

// remedy returns what to do about a connection that failed.
func remedy(text string) string {
	if strings.HasSuffix(text, syscall.EACCES.Error()) {
		return "this user may not connect: see --socket-group of `shoal serve`"
	}
	for _, r := range remedies {
		if strings.Contains(text, r.text) {
			return r.remedy
		}
	}
	return "is `shoal serve` running there? start it, or check the address"
}

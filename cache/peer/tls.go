package peer

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
)

// TLS returns a configuration for both ends of the nodes' connections: each end has the certificate of its node, and
// takes the other's if one of the authorities in ca signed it. All files are PEM, and read again at each new
// connection, so that a renewed certificate is in force at once.
//
// No name is checked. A node's address is what etcd says, often an IP address that no certificate has. And a name would
// prove nothing: whoever has a certificate of the cluster's authority may register at any address, and read everything.
// So that authority must be the cluster's own.
func TLS(cert, key, ca string) (*tls.Config, error) {
	if cert == "" || key == "" || ca == "" {
		return nil, errors.New("nodes need a certificate, its key and the cluster's authority: pass --cluster-cert, " +
			"--cluster-key and --cluster-ca")
	}
	pair := func() (*tls.Certificate, error) {
		c, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("certificate %s with key %s: %w", cert, key, err)
		}
		return &c, nil
	}
	authorities := func() (*x509.CertPool, error) {
		pem, err := os.ReadFile(ca)
		if err != nil {
			return nil, fmt.Errorf("the cluster's authority: %w", err)
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("the cluster's authority: %s holds no PEM certificate", ca)
		}
		return pool, nil
	}
	_, certErr := pair()
	_, caErr := authorities()
	if err := cmp.Or(certErr, caErr); err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		NextProtos: []string{"http/1.1"}, // an Upgrade needs it

		GetCertificate:       func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return pair() },
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return pair() },

		ClientAuth:         tls.RequireAnyClientCert,
		InsecureSkipVerify: true, //nolint:gosec // VerifyConnection verifies, at both ends
		VerifyConnection: func(s tls.ConnectionState) error {
			roots, err := authorities()
			if err != nil {
				return err
			}
			if len(s.PeerCertificates) == 0 {
				return errors.New("the other node has no certificate")
			}
			between := x509.NewCertPool()
			for _, c := range s.PeerCertificates[1:] {
				between.AddCert(c)
			}
			_, err = s.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: roots, Intermediates: between,
				KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}})
			return err
		},
		DynamicRecordSizingDisabled: true, // answers are large
	}, nil
}

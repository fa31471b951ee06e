package kubernetes

import (
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/shoalfs/shoal/lab/rig/s3server"
)

// names answers for the name of a Service with the addresses of its pods that are ready, as DNS does for headless
// ones. No kube-proxy gives the others an address, so it does the same for all.
func (c *cluster) names(t *testing.T) {
	t.Helper()
	conn, err := net.ListenPacket("udp", net.JoinHostPort(c.network.Host, "53"))
	must(t, err)
	t.Cleanup(func() { conn.Close() })
	go func() {
		for query := make([]byte, 1500); ; {
			n, from, err := conn.ReadFrom(query)
			if err != nil {
				return
			}
			if answer := c.resolve(query[:n]); answer != nil {
				_, _ = conn.WriteTo(answer, from) // who asks asks again
			}
		}
	}()
}

func (c *cluster) resolve(query []byte) []byte {
	var m dnsmessage.Message
	if m.Unpack(query) != nil || len(m.Questions) != 1 {
		return nil
	}
	q := m.Questions[0]
	m.Response, m.Authoritative, m.RCode, m.Additionals = true, true, dnsmessage.RCodeNameError, nil
	service, rest, _ := strings.Cut(q.Name.String(), ".")
	if namespace, ok := strings.CutSuffix(rest, ".svc.cluster.local."); ok && !strings.Contains(namespace, ".") {
		out, err := c.try("get", "endpoints", service, "-n", namespace, "-o", "jsonpath={.subsets[*].addresses[*].ip}")
		if err == nil {
			m.RCode = dnsmessage.RCodeSuccess
		}
		for _, ip := range strings.Fields(out) {
			if addr, err := netip.ParseAddr(ip); err == nil && q.Type == dnsmessage.TypeA {
				m.Answers = append(m.Answers, dnsmessage.Resource{
					Header: dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class, TTL: 1},
					Body:   &dnsmessage.AResource{A: addr.As4()}})
			}
		}
	}
	answer, err := m.Pack()
	if err != nil {
		return nil
	}
	return answer
}

// A feed as a Service, with TLS and a token, each from a Secret: a trainer on another node reads an epoch, and reads on
// when the feed's node is drained in the middle of it.
func testService(t *testing.T, c *cluster) {
	const namespace = "service"
	sums, paths := c.dataset(t, namespace, 240, 30_000)
	m := c.join(t)
	c.kubectl(t, "create", "namespace", namespace)
	c.secret(t, namespace, s3server.SecretKey)
	cert, key := c.authority.Issue(t, "feed", time.Hour)
	c.kubectl(t, "create", "secret", "generic", "feed", "-n", namespace, "--from-file=tls.crt="+cert,
		"--from-file=tls.key="+key, "--from-file=ca.crt="+c.authority.File, "--from-literal=tokens=walrus")
	c.kubectl(t, "create", "secret", "generic", "trainer", "-n", namespace, "--from-file=ca.crt="+c.authority.File,
		"--from-literal=token=walrus")
	c.write(t, "service.yaml", fmt.Sprintf(`
apiVersion: v1
kind: Service
metadata: {name: feed, namespace: service}
spec: {clusterIP: None, selector: {app: feed}, ports: [{port: 7072}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: feed, namespace: service}
spec:
  selector: {matchLabels: {app: feed}}
  template:
    metadata: {labels: {app: feed}}
    spec:
      securityContext: {fsGroup: 65532}
      affinity: # the other node, while it takes pods
        nodeAffinity:
          preferredDuringSchedulingIgnoredDuringExecution:
            - weight: 100
              preference: {matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [%[1]s]}]}
      containers:
        - name: shoal
          image: "%[2]sshoal:%[3]s"
          args: [serve, s3://service/train, "--listen=tls://0.0.0.0:7072", --tls-cert=/etc/shoal/feed/tls.crt,
            --tls-key=/etc/shoal/feed/tls.key, --token-file=/etc/shoal/feed/tokens, --cache-dir=/var/cache/shoal/feed,
            --cache-size=1GiB, --memory=auto]
          env: [{name: AWS_ENDPOINT_URL, value: %[4]q}, {name: AWS_REGION, value: us-east-1}]
          envFrom: [{secretRef: {name: shoal-s3}}]
          readinessProbe:
            exec:
              command: [/usr/bin/shoal, health, "tls://127.0.0.1:7072", --ca=/etc/shoal/feed/ca.crt, --server-name=feed]
            periodSeconds: 1
            timeoutSeconds: 6
          resources: {requests: {cpu: 100m}, limits: {memory: 512Mi}}
          volumeMounts: [{name: feed, mountPath: /etc/shoal/feed}, {name: cache, mountPath: /var/cache/shoal}]
      volumes: [{name: feed, secret: {secretName: feed}}, {name: cache, emptyDir: {sizeLimit: 2Gi}}]
---
apiVersion: batch/v1
kind: Job
metadata: {name: train, namespace: service}
spec:
  template:
    spec:
      restartPolicy: Never
      nodeSelector: {kubernetes.io/hostname: %[5]s}
      containers:
        - name: train
          image: "%[2]strainer:%[3]s"
          command: [python, train.py, "--feed=tls://feed:7072", --ca=/etc/shoal/trainer/ca.crt, --half=100]
          env: [{name: TOKEN, valueFrom: {secretKeyRef: {name: trainer, key: token}}}]
          volumeMounts: [{name: trainer, mountPath: /etc/shoal/trainer, readOnly: true}]
      volumes: [{name: trainer, secret: {secretName: trainer}}]
`, m.name, registry, tag, c.store.URL, c.name))
	c.kubectl(t, "apply", "-f", filepath.Join(c.dir, "service.yaml"))
	c.kubectl(t, "rollout", "status", "deployment/feed", "-n", namespace, "--timeout=3m")
	if out, err := c.try("exec", "-n", namespace, "deployment/feed", "--", "/usr/bin/shoal", "stat", "tls://feed:7072",
		"--ca", "/etc/shoal/feed/ca.crt"); err == nil || !strings.Contains(out, "requires a token") {
		t.Errorf("without a token: %v, %s", err, out)
	}
	trainer := c.half(t, namespace)[0]
	where := func() string {
		t.Helper()
		return c.pods(t, namespace, "app=feed")[0].Spec.NodeName
	}
	if at := where(); at != m.name {
		t.Errorf("the feed runs on %s, and was to run on %s", at, m.name)
	}
	began := time.Now()
	c.kubectl(t, "drain", m.name, "--delete-emptydir-data", "--timeout=2m")
	c.goOn(t, namespace, trainer)
	pods := c.complete(t, namespace)
	t.Logf("from the drain to the job's completion: %.1f s", time.Since(began).Seconds())
	check(t, sums, paths, c.trained(t, namespace, trainer))
	if at := where(); at != c.name || len(pods) != 1 || pods[0].Status.ContainerStatuses[0].RestartCount != 0 {
		t.Errorf("the feed runs on %s; the trainer: %+v", at, pods)
	}
	c.gone(t, namespace, pods)
	c.kubectl(t, "delete", "node", m.name)
}

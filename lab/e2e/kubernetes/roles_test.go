package kubernetes

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"
)

// roles stands in for Amazon's STS: service accounts of the namespace NAME may assume the role NAME, which is the S3
// server's user NAME. The server knows no session tokens, so there is none.
func (c *cluster) roles(t *testing.T) (url string) {
	t.Helper()
	listener, err := net.Listen("tcp", c.network.Host+":0")
	must(t, err)
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		arn := r.PostFormValue("RoleArn")
		role := arn[strings.LastIndexByte(arn, '/')+1:]
		var token struct {
			Sub string
			Aud []string
		}
		if parts := strings.Split(r.PostFormValue("WebIdentityToken"), "."); len(parts) == 3 {
			claims, _ := base64.RawURLEncoding.DecodeString(parts[1])
			_ = json.Unmarshal(claims, &token)
		}
		const action = "AssumeRoleWithWebIdentity"
		if r.PostFormValue("Action") != action || !slices.Contains(token.Aud, "sts.amazonaws.com") ||
			!strings.HasPrefix(token.Sub, "system:serviceaccount:"+role+":") {
			w.WriteHeader(http.StatusForbidden)
			fmt.Fprintf(w, `<ErrorResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><Error><Type>Sender</Type>
				<Code>AccessDenied</Code><Message>%s may not have %s</Message></Error></ErrorResponse>`, token.Sub, arn)
			return
		}
		fmt.Fprintf(w, `<%[1]sResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><%[1]sResult><Credentials>
			<AccessKeyId>%[2]s</AccessKeyId><SecretAccessKey>hush-%[2]s</SecretAccessKey><SessionToken></SessionToken>
			<Expiration>%[3]s</Expiration></Credentials></%[1]sResult></%[1]sResponse>`,
			action, role, time.Now().Add(time.Hour).UTC().Format(time.RFC3339))
	}))
	s.Listener.Close()
	s.Listener = listener
	s.Start()
	t.Cleanup(s.Close)
	return s.URL
}

// Pods of two namespaces on one node have a role each: each reads what is its role's, and neither the other's, although
// the node's cache has it, nor can it assume the other's role.
func testCSIRoles(t *testing.T, c *cluster) {
	c.csiDriver(t, "AWS_ENDPOINT_URL_STS="+c.roles(t))
	c.kubectl(t, "create", "namespace", "green")
	const arn = "arn:aws:iam::1:role/"
	user := func(name string) {
		t.Helper()
		must(t, c.server.Admin(t.Context(), "create-user", "--access", name, "--secret", "hush-"+name, "--role",
			"user"))
	}
	sums, paths := map[string]map[string]string{}, map[string][]string{}
	for _, team := range teams {
		bucket := "of-" + team
		sums[team], paths[team] = c.dataset(t, bucket, 8, 30_000)
		user(team)
		must(t, c.server.Admin(t.Context(), "change-bucket-owner", "--bucket", bucket, "--owner", team))
		c.csiTrainers(t, team, bucket, fmt.Sprintf(`
      - {op: remove, path: /spec/template/spec/volumes/0/csi/nodePublishSecretRef}
      - {op: add, path: /spec/template/spec/volumes/0/csi/volumeAttributes/role, value: "%s%s"}
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: --half=4}
`, arn, team))
	}
	waiting := map[string][]string{}
	for _, team := range teams {
		waiting[team] = c.half(t, team) // so what it has read is mounted and cached now
	}
	user("green")
	const volume = `{source: "s3://of-red/train", role: "%s%s"}`
	c.refused(t, "green", "own", fmt.Sprintf(volume, arn, "green"), "", "AccessDenied.*s3:ListBucket")
	c.refused(t, "green", "others", fmt.Sprintf(volume, arn, "red"), "",
		"AccessDenied: system:serviceaccount:green:default may not have "+arn+"red")
	for _, team := range teams {
		for _, pod := range waiting[team] {
			c.goOn(t, team, pod)
		}
		for _, p := range c.complete(t, team) {
			check(t, sums[team], paths[team], c.trained(t, team, p.Metadata.Name))
		}
	}
	c.kubectl(t, "delete", "namespace", teams[0], teams[1], "green", "--timeout=2m")
	c.noDriver(t)
}

package csi

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
)

// Volume is what a pod asks for.
type Volume struct {
	Source string
	Flags  map[string]string // of shoal mount, without the dashes
	// Own are the pod's variables: where the store is, and whose rights it is read with; without Rights, the driver's.
	Own    map[string]string
	Rights bool
	Role   string // assumed with the token of the pod's service account; "": none
	For    string // NAMESPACE/NAME of that account, if there is a role
	token  string
}

// The attributes that are flags of shoal mount. Those of the whole process are compared: they must be the driver's.
var flags = map[string]string{
	"order": "order", "samples": "samples", "shards": "shards", "bad-shards": "bad-shards", "recode": "recode",
	"kernel-cache": "kernel-cache",
	"connections":  "connections", "store": "store", "memory": "memory", "cache": "cache-size",
}

// The attributes that are variables.
var variables = map[string]string{"endpoint": "AWS_ENDPOINT_URL", "region": "AWS_REGION"}

// ownSecrets are the keys that a Secret may have: none that names a file or a program, which would be the driver's.
var ownSecrets = []string{"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_NO_SIGN_REQUEST",
	"AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "SHOAL_SSE_C_KEY"}

// ofStore are the driver's variables that a volume with rights of its own has, too.
var ofStore = []string{"AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3",
	"AWS_ENDPOINT_URL_STS", "AWS_CA_BUNDLE"}

const (
	kubernetes = ".kubernetes.io/" // in names of attributes that are not the user's
	pod        = "csi.storage.k8s.io/"
	audience   = "sts.amazonaws.com"
)

// volumeOf returns what a request asks for, or what is wrong with it.
func volumeOf(attributes, secrets map[string]string) (v Volume, err error) {
	v = Volume{Flags: map[string]string{}, Own: map[string]string{}}
	for _, name := range slices.Sorted(maps.Keys(attributes)) {
		value := attributes[name]
		switch {
		case name == "source":
			v.Source = value
		case name == "role":
			v.Role = value
		case flags[name] != "":
			v.Flags[flags[name]] = value
		case variables[name] != "":
			v.Own[variables[name]] = value
		case !strings.HasPrefix(name, pod) && !strings.Contains(name, kubernetes):
			known := slices.Sorted(maps.Keys(flags))
			return v, fmt.Errorf("volume attribute %q is unknown (there are source, role, endpoint, region, %s)",
				name, strings.Join(known, ", "))
		}
	}
	for _, at := range []string{v.Source, v.Flags["shards"]} {
		if !strings.HasPrefix(at, "s3://") && (at != "" || v.Source == "") { // the driver's files are not the pod's
			return v, fmt.Errorf("volume attribute source or shards is %q (give s3://BUCKET/PREFIX)", at)
		}
	}
	if strings.Contains(v.Flags["order"], "list:") {
		return v, fmt.Errorf("volume attribute order is %q, which names a file of the driver (write the list to "+
			".shoal/plan in the volume, which must not be readOnly)", v.Flags["order"])
	}
	for _, name := range slices.Sorted(maps.Keys(secrets)) {
		if !slices.Contains(ownSecrets, name) {
			return v, fmt.Errorf("the Secret has the key %q (it may have %s)", name, strings.Join(ownSecrets, ", "))
		}
		v.Own[name], v.Rights = secrets[name], true
	}
	switch keys := secrets["AWS_ACCESS_KEY_ID"] != "" && secrets["AWS_SECRET_ACCESS_KEY"] != ""; {
	case v.Rights && !keys && secrets["AWS_NO_SIGN_REQUEST"] == "":
		return v, fmt.Errorf("the Secret lacks AWS_ACCESS_KEY_ID or AWS_SECRET_ACCESS_KEY (or AWS_NO_SIGN_REQUEST=1, " +
			"for a public bucket)")
	case v.Role == "" && !v.Rights && v.Own["AWS_ENDPOINT_URL"] != "":
		return v, fmt.Errorf("the volume has an endpoint of its own, where the driver's keys do not go (give it a " +
			"Secret, too, or a role)")
	case v.Role == "":
		return v, nil
	case v.Rights:
		return v, fmt.Errorf("the volume has a role and a Secret (give one of them)")
	}
	var tokens map[string]struct{ Token string }
	_ = json.Unmarshal([]byte(attributes[pod+"serviceAccount.tokens"]), &tokens)
	v.Rights, v.token = true, tokens[audience].Token
	v.For = attributes[pod+"pod.namespace"] + "/" + attributes[pod+"serviceAccount.name"]
	if v.token == "" {
		return v, fmt.Errorf("the volume has a role, but Kubernetes sends no token for %s (the CSIDriver %s must "+
			"have it among its tokenRequests)", audience, Name)
	}
	return v, nil
}

// id names the stage of all volumes that ask for the same.
func (v Volume) id() string {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err) // it has strings alone
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:8])
}

// Scope names what decides what the volume shows, and to whom; "" is the driver's. No two scopes share anything.
func (v Volume) Scope() string {
	if len(v.Own) == 0 && v.Role == "" {
		return ""
	}
	return Volume{Own: v.Own, Role: v.Role, For: v.For}.id()
}

// Env returns the variables that the volume is mounted with; environ are the driver's.
func (v Volume) Env(environ []string, tokenFile string) map[string]string {
	env := map[string]string{}
	for _, kv := range environ {
		if name, value, _ := strings.Cut(kv, "="); slices.Contains(ofStore, name) ||
			!v.Rights && (strings.HasPrefix(name, "AWS_") || name == "HOME" || name == "SHOAL_SSE_C_KEY") {
			env[name] = value
		}
	}
	if v.Rights { // never the machine's
		env["AWS_EC2_METADATA_DISABLED"] = "true"
	}
	if v.Role != "" {
		env["AWS_ROLE_ARN"], env["AWS_WEB_IDENTITY_TOKEN_FILE"] = v.Role, tokenFile
	}
	if v.Own["AWS_ENDPOINT_URL"] != "" { // more specific than the driver's
		delete(env, "AWS_ENDPOINT_URL_S3")
	}
	if v.Own["AWS_REGION"]+v.Own["AWS_DEFAULT_REGION"] != "" {
		delete(env, "AWS_REGION")
	}
	maps.Copy(env, v.Own)
	return env
}

// Args returns the flags.
func (v Volume) Args() (args []string) {
	for _, name := range slices.Sorted(maps.Keys(v.Flags)) {
		args = append(args, "--"+name+"="+v.Flags[name])
	}
	return args
}

// mountFlags are the mount options that a volume may have. Only plans can be written to it.
var mountFlags = map[string]uintptr{
	"ro": unix.MS_RDONLY, "noexec": unix.MS_NOEXEC, "exec": 0, "nosuid": 0, "nodev": 0, "noatime": unix.MS_NOATIME,
	"nodiratime": unix.MS_NODIRATIME, "relatime": unix.MS_RELATIME,
}

func bindFlags(c *csi.VolumeCapability, readOnly, ephemeral bool) (flags uintptr, err error) {
	if c.GetMount() == nil {
		return 0, fmt.Errorf("a volume is a file system and no block device (volumeMode: Filesystem)")
	}
	switch mode := c.GetAccessMode().GetMode(); mode {
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY,
		csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY:
	default:
		if !readOnly && !ephemeral {
			return 0, fmt.Errorf(
				"a volume is read-only (accessModes: [ReadOnlyMany] in the persistent volume and its claim)")
		}
	}
	flags = unix.MS_NOSUID | unix.MS_NODEV
	if readOnly { // else plans can be written, and nothing else
		flags |= unix.MS_RDONLY
	}
	for _, o := range c.GetMount().GetMountFlags() {
		flag, ok := mountFlags[o]
		if !ok {
			return 0, fmt.Errorf("mount option %q (there are %s)",
				o, strings.Join(slices.Sorted(maps.Keys(mountFlags)), ", "))
		}
		flags |= flag
	}
	return flags, nil
}

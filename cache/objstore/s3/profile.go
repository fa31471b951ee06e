package s3

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"gopkg.in/ini.v1"

	"github.com/shoalfs/shoal/cache/objstore"
)

// profiles are the AWS tools' two shared files. A missing file is an empty one.
//
// https://docs.aws.amazon.com/sdkref/latest/guide/file-format.html
type profiles struct {
	config, credentials         *ini.File
	configPath, credentialsPath string // "" without a home directory
}

// loadProfiles reads AWS_CONFIG_FILE and AWS_SHARED_CREDENTIALS_FILE, or the files in ~/.aws.
func loadProfiles(getenv func(string) string) (*profiles, error) {
	p := &profiles{
		configPath:      awsFile(getenv, "AWS_CONFIG_FILE", "config"),
		credentialsPath: awsFile(getenv, "AWS_SHARED_CREDENTIALS_FILE", "credentials"),
	}
	var err error
	if p.config, err = loadIni(p.configPath, "AWS_CONFIG_FILE"); err != nil {
		return nil, err
	}
	p.credentials, err = loadIni(p.credentialsPath, "AWS_SHARED_CREDENTIALS_FILE")
	return p, err
}

func loadIni(path, variable string) (*ini.File, error) {
	if path == "" {
		return ini.Empty(), nil
	}
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return ini.Empty(), nil
	}
	var f *ini.File
	if err == nil {
		f, err = parseIni(text)
	}
	if err != nil {
		return nil, &objstore.Error{
			Op: "open", Key: path, Kind: objstore.KindInvalid, Err: sourceError(err),
			Remedy: "correct the file and its mode, or point " + variable + " elsewhere",
		}
	}
	return f, nil
}

// parseIni never quotes the text in its error, which may be a secret.
func parseIni(text []byte) (*ini.File, error) {
	f, err := ini.LoadSources(ini.LoadOptions{
		AllowNestedValues: true, SkipUnrecognizableLines: true, SpaceBeforeInlineComment: true, KeyValueDelimiters: "=",
		IgnoreContinuation: true, PreserveSurroundedQuote: true,
	}, text)
	if err != nil {
		return nil, errors.New("it is not in the format of the AWS tools' shared files")
	}
	return f, nil
}

// awsFile returns the path of a shared file, which variable sets; "" for none: without a home, as in a container with
// an empty environment.
func awsFile(getenv func(string) string, variable, name string) string {
	path, home := getenv(variable), getenv("HOME")
	if rest, ok := strings.CutPrefix(path, "~/"); ok && home != "" {
		return filepath.Join(home, rest)
	}
	if path == "" && home != "" {
		return filepath.Join(home, ".aws", name)
	}
	return path
}

// profile is the content of the two files under one name.
type profile struct {
	name     string
	sections []*ini.Section // the first with a key counts
}

// profile returns the profile of a name, and whether it exists. Keys in the credentials file override those in the
// config file.
func (f *profiles) profile(name string) (profile, bool) {
	p := profile{name: name}
	add := func(file *ini.File, section string) {
		if file.HasSection(section) {
			p.sections = append(p.sections, file.Section(section))
		}
	}
	add(f.credentials, name)
	add(f.config, "profile "+name)
	add(f.config, name)
	return p, len(p.sections) > 0
}

// get returns the value of a key, "" for none.
func (p profile) get(key string) string {
	for _, s := range p.sections {
		if s.HasKey(key) {
			if v := strings.TrimSpace(s.Key(key).Value()); v != "" {
				return v
			}
		}
	}
	return ""
}

// serviceEndpoint returns the endpoint_url nested under a service in the services section of a profile:
//
//	[services rig]
//	s3 =
//	  endpoint_url = http://127.0.0.1:9000
func (f *profiles) serviceEndpoint(p profile, service string) string {
	section := "services " + p.get("services")
	if !f.config.HasSection(section) || !f.config.Section(section).HasKey(service) {
		return ""
	}
	for _, line := range f.config.Section(section).Key(service).NestedValues() {
		if k, v, ok := strings.Cut(line, "="); ok && strings.TrimSpace(k) == "endpoint_url" {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

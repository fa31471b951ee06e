package s3

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/aws/aws-sdk-go-v2/config"

	"github.com/shoalfs/shoal/cache/objstore"
)

// loadProfile returns the chosen profile of the AWS tools' two shared files, unless it is known. It is empty, without a
// name, if it is in neither. A missing file is an empty one.
//
// https://docs.aws.amazon.com/sdkref/latest/guide/file-format.html
func loadProfile(getenv func(string) string, known *config.SharedConfig) (_ *config.SharedConfig, err error) {
	if known != nil {
		return known, nil
	}
	name := profileName(getenv)
	files := func(variable, file string) (paths []string) {
		path := awsFile(getenv, variable, file)
		if cause := readable(path); cause != nil && err == nil { // the SDK takes it for an empty file
			err = &objstore.Error{Op: "open", Key: path, Kind: objstore.KindInvalid, Err: cause,
				Remedy: "correct the file and its mode, or point " + variable + " elsewhere"}
		}
		return append([]string{}, path) // not nil, which means the SDK's own
	}
	configs, keys := files("AWS_CONFIG_FILE", "config"), files("AWS_SHARED_CREDENTIALS_FILE", "credentials")
	if err != nil {
		return &config.SharedConfig{}, err
	}
	p, err := config.LoadSharedConfigProfile(context.Background(), name, func(o *config.LoadSharedConfigOptions) {
		o.ConfigFiles, o.CredentialsFiles = configs, keys
	})
	var none config.SharedConfigProfileNotExistError
	var role config.SharedConfigAssumeRoleError
	switch {
	case errors.As(err, &role): // of a profile that is there
	case errors.As(err, &none):
		return &p, nil
	}
	if err != nil {
		if role.Profile != "" && role.Err == nil {
			err = fmt.Errorf("source_profile %q, with which %s is to be assumed, leads to no credentials", role.Profile,
				role.RoleARN)
		}
		err = &objstore.Error{Op: "open", Key: "profile " + name, Kind: objstore.KindInvalid,
			Err: errors.New(clean(err.Error())), Remedy: "correct the profile in " + configs[0] + " or " + keys[0]}
	}
	return &p, err
}

// readable returns why a file is there and cannot be read.
func readable(path string) error {
	f, err := os.Open(path)
	if err == nil {
		_, err = io.CopyN(io.Discard, f, 1)
		f.Close()
	}
	if path == "" || errors.Is(err, io.EOF) || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return sourceError(err)
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

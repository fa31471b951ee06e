package shard

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"

	"github.com/shoalfs/shoal/cache/catalog"
)

const (
	// SummaryName is the name of a set's manifest; if it exists, the set is complete.
	SummaryName = "shoal-manifest.json"
	// MarkerName is the name of the object that describes an unfinished set.
	MarkerName = "shoal-pack.json"

	summaryFormat  = "shoal-shards"
	markerFormat   = "shoal-pack"
	summaryVersion = 1
	codedSummary   = 2 // of a set with coded members

	// maxSummary bounds the size of a set's manifest: two million shards.
	maxSummary = 256 << 20
	// maxShards is what maxSummary can hold.
	maxShards = 2_000_000
)

// params determine the bytes of a set.
type params struct {
	Format    string `json:"format"`
	Version   int    `json:"version"`
	Dataset   string `json:"dataset"`           // dataset version, 64 hexadecimal digits
	Seed      uint64 `json:"seed"`              // of the order
	ShardSize int64  `json:"shard_size"`        // bytes that a shard is filled to
	Plan      string `json:"plan"`              // 32 hexadecimal digits; names which file lies in which shard
	Source    string `json:"source"`            // what was packed, for people
	Recoded   string `json:"recoded,omitempty"` // how the files were changed first: they are not the source's
	Coding    string `json:"coding,omitempty"`  // "jpeg": some members are stored in another form, see codedVersion
	Tables    string `json:"tables,omitempty"`  // that restore them, base64
	Files     int    `json:"files"`
	Bytes     int64  `json:"bytes"` // sum of the files' sizes
}

// Summary is a set's manifest, shoal-manifest.json.
type Summary struct {
	params
	Escaped Escaped         `json:"escaped"`
	Shards  []SummaryMember `json:"shards"`
}

// SummaryMember is one shard of a set.
type SummaryMember struct {
	Name    string `json:"name"`
	Size    int64  `json:"size"`
	Members int    `json:"members"`
	ETag    string `json:"etag"`
}

func shardName(i int) string { return fmt.Sprintf("shard-%06d.tar", i) }

const indexSuffix = ".sidx"

// check returns what is wrong with p.
func (p *params) check(format string) error {
	switch {
	case p.Format != format:
		return corrupt("format %.40q, want %q", p.Format, format)
	case p.Version > codedSummary, p.Coding != "" && p.Coding != codingJPEG:
		return fmt.Errorf("%w: format version %d, coding %.40q, but this version reads %d, %s",
			catalog.ErrNewerFormat, p.Version, p.Coding, codedSummary, codingJPEG)
	case p.Version < summaryVersion, (p.Version == codedSummary) != (p.Coding != ""):
		return corrupt("format version %d", p.Version)
	case p.Files <= 0 || p.Bytes < 0 || p.ShardSize <= 0:
		return corrupt("%d files of %d bytes in shards of %d", p.Files, p.Bytes, p.ShardSize)
	}
	if b, err := hex.DecodeString(p.Dataset); err != nil || len(b) != 32 {
		return corrupt("dataset version %.80q", p.Dataset)
	}
	if b, err := hex.DecodeString(p.Plan); err != nil || len(b) != 16 {
		return corrupt("plan %.80q", p.Plan)
	}
	return nil
}

// encodeJSON encodes both files: indented, so that people can read them.
func encodeJSON(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", " ")
	if err := e.Encode(v); err != nil {
		return nil, fmt.Errorf("shard set: %w", err)
	}
	return b.Bytes(), nil
}

// ParseSummary reads a set's manifest. Its errors wrap [catalog.ErrCorrupt] or [catalog.ErrNewerFormat].
func ParseSummary(data []byte) (*Summary, error) {
	s := new(Summary)
	if err := decodeJSON(data, s, &s.params, summaryFormat); err != nil {
		return nil, err
	}
	if len(s.Shards) == 0 || len(s.Shards) > maxShards {
		return nil, corrupt("%d shards", len(s.Shards))
	}
	files := 0
	room := int64(0)
	for i, m := range s.Shards {
		// A name of any other form could lie outside the prefix.
		if m.Name != shardName(i) {
			return nil, corrupt("shard %d has the name %.80q", i, m.Name)
		}
		if m.Members <= 0 || int64(m.Members) > m.Size/blockSize || m.Size < endLen || m.Size > 1<<60 || m.ETag == "" ||
			files > s.Files-m.Members {
			return nil, corrupt("shard %d: %d members in %d bytes", i, m.Members, m.Size)
		}
		files += m.Members
		if room += m.Size; room < 0 {
			return nil, corrupt("the shards exceed 8 EiB")
		}
	}
	if files != s.Files || s.Coding == "" && s.Bytes > room {
		return nil, corrupt("shards hold %d files in %d bytes, want %d of %d bytes", files, room, s.Files, s.Bytes)
	}
	return s, nil
}

// decodeJSON is the reverse of encodeJSON, and checks the params in what it has read.
func decodeJSON(data []byte, into any, p *params, format string) error {
	var v struct { // first: the rest may not match a newer one
		Version int `json:"version"`
	}
	if err := json.Unmarshal(data, &v); err != nil {
		return corrupt("%v", err)
	}
	if v.Version > codedSummary {
		return fmt.Errorf("%w: format version %d, but this version reads %d",
			catalog.ErrNewerFormat, v.Version, codedSummary)
	}
	if err := json.Unmarshal(data, into); err != nil {
		return corrupt("%v", err)
	}
	return p.check(format)
}

func parseMarker(data []byte) (p params, err error) {
	err = decodeJSON(data, &p, &p, markerFormat)
	return p, err
}

package engine

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	humanize "github.com/dustin/go-humanize"

	"github.com/shoalfs/shoal/cache/catalog"
)

// formats are the possible formats of samples (docs/samples.md, docs/records.md).
const formats = "samples are pictures (.jpg, .png and so on), any other files by --samples, rows of .csv and .tsv, " +
	"documents of .bin and .idx and columns of MDS and .parquet by --samples rows, and members of uncompressed tars"

// foreign says what to do with files that contain samples in other formats, by extension.
var foreign = []struct {
	remedy string
	ext    []string
}{
	{"what lies in these is samples with --samples rows", []string{".csv", ".tsv", ".idx", ".bin", ".mds", ".parquet"}},
	{"Arrow and its like are not read by the row: write the rows as a .csv for --samples rows, or as files in " +
		"tars, or serve SOURCE by shoal mount or shoal s3 to a reader that knows the format",
		[]string{".arrow", ".feather", ".orc"}},
	{"lines of JSON are no samples: write them as a .csv for --samples rows, or each as a file of its own, in tars",
		[]string{".jsonl", ".ndjson"}},
	{"single files cannot be read from a compressed tar: decompress the tars, and name them: " +
		"SOURCE/shard-{000000..000127}.tar",
		[]string{".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2", ".tar.lz4"}},
	{"name the tars themselves: SOURCE/shard-{000000..000127}.tar", []string{".tar"}},
	{"these are files of another loader: write their records as files, in tars",
		[]string{".tfrecord", ".rec", ".beton", ".lmdb", ".mdb", ".h5", ".hdf5", ".zip"}},
}

// extOf is a path's extension, including the .tar before that of a compressed one.
func extOf(p string) string {
	ext := strings.ToLower(path.Ext(p))
	if inner := strings.TrimSuffix(strings.ToLower(path.Base(p)), ext); strings.HasSuffix(inner, ".tar") {
		return ".tar" + ext
	}
	return ext
}

// columnsOf returns the columns of a first sample.
func columnsOf(m *catalog.Manifest) (columns []string) {
	first := ""
	for i := range min(m.Len(), 100) {
		stem, ext, _ := catalog.Cut(m.Name(i))
		if first = cmp.Or(first, stem); stem == first && ext != "" {
			columns = append(columns, ext)
		}
	}
	return columns
}

// noSamples says that no file of a version is a sample, which files it has, and what to do. It goes over all files.
func noSamples(source, pattern string, m *catalog.Manifest) error {
	count := map[string]int{}
	for i := range m.Len() {
		count[cmp.Or(extOf(m.Path(i)), "without extension")]++
	}
	kinds := slices.SortedFunc(maps.Keys(count), func(a, b string) int {
		return cmp.Or(count[b]-count[a], strings.Compare(a, b))
	})
	remedy := "give --samples '*', or a glob that matches"
	for _, f := range foreign {
		if len(kinds) > 0 && slices.Contains(f.ext, kinds[0]) {
			remedy = f.remedy
		}
	}
	if columns := columnsOf(m); (Config{Samples: pattern}).rows() && len(columns) > 0 {
		remedy = "number one of the columns: --samples rows:" + strings.Join(columns, ", rows:")
	}
	var most []string
	for _, kind := range kinds[:min(3, len(kinds))] {
		most = append(most, fmt.Sprintf("%s %s", humanize.Comma(int64(count[kind])), kind))
	}
	if len(kinds) == 1 && kinds[0][0] == '.' {
		most[0] += " file" + "s"[:min(m.Len()-1, 1)]
	}
	return fmt.Errorf("no file of %s is a sample: --samples %q matches none (%s); %s (%s)", source, pattern,
		strings.Join(most, ", "), formats, strings.ReplaceAll(remedy, "SOURCE/", strings.TrimSuffix(source, "/")+"/"))
}

// NoSamples returns an error that says why the dataset has no samples, and what to do; nil if it has some.
func (d *Dataset) NoSamples() error {
	if d.Len() > 0 {
		return nil
	}
	return noSamples(d.e.source.String(), d.e.cfg.Samples, d.v.manifest)
}

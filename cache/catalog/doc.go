// Package catalog keeps the small facts about datasets: which objects a source holds ([Manifest]), in which shards
// they lie ([Layout]), which version is current, where the cached bytes lie (the record tables of package segment),
// the user's settings (quota, pin), and how recoded files are restored. It holds no sample bytes. Everything
// but quotas, pins and the last can be rebuilt: by listing the source, and by scanning the segments.
//
//	CACHE-DIR/
//	  FORMAT                         "shoal cache 4"; 5 if it is encrypted
//	  ENCRYPTION                     the key of an encrypted one (package crypt)
//	  lock                           held by the process that owns the folder
//	  manifests/VERSION              written once, named by the dataset version; where there are empty
//	                                 folders, by a hash of both
//	  layouts/VERSION                written once, named by the layout version
//	  tables/DATASET/NNNNNNNN.table  a record table, replaced as a whole
//	  facts, facts.copy              sources and facts of datasets, replaced as a whole; the entry
//	                                 of a source names its manifest and its layout
//	  codings/DATASET[.copy]         what recoded files need to be restored, replaced as a whole
//
// # What a crash leaves
//
// Files are written under a temporary name, fsynced and renamed; then their folder is fsynced. A manifest and its
// layout are durable before the facts that name both, so a source has the old version or the new one. The same holds
// for a record table. A crash can leave temporary files and versions that nothing names; the next [Catalog.GC],
// [Lock], or load of the tables removes them. TestKill kills a process at every one of these steps.
//
// # Keys that a file system cannot show
//
// Nothing of a listing is lost silently: each key becomes a file, is counted in [Skipped], or is one of two equal
// entries. The rules apply to the key below the prefix; TestHostileKeys tests each:
//
//	key                              rule                             counted as
//	a//b, /b, a//                    left out                         hostile
//	a/ with content                  left out                         hostile
//	a/ without content               the folder a: tools write such   marker
//	                                 keys for folders
//	a/ or a/b/ beside the file a     the file is shown, no folder     marker
//	a//, ../ or the like, .shoal/,   no folder                        marker
//	without content
//	a beside a/b                     the folder is shown, a is not    shadowed
//	., .., as any component          left out                         hostile
//	a name over 255 bytes            left out                         hostile
//	a path over 4,095 bytes          left out                         hostile
//	NUL                              left out                         hostile
//	invalid UTF-8, surrogates        left out                         hostile
//	.shoal at the top                left out: it is the control      hostile
//	                                 folder's name; below it is shown
//	listed twice, same version       one file                         -
//	listed twice, two versions       the listing fails: list again    -
//
// All other keys are shown unchanged: control characters, backslashes, trailing spaces and dots, names that differ in
// case or normal form only. The first 16 keys left out are kept as examples, with the reason.
//
// # Sample order
//
// The files of a manifest are sorted by (class folder, directory path, file name), each compared by code point, which
// for UTF-8 is byte order. The class folder is the first component of the path; files at the root have none and come
// first. This is the order of torchvision's ImageFolder, and it is not key order: a/z.jpg comes before a/b/x.jpg, and
// c/s-x/1 before c/s/y/1, because directories are compared as whole path strings.
//
// # Dataset version
//
// The version of a dataset is the SHA-256 of, for each file in sample order:
//
//	u32 LE  length of the path     the path without the source's prefix, "/" between folders
//	...     path
//	u64 LE  size of the object
//	u32 LE  length of the ETag
//	...     ETag                   without quotes
//
// The prefix, modification times, empty folders and skipped keys are not part of it, so a copy of a dataset elsewhere
// that keeps the ETags has the same version. The version determines the numbers of the samples, and their labels with
// one exception: an empty folder at the top is a class, as in torchvision.
//
// # Manifest file
//
// CACHE-DIR/manifests/VERSION (see [Manifest.FileName]), written once, read as a whole. All integers are little
// endian. Later versions of the format keep magic, version, and the place of the header's checksum.
//
//	offset
//	     0  +--------------------------------+
//	        | magic "SHOALMAN"               |  8 bytes
//	     8  | format version (2)             |  u32
//	    12  | header length (128)            |  u32
//	    16  | dataset version                |  32 bytes, SHA-256
//	    48  | F: number of files             |  u64
//	    56  | D: number of directories       |  u64
//	    64  | sum of the sizes               |  u64
//	    72  | length of this file            |  u64
//	    80  | length of: directory names,    |  5 x u64
//	        |   file names, ETags, prefix,   |
//	        |   skipped                      |
//	   120  | CRC32C of all after the header |  u32
//	   124  | CRC32C of bytes 0..123         |  u32
//	   128  +--------------------------------+
//	        | D x directory                  |  40 bytes each:
//	        |                                |    u64 offset of the name, u32 length of the name,
//	        |                                |    u32 parent, u32 first file, u32 end file,
//	        |                                |    u32 first subdirectory, u32 end subdirectory,
//	        |                                |    u32 depth, u32 zero
//	        | (F+1) x offset of the name     |  u64, into the file names
//	        | (F+1) x offset of the ETag     |  u64, into the ETags
//	        | F x size                       |  u64
//	        | F x modification time          |  i64, ns since 1970; the lowest value means unknown
//	        | F x ID of the version          |  12 bytes, segment.IDOf path hash, size, ETag
//	        | F x directory                  |  u32
//	        | directory names, file names,   |
//	        | ETags, prefix, skipped (JSON)  |
//	        +--------------------------------+
//
// Directory 0 is the root. Directories are numbered breadth-first, so the subdirectories of one directory are
// contiguous and sorted by name; so are its files, in sample order. Hence a lookup is two binary searches and needs
// no table in memory.
//
// # Traps
//
// A loaded manifest reads from memory outside Go's heap: no method may run during or after [Manifest.Close]. Strings
// that the methods return are copies and stay valid. The same holds for a layout.
//
// Two sources can have the same version under different prefixes. The file then has the prefix of the source that was
// saved last; the catalog's entry for each source has its own.
//
// # What it costs
//
// Measured on 2 cores of an EPYC, a listing of ImageNet's shape with ETags of 32 bytes (BenchmarkScale,
// BenchmarkLayoutMillion, BenchmarkBigDirectory), for 1,000,000 and 10,000,000 files:
//
//	Build                     0.8 s, 11 s; heap at its peak 196, 221 bytes a file
//	manifest file, in memory  103 bytes a file
//	heap beside it            below 1 byte a file
//	Load, with all checks     17 ms, 200 ms: nothing is left unchecked but the SHA-256 (Verify)
//	Samples("images")         70 ms, 850 ms
//	DirTime, first call       2 ms, 12 ms
//	BuildLayout               1.4 s a million; heap 80 bytes a file at its peak
//	layout file, in memory    16 bytes a file
//	loadLayout                70 ms a million
//	Find among 100,000 names  0.7 µs; a missing name 0.3 µs
package catalog

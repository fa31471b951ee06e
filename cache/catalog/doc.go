// Package catalog keeps the small facts about datasets: which objects a source holds ([Manifest]),
// which version of it is current, and where the cached bytes lie (the record tables of package
// segment). It holds no sample bytes, and all of it can be rebuilt: from one listing of the source,
// and from a scan of the segments.
//
// # Sample order
//
// The files of a manifest are sorted by (class folder, directory path, file name), each compared by
// code point, which for UTF-8 is byte order. The class folder is the first component of the path;
// files at the root have none and come first. This is the order of torchvision's ImageFolder, and it
// is not key order: a/z.jpg comes before a/b/x.jpg, and c/s-x/1 before c/s/y/1, because directories
// are compared as whole path strings.
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
// The prefix, modification times and what was skipped are not part of it, so a copy of a dataset
// elsewhere that keeps the ETags has the same version.
//
// # Manifest file
//
// CACHE-DIR/manifests/VERSION, written once, mapped read-only. All integers are little endian. Later
// versions of the format keep magic, version, and the place of the header's checksum.
//
//	offset
//	     0  +--------------------------------+
//	        | magic "SHOALMAN"               |  8 bytes
//	     8  | format version (1)             |  u32
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
//	        | F x directory                  |  u32
//	        | directory names, file names,   |
//	        | ETags, prefix, skipped (JSON)  |
//	        +--------------------------------+
//
// Directory 0 is the root. Directories are numbered breadth-first, so that the subdirectories of one
// directory are contiguous and sorted by name; the files of one directory are contiguous by the
// sample order. Hence a lookup is two binary searches and needs no table in memory.
//
// # Traps
//
// A loaded manifest reads from a mapping: no method may run during or after [Manifest.Close], and
// the file must be replaced by rename, never written in place (a truncated mapping is a SIGBUS).
// Strings that the methods return are copies and stay valid.
//
// Two sources can hold one version under different prefixes. The file then carries the prefix of the
// one that was saved last, and the catalog's own entry for a source carries its prefix.
package catalog

// Package shard packs the files of a dataset into tar shards, and reads as datasets what lies in larger objects: its
// own shards and any WebDataset tars ([Set]), rows of tables, documents of Megatron's .bin and .idx, and columns of MDS
// ([Rows]). Both are an [Index]: they say of each sample in which object it lies, where, and how long it is. They read
// no more of the samples than it takes to find them.
//
// # Shard set
//
//	PREFIX/shard-000000.tar        plain POSIX tar, about 64 MiB
//	PREFIX/shard-000000.tar.sidx   its index
//	...
//	PREFIX/shoal-manifest.json     the set: dataset version, seed, shards (see [Summary])
//	PREFIX/shoal-pack.json         only while the set is being packed: what is packed
//
// A shard is written before its index and the manifest last, so all shards in the manifest are complete. An index is
// written after its shard was read back and compared, so a shard with an index is verified.
//
// # Tar
//
// Each member has one ustar header. If the name is not ASCII or does not fit, or the size is 8 GiB or more, a PAX
// header precedes it. Mode 0644, owner 0, the modification time of the object in seconds (0 if unknown or before
// 1970). Two zero blocks end the file. The bytes of a shard depend only on the manifest, the seed and the shard size.
//
// # Names
//
// Files of one folder whose base names agree up to the first dot (leading dots do not count) are one sample, as in
// WebDataset, and adjacent in one shard. Names that WebDataset would drop, or merge wrongly, are changed in the tar;
// the index keeps the path. The folder is never changed. In a changed base name "%2E" stands for ".", and "%25" for
// "%":
//
//   - a leading dot: .a.jpg becomes %2Ea.jpg;
//   - no extension, or an empty one: LICENSE becomes LICENSE.noext (x.noext becomes x%2Enoext.noext);
//   - two files of one stem with the same last extension: all but the last dot of every file of this
//     stem: img.0001.jpg becomes img%2E0001.jpg;
//   - more than 256 files of one stem (frame.0000001, frame.0000002): all dots, and .noext;
//   - %2E, %2e and %25 in a name: the "%" is escaped;
//   - over 255 bytes after all this: the stem becomes "%2e" and 32 hexadecimal digits of its SHA-256.
//
// So no two files get the same name, and no two samples of a folder the same stem.
//
// # Index (.sidx)
//
// All integers are little endian. Later versions keep magic, version, and the place of the header's checksum.
//
//	offset
//	     0  +--------------------------------+
//	        | magic "SHOALIDX"               |  8 bytes
//	     8  | format version (1 to 4)        |  u32
//	    12  | header length (128)            |  u32
//	    16  | dataset version                |  32 bytes, SHA-256
//	    48  | plan                           |  16 bytes: which file lies in which shard
//	    64  | number of the shard            |  u32
//	    68  | N: number of members           |  u32
//	    72  | size of the tar                |  u64
//	    80  | sum of the members' sizes      |  u64
//	    88  | length of the strings          |  u64
//	    96  | length of the tar's ETag       |  u32
//	   100  | zero                           |  12 bytes
//	   112  | length of this file            |  u64
//	   120  | CRC32C of all after the header |  u32
//	   124  | CRC32C of bytes 0..123         |  u32
//	   128  +--------------------------------+
//	        | the tar's ETag                 |
//	        | N x member, by offset          |  36 bytes each, in versions 2 and 4 40:
//	        |                                |    u64 offset of its bytes in the tar, u64 size,
//	        |                                |    i64 modification time (ns since 1970; the lowest
//	        |                                |    value means unknown), u32 CRC32C of its bytes,
//	        |                                |    u16 length of: path, name in the tar (0: it is the
//	        |                                |    path), ETag; u16 zero; versions 2 and 4: u32, see
//	        |                                |    below
//	        | strings                        |  for each member: path, name in the tar, ETag; in
//	        |                                |    versions 3 and 4, of one over 4 MiB, u32 CRC32C of
//	        |                                |    each 4 MiB of it
//	        +--------------------------------+
//
// Members over 4 MiB are fetched in pieces of 4 MiB, each of which is compared with its own checksum. An index without
// such members has version 1 or 2, which earlier builds read; so have those that earlier builds wrote, whose larger
// members are compared as a whole, by unpack only.
//
// # Recoded members
//
// A pack may store JPEGs in the shorter form of gpuingest/jpeg, where that is shorter. Then the manifest has version 2,
// and says by which coding and tables the members are restored; the index has version 2 or 4, and each member's row 4
// bytes more: the length of what is stored, or 0 if the file is stored as it is. Sizes, checksums and ETags stay those
// of the files, so that the dataset version does; the tar's headers and the member's offset are of what is stored.
// Files over 4 MiB are never recoded: they are read in parts. Earlier versions refuse such a set; sets without recoded
// members stay at version 1.
//
// # Foreign tars
//
// A source is read as a set of WebDataset shards if all its objects are .tar, .idx, .index, .sidx and .json, or if it
// is a brace list of .tar. Members are found by a valid .sidx beside the shard, else by a wds2idx index if it agrees
// with the tar (see [Set.Members]), else by the headers. GNU long names and PAX are supported. Compressed tars and
// sparse members are bad shards (see [OpenOptions]). The rules for names:
//
//   - leading "./" is cut off; otherwise a name is the path as it stands, and what no file system can
//     show ("..", absolute, empty components, over 255 bytes) is left out and counted by
//     [catalog.Build];
//   - directories, links, devices, FIFOs and names over 4,095 bytes are not members; all but
//     directories are counted;
//   - of two members of one tar with one path the last is shown, as "tar x" leaves it, and the other
//     is counted;
//   - a path that an earlier shard has already becomes DIR/SHARD~BASE, where SHARD is the base name
//     of the shard without .tar: the class folder and the extension stay. If that is taken too, it is
//     DIR/SHARD~2~BASE, and so on.
//
// A foreign member's ETag is the ETag of its shard, "+", and its offset; so is that of what [Rows] finds. What an index
// says of samples, where they lie, and in which type, is thereby in the dataset's version, and the index's own ETag is
// not: to add a shard to an MDS makes no other sample new.
//
// # Traps
//
// archive/tar reads its source in exact steps, so the position of the reader after Next is the offset
// of the member's bytes. That holds only for an unbuffered reader.
//
// wds2idx computes offsets from GNU tar's block numbers. With PAX headers they are wrong, and dotfiles, directories
// and links are missing. So an index is trusted only if it accounts for every block of its tar.
package shard

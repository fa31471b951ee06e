// Package segment keeps cached bytes on the local disk: append-only files of self-describing,
// checksummed records. A record holds one extent (at most 4 MiB) of one version of one object.
//
// # Segment file
//
// CACHE-DIR/segments/00000001.seg and so on. All integers are little endian; records begin at
// multiples of 64 bytes.
//
//	offset
//	     0  +-----------------------------+
//	        | magic "SHOALSEG"            |  8 bytes
//	     8  | format version (1)          |  u32, of the segment and of its records
//	    12  | segment number              |  u32
//	    16  | salt                        |  u64, random
//	    24  | zero                        |  36 bytes
//	    60  | CRC32C of bytes 0..59       |  u32
//	    64  +-----------------------------+  (up to here as it is in all versions)
//	        | record                      |  padded to a multiple of 64 bytes
//	        | record ...                  |
//	        +-----------------------------+
//
// # Record
//
//	offset
//	     0  +-----------------------------+
//	        | magic "SHRC"                |  4 bytes
//	     4  | format version (1)          |  u16
//	     6  | flags (0)                   |  u16; bit 0 is reserved for encrypted payloads
//	     8  | H: length of the header     |  u32
//	    12  | CRC32C of the header        |  u32, over bytes 0..H-1 with this field as zero
//	    16  | salt of the segment         |  u64
//	    24  | offset of this record       |  u64, in the segment
//	    32  | dataset id                  |  16 bytes
//	    48  | key hash                    |  16 bytes
//	    64  | size of the object          |  u64
//	    72  | offset in the object        |  u64
//	    80  | L: length of the payload    |  u32, 1 to 4 MiB
//	    84  | P: offset of the payload    |  u32, from the record's start, a multiple of 64
//	    88  | E: length of the ETag       |  u32, at most 1024
//	    92  | zero                        |  u32
//	    96  | ETag, padded to 4 bytes     |  E bytes
//	        | CRC32C of each 128-KiB      |  u32 x ceil(L / 128 KiB)
//	        |   block of the payload      |
//	     H  +-----------------------------+
//	        | padding                     |
//	     P  +-----------------------------+
//	        | payload                     |  L bytes
//	        +-----------------------------+
//
// Readers find the payload by P alone, so another alignment of payloads is no other format.
//
// # Writing and recovery
//
// Appends reserve their space under a lock and write outside it, payload first, header last: a header
// on the disk says that the payload was handed to the kernel before it. A segment that is full is
// fsynced by a background goroutine, and then its table of records is committed to the [Index]
// as sealed. [Store.Sync] does the same for the finished part of the segment in use.
//
// [Open] believes a committed table (what it covers was fsynced before) and scans only what lies
// behind it, from header to header. Where no valid header is (an append that did not finish before
// the crash while later ones did, or damage), the scan looks for the next one at every multiple of 64
// bytes. The salt and the offset in each header keep it from taking a cached file that
// itself looks like a segment for records. What follows the last valid record is cut off.
//
// The payload is not read then. After power loss it may be missing under a valid header; after bit rot it
// may differ. Its checksums are checked at the first read of each block after each Open, before a
// byte of it is returned, and later reads are plain preads.
//
// # Traps
//
// That a record is dead ([Store.Free]) is not written down: after a restart it is visited again, and
// the owner, who knows the current versions, frees it again. Records of one extent are visited in the
// order in which they were appended, so the last one visited is the newest.
//
// A [Loc] is valid until its segment is dropped; segment numbers are not used twice while a
// store is open, so a stale one gives [ErrGone], never other bytes. Locs are not durable.
package segment

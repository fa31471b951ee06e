// Package segment keeps cached bytes on the local disk: append-only files of self-describing,
// checksummed records. A record holds one extent (at most 4 MiB) of one version of one object, or the whole object in a
// shorter form that its owner knows: then its offset is 0 and its length less than the object's size.
//
// # Segment file
//
// CACHE-DIR/segments/DATASET/00000001.seg and so on, a folder for each dataset, named by the 32 hex digits
// of its id. All integers are little endian; records begin at multiples of 64 bytes.
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
//	     6  | flags                       |  u16; bit 0: the record is encrypted
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
// Readers find the payload by P alone, so payloads can be aligned differently without a new format.
//
// # Encryption
//
// With [Options.Key], dataset id, key hash, ETag and payload are encrypted in place, by AES-256-GCM with a key derived
// from the cache's key and the segment's salt. The checksums of the payload are zero, and the seal follows the header:
//
//	H  +-----------------------------+
//	   | seed                        |  8 bytes, random
//	   | tag of the identity         |  16 bytes: of dataset id, key hash and ETag, with
//	   |                             |    the rest of the header, but its checksum, bound to it
//	   | tag of each 128-KiB block   |  16 bytes x ceil(L / 128 KiB)
//	   |   of the payload            |
//	   +-----------------------------+
//	   | padding                     |
//	P  +-----------------------------+
//
// The nonce of a block is the record's place in the segment (26 bits), the block's number (5 bits) and the seed; that
// of the identity has the 32nd bit set. While a segment grows no two records share a place. A place is written again
// only if a crash or a failed write voided the record there; then the seeds differ, except with a probability of
// 2^-64 each time. TestNoncesDiffer checks all nonces of a store that fails and crashes repeatedly.
//
// Every read checks the tags of all blocks that it touches. The record tables in the [Index] are encrypted as a whole:
// 2 as version byte, 12 bytes of random nonce, the table, tag; with a key of the segment's own and bound to its number.
//
// A store with a key reads no unencrypted record, since anybody who can write to the disk could have put it there. A
// store without a key reads no encrypted record. Both keep such records: they are not visited, count as used and not
// as garbage, and a segment with one is scanned at each Open.
//
// # Void
//
// "SHVD" instead of the magic marks a void record: an append that failed, damage that [Check] repaired, or one that its
// owner has given up ([Store.Void]).
//
// # Writing and recovery
//
// One append at a time writes, without a lock, payload first, header last: a header on disk means that its payload was
// handed to the kernel before. The next has a place when it has ended. A full segment is fsynced by a background
// goroutine; then its table of records is committed to the [Index] as sealed. [Store.Sync] does the same for the
// segment in use.
//
// [Open] trusts a committed table (its records were fsynced before) and scans only the records behind it, from header
// to header. If there is no valid header (damage, or an append that did not reach the disk although later ones did),
// the scan looks for the next one at every multiple of 64 bytes. The salt and the offset in each header prevent it from
// reading records out of a cached file that itself looks like a segment. Everything after the last valid record is cut
// off. A damaged segment header is rewritten: the salt is that of the first record, or of one that the table names.
//
// The scan does not read payloads. After power loss a payload may be missing under a valid header; after bit rot it
// may differ. Each block is checked when it is first read after each Open, before any of its bytes are returned, and
// later by reads of half of the blocks that they touch, or more. Reads of less are plain preads then: a check would
// have the disk read 128 KiB for them. [Store.Scrub] checks all in the background, and [Check] while no store is open.
//
// # Moments of a crash
//
// The points of internal/killpoint, each named after the step just done:
//
//	segment.create.file       a new segment's file was made; it is empty
//	segment.create.header     its header was written
//	segment.append.payload    a payload was written, its header was not
//	segment.append.header     the header was, too; Append has not returned
//	segment.undo.void         the header of a failed append was voided
//	segment.undo.cut          a failed append was cut off
//	segment.commit.file       a segment was fsynced
//	segment.commit.dir        its folder was
//	segment.commit.index      its table was committed to the index
//	segment.condense.copied   the records to keep of a segment to drop were appended again
//	segment.drop.file         its file was removed
//	segment.drop.index        its table was
//	segment.open.cut          a torn tail was cut off by Open
//	segment.mend.header       a damaged segment header was rewritten
//	segment.repair.void       Check voided a damaged record
//	segment.repair.cut        Check cut off a torn tail
//	segment.repair.file       Check fsynced its writes
//	segment.repair.removed    Check removed a segment without a header
//	segment.repair.index      Check dropped a table
//
// # Traps
//
// A dead record ([Store.Free]) is not marked on disk: after a restart it is visited again, and the owner, who knows
// the current versions, frees it again. [Store.Void] marks one, whose bytes are wrong although they are as they were
// written. Records of one extent are visited in the order of their appends, so the last one visited is the newest.
//
// A [Loc] is valid until its segment is dropped. Segment numbers are not reused while a store is open, so a stale one
// gives [ErrGone], never other bytes. Locs are not durable.
package segment

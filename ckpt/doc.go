// Package ckpt carries what a trainer saves into an ordinary folder to a bucket: whole files, in order, resumable.
// Nothing lies between the trainer and its disk. Package folder tells which files are whole; [Queue] decides what may
// be done next, without clock or I/O; [Carrier] does it.
//
// # Rules
//
//  1. A file is published when it is whole, under the name that it has then. If a writer comes back before that, the
//     file is withdrawn, and takes its turn again when it is whole again. A later write is another generation, which
//     replaces the object.
//  2. Turns are given in the order in which files were closed. Parts of several files are sent at once; objects become
//     visible one by one, in turn.
//  3. Last names (such as .metadata or latest) wait for everything that had been closed before and is not in the bucket
//     yet, also for what a writer has taken back since, and in their own folder for torn files, and those that the
//     bucket never had. A last name that is written again goes to the end, and those above its folder that waited for
//     it follow it. Other files pass last names that wait, or have failed, so nothing waits in a circle.
//  4. What is removed here stays in the bucket, unless Delete was asked for. Then the removal takes a turn: it waits
//     for everything before it, and lets all files pass, but such above or below it as the store has refused.
//  5. A folder that is removed before its last name was visible is withdrawn: what the bucket has of it is removed,
//     last names first. A folder in it stays if its own last name is visible, or if all in it is older than an
//     earlier generation of the last name above it that is (DeepSpeed's latest).
//  6. Another name of a file that the bucket has (a rename, a hard link) is a copy in the bucket.
//  7. One daemon carries a folder (a lock on the folder), and one host a prefix (a lock object), or several that say
//     the same: their cluster, or that they have no order.
//
// # Hosts of a cluster
//
// They talk through etcd alone, below /shoal/v1/NAME/ckpt/HASH/, where HASH is of the destination. No clock is
// compared, and but for copies there is no lease. An ID is a journal's.
//
//	hosts/ID                         a host, JSON, as its present process wrote it
//	asks/ID/HASH                     a last name's path: its host asks all others; HASH is of that and of the Print
//	answers/ID/HASH/OTHER            OTHER's answer to that: empty, or the name of copies (rule 16)
//	alive/ID                         HOST:PORT for copies, under the host's lease
//	adopted/ID                       who publishes its copies, under that one's lease
//
// Its rules go on:
//
//  8. A host is registered until it ends with nothing owed, each ask answered that it has seen, and none made since: a
//     transaction says so. A killed host keeps its registration, and comes back as the same. A new process writes it
//     anew, so that a late farewell of the last one has no effect.
//  9. A last name that was closed is an ask, at once, and the same one after a restart; one that was written again is
//     another ask. It is published when all hosts have answered that are registered then. So nobody waits any more for
//     one whose registration somebody has deleted.
//  10. Whoever finds an ask looks through its folder, because news of what was closed before may be under way. Then the
//     ask takes a turn. It is answered when no file is owed that was closed before, and none is torn in the last name's
//     folder, last names aside. So asks wait only for what waits for nothing, and nothing waits in a circle.
//  11. An answer is written only while the ask is there that it answers. The asker deletes its asks, with their
//     answers, when they have served, and those of a process before that it does not make.
//  12. Everything is decided by what etcd has at one revision, all of it at once. A watch only says that it is worth
//     another look, and one looks every few seconds in any case. So a write may be late, lost or made twice.
//  13. Last names of different hosts have no order among them. Removals, and rule 5, are each host's own.
//
// # Copies
//
// With Copies a host has a neighbour, the next one that lives. It is named in the registration, with a random name of
// the copies.
//
//  14. What is closed is copied there in the order of turns, and is dropped there when the bucket has it, or it has
//     gone here. What the neighbour was asked for, without an answer, has no effect once it is asked for something
//     else. A last name is copied when all that it waits for here is there, or in the bucket. So the copies are a
//     folder in which the rules above hold.
//  15. A host makes no change of a path while its neighbour has, or may have, another generation of it: it replaces or
//     drops that first. So the two may publish at the same time, and never different generations. Copies of another
//     name count for nothing once etcd has the registration with the new name, which it takes only while nobody stands
//     in.
//  16. An ask is answered by the copies' name when all that was closed before is published or copied.
//  17. When a host's lease has ended, and its registration names the copies, the neighbour stands in: it carries their
//     folder as that host, under its ID. Of asks it hears those that were answered by the copies' name; of others
//     nobody knows what is lost. It ends, after what is under way, when the host's lease is back, or the host asks it
//     for something.
//
// # Links
//
//  18. With Link, a complete folder that only the bucket has is a symbolic link into a mount of the bucket. A link is
//     made over nothing, nor where files were published from, unless KeepLocal has removed them; it goes when its
//     folder is not complete any more. The mount is not looked into: one that hangs hangs nothing here.
//
// # Crashes
//
// The journal says what the bucket has and which uploads are under way; before a publication it says that perhaps the
// bucket has it. What perhaps is there is published again, or removed if it says that this journal made it. The journal
// need not say what was closed: after a crash the folder is looked through, in the order of the files' times of change
// (ctime). An upload goes on by its id if the file has not changed; its key is written down before it begins, so that
// one without an id is found and aborted. Uploads of others are left alone. Power may go as well: so a file is durable
// under its name before it is published, and so is the journal before a last name is.
package ckpt

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
//     yet, also for what a writer has taken back since, and for torn files in their own folder. A last name that is
//     written again goes to the end, and those above its folder that waited for it follow it. Other files never wait
//     for last names, so nothing waits in a circle.
//  4. What is removed here stays in the bucket, unless Delete was asked for. Then the removal takes a turn among the
//     last names: it waits for everything before it.
//  5. A folder that is removed before its last name was visible is withdrawn: what the bucket has of it is removed.
//  6. Another name of a file that the bucket has (a rename, a hard link) is a copy in the bucket.
//  7. One daemon carries a folder (a lock on the folder), and one host a prefix (a lock object).
//
// # Crashes
//
// The journal says what the bucket has and which uploads are under way; before a publication it says that perhaps the bucket has it.
// What perhaps is there is published again, or removed, as if it were. The journal need not say what was closed: after a crash
// the folder is looked through, in the order of the files' times of change (ctime). An upload goes on by its id if the
// file has not changed. An id is written down before the first part is sent, and the key before the id exists, so that
// the upload of a crash in between is found and aborted. Uploads of others are left alone.
package ckpt

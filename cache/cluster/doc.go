// Package cluster knows which daemons share a cache. It keeps in etcd who takes part, locks, and the dataset
// versions that all follow.
//
// A cluster has a name; a node is one daemon in it, with an ID that survives its restarts. Nothing here is on a
// read's path: readers use the last [View], which is a value in memory.
//
// # Keys
//
//	/shoal/v1/NAME/nodes/ID        a node, JSON, under its lease
//	/shoal/v1/NAME/written/lead    the lease of the node that makes batches, under that lease
//	/shoal/v1/NAME/written/nodes   the last batch
//	/shoal/v1/NAME/last            names it: up to which revision it tells what was written, and a token
//	/shoal/v1/NAME/written         the same, for nodes of releases before
//	/shoal/v1/NAME/locks/LOCK      who holds it, under the holder's lease
//	/shoal/v1/NAME/versions/KEY    what [Cluster.Publish] wrote
//
// # Rules
//
//  1. A node registers under a lease of 10 s and renews it every 5 s. When the lease ends, etcd removes the node and
//     its locks.
//  2. Only one node, the lead, watches nodes/. It makes batches of what is written there, at most four a second, and
//     all watch those: so a change of N nodes at once reaches each of N as one event, and not as N. A batch follows on
//     the last one, and is written if that is still the last and its maker still the lead. A process reads the list of
//     nodes once, as of the revision that the last batch tells of, so that all have the same list after the same batch.
//     If etcd has compacted that revision, it reads the present list, and once more after the next batch.
//  3. The lead is named under its lease. If there is none, the nodes try to become it one after another, by ID, 50 ms
//     apart. A new lead reads nodes/, and what differs from the last batch's list goes into its first batch. If none is
//     left that has that list, the batch follows on none, and all read anew. Two who believe to be the lead do no harm.
//  4. versions/ is watched, too. Who follows a key reads it after each event.
//  5. A watch falls silent when its server hangs, and for long when etcd was restored and counts from less. So nothing
//     rests on it alone. After each renewal etcd is asked which batch was the last, who is the lead, what was last
//     published and what it has of this node, unless the renewal's answer shows the revision of the answer before.
//     After two answers in a row with another batch or lead, and no batch in between, the list is read anew; at once if
//     etcd's revision is lower than one seen, and after 1 s if a batch is missing or a watch has ended (its revision
//     was compacted). The lead reads nodes/ after each question, as at its start. If two exchanges in a row get no
//     answer, etcd is away. One waits for 1 s, or four times the slowest of late if that is more; at most 4 s, as the
//     first does, which has to connect: so an etcd may be a second away.
//  6. A list becomes the view when its members (ID, weight, zone, datasets, draining) have been the same for 1.5 s.
//     Many joins therefore move ownership once, unless more than that lies between them, and one join is in all views
//     within 2 s. Other details of a node (its address, its version) are taken at once.
//  7. While etcd is away, or lists no node of this process, the last view stays. After that nodes return one by one, so
//     a list that lacks some of the view's is not taken before 6 s have passed.
//  8. A node treats its lease as lost 8 s after the last renewal that it began, before etcd does, and then registers
//     again under a new one. So does a node that was frozen, or one whose etcd has lost its data, or was restored from
//     a copy: a lock that is held in the copy, and was let go of since, ends with the old lease.
//  9. A lock ends with the lease. What is published under a lock is written in a transaction that checks the lock.
//  10. An ID belongs to one process. A restarted node takes over from the process before it if it has the same
//     address; otherwise it waits for the old lease to end. If the other keeps its lease, the newcomer
//     is refused: its cache directory is a copy.
//  11. A drained node stays in the view, marked, until it leaves. It marks itself again when it has to register again.
//
// # Clocks
//
// No clock is compared with another machine's. etcd counts the leases. A node measures spans by its own monotonic
// clock, and they only have to be right within a quarter.
//
// # etcd
//
// Transactions, ranges, watches and leases are all that is used: etcd 3.4 or newer will do.
package cluster

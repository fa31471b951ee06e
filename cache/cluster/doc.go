// Package cluster knows which daemons share a cache. It keeps in etcd who takes part, locks, and the dataset
// versions that all follow.
//
// A cluster has a name; a node is one daemon in it, with an ID that survives its restarts. Nothing here is on a
// read's path: readers use the last [View], which is a value in memory.
//
// # Keys
//
//	/shoal/v1/NAME/nodes/ID        a node, JSON, under its lease
//	/shoal/v1/NAME/written         another value with each write to nodes/
//	/shoal/v1/NAME/locks/LOCK      who holds it, under the holder's lease
//	/shoal/v1/NAME/versions/KEY    what [Cluster.Publish] wrote
//
// # Rules
//
//  1. A node registers under a lease of 10 s and renews it every 2.5 s. When the lease ends, etcd removes the node and
//     its locks.
//  2. Each second a node asks etcd how many nodes there are and which write was the last, and reads the list if
//     either differs. There is no watch: a watch stays silent when its server hangs, and for ever when etcd
//     was restarted empty and counts from one again. If two questions in a row get no answer, etcd is
//     away. An exchange waits for 1 s, or four times the slowest of late if that is more; at most 4 s, as the first does, which has
//     to connect: so an etcd may be a second away. A question costs etcd one read, and no write.
//  3. A list becomes the view when its members (ID, weight, zone, datasets, draining) have been the same for 2 s. Many joins
//     therefore move ownership once. Other details of a node (its address, its version) are taken at once.
//  4. While etcd is away, or lists no node of this process, the last view stays. After that nodes return one by one, so
//     a list that lacks some of the view's is not taken before 6 s have passed.
//  5. A node treats its lease as lost 8 s after the last renewal that it began, before etcd does, and then registers
//     again under a new one. So does a node that was frozen, or one whose etcd has lost its data.
//  6. A lock ends with the lease. What is published under a lock is written in a transaction that checks the lock.
//  7. An ID belongs to one process. A restarted node takes over from the process before it if it has the same
//     address; otherwise it waits for the old lease to end. If the other keeps its lease, the newcomer
//     is refused: its cache directory is a copy.
//  8. A drained node stays in the view, marked, until it leaves. It marks itself again when it has to register again.
//
// # Clocks
//
// No clock is compared with another machine's. etcd counts the leases. A node measures spans by its own monotonic
// clock, and they only have to be right within a quarter.
//
// # etcd
//
// Transactions, ranges and leases are all that is used: etcd 3.4 or newer will do.
package cluster

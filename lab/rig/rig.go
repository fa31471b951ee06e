// Package rig is the test rig: what stands in for the world outside Shoal when it is tested,
// measured and shown. It is real where that matters and scripted where it must be.
//
//   - [github.com/shoalfs/shoal/lab/rig/photos] makes a training set of real photographs.
//   - [github.com/shoalfs/shoal/lab/rig/s3server] runs a real S3 server (versitygw) on loopback.
//   - [github.com/shoalfs/shoal/lab/rig/proxy] puts distance and faults in front of it.
//   - [github.com/shoalfs/shoal/lab/rig/netns] is a network of machines on one, with links that can be cut.
//   - [github.com/shoalfs/shoal/lab/rig/faultdisk] is a disk that fails, fills up and hangs when told to.
//   - [github.com/shoalfs/shoal/lab/rig/subproc] runs all of these so that none outlives its parent.
//   - [github.com/shoalfs/shoal/lab/rig/cputime] reads what they, and the cores, have worked.
//   - [github.com/shoalfs/shoal/lab/rig/synced] keeps what they write, for those who look at it meanwhile.
//   - [github.com/shoalfs/shoal/internal/progress] draws the progress bars.
//
// Only bench, demo, shoal-lab and tests import it. The server, the proxy and the daemon under test each
// belong in a process of their own: they share the cores anyway, but a figure for "the daemon"
// must not contain the rig's allocations, threads and garbage collection.
package rig

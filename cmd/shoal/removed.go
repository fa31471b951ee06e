package main

// removedFrom are the verbs that had those of the flags which other verbs still have.
var removedFrom = map[string][]string{
	"epoch": {"mount", "serve", "s3"}, "nodes": {"mount", "serve", "s3", "warm", "pack"},
	"refresh": {"mount", "serve", "s3"},
	"weight":  {"mount", "serve", "s3"}, "publish": {"serve", "s3"}, "workers": {"serve"},
}

// removed says what holds instead of flags that are no more (ADR 66).
var removed = map[string]string{
	"allow-remote":   "use a tls:// address with --tls-client-ca or --token-file, tcp:// on loopback, or a unix socket",
	"audit-log-keep": "5 old files are kept",
	"audit-log-size": "it is rotated at 100 MiB",
	"debug-fuse":     "trace the reader (strace), or the daemon (--log-level debug)",
	"drain-timeout":  "set SHOAL_DRAIN_TIMEOUT",
	"entry-timeout":  "it is 4 h", "epoch": "write it into the order, such as --order torch:seed=7,epoch=3",
	"gets-per-hour": "give --store gets-per-hour=N",
	"gid":           "files belong to the daemon's group, and all may read them",
	"links-outside": "give --store links-outside", "log-format": "give --log-level info,json",
	"log-size": "it is rotated at 10 MiB", "mkdir": "a mount point that is not there is made",
	"nodes":           "a node begins once no more have come for 2 s",
	"policy":          "the kept set is what daemons have; docs/plan.md compares",
	"object-versions": "versions are read where the bucket has them", "pprof": "set SHOAL_PPROF=1",
	"price":      "give --store get=0.0004/1000,currency=USD",
	"publish":    "give it to shoal mount, or run shoal pack",
	"quota":      "use shoal cache quota once the dataset is in the cache",
	"read-ahead": "it follows from the size of the files", "records": "give --samples rows",
	"refresh": "mount, then shoal refresh MOUNTPOINT", "requester-pays": "give --store requester-pays",
	"s3-anonymous-write": "give --s3-anonymous=write", "s3-connections": "set SHOAL_S3_CONNECTIONS",
	"socket-mode": "it is 0660, for the owner and --socket-group", "sse-c-key-file": "set SHOAL_SSE_C_KEY",
	"supervise": "give --daemon=supervised; in the foreground the service manager restarts it",
	"uid":       "files belong to the daemon's user, and all may read them", "umask": "all may read the files",
	"weight":    "give it to the sessions of a feed",
	"weak-etag": "give --store weak-etag", "workers": "it is one for each processor; set GOMAXPROCS for another number",
}

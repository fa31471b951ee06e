package objstore

// StoreOptions are what a user may ask of a store beyond its place. All but LinksOutside are those of S3; a
// folder has no use for them. The zero value asks for nothing.
type StoreOptions struct {
	// CustomerKey is sent with every request that reads or writes an object (SSE-C).
	CustomerKey CustomerKey
	// RequesterPays accepts that the requester is charged, in buckets that want it so.
	RequesterPays bool
	// CurrentOnly fails reads of objects that were overwritten or deleted also where the bucket is versioned
	// and holds the version that was listed.
	CurrentOnly bool
	// WeakETag accepts objects that the store gives no ETag. Their size and modification time, in seconds, stand
	// for it: no condition can be sent, but an answer of another size, or of another time where it tells one,
	// is a changed object. One that is overwritten by as many bytes within a second of its time goes unnoticed.
	WeakETag bool
	// GetsPerHour is the most GETs and HEADs that an hour may have; 0: no bound. The store itself does not
	// look at it: see [Budget].
	GetsPerHour int64
	// LinksOutside follows symbolic links that lead out of a folder.
	LinksOutside bool
	// Prices are what requests are charged at, for reports.
	Prices Prices
}

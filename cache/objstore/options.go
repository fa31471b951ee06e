package objstore

// StoreOptions are what a user may ask of a store beyond its place. They are those of S3; a folder has no use for
// them. The zero value asks for nothing.
type StoreOptions struct {
	// CustomerKey is sent with every request that reads or writes an object (SSE-C).
	CustomerKey CustomerKey
	// RequesterPays accepts that the requester is charged, in buckets that want it so.
	RequesterPays bool
	// CurrentOnly fails reads of objects that were overwritten or deleted also where the bucket is versioned
	// and holds the version that was listed.
	CurrentOnly bool
	// GetsPerHour is the most GETs and HEADs that an hour may have; 0: no bound. The store itself does not
	// look at it: see [Budget].
	GetsPerHour int64
	// Prices are what requests are charged at, for reports.
	Prices Prices
}

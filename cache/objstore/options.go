package objstore

// StoreOptions are the user's options for a store. All but LinksOutside are for S3 and ignored by a folder. The zero
// value is the default.
type StoreOptions struct {
	// CustomerKey is sent with every request that reads or writes an object (SSE-C).
	CustomerKey CustomerKey
	// RequesterPays accepts charges to the requester, for buckets that require it.
	RequesterPays bool
	// CurrentOnly makes reads of overwritten or deleted objects fail even if the bucket is versioned and has the
	// listed version.
	CurrentOnly bool
	// WeakETag accepts objects without an ETag. Their size and modification time, in seconds, replace it. No condition
	// can be sent, but an answer with another size, or another time if it has one, means a changed object. An object
	// overwritten by as many bytes within the same second goes unnoticed.
	WeakETag bool
	// GetsPerHour limits the GETs and HEADs per hour; 0: no limit. The store itself does not enforce it: see [Budget].
	GetsPerHour int64
	// LinksOutside follows symbolic links that lead out of a folder.
	LinksOutside bool
	// Prices are the charges for requests, for reports.
	Prices Prices
}

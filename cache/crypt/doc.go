// Package crypt holds the keys of encrypted caches.
//
// The user's key, a [Secret], encrypts one thing: the cache directory's own key, a [Key] of 32 random bytes,
// in CACHE-DIR/ENCRYPTION. Another user's key is a matter of writing that file anew ([Key.Rewrap]). From
// the directory's key one key is derived for each purpose and, where much is written, for each file, by
// HKDF-SHA256; what they encrypt by AES-256-GCM, and how nonces are kept apart, is told where it is done:
// package segment for samples and record tables, package catalog for manifests and what it knows of datasets.
//
// docs/security.md says what that protects from, and ADR 0035 why it is as it is.
//
// # Moments of a crash
//
//	crypt.key.written   the key file was written beside its place
//	crypt.key.renamed   it took its place
//	crypt.key.durable   its folder was fsynced
package crypt

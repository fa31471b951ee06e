// Package crypt holds the keys of encrypted caches.
//
// The user's key, a [Secret], encrypts only the cache directory's own key, a [Key] of 32 random bytes, in
// CACHE-DIR/ENCRYPTION. To change the user's key, only that file is rewritten ([Key.Rewrap]). From the directory's
// key one key is derived per purpose and, for large amounts of data, per file, by HKDF-SHA256. These keys encrypt
// with AES-256-GCM. Package segment (samples, record tables) and package catalog (manifests, facts) say what they
// encrypt and how nonces are kept apart.
//
// docs/security.md says what that protects from; ADR 0035 gives the reasons.
//
// # Moments of a crash
//
//	crypt.key.created   a file beside the key's place was begun
//	crypt.key.written   the key file was written there
//	crypt.key.synced    and fsynced
//	crypt.key.renamed   it took its place
//	crypt.key.durable   its folder was fsynced
package crypt

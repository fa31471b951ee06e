"""One epoch from the feed, for soak: prints a digest of all that came, and fails unless each sample came once."""

import hashlib
import os
import sys

from shoal import Feed

address, transform, seed, samples = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
feed = Feed(address, 32, transform=transform, order="uniform", seed=seed, tail="uneven", epochs=1, as_torch=False,
            session=f"python{os.getpid()}")
digest, seen = hashlib.sha256(), set()
for batch in feed:
    digest.update(batch.data.tobytes())
    digest.update(batch.label.tobytes())
    seen.update(int(i) for i in batch.id)
feed.close()
assert seen == set(range(samples)), f"{len(seen)} samples of {samples} came"
print(digest.hexdigest())

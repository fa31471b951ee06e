#!/bin/sh
# Runs a command without the mounts of tests that run beside this one, but those below DIR ("": none stays): a copy of a
# mount keeps its daemon after umount. It must be in a new mount namespace. Where / is shared, copies go by themselves.
#
#	alone.sh DIR COMMAND [ARG...]
below=$1
shift
[ "$(findmnt -no PROPAGATION /)" = shared ] ||
	findmnt -rno TARGET -t fuse.shoal | grep -v "^${below:-//}" | xargs -r umount -cl
exec "$@"

#!/bin/sh
# Makes what people install, in dist/, of what make release has built in bin/release: archives, .deb and .rpm, wheels,
# images, bills of materials, checksums. VERSION, COMMIT and SOURCE_DATE_EPOCH come from the Makefile; the arguments are
# architectures. The same binaries give the same bytes.
set -eu
export SOURCE_DATE_EPOCH VERSION ARCH STAGE

pack() { # pack FOLDER FILE: a tar of a folder that depends on nothing but what it holds
	tar --sort=name --mode=u=rwX,go=rX --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner -C "$(dirname "$1")" -cf - "$(basename "$1")" >"$2"
}

rm -rf dist
mkdir dist
for ARCH; do
	name=shoal-$VERSION-linux-$ARCH
	STAGE=bin/release/stage/$name
	rm -rf "$STAGE"
	mkdir -p "$STAGE/licences"
	cp bin/release/image/"$ARCH"/shoal "$STAGE/shoal"
	cp -r bin/release/docs/man bin/release/docs/completions bin/release/docs/shoal.yaml deploy/systemd "$STAGE/"
	gzip -9n "$STAGE"/man/man1/*
	cp LICENSE "$STAGE/licences/shoal"
	cp /usr/share/doc/libjpeg62-turbo-dev/copyright "$STAGE/licences/libjpeg-turbo"
	cp /usr/share/doc/libc6-dev/copyright "$STAGE/licences/glibc"
	chmod -R u=rwX,go=rX "$STAGE"
	pack "$STAGE" "dist/$name.tar"
	gzip -9n "dist/$name.tar"
	for format in deb rpm; do
		bin/nfpm package -f deploy/packages/nfpm.yaml -p $format -t dist/ >/dev/null
	done
	bin/packages wheels "$VERSION" "$STAGE" dist
	cp "bin/release/shoal-image-$ARCH.cdx.json" "dist/$name.cdx.json"
done
bin/packages client "$VERSION" "$STAGE" dist
pack bin/release/shoal-image "dist/shoal-$VERSION-oci.tar"
cp bin/release/shoal-image.tar "dist/shoal-$VERSION-docker.tar"
bin/packages provenance "$VERSION" "$COMMIT" dist
(cd dist && sha256sum -- * >SHA256SUMS && ls -sh1)

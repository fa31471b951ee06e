#!/bin/sh
# Installs missing Debian packages for building, testing and the demo. With the argument "build", only those for
# building; with "conformance", those for the servers and clients of make conformance; with "kubernetes", what runs containers; with "release",
# the cross compiler of make release; with "promcheck", promtool.
set -eu

GO=${GO:-go}
command -v "$GO" >/dev/null || { echo "setup: Go is missing: install Go 1.26 or newer (https://go.dev/dl) and put it on PATH" >&2; exit 1; }

packages="gcc libc6-dev make pkg-config libjpeg62-turbo-dev"
case ${1:-} in
build) ;;
conformance) packages="python3 python3-venv maven rclone redis-server" ;;
kubernetes) packages="etcd-server containerd containernetworking-plugins python3 python3-numpy python3-grpcio iproute2" ;;
promcheck) packages="prometheus jq" ;;
release) packages="gcc-aarch64-linux-gnu libc6-dev-arm64-cross" ;;
*) packages="$packages curl fuse3 rsync flac chromium systemd etcd-server \
python3 python3-numpy python3-pil python3-grpcio python3-torch python3-torchvision \
plasma-workspace-wallpapers mate-backgrounds" ;;
esac

sudo=""
missing=""
for p in $packages; do
	dpkg-query -W -f '${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing="$missing $p"
done
# fusermount3 reads /etc/mtab, which the first boot creates. A root file system that has never booted
# (a chroot, some container images) lacks it.
if [ -n "$missing" ] || [ ! -e /etc/mtab ]; then
	if [ "$(id -u)" != 0 ]; then
		command -v sudo >/dev/null || { echo "setup: not root and no sudo; as root run ./setup.sh, for:${missing:- /etc/mtab}" >&2; exit 1; }
		sudo=sudo
	fi
	[ -e /etc/mtab ] || $sudo ln -s /proc/self/mounts /etc/mtab
fi
if [ -n "$missing" ]; then
	echo "setup: installing$missing"
	# A machine that has just started may be installing updates: wait for it.
	lock="-o DPkg::Lock::Timeout=300"
	$sudo apt-get $lock update -q
	# Without a terminal of its own dpkg draws no progress bars into logs.
	# shellcheck disable=SC2086
	$sudo env DEBIAN_FRONTEND=noninteractive apt-get $lock -o Dpkg::Use-Pty=0 install -y -q --no-install-recommends $missing
	# Debian starts these at once. The tests start their own.
	case $missing in *etcd-server*) $sudo systemctl disable --now -q etcd 2>/dev/null || true ;; esac
	case $missing in *redis-server*) $sudo systemctl disable --now -q redis-server 2>/dev/null || true ;; esac
	case $missing in *" prometheus"*) $sudo systemctl disable --now -q prometheus 2>/dev/null || true ;; esac
	case $missing in *" containerd"*) $sudo systemctl disable --now -q containerd 2>/dev/null || true ;; esac
fi

"$GO" mod download

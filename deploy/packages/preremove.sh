#!/bin/sh
# Ends the services before their program goes; not at an upgrade.
case "$1" in
remove | 0) if [ -d /run/systemd/system ]; then systemctl disable --now 'shoal-mount@*.service' 'shoal-serve@*.service' || true; fi ;;
esac

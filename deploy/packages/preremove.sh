#!/bin/sh
# Ends the services before their program goes; not at an upgrade.
case "$1" in
remove | 0)
    if [ -d /run/systemd/system ]; then
        systemctl stop 'shoal-mount@*.service' 'shoal-serve@*.service' || true
        systemctl disable shoal-mount@.service shoal-serve@.service || true
    fi
    ;;
esac

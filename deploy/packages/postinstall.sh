#!/bin/sh
# Makes the user of shoal-serve@.service; where there is no systemd, of a start script.
if command -v systemd-sysusers >/dev/null; then
    systemd-sysusers shoal.conf || true
elif command -v useradd >/dev/null; then
    id shoal >/dev/null 2>&1 || useradd --system --comment Shoal --home-dir /var/cache/shoal --shell /usr/sbin/nologin shoal || true
fi
# Units of different users have folders of their own in it.
[ ! -d /var/cache/shoal ] || chmod 755 /var/cache/shoal
if [ -d /run/systemd/system ]; then systemctl daemon-reload || true; fi

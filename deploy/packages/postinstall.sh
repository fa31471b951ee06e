#!/bin/sh
# Makes the user of shoal-serve@.service, where there is systemd.
if command -v systemd-sysusers >/dev/null; then systemd-sysusers shoal.conf || true; fi
if [ -d /run/systemd/system ]; then systemctl daemon-reload || true; fi

# ===== apply, stage serve: gpu01
# --- chrony: installed
# unless
cc_service=chrony
command -v chronyd
# do
cc_service=chrony
cc_say "chronyd is not installed: add it with services: os_packages:, or by hand"
false
# --- chrony: no other clock daemon
# unless
cc_service=chrony
for cc_u in systemd-timesyncd.service ntp.service ntpd.service ntpsec.service openntpd.service; do cc_off "$cc_u" || exit 1; done
# do
cc_service=chrony
for cc_u in systemd-timesyncd.service ntp.service ntpd.service ntpsec.service openntpd.service; do cc_off "$cc_u" || cc_stop "$cc_u"; done
# --- chrony: configuration
# unless
cc_service=chrony
# Debian and Ubuntu: /etc/chrony/chrony.conf and chrony.service; Red Hat: /etc/chrony.conf and chronyd.service.
if [ -d /etc/chrony ]; then cc_conf=/etc/chrony/chrony.conf; else cc_conf=/etc/chrony.conf; fi
if cc_has_unit chrony.service; then cc_unit=chrony.service; else cc_unit=chronyd.service; fi
cc_text='# Written by clusterctl; `clusterctl services undo chrony` restores the previous file.
local stratum 10
driftfile /var/lib/chrony/drift
makestep 1.0 3
rtcsync
'
cc_is "$cc_conf" 644 "$cc_text"
# do
cc_service=chrony
# Debian and Ubuntu: /etc/chrony/chrony.conf and chrony.service; Red Hat: /etc/chrony.conf and chronyd.service.
if [ -d /etc/chrony ]; then cc_conf=/etc/chrony/chrony.conf; else cc_conf=/etc/chrony.conf; fi
if cc_has_unit chrony.service; then cc_unit=chrony.service; else cc_unit=chronyd.service; fi
cc_text='# Written by clusterctl; `clusterctl services undo chrony` restores the previous file.
local stratum 10
driftfile /var/lib/chrony/drift
makestep 1.0 3
rtcsync
'
cc_remember "$cc_unit"
cc_stage "$cc_conf" 644 "$cc_text"
chronyd -p -f "$cc_new" >/dev/null
cc_commit "$cc_conf"
cc_restart "$cc_unit"
cc_done "$cc_conf"
# --- chrony: running
# unless
cc_service=chrony
# Debian and Ubuntu: /etc/chrony/chrony.conf and chrony.service; Red Hat: /etc/chrony.conf and chronyd.service.
if [ -d /etc/chrony ]; then cc_conf=/etc/chrony/chrony.conf; else cc_conf=/etc/chrony.conf; fi
if cc_has_unit chrony.service; then cc_unit=chrony.service; else cc_unit=chronyd.service; fi

cc_on "$cc_unit"
# do
cc_service=chrony
# Debian and Ubuntu: /etc/chrony/chrony.conf and chrony.service; Red Hat: /etc/chrony.conf and chronyd.service.
if [ -d /etc/chrony ]; then cc_conf=/etc/chrony/chrony.conf; else cc_conf=/etc/chrony.conf; fi
if cc_has_unit chrony.service; then cc_unit=chrony.service; else cc_unit=chronyd.service; fi

cc_start "$cc_unit"
# ===== verify, stage serve: gpu01
# --- chrony: serves the time
# unless
cc_service=chrony
cc_t=$(chronyc -n tracking 2>&1)
printf "%s\n" "$cc_t" | grep -q "^Leap status *: Normal"
# do
cc_service=chrony
cc_t=$(chronyc -n tracking 2>&1)
printf "%s\n" "$cc_t" | grep -E "^(Stratum|System time|Leap status|506)"
false
